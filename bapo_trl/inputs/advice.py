"""Which method to take, as the studies found (docs/which_loss.md)."""

from typing import Any


ADVICE = {"loss_type": "vespo"}
"""Fields of `BAPOConfig` to set, on top of the defaults."""


def advice_line(args: Any) -> str:
    """
    Return the advice that a run prints at its start, or an empty string.

    Up to 4 updates per generation the loss makes no difference, and who has chosen a loss needs no advice on it.
    """
    updates = args.micro_batches_per_generation / args.gradient_accumulation_steps
    if updates <= 4 or args.loss_type != type(args).loss_type or args.loss_was_chosen:
        return ""
    return f"Advice: {', '.join(f'{name} {value}' for name, value in ADVICE.items())} (docs/which_loss.md)."
