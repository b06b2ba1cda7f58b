"""
Measure the bound search: speed-up over the step-by-step loop of Algorithm 1, and peak extra memory.

    python -m benchmarks.search_cost

The input has about a million tokens, three in four negative, and a target out of reach: the loop visits all 52
candidate pairs. The search and both loops alternate in one process; results are medians of the rounds' ratios.

- `recomputed` is Algorithm 1 as written: it recomputes the contribution of every token at every pair. The goal is
  relative to this loop.
- `hoisted` is a loop that computes everything independent of the bounds once, before it starts.

On a CPU, the loops also spend time on memory that is returned to the system and requested again at each step. How
often this happens depends on the history of the process. So everything is measured with the default allocator, and
again with freed memory kept in the process, which leaves only the arithmetic.

Extra memory is the memory allocated in addition to the inputs, from the allocator's record of all allocations and
releases (`torch.profiler`), including tensors inside kernels. `gpu_first_run` measures the search on a GPU.
"""

import argparse
import itertools
import os
from collections.abc import Callable
from functools import partial

import torch

from bapo_trl.clip_bounds import MEASURES, BoundGrid, contributions, search_bounds
from benchmarks.common import in_turns, keep_freed_memory, save_result, spread, time_s


ROWS, LENGTH_TOKENS = 512, 2048
OUT_OF_REACH = 0.99
TARGETS = (0.1, 0.25, 0.3, 0.33, 0.36, 0.4, OUT_OF_REACH)  # all along the path
SPEEDUP_TARGET = 10.0
MEMORY_TARGET = 4.0
GRID = BoundGrid()


def make_tokens(device: str, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ratios (B, T), advantages (B,) and weights (B, T): a quarter of the rows positive, uneven lengths."""
    generator = torch.Generator().manual_seed(0)
    ratio = torch.exp(0.35 * torch.randn(rows, LENGTH_TOKENS, generator=generator))
    advantages = torch.where(torch.arange(rows) % 4 == 0, 1.0, -1.0)
    lengths = torch.randint(LENGTH_TOKENS // 2, LENGTH_TOKENS + 1, (rows, 1), generator=generator)
    weights = (torch.arange(LENGTH_TOKENS) < lengths).float()
    return ratio.to(device), advantages.to(device), weights.to(device)


def fast_search(ratio, advantages, weights, measure: str, target: float) -> tuple[float, float]:
    """Return the bounds from the package's search."""
    bounds = search_bounds(contributions(ratio, advantages, weights, GRID, measure=measure), GRID, target)
    return bounds.low.item(), bounds.high.item()


def recomputed_loop(ratio, advantages, weights, measure: str, target: float) -> tuple[float, float]:
    """Return the bounds from Algorithm 1, with all contributions recomputed at each pair of bounds."""
    advantages = advantages.unsqueeze(1)

    def share(low: float, high: float) -> float:
        if measure == "gradient":
            passes = torch.where(advantages > 0, ratio <= high, ratio >= low)
            terms = ratio * advantages * weights * passes
        else:
            terms = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages) * weights
        positive, negative = _sum(terms.clamp(min=0)), -_sum(terms.clamp(max=0))
        return (positive / (positive + negative)).item()

    return _walk(share, target)


def hoisted_loop(ratio, advantages, weights, measure: str, target: float) -> tuple[float, float]:
    """Return the bounds from Algorithm 1, with everything independent of the bounds computed once."""
    size = weights * advantages.abs().unsqueeze(1)
    of_positive = torch.where(advantages.unsqueeze(1) > 0, size, 0.0)
    of_negative = torch.where(advantages.unsqueeze(1) < 0, size, 0.0)
    if measure == "gradient":
        of_positive, of_negative = of_positive * ratio, of_negative * ratio

    def share(low: float, high: float) -> float:
        if measure == "gradient":
            positive = _sum(of_positive * (ratio <= high))
            negative = _sum(of_negative * (ratio >= low))
        else:
            positive = _sum(of_positive * ratio.clamp(max=high))
            negative = _sum(of_negative * ratio.clamp(min=low))
        return (positive / (positive + negative)).item()

    return _walk(share, target)


LOOPS = {"recomputed": recomputed_loop, "hoisted": hoisted_loop}


def _sum(terms: torch.Tensor) -> torch.Tensor:
    """Sum in double precision, as the search does."""
    return terms.sum(dtype=torch.float64)


def _walk(share: Callable[[float, float], float], target: float) -> tuple[float, float]:
    uppers, lowers = GRID.upper.tolist(), GRID.lower.tolist()
    pairs = [(lowers[0], high) for high in uppers] + [(low, uppers[-1]) for low in lowers[1:]]
    for low, high in pairs:
        if share(low, high) >= target:
            break
    return low, high


def check_same_bounds(tokens, measure: str):
    """Raise a `RuntimeError` if the search and a loop find different bounds."""
    for target in TARGETS:
        expected = fast_search(*tokens, measure, target)
        for name, loop in LOOPS.items():
            found = loop(*tokens, measure, target)
            if found != expected:
                raise RuntimeError(f"target {target}, {measure}: search {expected}, {name} loop {found}.")


def peak_extra_bytes(function: Callable) -> int:
    """Return the peak number of bytes that `function` allocates in addition to memory in use before the call."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        function()
    held = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def time_in_turns(tokens, measure: str, rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Return the seconds of the search and of both loops in each round, with a target out of reach."""
    functions = {"search": fast_search, **LOOPS}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _, name in in_turns(functions, rounds):
        seconds[name].append(time_s(partial(functions[name], *tokens, measure, OUT_OF_REACH), device))
    return seconds


def measure_setting(measure: str, num_threads: int, memory: str, rounds: int) -> dict:
    """Return a row of the results: speed-up over each loop, and extra memory in token-sized tensors."""
    torch.set_num_threads(num_threads)
    tokens = make_tokens("cpu")
    check_same_bounds(tokens, measure)  # warms up, too
    seconds = time_in_turns(tokens, measure, rounds)
    extra_bytes = peak_extra_bytes(partial(fast_search, *tokens, measure, OUT_OF_REACH))
    return {
        "measure": measure,
        "tokens": tokens[0].numel(),
        "threads": num_threads,
        "freed_memory": memory,
        "ms": {name: spread([1000 * each for each in values]) for name, values in seconds.items()},
        "speedup": {
            name: spread([loop / search for loop, search in zip(seconds[name], seconds["search"], strict=True)])
            for name in LOOPS
        },
        "speedup_target": SPEEDUP_TARGET,
        "extra_memory_tensors": round(extra_bytes / tokens[0].nbytes, 3),
        "extra_memory_target": MEMORY_TARGET,
        "same_bounds": True,  # else `check_same_bounds` has raised
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="paired rounds of each setting")
    args = parser.parse_args()

    results = []
    for memory in ("default", "kept"):
        if memory == "kept":
            keep_freed_memory()  # for good
        for measure, num_threads in itertools.product(MEASURES, sorted({1, len(os.sched_getaffinity(0))})):
            results.append(measure_setting(measure, num_threads, memory, args.rounds))
            print(results[-1], flush=True)
    num_pairs = len(GRID.upper) + len(GRID.lower) - 1
    settings = {"tokens": ROWS * LENGTH_TOKENS, "rows": ROWS, "pairs": num_pairs, "target_share": OUT_OF_REACH}
    save_result("search_cost", settings, results)


if __name__ == "__main__":
    main()
