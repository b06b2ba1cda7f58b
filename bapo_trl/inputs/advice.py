"""
The loss that the studies recommend, by updates per generation and positive contribution.

| updates per generation | positive contribution | settings | evidence |
|---|---|---|---|
| up to 4 | any | the loss makes no difference | docs/which_loss.md |
| more than 4 | any | `ADVICE` | docs/which_loss.md |
| 64 or more | up to `FEW_POSITIVE` | also `FEW_POSITIVE_ADVICE` | docs/study_few_positive.md |
"""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]

from ..batch.staleness import updates_per_generation


ADVICE = {"loss_type": "vespo"}
"""Fields of `BAPOConfig` to set, on top of the defaults."""

FEW_POSITIVE_ADVICE = {"negative_weight_min": 0.5, "positive_contribution_target": 1.0}
"""Fields to set besides `ADVICE`: half the weight on negative tokens."""

FEW_POSITIVE = 0.11
"""
Positive contribution in the first updates, with BAPO. With 64 updates per generation, it was 0.092 to 0.105 in three
runs of the study at a contribution of 0.1, and 0.174 or more at the others.
"""

FIRST_UPDATES = 10


def _has_chosen(args: Any) -> bool:
    return args.loss_type != type(args).loss_type or args.loss_was_chosen


def _in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def advice_line(args: Any) -> str:
    """
    Return the advice on the loss that a run prints at its start, or an empty string.

    There is none up to 4 updates per generation, and none for a run whose user has chosen a loss or a method.
    """
    updates = updates_per_generation(args)
    if updates <= 4 or _has_chosen(args):
        return ""
    return f"Advice: for {updates:g} updates per generation, try {_in_words(ADVICE)} (docs/which_loss.md)."


class FewPositiveAdvice:
    """
    Print the advice for few positive tokens, once a run's first updates have shown their positive contribution.

    A run that resumes among or after them prints nothing.
    """

    def __init__(self, args: Any, is_main_process: bool):
        self._is_silent = not is_main_process or _has_chosen(args) or updates_per_generation(args) < 64
        self._contributions: list[float] = []

    def observe(self, metrics: Mapping[str, float], update: int) -> None:
        """Take the metrics of an update, counted from 1; those without a contributing token are NaN."""
        if self._is_silent or update > FIRST_UPDATES:
            return
        self._contributions.append(metrics.get("bapo/positive_share_initial", math.nan))  # none with fixed bounds
        if len(self._contributions) < FIRST_UPDATES:
            return
        known = [value for value in self._contributions if not math.isnan(value)]
        if known and fmean(known) <= FEW_POSITIVE:
            tqdm.write(
                f"Advice: the positive contribution was {fmean(known):.2f} in the first {FIRST_UPDATES} updates. With "
                f"{_in_words(ADVICE)}, also set\n{_in_words(FEW_POSITIVE_ADVICE)} (docs/study_few_positive.md)."
            )
