"""
CPU-seconds of a generation and its first update with a real chat model: with the measures of
`bapo_trl.upstream.cpu_speed`, without, and without each of them.

    python -m benchmarks.llm_speed

The work is that of `recipes/smollm2_sums.yaml`: 128 samples of at most 16 tokens to prompts of 30, and an update on
32 of them, LoRA on SmolLM2-135M. Each measurement is a process of its own with one thread; those of a round follow
one another, so that ratios are of pairs. CPU-seconds are of the process, user and system; waiting does not count.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from statistics import median

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import load_chat_sums, smollm2_path
from bapo_trl.upstream import cpu_speed
from benchmarks.common import ROOT, save_result, spread


TARGET_SECONDS = 25
MEASURES = {
    "bfloat16": "bfloat16 base under autocast",
    "head": "contiguous rows to the frozen head",
    "completions": "only completions are scored",
}
ARMS = {"all": set(MEASURES), "none": set()} | {f"without {name}": set(MEASURES) - {name} for name in MEASURES}


class CpuClock(TrainerCallback):
    """Reads the CPU time of the process when training begins and after the first update."""

    def __init__(self):
        self.readings: list[tuple[float, float]] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self._read()

    def on_step_end(self, args, state, control, **kwargs):
        self._read()

    def _read(self):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.readings.append((usage.ru_utime, usage.ru_stime))

    @property
    def seconds(self) -> dict[str, float]:
        """Return user and system seconds between the two readings."""
        (user_before, system_before), (user, system) = self.readings[:2]
        return {"user": round(user - user_before, 2), "system": round(system - system_before, 2)}


def measure(measures: set[str], completion_tokens: int, seed: int) -> dict[str, float]:
    """Return the CPU-seconds and the peak memory of a generation and its first update, in this process."""
    from peft import LoraConfig

    torch.set_num_threads(1)
    if "completions" in measures:
        cpu_speed.score_completions_only()
    has_bfloat16 = "bfloat16" in measures and cpu_speed.has_bfloat16()
    task, clock = load_chat_sums(), CpuClock()
    with tempfile.TemporaryDirectory() as folder:
        args = BAPOConfig(
            folder,
            seed=seed,
            use_cpu=True,
            bf16=has_bfloat16,
            model_init_kwargs={
                "dtype": "bfloat16" if has_bfloat16 else "float32",
                "attn_implementation": "eager",
            },
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=1,
            steps_per_generation=4,
            num_generations=8,
            max_completion_length=completion_tokens,
            max_steps=1,
            save_strategy="no",
            report_to="none",
        )
        trainer = BAPOTrainer(
            str(smollm2_path()),
            task.reward_func,
            args,
            train_dataset=task.train_dataset,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
            callbacks=[clock],
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        if "head" in measures:
            cpu_speed.make_head_input_contiguous(trainer.model)
        trainer.train()
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {**clock.seconds, "peak_gb": round(peak_gb, 2)}


def measure_in_process(arm: str, completion_tokens: int, seed: int) -> dict[str, float]:
    """Return what [`measure`] gives in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.llm_speed", "--arm", arm, "--seed", str(seed)]
    command += ["--completion-tokens", str(completion_tokens)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="what to measure")
    parser.add_argument("--completion-tokens", type=int, default=16, help="longest completion")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)  # of a process that measures
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(measure(ARMS[args.arm], args.completion_tokens, args.seed)))
        return
    smollm2_path()  # so that no process has to build it
    seconds: dict[str, list[dict[str, float]]] = {arm: [] for arm in args.arms}
    for round_index in range(args.rounds):
        for arm, measured in seconds.items():
            measured.append(measure_in_process(arm, args.completion_tokens, seed=round_index))
            print(f"round {round_index}, {arm}: {measured[-1]}", flush=True)
    settings = {"target_seconds": TARGET_SECONDS, "completion_tokens": args.completion_tokens, "threads": 1}
    save_result("llm_speed", "cpu", settings, [to_row(arm, seconds) for arm in seconds])


def to_row(arm: str, seconds: dict[str, list[dict[str, float]]]) -> dict:
    """Return the row of an arm: spreads of its CPU-seconds, and of their ratio to those with all measures."""
    totals = {name: [reading["user"] + reading["system"] for reading in values] for name, values in seconds.items()}
    row = {
        "arm": arm,
        "seconds": spread(totals[arm]) if len(totals[arm]) > 1 else {"median": totals[arm][0]},
        "system": round(median(reading["system"] for reading in seconds[arm]), 2),
        "peak_gb": round(median(reading["peak_gb"] for reading in seconds[arm]), 2),
    }
    if "all" in totals and arm != "all":
        ratios = [own / base for own, base in zip(totals[arm], totals["all"], strict=True)]
        row["ratio"] = spread(ratios) if len(ratios) > 1 else {"median": round(ratios[0], 3)}
    return row


if __name__ == "__main__":
    main()
