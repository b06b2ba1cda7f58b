"""What the report draws: its panels, and the lines of each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .health import CUT_OFF_MAX, NO_SIGNAL_MAX, RATIO_MEAN_MAX, RATIO_MEAN_MIN
from .logs import Logs


@dataclass(frozen=True)
class Line:
    """A metric in a panel."""

    metric: str
    label: str
    over_seeds: str = "mean"  # part of the `Curve` of several seeds; a maximum is the "high", a minimum the "low" one


@dataclass(frozen=True)
class Panel:
    """A panel, whose first line is drawn with a band, and lines without data are not."""

    title: str
    lines: tuple[Line, ...]
    marks: tuple[float, ...] = ()  # grey lines
    limits: tuple[float, float | None] | None = None  # of the axis; open above for `None`
    is_log: bool = False
    has_target: bool = False  # a dashed line, for each group that has a target

    def drawn_lines(self, runs: Sequence[Logs]) -> list[Line]:
        """Return the lines that some run has a finite value of; none if the panel is to be left out."""
        values = {line: np.concatenate([logs.finite(line.metric).values for logs in runs]) for line in self.lines}
        return [line for line in self.lines if len(values[line])]


SHARE = (0.0, 1.0)
FROM_ZERO = (0.0, None)

PANELS = (
    Panel("Mean reward of the samples", (Line("reward", "reward"),)),
    Panel(
        "Length of the completions (tokens)",
        (Line("completions/mean_length", "mean"), Line("completions/max_length", "longest of a generation")),
    ),
    Panel(
        "Completions cut off, and without signal (share)",
        (Line("completions/clipped_ratio", "cut off"), Line("frac_reward_zero_std", "without signal")),
        marks=(CUT_OFF_MAX, NO_SIGNAL_MAX),
        limits=SHARE,
    ),
    Panel("Entropy of the policy (nats per token)", (Line("entropy", "entropy"),)),
    Panel(
        "Share of positive-advantage tokens in the loss",
        (Line("bapo/positive_share", "as trained"), Line("bapo/positive_share_initial", "unadjusted")),
        limits=SHARE,
        has_target=True,
    ),
    Panel(
        "Clip bounds (importance ratio)",
        (Line("bapo/clip_high", "upper bound"), Line("bapo/clip_low", "lower bound")),
        marks=(1.0,),
    ),
    Panel(
        "Importance ratios",
        (
            Line("ratio/mean", "mean"),
            Line("ratio/max", "largest", over_seeds="high"),
            Line("ratio/min", "smallest", over_seeds="low"),
        ),
        marks=(RATIO_MEAN_MIN, RATIO_MEAN_MAX),
        is_log=True,
    ),
    Panel(
        "Staleness of the samples (policy versions)",
        (Line("staleness/mean", "mean"), Line("staleness/max", "largest", over_seeds="high")),
        limits=FROM_ZERO,
    ),
)
"""All panels, in their order."""
