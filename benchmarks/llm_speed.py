"""
Measure the CPU time of a generation and its first update with a chat model: with all optimizations in
`bapo_trl.upstream.cpu_speed`, with none, and without each of them.

    python -m benchmarks.llm_speed

The workload is that of `recipes/smollm2_sums.yaml`: 128 samples of at most 16 tokens with prompts of 30 tokens, and an
update on 32 of them, LoRA on SmolLM2-135M. Each measurement runs in a separate process with one thread; ratios are
between consecutive measurements. CPU time is user plus system time of the process, without waiting.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

import torch
from transformers import PrinterCallback, ProgressCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import load_chat_sums, smollm2_path
from bapo_trl.upstream import cpu_speed
from benchmarks.common import ROOT, in_turns, save_result, spread
from benchmarks.watched_training import UpdateClock


TARGET_SECONDS = 25
COMPLETION_TOKENS = 16
MEASURES = {
    "bfloat16": "bfloat16 base under autocast",
    "head": "contiguous rows to the frozen head",
    "completions": "only completions are scored",
}
ARMS = {"all": set(MEASURES), "none": set()} | {f"without {name}": set(MEASURES) - {name} for name in MEASURES}


def measure(measures: set[str], seed: int) -> float:
    """Return the CPU seconds of a generation and its first update in this process."""
    from peft import LoraConfig

    torch.set_num_threads(1)
    if "completions" in measures:
        cpu_speed.score_completions_only()
    has_bfloat16 = "bfloat16" in measures and cpu_speed.has_bfloat16()
    task, clock = load_chat_sums(), UpdateClock(time.process_time)
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
            max_completion_length=COMPLETION_TOKENS,
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
    begun, ended = clock.readings
    return ended - begun


def measure_in_process(arm: str, seed: int) -> float:
    """Return the result of [`measure`] in a separate process."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.llm_speed", "--arm", arm, "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each arm, at least two")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)  # of a process that measures
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print(measure(ARMS[args.arm], args.seed))
        return
    smollm2_path()  # so that no process has to build it
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for index, arm in in_turns(ARMS, args.rounds):
        seconds[arm].append(measure_in_process(arm, seed=index))
        print(f"round {index}, {arm}: {seconds[arm][-1]}", flush=True)
    settings = {"target_seconds": TARGET_SECONDS, "completion_tokens": COMPLETION_TOKENS, "threads": 1}
    save_result("llm_speed", settings, [to_row(arm, seconds) for arm in seconds])


def to_row(arm: str, seconds: dict[str, list[float]]) -> dict:
    """Return the row of a variant: the spread of its CPU seconds, and of the ratio to all optimizations."""
    ratios = [own / base for own, base in zip(seconds[arm], seconds["all"], strict=True)]
    return {"arm": arm, "seconds": spread(seconds[arm]), "ratio": spread(ratios)}


if __name__ == "__main__":
    main()
