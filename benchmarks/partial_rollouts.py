"""
Measure partial rollouts against waiting for the longest completion: decode steps, idle slots and time per generation.

    python -m benchmarks.partial_rollouts --sampler transformers
    python -m benchmarks.partial_rollouts --sampler vllm        # needs vLLM; starts a server

Each generation has 16 groups of 8. The completions of a hand-made model (`lognormal_model.py`) have lognormal lengths:
the 95th percentile is 5 times the median, the maximum 10 times. Each setting is one `train()` call, in the same
process and with the same prompts. A round runs all settings, in alternating order; ratios are between two settings of
a round. The first generations, in which the pool fills, are not counted.

A sampler call takes as many *decode steps* as its longest completion has tokens. A generation has a *slot* for each
sample of its first call; a slot is *idle* in decode steps without a token.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from benchmarks.common import RESULTS, in_turns, keep_freed_memory, save_result, spread
from benchmarks.lognormal_model import lognormal_model, lognormal_tokenizer
from benchmarks.watched_training import UpdateClock


TAIL, CAP = 5, 10  # 95th percentile and longest, over the median
MEDIANS = {"transformers": 16, "vllm": 32}
PROMPT_TOKENS = 8
GROUPS, COMPLETIONS = 16, 8
UPDATES = 4
WARMUP = 3
BLOCK_TOKENS = 32  # of vLLM's prefix cache
SYNCHRONOUS = 1.0
CHUNK = 0.25  # of the median
# Oversampling, chunk
SETTINGS = ((SYNCHRONOUS, CHUNK), (1.25, CHUNK), (1.5, CHUNK), (1.9, CHUNK), (1.5, 1.0))
TARGETS = {"steps": 2.0, "idle": 3.0, "wall": 1.5}  # at 1.5, synchronous over partial


@dataclass
class Call:
    """Statistics of a sampler call: samples, longest completion, and total tokens."""

    rows: int
    longest: int
    tokens: int


class Counting(BAPOTrainer):
    """Trainer that records the statistics of sampler calls by generation."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls: list[list[Call]] = []

    def _generate_and_score_completions(self, inputs):
        self.calls.append([])
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        output = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self._injected is None:
            lengths = [len(row) for row in output[0]]
            self.calls[-1].append(Call(len(lengths), max(lengths), sum(lengths)))
        return output


def measure(
    oversampling: float,
    chunk: float,
    median: int,
    generations: int,
    settings: dict,
    model: PreTrainedModel | None = None,
    groups: int | None = None,
) -> dict[str, float]:
    """
    Train once, and measure.

    Args:
        oversampling (`float`): `partial_rollout_oversampling`.
        chunk (`float`): `partial_rollout_chunk_length` divided by the median length.
        median (`int`): Median length of a completion in tokens.
        generations (`int`): Number of measured generations.
        settings (`dict`): Settings of the sampler and the device; `{}` for transformers' generation on the CPU.
        model ([`~transformers.PreTrainedModel`], *optional*): A `lognormal_model`, by default a small one.
        groups (`int`, *optional*, defaults to `GROUPS`): Groups per generation.

    Returns:
        `dict` with values per trained sample: decode `steps`, `idle` slots, `wall` seconds of generation and training.
    """
    groups = groups or GROUPS
    rows = groups * COMPLETIONS
    prompts = [f"{index:0{PROMPT_TOKENS}d}" for index in range(groups * (WARMUP + generations))]
    on_cpu = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
    clock = UpdateClock()
    with tempfile.TemporaryDirectory() as folder:
        args = BAPOConfig(
            folder,
            partial_rollout_oversampling=oversampling,
            partial_rollout_chunk_length=round(chunk * median),
            per_device_train_batch_size=rows // UPDATES,
            steps_per_generation=UPDATES,
            gradient_accumulation_steps=1,
            num_generations=COMPLETIONS,
            max_completion_length=CAP * median,
            max_steps=UPDATES * (WARMUP + generations),
            search_scope="batch",
            learning_rate=1e-7,  # the weights change, and what was computed from them is of no use; lengths stay
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            gradient_checkpointing=False,
            **{**on_cpu, **settings},
        )
        trainer = Counting(
            model or lognormal_model(median, TAIL, PROMPT_TOKENS, CAP * median),
            lambda completions, **kwargs: [float(len(set(text)) % 2) for text in completions],
            args,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=lognormal_tokenizer(),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    counted = trainer.calls[WARMUP:]
    calls = [call for calls in counted for call in calls]
    slots = sum(calls[0].rows * sum(call.longest for call in calls) for calls in counted)
    samples = rows * generations
    return {
        "steps": sum(call.longest for call in calls) / samples,
        "idle": (slots - sum(call.tokens for call in calls)) / samples,
        "wall": (clock.readings[-1] - clock.readings[UPDATES * WARMUP]) / samples,
    }


def measure_rounds(name: str, rounds: int, generations: int, sampler: Callable[[], dict]) -> list[dict]:
    """Return a row per setting, with the values of each round and their ratios to the synchronous setting."""
    median = MEDIANS[name]
    measured: dict[tuple[float, float], list[dict]] = {setting: [] for setting in SETTINGS}
    for index, setting in in_turns(SETTINGS, rounds):
        torch.manual_seed(index)
        measured[setting].append(measure(*setting, median, generations, {"seed": index, **sampler()}))
        print(name, *setting, {key: round(value, 4) for key, value in measured[setting][-1].items()}, flush=True)
    rows = []
    for (oversampling, chunk), values in measured.items():
        row = {"sampler": name, "oversampling": oversampling, "chunk": chunk, "median": median}
        for key in TARGETS:
            row[key] = spread([value[key] for value in values])
            pairs = zip(measured[SYNCHRONOUS, CHUNK], values, strict=True)
            row[f"{key}_ratio"] = spread([synchronous[key] / own[key] for synchronous, own in pairs])
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampler", choices=sorted(MEDIANS), required=True)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of all settings")
    parser.add_argument("--generations", type=int, default=8, help="generations of a setting in a round")
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    if args.sampler == "vllm":
        rows = _measure_over_server(args.rounds, args.generations)
    else:
        rows = measure_rounds(args.sampler, args.rounds, args.generations, dict)
    before = json.loads((RESULTS / "partial_rollouts.json").read_text())
    others = [row for row in before["results"] if row["sampler"] != args.sampler]
    earlier = [{key: before[key] for key in ("command", "date", "machine")}]
    sizes = {"threads": 1, "groups": GROUPS, "completions": COMPLETIONS, "updates": UPDATES, "warmup": WARMUP}
    save_result("partial_rollouts", sizes, sorted(others + rows, key=lambda row: row["sampler"]), earlier=earlier)


def _measure_over_server(rounds: int, generations: int) -> list[dict]:
    from tests.e2e.launching import vllm_server  # starts `bapo-trl serve` and waits for it
    from tests.helpers.commands import free_port

    median = MEDIANS["vllm"]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        lognormal_model(median, TAIL, PROMPT_TOKENS, CAP * median).save_pretrained(model)
        lognormal_tokenizer().save_pretrained(model)
        log = Path(folder) / "server.log"
        # Small blocks, so that the cache keeps most of what a round sends again
        flags = ["--max-num-seqs", "256", "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(2**30)]
        flags += ["--max-model-len", str(PROMPT_TOKENS + CAP * median)]
        with vllm_server(model, log, flags=flags) as server:
            sampler = {
                "use_vllm": True,
                "vllm_mode": "server",
                "vllm_server_host": "127.0.0.1",
                "vllm_server_port": server.port,
                "vllm_importance_sampling_mode": "token_truncate",
            }
            # A port of its own for each run: the group of the last one is there until this process ends
            return measure_rounds("vllm", rounds, generations, lambda: {**sampler, "vllm_group_port": free_port()})


if __name__ == "__main__":
    main()
