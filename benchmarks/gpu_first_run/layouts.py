"""Measure time and memory of an update without padding and skipped samples, on the workloads of `update_cost`."""

import statistics
import tempfile
import warnings
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.common import time_s
from benchmarks.gpu_first_run.trainers import Case, Progress, Setup, free, trained_model
from benchmarks.update_cost import (
    UPDATES,
    WARMUP_GENERATIONS,
    WORKLOADS,
    Workload,
    by_generation,
    logged,
    make_for_layout,
)
from benchmarks.watched_training import SteppedTraining, train_in_turns


KINDS = ("grpo", "bapo")


def layout(setup: Setup) -> dict[str, Case]:
    return {workload.name: Case(partial(_measure, setup, workload)) for workload in WORKLOADS}


def _measure(setup: Setup, workload: Workload) -> dict:
    """Train both trainers in turns, on the same weights and completions."""
    sizes, progress = setup.sizes, Progress(workload.name)
    generations = WARMUP_GENERATIONS + sizes.layout_rounds

    def measure(run: SteppedTraining, update: Callable[[], None]) -> tuple[float, int | None]:
        found = _time_and_memory(update, setup)
        progress.say(f"an update: {found[0]:.2f} s")
        return found

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = trained_model(setup, sizes.trained, uses_lora=False)
        trainers = {
            kind: make_for_layout(
                kind, workload, f"{folder}/{kind}", model, generations, setup, sizes.layout_rows, sizes.layout_tokens
            )
            for kind in KINDS
        }
        measured = by_generation(train_in_turns(trainers, generations * UPDATES, measure))
        norms = {kind: logged(trainer, "grad_norm") for kind, trainer in trainers.items()}
        padding = {name: logged(trainers["bapo"], f"padding/{name}") for name in ("computed", "skipped")}
    row = {
        "seconds": {kind: [[seconds for seconds, _ in each] for each in own] for kind, own in measured.items()},
        "targets": {"time": workload.time_target, "memory": workload.memory_target},
        "gradient_norms": norms,
        "padding": {name: statistics.fmean(values) for name, values in padding.items()},
    }
    if setup.on_gpu:
        row["peak_bytes"] = {kind: max(peak for each in own for _, peak in each) for kind, own in measured.items()}
    del model, trainers
    free()
    return row


def _time_and_memory(update: Callable[[], None], setup: Setup) -> tuple[float, int | None]:
    """Return the seconds of an update, and on a GPU its peak memory above that before it."""
    if not setup.on_gpu:
        return time_s(update, setup.device), None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = time_s(update, setup.device)
    return seconds, torch.cuda.max_memory_allocated() - before
