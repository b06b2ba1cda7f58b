"""
One training run on an embedded task in a process of its own, and a pool that makes many of them.

    python benchmarks/training_run.py '{"seed": 0, "generations": 2, "args": {"learning_rate": 5e-4}}'

prints one line of JSON. Studies import [`run_all`], which keeps finished runs in a file and skips them the next time.
"""

import hashlib
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from smoothed_bounds import SmoothedBAPOTrainer
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import EmbeddedTask, held_out_accuracy, load_task, warm_start_path
from bapo_trl.tasks.evaluation import seeded
from measuring import keep_freed_memory


SETTINGS = {
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}
TASK_SETTINGS = {
    # A generation of 1,024 answers, 8 updates of 128 in one pass over it
    "sums": {"per_device_train_batch_size": 128, "steps_per_generation": 8, "num_generations": 8},
    # About 20,000 tokens an update
    "running_totals": {
        "per_device_train_batch_size": 416,
        "steps_per_generation": 8,
        "num_generations": 16,
        "cache_implementation": "static",  # takes less time
    },
}
TRAINERS = {
    "BAPO": (BAPOTrainer, BAPOConfig),
    "smoothed BAPO": (SmoothedBAPOTrainer, BAPOConfig),
    "GRPO": (GRPOTrainer, GRPOConfig),
}
# Take long to import
LIBRARIES = ["bapo_trl.bapo_trainer", "bapo_trl.tasks.warm_start", "trl.trainer.grpo_trainer"]
# Metrics of which a run returns the value of every update
SERIES = (
    "grad_norm",
    "entropy",
    "clip_ratio/region_mean",
    "bapo/clip_low",
    "bapo/clip_high",
    "bapo/positive_share",
    "bapo/positive_share_initial",
    "ratio/min",
    "ratio/max",
    "ratio/ess",
    "ratio/kl",
)


def fixed_clip(low: float, high: float) -> dict:
    """Return the settings of a fixed clip range in ratio space, which leave nothing to search."""
    return {"ratio_lower_start": low, "ratio_lower_max": low, "ratio_upper_start": high, "ratio_upper_max": high}


class HeldOut(TrainerCallback):
    """Measures accuracy and entropy on held-out problems every so many updates, outside the clock of the run."""

    def __init__(self, every: int, task: EmbeddedTask):
        self.every = every
        self.task = task
        self.points: list[dict] = []
        self.seconds = 0.0

    def measure(self, update: int, model, tokenizer) -> None:
        started = time.perf_counter()
        accuracy = held_out_accuracy(
            model,
            tokenizer,
            self.task.test_dataset,
            num_samples=2,
            max_new_tokens=self.task.max_new_tokens,
            reward_func=self.task.reward_func,
        )
        entropy = sampled_entropy(model, tokenizer, self.task)
        self.points.append({"update": update, **vars(accuracy), "entropy": entropy})
        self.seconds += time.perf_counter() - started

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        self.measure(0, model, processing_class)

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        if state.global_step % self.every == 0:
            self.measure(state.global_step, model, processing_class)


@torch.no_grad()
def sampled_entropy(model, tokenizer, task: EmbeddedTask) -> float:
    """Return the mean entropy (nats) of the model's next token along answers that it samples to held-out problems."""
    prompts = tokenizer(task.test_dataset["prompt"][:], return_tensors="pt", padding=True).to(model.device)
    was_training = model.training
    model.eval()
    with seeded(model.device, 0):
        output = model.generate(
            **prompts,
            max_new_tokens=task.max_new_tokens,
            do_sample=True,
            top_k=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    model.train(was_training)
    entropies = torch.distributions.Categorical(logits=torch.stack(output.logits, dim=1)).entropy()
    answers = output.sequences[:, prompts["input_ids"].shape[1] :]
    ended = (answers == tokenizer.eos_token_id).cumsum(dim=1) - (answers == tokenizer.eos_token_id).long()
    return entropies[ended == 0].mean().item()


def run(spec: dict) -> dict:
    """
    Train once.

    Args:
        spec (`dict`):
            `seed`; `generations`, how many batches of answers to generate; `held_out_every`, updates between two
            measurements (default: those of two generations); `task`, `"sums"` (default) or `"running_totals"`;
            `trainer`, a key of `TRAINERS` (default: `"BAPO"`); `args`, settings of its config on top of `SETTINGS`.

    Returns:
        `dict` with one value a generation for `reward` and `generated_tokens` (so far), held-out accuracy by update,
        `series` of the metrics of each update, means of them, and the seconds of training. `failure` is there if the
        run broke off because a NaN came up.
    """
    torch.set_num_threads(1)
    keep_freed_memory()  # takes 25 % less time on long answers
    name = spec.get("task", "sums")
    task = load_task(name=name)
    trainer_class, config_class = TRAINERS[spec.get("trainer", "BAPO")]
    settings = {**SETTINGS, **TASK_SETTINGS[name], "max_completion_length": task.max_new_tokens, **spec["args"]}
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(folder, seed=spec["seed"], **settings)
        updates = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
        args.max_steps = spec["generations"] * updates
        held_out = HeldOut(spec.get("held_out_every", 2 * updates), task)
        trainer = trainer_class(
            str(warm_start_path(task=name)),
            task.reward_func,
            args,
            train_dataset=task.train_dataset,
            callbacks=[held_out],
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        failure = None
        started = time.perf_counter()
        try:
            trainer.train()
        except RuntimeError as error:
            if "nan" not in str(error).lower() or not trainer.state.log_history:
                raise
            failure = str(error)  # the policy is broken: a result, not a mistake
            held_out.points += [
                {"update": update, "greedy": 0.0, "sampled": 0.0, "entropy": None}
                for update in range(held_out.every, args.max_steps + 1, held_out.every)
                if update > held_out.points[-1]["update"]
            ]
        seconds = time.perf_counter() - started - held_out.seconds
    logs = [log for log in trainer.state.log_history if "loss" in log]
    generations = [log for log in logs if "reward" in log]
    if failure is None and (len(logs), len(generations)) != (args.max_steps, spec["generations"]):
        raise AssertionError(f"{len(logs)} updates and {len(generations)} generations, not as {spec} has them.")
    rows = args.per_device_train_batch_size * args.steps_per_generation
    tokens, generated = 0, []
    for log in generations:
        tokens += round(log["completions/mean_length"] * rows)
        generated.append(tokens)
    means = {
        key: _mean([log[key] for log in logs if key in log])
        for key in (
            "frac_reward_zero_std",
            "staleness/mean",
            "staleness/max",
            "bapo/clip_low",
            "bapo/clip_high",
            "bapo/positive_share",
            "ratio/ess",
            "replay/reuse_mean",
        )
    }
    return {
        **({} if failure is None else {"failure": failure}),
        "updates": len(logs),
        "seconds": round(seconds, 1),
        "generated_tokens": generated,
        "reward": [round(log["reward"], 4) for log in generations],
        "entropy_first_last": [logs[0]["entropy"], logs[-1]["entropy"]],
        "held_out": [
            {
                "update": point["update"],
                "generations": point["update"] // updates,
                **{
                    key: None if point[key] is None else round(point[key], 4)
                    for key in ("greedy", "sampled", "entropy")
                },
            }
            for point in held_out.points
        ],
        "series": {
            key: [float(f"{log[key]:.4g}") if _is_number(log[key]) else None for log in logs]
            + [None] * (args.max_steps - len(logs))
            for key in SERIES
            if all(key in log for log in logs)
        },
        "means": {key: value for key, value in means.items() if value is not None},
    }


def run_all(specs: Sequence[dict], finished: Path, jobs: int) -> list[dict]:
    """
    Make runs, each in a process of its own, `jobs` at a time with one thread each.

    Args:
        specs (sequence of `dict`):
            What [`run`] takes, and anything else that names the run.
        finished (`Path`):
            File of finished runs, a line of JSON each. Runs that it holds are not made again, so it must not hold
            those of another version of this code.
        jobs (`int`):
            Number of processes at a time. With 0, no run is made, and the result of one that is missing is `None`.

    Returns:
        The specs in their order, each with its `result`.

    Raises:
        RuntimeError: If a run fails; it has printed why.
    """
    finished.parent.mkdir(parents=True, exist_ok=True)
    results = _read(finished)
    missing = {_key(spec): spec for spec in specs if _key(spec) not in results}
    print(f"{len(specs) - len(missing)} of {len(specs)} runs are there.", flush=True)
    if not jobs:
        return [{**spec, "result": results.get(_key(spec))} for spec in specs]
    for task in sorted({spec.get("task", "sums") for spec in missing.values()}):
        warm_start_path(task=task)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # of the processes
    with ThreadPoolExecutor(jobs) as pool, open(finished, "a") as file:
        keys = {pool.submit(_run_in_process, spec): key for key, spec in missing.items()}
        try:
            for future in as_completed(keys):
                key = keys[future]
                results[key] = result = future.result()
                file.write(json.dumps({"key": key, "spec": missing[key], "result": result}) + "\n")
                file.flush()
                print(f"{len(results)}: {missing[key]} -> {result['held_out'][-1]}, {result['seconds']} s", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
    return [{**spec, "result": results[_key(spec)]} for spec in specs]


def _read(finished: Path) -> dict[str, dict]:
    """Return the results of finished runs by key. A last line that was cut off is left out, and removed."""
    lines = finished.read_text().splitlines(keepends=True) if finished.exists() else []
    if lines and not lines[-1].endswith("\n"):
        print(f"{finished} ends in the middle of a run, which is made again.")
        finished.write_text("".join(lines := lines[:-1]))
    return {line["key"]: line["result"] for line in map(json.loads, lines)}


def _run_in_process(spec: dict) -> dict:
    """Return the result of a run that a process of its own makes, forked from one that has imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(spec, sender))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = None
    process.join()
    if result is None:
        raise RuntimeError(f"The run {spec} ended with exit status {process.exitcode}, see what it printed above.")
    return result


def _send_result(spec: dict, sender: Connection) -> None:
    sender.send(run(spec))


def _key(spec: dict) -> str:
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)  # TRL logs None for NaN


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if _is_number(value)]
    return round(sum(defined) / len(defined), 4) if defined else None


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
