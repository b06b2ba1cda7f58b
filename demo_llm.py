r"""
A real chat model learns sums on a laptop: SmolLM2-135M-Instruct with LoRA, before and after.

    python demo_llm.py

It trains with `train_bapo.py` and `recipes/smollm2_sums.yaml`, and takes its flags. Another model in its place:

    python demo_llm.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct

Before and after, it asks held-out problems: greedily; four times sampled; and greedily once more with a limit that
hardly any completion reaches, since shorter answers alone would be right more often under the limit of training.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_trl.script import training
from bapo_trl.script.command_line import parse_arguments
from bapo_trl.script.commands import SCRIPT
from bapo_trl.script.failures import run_command
from bapo_trl.script.models import PACKAGED_MODELS
from bapo_trl.script.recipes import RECIPES
from bapo_trl.tasks import load_chat_sums
from bapo_trl.tasks.chat_sums import ask
from bapo_trl.tasks.evaluation import seeded
from bapo_trl.upstream.cpu_speed import base_dtype, keep_freed_memory, limit_threads, make_head_input_contiguous


COMMAND = replace(SCRIPT, name="demo_llm.py")
NUM_PROBLEMS, NUM_SAMPLES, NUM_SHOWN = 256, 4, 3
FREE_TOKENS = 96  # "without the cap"
EASY_SUMS = [(1, 2), (2, 2), (3, 4), (5, 5), (7, 8), (9, 6), (4, 1), (8, 3)]
RESULTS_FILE = "demo_results.json"


@dataclass(frozen=True)
class HeldOut:
    """
    What a model gets right, shares of completions in [0, 1].

    Attributes:
        greedy (`float`):
            Right greedy completions, under the length limit of training.
        sampled (`float`):
            Right sampled completions under that limit, mean over four of each problem.
        ended (`float`):
            Greedy completions that ended by themselves under that limit.
        without_limit (`float`):
            Right greedy completions with at most 96 tokens.
        ended_without_limit (`float`):
            Greedy completions that ended by themselves then.
        completions (`list[str]`):
            The first greedy completions.
    """

    greedy: float
    sampled: float
    ended: float
    without_limit: float
    ended_without_limit: float
    completions: list[str]


def complete(model, tokenizer, prompts: Sequence[list[dict]], max_new_tokens: int, sample: bool = False):
    """Return the completions to prompts, and whether each ended by itself."""
    texts, ended = [], []
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    for start in range(0, len(prompts), 64):
        batch = tokenizer.apply_chat_template(
            list(prompts[start : start + 64]), add_generation_prompt=True, tokenize=True, padding=True,
            return_tensors="pt", return_dict=True,
        ).to(model.device)  # fmt: skip
        output = model.generate(
            **batch, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id, **sampling
        )
        completions = output[:, batch["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(completions, skip_special_tokens=True)
        ended += (completions == tokenizer.eos_token_id).any(dim=1).tolist()
    return texts, ended


def load_model(folder: str, adapter: Path | None, dtype: str):
    """Return the model of a folder, with the adapter that was trained for it, ready to generate, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    if torch.cuda.is_available():
        model = model.cuda()
    else:
        keep_freed_memory()
        make_head_input_contiguous(model.requires_grad_(False))
    return model.eval(), tokenizer


@torch.no_grad()
def measure(model, tokenizer, problems, max_new_tokens: int, reward_func) -> HeldOut:
    """Measure a model on held-out problems."""
    prompts, answers = problems["prompt"][:], problems["answer"][:]

    def accuracy(texts: list[str], answers: list[str]) -> float:
        return sum(reward_func(texts, answers)) / len(answers)

    texts, ended = complete(model, tokenizer, prompts, max_new_tokens)
    free_texts, free_ended = list(texts), list(ended)  # what ended under the limit would be the same without it
    cut_off = [index for index, has_ended in enumerate(ended) if not has_ended]
    longer = complete(model, tokenizer, [prompts[index] for index in cut_off], FREE_TOKENS)
    for index, text, has_ended in zip(cut_off, *longer, strict=True):
        free_texts[index], free_ended[index] = text, has_ended
    with seeded(model.device, 0):
        samples, _ = complete(model, tokenizer, prompts * NUM_SAMPLES, max_new_tokens, sample=True)
    return HeldOut(
        greedy=accuracy(texts, answers),
        sampled=accuracy(samples, answers * NUM_SAMPLES),
        ended=sum(ended) / len(ended),
        without_limit=accuracy(free_texts, answers),
        ended_without_limit=sum(free_ended) / len(free_ended),
        completions=texts[:NUM_SHOWN],
    )


def check_answers(model, tokenizer, reward_func) -> None:
    """Print greedy answers to easy sums; stop if none is right, since then the weights were not read rightly."""
    with torch.no_grad():
        texts, _ = complete(model, tokenizer, [ask(a, b) for a, b in EASY_SUMS], FREE_TOKENS)
    rewards = reward_func(texts, [str(a + b) for a, b in EASY_SUMS])
    print(f"Easy sums, greedy: {sum(rewards):.0f} of {len(rewards)} right, such as {texts[0]!r}.", flush=True)
    if not any(rewards):
        raise ValueError(
            "`model_name_or_path` gives a model that adds no two digits rightly: give one that is tuned for chat. If "
            "it is 'smollm2', remove its folder from the cache, so that it is fetched again."
        )


def describe(before: HeldOut, after: HeldOut, problems, max_new_tokens: int) -> str:
    """Return what the demo ends with."""
    rows = {
        f"greedy, at most {max_new_tokens} tokens": "greedy",
        f"mean of {NUM_SAMPLES} samples": "sampled",
        "share that ended by itself": "ended",
        f"greedy, at most {FREE_TOKENS} tokens": "without_limit",
        f"share that ended by itself, at most {FREE_TOKENS}": "ended_without_limit",
    }
    width = max(map(len, rows))
    lines = [f"Held-out accuracy on {len(problems)} problems, before -> after:"]
    lines += [
        f"  {name:<{width}}  {getattr(before, key):.3f} -> {getattr(after, key):.3f}" for name, key in rows.items()
    ]
    for index, (first, last) in enumerate(zip(before.completions, after.completions, strict=True)):
        question = problems[index]["prompt"][-1]["content"]
        lines += [f"{question}", f"  before: {' '.join(first.split())}", f"  after:  {' '.join(last.split())}"]
    return "\n".join(lines)


def main(arguments: Sequence[str]):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--held_out_problems", type=int, default=NUM_PROBLEMS, help=f"problems to measure on (default {NUM_PROBLEMS})"
    )
    own, flags = parser.parse_known_args(arguments)
    flags = ["--config", str(RECIPES / "smollm2_sums.yaml"), *flags]
    _, training_args, model_args, _ = parse_arguments(flags, COMMAND)
    started = time.perf_counter()
    if training_args.use_cpu:
        limit_threads()
    task = load_chat_sums()
    problems = task.test_dataset.select(range(own.held_out_problems))
    name = model_args.model_name_or_path
    folder = str(PACKAGED_MODELS[name]()) if name in PACKAGED_MODELS else name
    dtype = model_args.dtype or base_dtype(training_args, model_args.use_peft)
    tokens = training_args.max_completion_length

    model, tokenizer = load_model(folder, None, dtype)
    check_answers(model, tokenizer, task.reward_func)
    before = measure(model, tokenizer, problems, tokens, task.reward_func)
    print(f"Before training, greedy {before.greedy:.3f}, mean of {NUM_SAMPLES} {before.sampled:.3f}.", flush=True)
    del model

    training_started = time.perf_counter()
    training.main(flags, COMMAND)
    training_s = time.perf_counter() - training_started

    output_dir = Path(training_args.output_dir)
    has_adapter = (output_dir / "adapter_config.json").exists()
    model, tokenizer = load_model(*((folder, output_dir) if has_adapter else (str(output_dir), None)), dtype)
    after = measure(model, tokenizer, problems, tokens, task.reward_func)
    print(describe(before, after, problems, tokens))
    seconds = {"training_s": round(training_s), "all_s": round(time.perf_counter() - started)}
    results = {"before": asdict(before), "after": asdict(after), "problems": len(problems), **seconds}
    (output_dir / RESULTS_FILE).write_text(json.dumps(results, indent=2))
    print(f"Training took {seconds['training_s']} s, all of it {seconds['all_s']} s.")
    print(f"Report: {output_dir / 'report.png'}")


if __name__ == "__main__":
    run_command(main, sys.argv[1:], COMMAND.name)
