"""What partial rollouts and overlapped generation need of a trainer: completions that are token ids alone."""

from typing import Any

from ..errors import InputError


def check_token_ids_suffice(trainer: Any, feature: str, fix: str) -> None:
    """Raise an `InputError` if completions consist of more than token ids: nothing else can be injected."""
    reasons = {
        "`tools`": bool(trainer.tools),
        "`environment_factory`": trainer.environment_factories is not None,
        "`rollout_func`": trainer.rollout_func is not None,
        "a model that takes images": trainer._is_vlm,
    }
    for name, is_there in reasons.items():
        if is_there:
            raise InputError(
                f"The trainer has {name}, which {feature} cannot handle, since only the token ids of a completion are "
                f"kept: remove it, or set {fix}."
            )
