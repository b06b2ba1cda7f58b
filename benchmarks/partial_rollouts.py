"""
What partial rollouts save: decode steps, idle slots and time of a generation, against waiting for the longest.

    python -m benchmarks.partial_rollouts --sampler transformers
    python -m benchmarks.partial_rollouts --sampler vllm        # where vLLM is installed; starts a server

16 groups of 8 a generation. A hand-made model (`lognormal_model.py`) ends its completions by the hazards of a
lognormal distribution: the 95th percentile is 5 times the median, the cap 10 times. Every setting is a `train()` of
its own, in one process, on the same prompts. A round goes through the settings, every other one backwards; a ratio is
that of two settings in a round. The first generations, in which the pool fills, are not counted.

A call of the sampler takes as many *decode steps* as its longest completion has tokens. A generation has a *slot* for
each row of its first call; a slot is *idle* in a decode step in which it has no token. Prompts and tokens so far are
*sent again* with every call but the first. transformers computes them again; so does vLLM, but for whole blocks of its
cache (of 32 tokens here) that the same policy filled.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from benchmarks.common import keep_freed_memory, result_path, save_result, spread
from benchmarks.lognormal_model import lognormal_model, lognormal_tokenizer


TAIL, CAP = 5, 10  # 95th percentile and longest, over the median
MEDIANS = {"transformers": 16, "vllm": 32}
PROMPT_TOKENS = 8
GROUPS, COMPLETIONS = 16, 8
UPDATES = 4
WARMUP = 3
BLOCK_TOKENS = 32  # of vLLM's prefix cache
SYNCHRONOUS = 1.0
OVERSAMPLING = (1.25, 1.5, 1.9)
CHUNK = 0.25  # of the median
LONGER_CHUNKS = (1.0,)  # at 1.5 as well
TARGETS = {"steps": 2.0, "idle": 3.0, "wall": 1.5}  # at 1.5, synchronous over partial


@dataclass
class Call:
    """One call of the sampler: its rows, its longest completion, all tokens sampled, tokens sent once more."""

    rows: int
    longest: int
    tokens: int
    sent_again: int


class Counting(BAPOTrainer):
    """Keeps what each call of the sampler did, by generation."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls: list[list[Call]] = []

    def _generate_and_score_completions(self, inputs):
        self.calls.append([])
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        output = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return output if self._injected is not None else self._count(prompt_ids, output)

    def _count(self, prompts, output):
        lengths = [len(row) for row in output[0]]
        again = sum(len(row) for row in prompts if len(row) > PROMPT_TOKENS)
        self.calls[-1].append(Call(len(lengths), max(lengths), sum(lengths), again))
        return output


class GenerationClock(TrainerCallback):
    """Wall time, and CPU time of this process, at which each generation begins, and those of the end."""

    def __init__(self):
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % UPDATES == 0:
            self._read()

    def on_train_end(self, args, state, control, **kwargs):
        self._read()

    def _read(self):
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def settings() -> list[tuple[float, float]]:
    """Return oversampling and chunk (over the median length) of each setting; the synchronous one comes first."""
    chosen = [(SYNCHRONOUS, CHUNK)] + [(oversampling, CHUNK) for oversampling in OVERSAMPLING]
    return chosen + [(1.5, chunk) for chunk in LONGER_CHUNKS]


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
    Train once.

    Args:
        oversampling (`float`): `partial_rollout_oversampling`.
        chunk (`float`): `partial_rollout_chunk_length` over the median length.
        median (`int`): Median length of a completion in tokens.
        generations (`int`): Generations that count.
        settings (`dict`): Settings of the sampler and the device; `{}` for transformers' generation on the CPU.
        model ([`~transformers.PreTrainedModel`], *optional*): The model, by default that of `lognormal_model.py`.
        groups (`int`, *optional*): Groups a generation.

    Returns:
        `dict` with, a trained sample: decode `steps`, `idle` slots, `wall` seconds of generation and training, `cpu`
        seconds of this process; with `sent_again`, prompt and completion tokens sent once more over tokens
        decoded; and with the run's means of `staleness` (policy versions), `segments` and `length` (tokens).
    """
    groups = groups or GROUPS
    rows = groups * COMPLETIONS
    prompts = [f"{index:0{PROMPT_TOKENS}d}" for index in range(groups * (WARMUP + generations))]
    on_cpu = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
    clock = GenerationClock()
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
    samples, tokens = rows * generations, sum(call.tokens for call in calls)
    logs = [log for log in trainer.state.log_history if log["step"] > WARMUP * UPDATES]

    def mean(key: str, default: float) -> float:
        values = [log[key] for log in logs if log.get(key) is not None]
        return statistics.mean(values) if values else default

    return {
        "steps": sum(call.longest for call in calls) / samples,
        "idle": (slots - tokens) / samples,
        "wall": (clock.wall[-1] - clock.wall[WARMUP]) / samples,
        "cpu": (clock.cpu[-1] - clock.cpu[WARMUP]) / samples,
        "sent_again": sum(call.sent_again for call in calls) / tokens,
        "staleness": mean("staleness/mean", 0.0),
        "segments": mean("partial/segments_mean", 1.0),
        "length": mean("completions/mean_length", 0.0),
    }


def measure_rounds(name: str, rounds: int, generations: int, sampler: Callable[[], dict]) -> list[dict]:
    """Return a row for each setting, with the figures of each round and their ratios to the synchronous setting's."""
    median = MEDIANS[name]
    measured: dict[tuple[float, float], list[dict]] = {setting: [] for setting in settings()}
    for index in range(rounds):
        for setting in settings() if index % 2 == 0 else reversed(settings()):
            torch.manual_seed(index)
            measured[setting].append(measure(*setting, median, generations, {"seed": index, **sampler()}))
            print(name, *setting, {key: round(value, 4) for key, value in measured[setting][-1].items()}, flush=True)
    rows = []
    for (oversampling, chunk), values in measured.items():
        row = {"sampler": name, "oversampling": oversampling, "chunk": chunk, "median": median}
        for key in ("steps", "idle", "wall", "cpu", "sent_again", "staleness", "segments", "length"):
            row[key] = spread([value[key] for value in values])
        for key in (*TARGETS, "cpu"):
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
    path = result_path("partial_rollouts", "cpu")
    before = json.loads(path.read_text()) if path.exists() else {"results": []}
    others = [row for row in before["results"] if row["sampler"] != args.sampler]
    earlier = [{key: before[key] for key in ("command", "date", "machine")}] if others else []
    sizes = {"threads": 1, "groups": GROUPS, "completions": COMPLETIONS, "updates": UPDATES, "warmup": WARMUP}
    save_result("partial_rollouts", "cpu", sizes, sorted(others + rows, key=lambda row: row["sampler"]), earlier)


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
