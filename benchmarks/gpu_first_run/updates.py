"""Measure the time, kernels and memory of an update, and the places where the host waits for the device."""

import linecache
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from transformers import TrainerCallback
from trl import GRPOTrainer

import bapo_trl
from benchmarks.common import in_turns, synchronize, time_s
from benchmarks.gpu_first_run.shapes import Load, lora
from benchmarks.gpu_first_run.trainers import (
    MICRO_BATCHES,
    SCOPES,
    Case,
    Progress,
    Setup,
    free,
    make_trainer,
    settings_for,
    trained_model,
)
from benchmarks.watched_training import SteppedTraining


WARMUP_ROUNDS = 2


class RandomCompletions:
    """A `rollout_func` that returns random tokens, from half the maximum length up, without generating."""

    def __init__(self, load: Load, seed: int):
        self.load = load
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        longest, end = self.load.completion_tokens, trainer.model.config.eos_token_id
        lengths = torch.randint(longest // 2, longest + 1, (len(prompts),), generator=self.generator).tolist()
        lengths[0] = longest
        tokens = [torch.randint(5, 40, (length - 1,), generator=self.generator).tolist() for length in lengths]
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": prompt_ids, "completion_ids": [[*row, end] for row in tokens], "logprobs": None}


def load_settings(setup: Setup, load: Load, rounds: int) -> dict[str, Any]:
    """Return settings that train on one generation for the whole run: samples are stale from the second update on."""
    updates = rounds + 1
    return settings_for(
        setup, load.rows, load.completion_tokens, num_iterations=updates, max_steps=updates, learning_rate=1e-6
    )


@contextmanager
def loaded_trainers(setup: Setup, load: Load, kinds: dict[str, str], rounds: int) -> Iterator[dict[str, GRPOTrainer]]:
    """Yield trainers of one model, by name, and free the device's memory at the end."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = trained_model(setup, load.shape, load.uses_lora)
        trainers: dict[str, GRPOTrainer] = {}
        for name, kind in kinds.items():
            trainers[name] = make_trainer(
                kind,
                model,
                f"{folder}/{name}",  # a folder has one live run
                load_settings(setup, load, WARMUP_ROUNDS + rounds),
                peft_config=lora() if load.uses_lora and not trainers else None,
                rollout_func=RandomCompletions(load, setup.seed),
            )
            model = trainers[name].model  # with the adapter that the first has put on
        yield trainers
    del model, trainers
    free()


def cost(setup: Setup) -> dict[str, Case]:
    return {load.name: Case(partial(_time_updates, setup, load), load.stage) for load in setup.sizes.loads}


def _time_updates(setup: Setup, load: Load) -> dict:
    """Time updates of alternating trainers; then profile one update of each, for its steadier device time."""
    kinds = {"grpo": "grpo", "grpo again": "grpo", **{scope: scope for scope in SCOPES}}
    progress, rounds = Progress(load.name), WARMUP_ROUNDS + load.rounds
    with loaded_trainers(setup, load, kinds, load.rounds + 1) as trainers:
        updates = {name: SteppedTraining(trainer) for name, trainer in trainers.items()}
        for name, update in updates.items():
            update.start()
            progress.say(f"`{name}` is ready")
        seconds: dict[str, list[float]] = {name: [] for name in updates}
        for index, name in in_turns(updates, rounds):
            seconds[name].append(time_s(updates[name].update, setup.device))
            progress.say(f"round {index + 1} of {rounds}, `{name}`: {seconds[name][-1]:.2f} s")
        profiles = {name: _profile(update, setup.device) for name, update in updates.items()}
        for update in updates.values():
            update.finish()
    return {
        "tokens_a_micro_batch": load.rows * load.completion_tokens,
        "micro_batches": MICRO_BATCHES,
        "seconds": {name: values[WARMUP_ROUNDS:] for name, values in seconds.items()},
        "profiles": profiles,
    }


def _profile(training: SteppedTraining, device: str) -> dict[str, float]:
    """
    Return the device time, the kernels and the host's waits of an update.

    On a CPU, for trying this out, operations replace kernels, although their times overlap.
    """
    activity, kind = {
        "cuda": (ProfilerActivity.CUDA, DeviceType.CUDA), "cpu": (ProfilerActivity.CPU, DeviceType.CPU),
    }[device]  # fmt: skip
    profiler = torch.profiler.profile(activities=[activity])
    synchronize(device)
    with host_waits(device) as lines:
        training.update(around=profiler)
    events = [
        event for event in profiler.profiler.kineto_results.events()
        if event.device_type() == kind and not event.is_user_annotation()
    ]  # fmt: skip
    return {
        "device_seconds": sum(event.duration_ns() for event in events) / 1e9,
        "kernels": len(events),
        "host_waits": lines.total(),
    }


@contextmanager
def host_waits(device: str = "cuda") -> Iterator[Counter[str]]:
    """Count calls that wait for the device, by the line in this package or TRL that made them, or by their own."""
    lines: Counter[str] = Counter()

    def keep(message, category, filename, lineno, file=None, line=None):
        if "called a synchronizing" not in str(message):  # and not what torch says of this mode
            return
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_stack() if _in_package(frame.filename)]
        place, number = places[-1] if places else (filename, lineno)
        name = _in_package(place) or place.split("site-packages/")[-1]
        lines[f"{name}:{number}: {linecache.getline(place, number).strip()}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = keep
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lines
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def _in_package(file: str) -> str | None:
    """Return a file's path from the package name on, for this package or TRL; `None` for other files."""
    folders = (Path(package.__file__).parent for package in (bapo_trl, trl))
    return next(
        (str(Path(file).relative_to(folder.parent)) for folder in folders if folder in Path(file).parents), None
    )


class MemoryReader(TrainerCallback):
    """Callback with the peak memory of the last update."""

    peak = 0

    def on_step_begin(self, args, state, control, **kwargs):
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **kwargs):
        self.peak = torch.cuda.max_memory_allocated()


def memory(setup: Setup) -> dict[str, Case]:
    return {
        load.name: Case(partial(_read_memory, setup, load), load.stage, lacks=setup.lacks_gpu)
        for load in setup.sizes.loads
    }


def _read_memory(setup: Setup, load: Load) -> dict:
    row = {}
    for kind in ("grpo", *SCOPES):
        with loaded_trainers(setup, load, {kind: kind}, rounds=1) as trainers:
            reader = MemoryReader()
            trainers[kind].add_callback(reader)
            trainers[kind].add_callback(Progress(f"{load.name}, `{kind}`"))
            trainers[kind].train()
        row[kind] = {"peak_bytes": reader.peak}
    return row


def reads(setup: Setup) -> dict[str, Case]:
    load = setup.sizes.loads[0]
    kinds = ("grpo", *SCOPES)
    return {kind: Case(partial(_count_reads, setup, load, kind), lacks=setup.lacks_gpu) for kind in kinds}


def _count_reads(setup: Setup, load: Load, kind: str) -> dict:
    with loaded_trainers(setup, load, {kind: kind}, rounds=1) as trainers:
        update = SteppedTraining(trainers[kind])
        update.start()
        for _ in range(WARMUP_ROUNDS):
            update.update()
        with host_waits() as lines:
            update.update()
        update.finish()
    return {"synchronizing_calls": lines.total(), "lines": dict(lines.most_common())}
