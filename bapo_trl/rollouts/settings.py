"""What partial rollouts refuse: values of their settings, and settings of the sampler that they do not go with."""

from typing import Any

from ..errors import InputError
from ..inputs.setting_checks import check_number
from .sampling_settings import broken_across_calls


def check_partial_rollouts(config: Any) -> None:
    """Refuse values of the partial rollouts, and settings of the sampler that they do not go with."""
    check_number("partial_rollout_oversampling", config.partial_rollout_oversampling)
    if not 1 <= config.partial_rollout_oversampling < 2:
        raise InputError(
            f"`partial_rollout_oversampling` is {config.partial_rollout_oversampling}: set it to at least 1 (off) "
            "and less than 2."
        )
    for name, smallest in (("partial_rollout_chunk_length", 1), ("partial_rollout_max_staleness", 0)):
        value = getattr(config, name)
        if value is None and name == "partial_rollout_max_staleness":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise InputError(f"`{name}` is {value!r}: set it to a whole number, at least {smallest}.")
    if not config.uses_partial_rollouts:
        return
    if config.max_completion_length is None:
        raise InputError(
            "`max_completion_length` is None, but partial rollouts cut a completion into calls of at most so many "
            "tokens in all: set it to a number, or set `partial_rollout_oversampling` to 1.0."
        )
    if config.rows_per_generation % config.num_generations != 0:
        raise InputError(
            f"`num_generations` is {config.num_generations}, but each rank has {config.rows_per_generation} samples "
            "of a generation (`per_device_train_batch_size` x `steps_per_generation`): with partial rollouts a "
            "group lives on one rank, so make that a multiple of it."
        )
    if config.groups_held == 0:
        raise InputError(
            f"`partial_rollout_oversampling` is {config.partial_rollout_oversampling}, which holds over none of the "
            f"{config.groups_per_generation} groups of a generation on each rank: raise it above "
            f"{1 + 0.5 / config.groups_per_generation:.4g}, e.g. to {1 + 1 / config.groups_per_generation:.4g}, or "
            "raise `steps_per_generation`."
            if config.groups_per_generation > 1
            else f"`partial_rollout_oversampling` is {config.partial_rollout_oversampling}, but each rank has one "
            "group a generation, and cannot hold one over: raise `steps_per_generation` or "
            "`per_device_train_batch_size`."
        )
    needed = config.updates_per_generation + config.largest_staleness
    if config.partial_rollout_max_staleness is not None and config.partial_rollout_max_staleness < needed:
        raise InputError(
            f"`partial_rollout_max_staleness` is {config.partial_rollout_max_staleness}, but a completion parked "
            f"for one generation is {needed} versions old at its last update: with less, nothing is ever parked. "
            f"Set it to at least {needed}, or to None."
        )
    settings = {**(config.generation_kwargs or {}), "structured_outputs": config.vllm_structured_outputs_regex}
    broken = broken_across_calls(settings)
    if broken:
        raise InputError(
            f"{'; '.join(broken)} (in `generation_kwargs` or by a field): that does not go with partial rollouts, "
            "where a completion is sampled in several calls. Remove it, or set `partial_rollout_oversampling` to "
            "1.0."
        )
