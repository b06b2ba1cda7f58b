"""What the report draws: its panels, and the lines of each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .health import CHI2_MAX, CUT_OFF_MAX, ESS_MIN, NO_SIGNAL_MAX, RATIO_MEAN_MAX, RATIO_MEAN_MIN
from .logs import Logs


@dataclass(frozen=True)
class Line:
    """A metric in a panel."""

    metric: str
    label: str
    sign: int = 1  # -1 draws its negative
    over_seeds: str = "mean"  # part of the `Curve` of several seeds; a maximum is the "high", a minimum the "low" one


@dataclass(frozen=True)
class Panel:
    """A panel, whose first line is drawn with a band, and lines without data are not."""

    title: str
    lines: tuple[Line, ...]
    marks: tuple[float, ...] = ()  # grey lines
    limits: tuple[float, float | None] | None = None  # of the axis; open above for `None`
    is_log: bool = False
    target: str | None = None  # setting whose value is a dashed line, for each group that has a target
    unless: float | None = None  # left out where no value of the first line differs from this

    def drawn_lines(self, runs: Sequence[Logs]) -> list[Line]:
        """Return the lines that some run has a finite value of; none if the panel is to be left out."""
        values = {line: np.concatenate([logs.finite(line.metric).values for logs in runs]) for line in self.lines}
        if self.unless is not None and (values[self.lines[0]] == self.unless).all():
            return []
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
        "Predicted change of the entropy",
        (Line("bapo/entropy_covariance", "minus the covariance", sign=-1),),
        marks=(0.0,),
    ),
    Panel("Norm of the gradient", (Line("grad_norm", "gradient norm"),), limits=FROM_ZERO),
    Panel(
        "Share of positive-advantage tokens in the loss",
        (Line("bapo/positive_share", "as trained"), Line("bapo/positive_share_initial", "unadjusted")),
        limits=SHARE,
        target="positive_contribution_target",
    ),
    Panel("Weight of negative-advantage tokens", (Line("bapo/negative_weight", "weight"),), limits=SHARE, unless=1.0),
    Panel(
        "Clip bounds (importance ratio)",
        (Line("bapo/clip_high", "upper bound"), Line("bapo/clip_low", "lower bound")),
        marks=(1.0,),
    ),
    Panel(
        "Tokens clipped (share)",
        (
            Line("clip_ratio/high_mean", "above upper"),
            Line("clip_ratio/low_mean", "below lower"),
            Line("cispo_clip_ratio", "above cap"),
        ),
        limits=FROM_ZERO,
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
    Panel("Effective sample size (share)", (Line("ratio/ess", "ESS"),), marks=(ESS_MIN,), limits=SHARE),
    Panel("Chi-square divergence", (Line("ratio/chi2", "chi-square"),), marks=(CHI2_MAX,)),
    Panel(
        "Staleness of the samples (policy versions)",
        (Line("staleness/mean", "mean"), Line("staleness/max", "largest", over_seeds="high")),
        limits=FROM_ZERO,
    ),
    Panel("Samples in the replay queue", (Line("replay/size", "samples"),), limits=FROM_ZERO),
    Panel("Share of the batch from the queue", (Line("replay/fraction", "share"),), limits=SHARE),
    Panel("Completions in flight (pool)", (Line("partial/in_flight", "completions"),), limits=FROM_ZERO),
    Panel("Tokens parked in the pool", (Line("partial/parked_tokens", "tokens"),), limits=FROM_ZERO),
)
"""All panels, in their order."""

LOSS = Panel("Loss", (Line("loss", "loss"),))
"""Drawn of runs that logged nothing else: it says little of how a policy does."""
