"""What the log-probabilities of a fixed token sequence tell of the weights of vLLM's engine.

After a weight transfer, engine and trainer compute the log-probabilities of the same tokens. Their changes since an
earlier reading are compared: an engine with the new weights changes like the trainer, an engine with old weights does
not, and the difference in arithmetic cancels out. Each token counts by its probability at the earlier reading, because
low precision rounds the log-probabilities of unlikely tokens most.

Invariant: the earlier reading is replaced only once the engine has provably loaded new weights. Changes that are too
small to decide accumulate until they are large enough.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch


NUM_REPEATS = 3  # checks in a row with the same finding: rounding alone is large now and then
ROUNDING = 1e-6  # nats, for float32; lower precision shows as a larger difference between engine and trainer


@dataclass(frozen=True)
class WeightLimits:
    """Limits of the check; see [`check_server_weights`]."""

    vllm_logp_tolerance: float | None
    min_followed: float = 0.5
    cache_tolerance: float = 0.01


class Answer(NamedTuple):
    """Log-probabilities of an engine, at temperature 1."""

    logps: torch.Tensor  # of the `N` tokens of the sequence after the first, `(N,)` in float64 on the CPU
    by_cache: float = 0.0  # largest change of the next token's log-probabilities by what the prefix cache had, in nats
    by_chance: float = 0.0  # the same between two new caches


class Reading(NamedTuple):
    """Log-probabilities of the same `N` tokens at one time, each `(N,)` in float64 on the CPU."""

    trainer: torch.Tensor
    server: torch.Tensor

    @property
    def rounding(self) -> torch.Tensor:
        """Rounding error of each token, `(N,)` in nats: the difference between the two with the same weights."""
        return (self.server - self.trainer).abs().clamp(min=ROUNDING)

    def mean(self, values: torch.Tensor) -> float:
        """Return the mean of values of the tokens, `(N,)`, weighted by the trainer's probabilities."""
        weights = (self.trainer - self.trainer.amax()).exp()
        return ((weights * values).sum() / weights.sum()).item()


def share_followed(before: Reading, now: Reading) -> float:
    """
    Return the fraction of the trainer's change that the server followed.

    With `d` the trainer's change of each token's log-probability and `e` the server's, the fraction is
    `mean(sign(d) * e) / mean(|d|)`: 1 if the server follows, 0 if it does not change. If the mean of `|d|` is 8 times
    the mean rounding error, which enters twice (before and now), rounding changes the fraction by at most 1/4. For
    smaller changes, the result is NaN. At `before`, the server had the trainer's weights.
    """
    change = now.trainer - before.trainer
    size = before.mean(change.abs())
    if not size >= 8 * before.mean(before.rounding):
        return math.nan
    return before.mean(change.sign() * (now.server - before.server)) / size


def stands_still(before: Reading, now: Reading) -> bool:
    """
    Return whether the server's answer is identical to the last bit although the trainer changed.

    In bfloat16, steps far below the rounding error still change the server's answer for nearly all tokens: a median
    change of 1/100 of the median rounding error is enough. An answer can repeat after a step that changes almost no
    weight, but not several times in a row.
    """
    change = (now.trainer - before.trainer).abs().median()
    has_moved = change >= max(before.rounding.median().item() / 100, 10 * ROUNDING)
    return torch.equal(now.server, before.server) and bool(has_moved)


class Finding(NamedTuple):
    """Result of a check."""

    share: float  # of the trainer's change that the engine followed; NaN while it cannot be determined
    fault: str | None = None  # what is wrong with the engine's weights
    is_suspect: bool = False  # the engine's answer repeated, or the prefix cache changed it


class WeightHistory:
    """Compare the answers of one engine with the trainer."""

    def __init__(self, limits: WeightLimits):
        self.limits = limits
        # The last reading at which the engine had followed; the last one at which its answer had changed at all, or
        # repeated although the trainer changed; and how often in a row it has repeated
        self._followed: Reading | None = None
        self._moved: Reading | None = None
        self._repeats = 0
        # Checks in a row at which the engine did not follow, and at which the prefix cache changed its answer
        self._num_wrong = self._num_cached = 0
        self._by_chance = 0.0  # the largest so far: an engine may compute a batch in another way each time

    def compare(self, trainer: torch.Tensor, answer: Answer) -> Finding:
        """Compare an answer of the engine with the trainer's log-probabilities of the same tokens, `(N,)`."""
        now = Reading(trainer, answer.logps)
        share, least = self._share(now), self.limits.min_followed
        is_wrong = share < least or share > 2 - least
        self._num_wrong = self._num_wrong + 1 if is_wrong else 0
        self._by_chance = max(self._by_chance, answer.by_chance)
        is_cached = answer.by_cache > max(self.limits.cache_tolerance, 4 * self._by_chance)
        self._num_cached = self._num_cached + 1 if is_cached else 0
        is_suspect = bool(self._repeats or self._num_wrong or self._num_cached)
        return Finding(share, self._fault(now, share, answer.by_cache), is_suspect)

    def _fault(self, now: Reading, share: float, by_cache: float) -> str | None:
        tolerance, least = self.limits.vllm_logp_tolerance, self.limits.min_followed
        is_wrong = max(self._num_wrong, self._repeats) >= NUM_REPEATS
        if is_wrong and share < least:
            return (
                "does not load the trainer's weights: since the last transfer that worked, its log-probabilities of "
                f"fixed tokens made only {share:.2f} of the trainer's change (`min_followed` {least:g})"
            )
        if is_wrong and share > 2 - least:
            return (
                "loads more than the trainer's change of the weights, as with an adapter that is merged twice: its "
                f"log-probabilities of fixed tokens made {share:.2f} of the change (`min_followed` {least:g})"
            )
        difference = now.mean(now.rounding)
        if tolerance is not None and not difference <= tolerance:
            return (
                "does not have the trainer's weights: its log-probabilities of fixed tokens differ by "
                f"{difference:.3g} nats on average (`vllm_logp_tolerance` {tolerance:g})"
            )
        if self._num_cached >= NUM_REPEATS:
            return (
                "kept its prefix cache across a transfer: with it, the log-probability of a token differs by "
                f"{by_cache:.3g} nats from the one with a new cache (`cache_tolerance`)"
            )
        return None

    def _share(self, now: Reading) -> float:
        self._followed, self._moved = self._followed or now, self._moved or now
        if stands_still(self._moved, now):
            self._moved, self._repeats = now, self._repeats + 1
        elif not torch.equal(now.server, self._moved.server):
            self._moved, self._repeats = now, 0
        if self._repeats >= NUM_REPEATS:
            return 0.0
        share = share_followed(self._followed, now)
        if self.limits.min_followed <= share <= 2 - self.limits.min_followed:
            self._followed = now
        return share
