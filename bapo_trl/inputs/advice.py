"""The loss that the studies recommend (docs/which_loss.md)."""

from typing import Any


ADVICE = {"loss_type": "vespo"}
"""Fields of `BAPOConfig` to set, on top of the defaults."""


def advice_line(args: Any) -> str:
    """
    Return the advice on the loss that a run prints at its start, or an empty string.

    There is none up to 4 updates per generation, where the loss made no difference, and none for a run whose user has
    chosen a loss or a method.
    """
    updates = args.micro_batches_per_generation / args.gradient_accumulation_steps
    if updates <= 4 or args.loss_type != type(args).loss_type or args.loss_was_chosen:
        return ""
    advised = ", ".join(f"{name} {value}" for name, value in ADVICE.items())
    return f"Advice: for {updates:g} updates per generation, try {advised} (docs/which_loss.md)."
