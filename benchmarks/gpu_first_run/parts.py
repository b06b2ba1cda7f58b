"""Parts of the first run on a GPU. The cases of each part are functions that return a row of results."""

from collections.abc import Callable
from functools import partial

from bapo_trl.clip_bounds import MEASURES
from benchmarks import partial_rollouts, search_cost
from benchmarks.common import in_turns
from benchmarks.gpu_first_run.layouts import layout
from benchmarks.gpu_first_run.runs import runs
from benchmarks.gpu_first_run.sampled import chat, colocate, learns, qlora
from benchmarks.gpu_first_run.sharded import sharded
from benchmarks.gpu_first_run.to_accuracy import time_to_accuracy
from benchmarks.gpu_first_run.trainers import Case, Progress, Setup, free
from benchmarks.gpu_first_run.updates import cost, memory, reads
from benchmarks.lognormal_model import lognormal_model


def search(setup: Setup) -> dict[str, Case]:
    return {measure: Case(partial(_time_search, setup, measure)) for measure in MEASURES}


def _time_search(setup: Setup, measure: str) -> dict:
    rows = setup.sizes.search_rows
    tokens, on_cpu = search_cost.make_tokens(setup.device, rows), search_cost.make_tokens("cpu", rows)
    search_cost.check_same_bounds(tokens, measure)
    seconds = search_cost.time_in_turns(tokens, measure, 2 + 7, setup.device)
    return {
        "tokens": rows * search_cost.LENGTH_TOKENS,
        "seconds": {name: values[2:] for name, values in seconds.items()},
        "same_bounds_as_on_the_cpu": all(
            search_cost.fast_search(*tokens, measure, target) == search_cost.fast_search(*on_cpu, measure, target)
            for target in search_cost.TARGETS
        ),
    }


def rollouts(setup: Setup) -> dict[str, Case]:
    return {"oversampling 1.5, chunk a quarter of the median": Case(partial(_time_rollouts, setup))}


def _time_rollouts(setup: Setup) -> dict:
    sizes, prompt_tokens = setup.sizes, partial_rollouts.PROMPT_TOKENS
    median, cap = sizes.median_tokens, partial_rollouts.CAP * sizes.median_tokens
    given = {"use_cpu": False, "bf16": True, "dataloader_pin_memory": True} if setup.on_gpu else {}
    progress = Progress("partial rollouts")
    oversampling = {"whole": partial_rollouts.SYNCHRONOUS, "partial": 1.5}
    measured: dict[str, list[dict]] = {name: [] for name in oversampling}
    for index, name in in_turns(oversampling, sizes.rounds):
        shape = sizes.trained
        model = lognormal_model(median, partial_rollouts.TAIL, prompt_tokens, cap, shape.hidden, shape.layers)
        row = partial_rollouts.measure(
            oversampling[name], partial_rollouts.CHUNK, median, sizes.generations,
            {"seed": index, **given}, model, sizes.groups,
        )  # fmt: skip
        measured[name].append(row)
        progress.say(f"round {index + 1} of {sizes.rounds}, {name}: done")
        del model
        free()
    return measured


PARTS: dict[str, Callable[[Setup], dict[str, Case]]] = {
    "time": time_to_accuracy,
    **{
        part.__name__: part
        for part in (search, cost, layout, memory, reads, runs, rollouts, sharded, colocate, learns, chat, qlora)
    },
}
# Parts whose cases have a process each; the others share one. A case of `time` starts one of its own
OWN_PROCESS = ("sharded", "colocate", "learns", "chat", "qlora")
