"""The parts of the first run on a GPU: the cases of each, as functions that return a row of figures."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from bapo_trl.clip_bounds import MEASURES
from bapo_trl.tasks import character_tokenizer
from benchmarks import partial_rollouts, search_cost
from benchmarks.gpu_first_run.runs import runs
from benchmarks.gpu_first_run.sampled import chat, colocate, learns
from benchmarks.gpu_first_run.shapes import end_by_hazards
from benchmarks.gpu_first_run.sharded import sharded
from benchmarks.gpu_first_run.trainers import Case, Progress, Setup, free, trained_model
from benchmarks.gpu_first_run.updates import cost, memory, reads


@dataclass(frozen=True)
class Part:
    """Independent cases."""

    cases: Callable[[Setup], dict[str, Case]]
    own_process: bool = False  # of each case; else cases share one


def search(setup: Setup) -> dict[str, Case]:
    return {measure: Case(partial(_time_search, setup, measure)) for measure in MEASURES}


def _time_search(setup: Setup, measure: str) -> dict:
    rows, target = setup.sizes.search_rows, search_cost.OUT_OF_REACH
    tokens = search_cost.make_tokens(setup.device, rows)
    search_cost.check_same_bounds(tokens, measure)
    on_cpu = search_cost.make_tokens("cpu", rows)
    targets = (0.1, 0.25, 0.3, 0.33, 0.36, 0.4, target)
    bounds = [search_cost.fast_search(*tokens, measure, at) for at in targets]
    bounds_on_cpu = [search_cost.fast_search(*on_cpu, measure, at) for at in targets]
    functions = {"search": search_cost.fast_search, **search_cost.LOOPS}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(2 + 7):
        for name, function in functions.items():
            timed = partial(function, *tokens, measure, target)
            seconds[name].append(search_cost.time_s(timed, setup.device))
    return {
        "tokens": rows * search_cost.LENGTH_TOKENS,
        "seconds": {name: values[2:] for name, values in seconds.items()},
        "same_bounds_as_on_the_cpu": bounds == bounds_on_cpu,
    }


def rollouts(setup: Setup) -> dict[str, Case]:
    return {"oversampling 1.5, chunk a quarter of the median": Case(partial(_time_rollouts, setup))}


def _time_rollouts(setup: Setup) -> dict:
    sizes = setup.sizes
    shape = replace(sizes.trained, ties_embeddings=False)
    median, cap = sizes.median_tokens, partial_rollouts.CAP * sizes.median_tokens
    given = {} if not setup.on_gpu else {"use_cpu": False, "bf16": True, "dataloader_pin_memory": True}
    progress = Progress("partial rollouts")
    measured: dict[str, list[dict]] = {"whole": [], "partial": []}
    for index in range(sizes.rounds):
        settings = {"whole": partial_rollouts.SYNCHRONOUS, "partial": 1.5}
        for name in list(settings) if index % 2 == 0 else reversed(settings):
            model = trained_model(setup, shape, False)
            end_by_hazards(model, median, partial_rollouts.TAIL, cap, first_token=len(character_tokenizer()))
            row = partial_rollouts.measure(
                settings[name], partial_rollouts.CHUNK, median, sizes.generations,
                {"seed": index, **given}, model, sizes.groups,
            )  # fmt: skip
            measured[name].append(row)
            progress.say(f"round {index + 1} of {sizes.rounds}, {name}: done")
            del model
            free()
    return measured


PARTS = {
    "search": Part(search),
    "cost": Part(cost),
    "memory": Part(memory),
    "reads": Part(reads),
    "runs": Part(runs),
    "rollouts": Part(rollouts),
    "sharded": Part(sharded, own_process=True),
    "colocate": Part(colocate, own_process=True),
    "learns": Part(learns, own_process=True),
    "chat": Part(chat, own_process=True),
}
