"""
Simulated generations of long completions on many servers: throughput and staleness by oversampling.

    python -m benchmarks.rollout_simulation

Nothing is timed here. The package's own pool takes in completions whose lengths are drawn from a lognormal
distribution: the 95th percentile is 5 times the median, the cap 10 times. Each rank has a server of its own, as in
data parallelism. Assumed:

- Decoding waits for memory: the time of a step goes with the bytes that it reads, the weights and the keys and values
  of all tokens in flight. 15 GB and 57 kB a token are those of a model of 7B with grouped attention, in bfloat16.
- Under a new policy, a server computes the tokens so far again, 512 in the time in which it reads the weights once.
- All ranks look together, after a chunk of a quarter of the median, at who has enough; the slowest decides.

Prompts and training are left out. A token here stands for many, so that a completion has up to 320 of them.
"""

import argparse
import math
import random
from statistics import NormalDist

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bapo_trl.rollouts.pool import Continuation, Group, RolloutPool
from benchmarks.common import Section, provenance, save_result, table


CAPS = (8192, 32768)  # longest completion in tokens
SERVERS = (1, 8, 64)
OVERSAMPLING = (1.0, 1.25, 1.5, 1.9)
GROUPS, COMPLETIONS = 16, 8  # of a rank
UPDATES = 4  # of a generation
TAIL, CAP = 5, 10  # 95th percentile and longest, over the median
MEDIAN, CHUNK = 32, 8  # in tokens of the simulation
PREFILL_TOKENS = 512  # in the time in which a server reads the weights
WEIGHT_BYTES, BYTES_PER_TOKEN = 15e9, 57e3
WARMUP, GENERATIONS = 6, 12
END, GOES_ON = 1, 2
FIGURE = "partial_rollouts_generation.png"


class Rank:
    """A pool, and the lengths that its completions will have."""

    def __init__(self, index: int, num_ranks: int, num_held: int, rng: random.Random, num_groups: int = GROUPS):
        self.pool = RolloutPool(COMPLETIONS, CAP * MEDIAN, [END], index, num_ranks)
        self.num_held = num_held
        self.num_groups = num_groups
        self.rng = rng
        self.lengths: dict[tuple[int, int], int] = {}

    def admit(self) -> int:
        """Take in the groups of a generation; return how many it needs."""
        sigma = math.log(TAIL) / NormalDist().inv_cdf(0.95)
        for _ in range(self.num_groups):
            group = self.pool.admit({}, [GOES_ON])
            for place in range(COMPLETIONS):
                length = round(MEDIAN * math.exp(self.rng.gauss(0, sigma)))
                self.lengths[group, place] = min(CAP * MEDIAN, max(1, length))
        return max(1, min(self.num_groups, len(self.pool) - self.num_held))

    @property
    def longest_left(self) -> int:
        """Tokens that the longest completion still has to come; 0 without any."""
        return max((self._left(each) for each in self.pool.unfinished()), default=0)

    def decode(self, version: int, cap: int) -> None:
        """Continue all completions by up to `cap` tokens."""
        continuations = self.pool.unfinished()
        lefts = [self._left(each) for each in continuations]
        tokens = [[GOES_ON] * (left - 1) + [END] if left <= cap else [GOES_ON] * cap for left in lefts]
        if continuations:
            self.pool.take(continuations, tokens, version, cap)

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of completions that go on."""
        return sum(len(each.completion.tokens) for each in self.pool.unfinished())

    def _left(self, each: Continuation) -> int:
        place = next(i for i, other in enumerate(each.group.completions) if other is each.completion)
        return self.lengths[each.group.id, place] - len(each.completion.tokens)


def simulate(oversampling: float, num_servers: int, cap_tokens: int, seed: int = 0) -> dict:
    """
    Generate on ranks with a server each.

    Args:
        oversampling (`float`):
            Groups in flight over those of a generation; 1 waits for all.
        num_servers (`int`):
            Number of ranks.
        cap_tokens (`int`):
            Longest completion in real tokens.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the lengths.

    Returns:
        `dict` with `time` of a generation, in readings of the weights, and `staleness_mean` and `staleness_max` of the
        trained tokens over the updates, in policy versions.
    """
    rng = random.Random(seed)
    held = round((oversampling - 1) * GROUPS)
    ranks = [Rank(index, num_servers, held, rng) for index in range(num_servers)]
    scale = cap_tokens / (CAP * MEDIAN)  # real tokens of one here
    time, ages = 0.0, []
    for generation in range(WARMUP + GENERATIONS):
        version = generation * UPDATES
        took = max(rank.tokens_in_flight for rank in ranks) * scale / PREFILL_TOKENS
        wanted = [rank.admit() for rank in ranks]
        while not all(rank.pool.has_enough(count) for rank, count in zip(ranks, wanted, strict=True)):
            cap = min([CHUNK, *(each.num_left for rank in ranks for each in rank.pool.unfinished())])
            decoded = min(cap, max(rank.longest_left for rank in ranks))
            for rank in ranks:
                rank.decode(version, cap)
            read = max(rank.tokens_in_flight for rank in ranks) * scale * BYTES_PER_TOKEN
            took += scale * decoded * (1 + read / WEIGHT_BYTES)
        groups = [group for rank, count in zip(ranks, wanted, strict=True) for group in rank.pool.emit(count)]
        if generation >= WARMUP:
            time += took
            ages.append(_staleness(groups, version))
    means, largest = zip(*ages, strict=True)
    return {
        "oversampling": oversampling,
        "servers": num_servers,
        "cap": cap_tokens,
        "time": round(time / GENERATIONS, 1),
        "staleness_mean": round(float(np.mean(means)), 3),
        "staleness_max": max(largest),
    }


def _staleness(groups: list[Group], version: int) -> tuple[float, int]:
    """Return mean and largest age of the groups' tokens over the updates, in random order, from a version on."""
    segments = [segment for group in groups for completion in group.completions for segment in completion.segments]
    tokens = sum(length for _, length in segments)
    mean = sum((version - sampled) * length for sampled, length in segments) / tokens + (UPDATES - 1) / 2
    return mean, max(version - sampled for sampled, _ in segments) + UPDATES - 1


def render(content: dict) -> Section:
    """Return the section of a result."""
    settings, results = content["settings"], content["results"]
    synchronous = {(row["cap"], row["servers"]): row["time"] for row in results if row["oversampling"] == 1}
    rows = [
        [
            f"{row['cap']:,}",
            str(row["servers"]),
            f"{row['oversampling']:g}",
            f"{synchronous[row['cap'], row['servers']] / row['time']:.2f}",
            f"{row['staleness_mean']:.1f}",
            str(row["staleness_max"]),
        ]
        for row in results
    ]
    header = ["Longest completion", "Servers", "Oversampling", "Throughput", "Mean staleness", "Largest"]
    best = max(results, key=lambda row: synchronous[row["cap"], row["servers"]] / row["time"])
    most = synchronous[best["cap"], best["servers"]] / best["time"]
    sizes = f"{settings['groups']} groups of {settings['completions']} a generation, {settings['updates']} updates"
    text = f"""\
## Simulated: partial rollouts of long completions

These figures are simulated, not measured: the package's pool takes in completions whose lengths are drawn. The time of
a decode step goes with the bytes it reads: weights of {settings["weight_bytes"] / 1e9:g} GB, and
{settings["bytes_per_token"] / 1e3:g} kB for each token in flight. A new policy computes tokens so far again,
{settings["prefill_tokens"]} in the time in which the weights are read once. Each rank has a server of its own and
{sizes}; the slowest rank decides when a generation ends. Prompts and training are left out. Throughput is in samples
generated in a time, over that of waiting for all. Staleness is in policy versions, over all updates of a generation.

{table(header, rows)}

The more ranks there are, the surer one of them has a long group. The longer the completions, the more a step costs
that has more rows. Both take from what oversampling gains. The most here is
{most:.2f} times the samples, at {best["oversampling"]:g} with {best["servers"]} server(s), for tokens that are
{best["staleness_mean"]:.1f} versions old on average.

{provenance(content)}"""
    return Section(text, figures={FIGURE: draw_generation()})


def draw_generation(generation: int = 8, num_groups: int = 6) -> Figure:
    """Draw one generation of a small pool: its rows over decode steps, what was parked before and what is after."""
    rng = random.Random(4)
    rank = Rank(0, 1, num_groups // 2, rng, num_groups)
    for index in range(generation + 1):
        wanted = rank.admit()
        before = {id(each.completion): len(each.completion.tokens) for each in rank.pool.unfinished()}
        rows = [(group, completion) for group in rank.pool for completion in group.completions]
        steps = 0
        while not rank.pool.has_enough(wanted):
            cap = min([CHUNK, *(each.num_left for each in rank.pool.unfinished())])
            steps += min(cap, rank.longest_left)
            rank.decode(index, cap)
        left = {group.id for group in rank.pool.emit(wanted)}
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    colors = {"trained": "#3b7dd8", "parked": "#e0a030"}
    for place, (group, completion) in enumerate(rows):
        y = place + 1.5 * (place // COMPLETIONS)
        known = before.get(id(completion), len(completion.tokens))
        kind = "trained" if group.id in left else "parked"
        axes.barh(y, -known, color="#c8ccd2", height=0.85)
        axes.barh(y, len(completion.tokens) - known, color=colors[kind], height=0.85)
        if not completion.has_ended:
            axes.plot(len(completion.tokens) - known + 1.5, y, marker=">", color=colors[kind], markersize=4)
    axes.axvline(0, color="black", linewidth=1)
    axes.axvline(steps, color="black", linewidth=1, linestyle="--")
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_ylabel("Completions, in groups of 8; the oldest group on top")
    axes.set_xlabel("Tokens: of earlier policies (left of 0) and of this generation")
    handles = [
        Patch(color="#c8ccd2", label="sampled in earlier generations"),
        Patch(color=colors["trained"], label="sampled now, group is complete and trained"),
        Patch(color=colors["parked"], label="sampled now, group stays in the pool"),
        Line2D([], [], marker=">", linestyle="", color=colors["parked"], label="parked: a later policy goes on"),
        Line2D([], [], linestyle="--", color="black", label="enough groups are complete"),
    ]
    axes.legend(handles=handles, loc="lower left", fontsize=8)
    return figure


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for cap in CAPS:
        for servers in SERVERS:
            for oversampling in OVERSAMPLING:
                rows.append(simulate(oversampling, servers, cap))
                print(rows[-1], flush=True)
    sizes = {"groups": GROUPS, "completions": COMPLETIONS, "updates": UPDATES, "prefill_tokens": PREFILL_TOKENS}
    sizes |= {"weight_bytes": WEIGHT_BYTES, "bytes_per_token": BYTES_PER_TOKEN}
    save_result("rollout_simulation", "cpu", sizes, rows)


if __name__ == "__main__":
    main()
