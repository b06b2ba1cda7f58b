"""
One training run of a study, on the task of the demo or on a task of the studies.

    python -m benchmarks.training_run '{"seed": 0, "generations": 2, "args": {"learning_rate": 5e-4}}'

prints its result, one line of JSON.
"""

import functools
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOConfig

from bapo_trl import BAPOConfig
from bapo_trl.tasks import EmbeddedTask, HeldOutAccuracy, held_out_accuracy, load_task, warm_start_path
from bapo_trl.tasks.held_out import seeded
from bapo_trl.upstream.cpu_speed import keep_freed_memory
from benchmarks.long_tailed_sums import load_long_tailed_sums
from benchmarks.measured_trainer import (
    GivenWeightsTrainer,
    MeasuredBAPOTrainer,
    MeasuredGRPOTrainer,
    WeighedUpTrainer,
)
from benchmarks.running_totals import load_running_totals


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
RUNNING_TOTALS = (
    "running_totals", "running_totals_long", "running_totals_longer", "running_totals_larger_model",
)  # fmt: skip
TASKS = {
    "sums": load_task,
    **{name: functools.partial(load_running_totals, name=name) for name in RUNNING_TOTALS},
    "long_tailed_sums": load_long_tailed_sums,
}
TASK_SETTINGS = {
    # A generation of 1,024 completions, 8 updates of 128 in one pass over it
    "sums": {"per_device_train_batch_size": 128, "steps_per_generation": 8, "num_generations": 8},
    # About 20,000 tokens an update, and more where completions are longer
    **{
        name: {
            "per_device_train_batch_size": 416,
            "steps_per_generation": 8,
            "num_generations": 16,
            "cache_implementation": "static",  # takes less time
        }
        for name in RUNNING_TOTALS
    },
    # A generation of 512 completions, 4 updates of 128
    "long_tailed_sums": {"per_device_train_batch_size": 128, "steps_per_generation": 4, "num_generations": 8},
}
TRAINERS = {
    "BAPO": (MeasuredBAPOTrainer, BAPOConfig),
    "GRPO": (MeasuredGRPOTrainer, GRPOConfig),
    "given weights": (GivenWeightsTrainer, BAPOConfig),
    "weighed up": (WeighedUpTrainer, BAPOConfig),
}
# Metrics of which a run returns the value of every update
SERIES = (
    "grad_norm",
    "entropy",
    "clip_ratio/region_mean",
    "bapo/clip_low",
    "bapo/clip_high",
    "bapo/positive_share",
    "bapo/positive_share_initial",
    "bapo/negative_weight",
    "bapo/entropy_covariance",
    "ratio/min",
    "ratio/max",
    "ratio/ess",
    "ratio/kl",
)


def fixed_clip(low: float, high: float) -> dict:
    """Return the settings of a fixed clip range in ratio space, which leave nothing to search."""
    return {"ratio_lower_start": low, "ratio_lower_max": low, "ratio_upper_start": high, "ratio_upper_max": high}


class HeldOut(TrainerCallback):
    """
    Measures accuracy and entropy on held-out problems every so many updates, outside the clock of the run.

    Attributes:
        points (`list[dict]`):
            What was measured.
        seconds_so_far (`list[float]`):
            For each generation, the seconds from the start of the training to the end of its first update, without
            those of the measurements.
    """

    def __init__(self, every: int, task: EmbeddedTask):
        self.every = every
        self.task = task
        self.points: list[dict] = []
        self.seconds_so_far: list[float] = []
        self.seconds = 0.0
        self._started = 0.0

    def measure(self, update: int, model, tokenizer) -> None:
        started = time.perf_counter()
        accuracy = _held_out(model, tokenizer, self.task, num_samples=2)
        entropy = sampled_entropy(model, tokenizer, self.task)
        self.points.append(
            {"update": update, "greedy": accuracy.greedy, "sampled": accuracy.sampled, "entropy": entropy}
        )
        self.seconds += time.perf_counter() - started

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        self._started = time.perf_counter()
        self.measure(0, model, processing_class)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.seconds_so_far.append(round(time.perf_counter() - self._started - self.seconds, 2))

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        if state.global_step % self.every == 0:
            self.measure(state.global_step, model, processing_class)


def _held_out(model, tokenizer, task: EmbeddedTask, num_samples: int) -> HeldOutAccuracy:
    return held_out_accuracy(
        model,
        tokenizer,
        task.test_dataset,
        num_samples=num_samples,
        max_new_tokens=task.max_new_tokens,
        reward_func=task.reward_func,
    )


@torch.no_grad()
def sampled_entropy(model, tokenizer, task: EmbeddedTask) -> float:
    """Return the mean entropy (nats) of the next token along completions sampled to held-out problems."""
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
    completions = output.sequences[:, prompts["input_ids"].shape[1] :]
    is_end = (completions == tokenizer.eos_token_id).long()
    ended = is_end.cumsum(dim=1) - is_end
    return entropies[ended == 0].mean().item()


def run(spec: dict) -> dict:
    """
    Train once.

    Args:
        spec (`dict`):
            `seed`; `generations`, how many batches of completions to generate; `held_out_every`, updates between two
            measurements (default: those of two generations); `task`, a key of `TASKS` (default: `"sums"`); `k`, the
            samples of each held-out problem for pass@k at the end (default: pass@k is not measured); `weights`, those
            of the trainer `"given weights"`, one an update;
            `trainer`, a key of `TRAINERS` (default: `"BAPO"`); `args`, settings of its config on top of `SETTINGS`.

    Returns:
        `dict` with one value a generation for `reward` and `generated_tokens` (so far), held-out accuracy by update,
        `series` of the metrics of each update, means of them, the seconds of training, and what [`count_rollouts`]
        gives. `failure` is there if the run broke off because a NaN came up.
    """
    torch.set_num_threads(1)
    keep_freed_memory()  # takes 25 % less time on long completions
    name = spec.get("task", "sums")
    task = TASKS[name]()
    trainer_class, config_class = TRAINERS[spec.get("trainer", "BAPO")]
    settings = {**SETTINGS, **TASK_SETTINGS[name], "max_completion_length": task.max_new_tokens, **spec["args"]}
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(folder, seed=spec["seed"], **settings)
        updates = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
        args.max_steps = spec["generations"] * updates
        held_out = HeldOut(spec.get("held_out_every", 2 * updates), task)
        trainer = trainer_class(
            str(warm_start_path(task=task)),
            task.reward_func,
            args,
            train_dataset=task.train_dataset,
            callbacks=[held_out],
        )
        if "weights" in spec:
            trainer.given_weights = spec["weights"]
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
        solved = {}
        if "k" in spec:
            accuracy = None if failure else _held_out(trainer.model, trainer.processing_class, task, spec["k"])
            solved = {"pass@k": round(accuracy.solved, 4) if accuracy else 0.0}
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
            "completions/clipped_ratio",
        )
    }
    return {
        **({} if failure is None else {"failure": failure}),
        "updates": len(logs),
        "seconds": round(seconds, 1),
        "seconds_so_far": held_out.seconds_so_far,
        "generated_tokens": generated,
        "reward": [round(log["reward"], 4) for log in generations],
        **solved,
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
        **count_rollouts(trainer),
        "trained_length_ratio": generations[-1].get("partial/trained_length_ratio"),
    }


def count_rollouts(trainer: MeasuredGRPOTrainer) -> dict:
    """Return what a trainer counted: decode steps and lengths of its generations, versions of what it trained."""
    num_some = max(1, len(trainer.lengths) // 4)
    return {
        "decode_steps": trainer.decode_steps,
        "completions": sum(map(len, trainer.lengths)),
        "lengths": {
            "first": _percentiles(trainer.lengths[:num_some]),
            "last": _percentiles(trainer.lengths[-num_some:]),
        },
        "share_of_several_versions": round(trainer.num_trained_of_several_versions / max(1, trainer.num_trained), 4),
    }


def _percentiles(lengths: Sequence[Sequence[int]]) -> dict[str, float]:
    ordered = sorted(itertools.chain.from_iterable(lengths))
    return {name: ordered[int(share * len(ordered))] for name, share in (("median", 0.5), ("95th", 0.95)) if ordered}


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)  # TRL logs None for NaN


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if _is_number(value)]
    return round(sum(defined) / len(defined), 4) if defined else None


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
