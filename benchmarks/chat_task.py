"""
Write a task of the chat-model study as files (for benchmarks/studies/chat_*.yaml): the training problems, 512 held-out
problems, and SmolLM2-135M-Instruct after a short supervised warm-up on worked answers of the task.

    python -m benchmarks.chat_task chain_sum     # outputs/tasks/chat_chain_sum/: model/, train.jsonl, test.jsonl
    python -m benchmarks.chat_task leg_counting  # both need the extras llm and reasoning-gym

The warm-up should reach an accuracy of 0.25 to 0.35 on the held-out problems (sampled, as `bapo-trl evaluate` does).
`chain_sum` reached 0.18 after 4 steps, 0.27 after 5, 0.36 after 6, 0.56 after 16; `leg_counting` 0.13 after 12, 0.18
after 16, 0.28 after 17, 0.42 after 18, 0.72 after 24. `--steps` sets another number. Greatest common divisors and
filtered numbers were tried as the second task: 4 more steps changed their accuracy by 0.02 and -0.04.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from bapo_trl.tasks import load_gym_task, smollm2_path
from benchmarks.common import ROOT


TRAIN_PROBLEMS, HELD_OUT = 4000, 512
HELD_OUT_SEED = 1_000_000


def work_out_sum(entry: dict[str, Any]) -> str:
    """Return the worked answer of a sum, term by term: `"12 + 7 = 19"`, `"19 - 30 = -11"`."""
    first, *rest = re.findall(r"[+-] \d+|^-?\d+", entry["metadata"]["expression"])
    total, lines = int(first), []
    for term in rest:
        before, total = total, total + int(term.replace(" ", ""))
        lines.append(f"{before} {term} = {total}")
    return "\n".join(lines)


def work_out_legs(entry: dict[str, Any]) -> str:
    """Return the worked answer of `leg_counting`: `"2*4=8"`, `"3*2=6"`, `"8+6=14"`."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    legs = [(count, ANIMALS[animal]) for animal, count in entry["metadata"]["animals"].items()]
    lines = [f"{count}*{each}={count * each}" for count, each in legs]
    if len(legs) > 1:
        lines.append("+".join(str(count * each) for count, each in legs) + f"={entry['answer']}")
    return "\n".join(lines)


class ChatTask(NamedTuple):
    """Task with its reasoning-gym arguments, the function for worked answers, and the warm-up steps."""

    args: dict[str, Any]
    work_out: Callable[[dict[str, Any]], str]
    steps: int


TASKS = {
    # Longer problems are answered wrong more often, so that tokens of wrong answers outnumber those of right ones
    "chain_sum": ChatTask({"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1}, work_out_sum, 5),
    "leg_counting": ChatTask(
        {"min_animals": 1, "max_animals": 2, "min_instances": 1, "max_instances": 5}, work_out_legs, 17
    ),
}


def problems(name: str) -> tuple[Dataset, Dataset]:
    """Return training and held-out problems, without duplicates or overlap."""
    args = TASKS[name].args
    train = load_gym_task(name, {**args, "size": TRAIN_PROBLEMS, "seed": 0}).train_dataset
    held_out = load_gym_task(name, {**args, "size": 4 * HELD_OUT, "seed": HELD_OUT_SEED}).train_dataset
    first_asked = {row["prompt"][0]["content"]: place for place, row in reversed(list(enumerate(held_out)))}
    held_out = held_out.select(sorted(first_asked.values())[:HELD_OUT])
    asked = {row["prompt"][0]["content"] for row in held_out}
    train = train.filter(lambda row: row["prompt"][0]["content"] not in asked)
    return train.map(with_system), held_out.map(with_system)


def with_system(row: dict[str, Any]) -> dict[str, Any]:
    """Add a short system message before a question. Otherwise the model's template adds a long one."""
    return {"prompt": [{"role": "system", "content": "Work it out."}, *row["prompt"]]}


def start(name: str, train: Dataset, steps: int, model: Path) -> tuple[Any, Any]:
    """Return the chat model of a folder, after a warm-up with 32 worked answers per step, and its tokenizer."""
    work_out = TASKS[name].work_out

    def worked(row: dict[str, Any]) -> dict[str, Any]:
        content = work_out(json.loads(row["entry"])["entry"])
        return {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": content}]}

    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, max_steps=steps, per_device_train_batch_size=32, learning_rate=1e-3, lr_scheduler_type="constant",
            use_cpu=True, gradient_checkpointing=False, save_strategy="no", report_to="none", logging_steps=10, seed=0,
            model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
        lessons = train.map(worked, remove_columns=train.column_names)
        trainer = SFTTrainer(str(model), args, train_dataset=lessons, peft_config=lora)
        trainer.train()
    return trainer.model.merge_and_unload().to(torch.bfloat16), trainer.processing_class


def write_task(name: str, folder: Path, steps: int, model: Path) -> None:
    """Write a task's problems, and the model after its warm-up."""
    train, held_out = problems(name)
    for part in start(name, train, steps, model):
        part.save_pretrained(folder / "model")
    for split, rows in (("train", train), ("test", held_out)):
        rows.to_json(folder / f"{split}.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--steps", type=int, help="steps of the supervised start, to try others")
    options = parser.parse_args()
    folder = ROOT / "outputs" / "tasks" / f"chat_{options.task}"
    write_task(options.task, folder, options.steps or TASKS[options.task].steps, smollm2_path())
    print(f"Written: {folder}")


if __name__ == "__main__":
    main()
