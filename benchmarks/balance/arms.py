"""What the study of the balance compares. The published methods are those of `benchmarks.stability`."""

from benchmarks.stability.arms import ABLATION
from benchmarks.stability.arms import ARMS as PUBLISHED
from benchmarks.training_run import fixed_clip


WIDEST = fixed_clip(0.6, 3.0)
CAPPED = {**WIDEST, "negative_ratio_cap": 3.0}
SMALLEST_WEIGHT = 0.05


def with_share(target: float, settings: dict) -> dict:
    """Return settings that reach this share of positive tokens by a weight on the negative ones."""
    return {**settings, "positive_contribution_target": target, "negative_weight_min": SMALLEST_WEIGHT}


def with_weight(weight: float, settings: dict) -> dict:
    """Return settings that give negative tokens always this weight: it is the least there is, and the target is 1."""
    return {**settings, "positive_contribution_target": 1.0, "negative_weight_min": weight}


ARMS = {
    "share 0.8": with_share(0.8, CAPPED),
    "share 0.9": with_share(0.9, CAPPED),
    "share 0.7": with_share(0.7, CAPPED),
    "VESPO, share 0.8": with_share(0.8, PUBLISHED["VESPO"]),
    "VESPO, constant weight 0.5": with_weight(0.5, PUBLISHED["VESPO"]),
    "widest, cap": CAPPED,
    "share 0.95": with_share(0.95, CAPPED),
    "share 0.6": with_share(0.6, CAPPED),
    "share 0.8, no cap": with_share(0.8, WIDEST),
    "GSPO, share 0.8": with_share(0.8, PUBLISHED["GSPO"]),
    "CISPO, share 0.8": with_share(0.8, PUBLISHED["CISPO"]),
    "BAPO, weight": with_share(0.7, {}),
}
# Arms with a share that have controls: their weights in another order, on the positive tokens, carried over
CONTROLLED = ("share 0.8", "VESPO, share 0.8")
SHUFFLED, WEIGHED_UP = "weights shuffled", "positives weighed up"
CARRIED_OVER = "carried over"
CONSTANT = "constant weight "  # and then the weight
# Their runs of `benchmarks.stability` count; pass@4 is measured in runs of this study, which repeat some of those
REPEATED = {
    "VESPO": PUBLISHED["VESPO"],
    "BAPO": PUBLISHED["BAPO"],
    "GRPO": PUBLISHED["GRPO"],
    "widest": ABLATION["fixed at the widest"],
    "GSPO": PUBLISHED["GSPO"],
    "CISPO": PUBLISHED["CISPO"],
}
NAMES_BEFORE = {"widest": "fixed at the widest"}  # in `benchmarks.stability`


def variant(arm: str, name: str) -> str:
    """Return the name of a variant of an arm."""
    return f"{arm}; {name}"


def controlled_by(arm: str) -> str | None:
    """Return the arm with a share that a variant or a constant weight is compared with, `None` for the other arms."""
    if CONSTANT in arm and arm not in ARMS:
        return next(name for name in CONTROLLED if name.startswith("VESPO") == arm.startswith("VESPO"))
    controlled, is_variant, _ = arm.partition("; ")
    return controlled if is_variant else None


def settings_of(arm: str) -> dict:
    """Return the settings of an arm or of a variant."""
    of, is_constant, weight = arm.partition(CONSTANT)
    if is_constant:
        return with_weight(float(weight), PUBLISHED["VESPO"] if of else CAPPED)
    arm, _, name = arm.partition("; ")
    return {**ARMS, **REPEATED}[arm] | ({"search_scope": "carried_over"} if name == CARRIED_OVER else {})
