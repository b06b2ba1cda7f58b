"""
Measure the bound search: time against the step-by-step loop of Algorithm 1, and extra memory at its peak.

    python -m benchmarks.search_cost
    python -m benchmarks.search_cost --device cuda

About a million tokens, three in four negative, and a target out of reach: the loop walks all 52 candidate pairs.
Rounds of the search and of both loops alternate in one process; a figure is the median of the rounds' ratios.

- `recomputed`, the loop as Algorithm 1 reads: at every pair it computes the contribution of every token anew. The
  target is set against this one.
- `hoisted`, a loop that computes all that does not depend on the bounds once, before it starts.

On a CPU the loops also pay for memory that is given back to the system and fetched again at each of their steps. How
often that happens depends on all that the process did before. So everything is measured under the default allocator
and, then, with freed memory kept in the process, which leaves arithmetic only (as on a GPU).

Extra memory is what is allocated above the inputs. On the CPU, the allocator's own record of each allocation and
release (`torch.profiler`), so that tensors inside of kernels count; on a GPU, `torch.cuda.max_memory_allocated`.

On a GPU, a micro-batch of 8k tokens is measured too, and `torch.profiler` counts the kernels of each search and loop
and adds up the time that they take on the device.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial

import torch

from bapo_trl.clip_bounds import MEASURES, BoundGrid, contributions, search_bounds
from benchmarks.common import keep_freed_memory, num_cores, save_result, spread, synchronize


ROWS, LENGTH_TOKENS = 512, 2048
MICRO_BATCH_ROWS = 4
OUT_OF_REACH = 0.99
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
    """Return the bounds that the package finds."""
    bounds = search_bounds(contributions(ratio, advantages, weights, GRID, measure=measure), GRID, target)
    return bounds.low.item(), bounds.high.item()


def recomputed_loop(ratio, advantages, weights, measure: str, target: float) -> tuple[float, float]:
    """Return the bounds that Algorithm 1 finds, with all contributions computed anew at each pair of bounds."""
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
    """Return the bounds that Algorithm 1 finds, with the parts that no bound enters computed once."""
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
    """Raise `RuntimeError` if the search and a loop choose different bounds, for targets all along the path."""
    for target in (0.1, 0.25, 0.3, 0.33, 0.36, 0.4, OUT_OF_REACH):
        expected = fast_search(*tokens, measure, target)
        for name, loop in LOOPS.items():
            found = loop(*tokens, measure, target)
            if found != expected:
                raise RuntimeError(f"target {target}, {measure}: search {expected}, {name} loop {found}.")


def time_s(function: Callable, device: str) -> float:
    """Return the seconds that one call takes."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def peak_extra_bytes(function: Callable, device: str) -> int:
    """Return the most bytes that `function` holds at any time, above what was allocated before the call."""
    if torch.device(device).type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        function()
    held = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def count_kernels(function: Callable, device: str) -> dict:
    """Return the number of kernels of one call on a GPU, copies and fills of memory included, and their time in ms."""
    synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        function()
        synchronize(device)
    events = profiler.profiler.kineto_results.events()
    durations = [event.duration_ns() for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    return {"kernels": len(durations), "ms": round(sum(durations) / 1e6, 4)}


def measure_setting(measure: str, num_threads: int, memory: str, rounds: int, device: str, rows: int = ROWS) -> dict:
    """Return one row of the results: speed-up over each loop, and extra memory in token-sized tensors."""
    torch.set_num_threads(num_threads)
    tokens = make_tokens(device, rows)
    check_same_bounds(tokens, measure)  # warms up, too
    functions = {"search": fast_search, **LOOPS}
    calls = {name: partial(function, *tokens, measure, OUT_OF_REACH) for name, function in functions.items()}
    seconds = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(time_s(call, device))
    extra_bytes = peak_extra_bytes(calls["search"], device)
    token_bytes = tokens[0].numel() * tokens[0].element_size()
    on_gpu = torch.device(device).type == "cuda"
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
        "on_device": {name: count_kernels(call, device) for name, call in calls.items()} if on_gpu else None,
        "speedup_target": SPEEDUP_TARGET,
        "extra_memory_tensors": round(extra_bytes / token_bytes, 3),
        "extra_memory_target": MEMORY_TARGET,
        "same_bounds": True,  # else `check_same_bounds` has raised
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--rounds", type=int, default=9, help="paired rounds of each setting")
    args = parser.parse_args()

    on_cpu = args.device == "cpu"
    thread_counts = sorted({1, num_cores()}) if on_cpu else [1]
    results = []
    print("freed memory  measure      tokens  threads  search ms  recomputed  hoisted  extra tensors  kernels")
    for memory in ("default", "kept") if on_cpu else ("kept",):
        if memory == "kept":
            keep_freed_memory()  # for good
        sizes = (ROWS,) if on_cpu else (ROWS, MICRO_BATCH_ROWS)
        for rows, measure, num_threads in itertools.product(sizes, MEASURES, thread_counts):
            row = measure_setting(measure, num_threads, memory, args.rounds, args.device, rows)
            results.append(row)
            recomputed, hoisted = (row["speedup"][name]["median"] for name in LOOPS)
            kernels = "-" if row["on_device"] is None else row["on_device"]["search"]["kernels"]
            print(
                f"{memory:<12}  {measure:<10} {row['tokens']:>8} {num_threads:>8} "
                f"{row['ms']['search']['median']:>10.3f} {recomputed:>10.1f}x {hoisted:>7.1f}x "
                f"{row['extra_memory_tensors']:>14.2f} {kernels:>8}",
                flush=True,
            )
    num_pairs = len(GRID.upper) + len(GRID.lower) - 1
    settings = {"tokens": ROWS * LENGTH_TOKENS, "rows": ROWS, "pairs": num_pairs, "target_share": OUT_OF_REACH}
    save_result("search_cost", args.device, settings, results)


if __name__ == "__main__":
    main()
