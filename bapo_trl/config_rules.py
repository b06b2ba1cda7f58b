"""Refuse settings of a [`BAPOConfig`] that contradict one another. The value of each field is checked before."""

import math
from typing import Any

from .clip_bounds import BOUND_PARTS
from .clip_bounds.grid import BoundGrid
from .errors import InputError
from .losses import CLIPPED_LOSS_TYPES, LOSSES
from .replay.buffer import smallest_capacity, smallest_max_staleness
from .rollouts.sampling_settings import broken_across_calls


_MODES_OF_VESPO = ("token_truncate", "token_mask")


def check_rules(config: Any) -> None:
    """Refuse settings that contradict one another, in the config of a run (`InputError`)."""
    # TRL's, by which the rules below divide
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"):
        if not getattr(config, name) >= 1:
            raise InputError(f"`{name}` is {getattr(config, name)!r}: set it to a whole number, at least 1.")
    _check_search(config)
    _check_partial_rollouts(config)
    _check_overlap(config)
    _check_replay(config)
    _check_vllm(config)


def _check_search(config: Any) -> None:
    if config.loss_type not in LOSSES:
        raise InputError(f"`loss_type` is {config.loss_type!r}: choose one of {', '.join(map(repr, LOSSES))}.")
    check_epsilons(config)
    if not config.has_clip_bounds:
        _check_unclipped_loss(config)
    check_bounds(config)
    if config.has_clip_bounds and config.delta is not None and not config.delta >= config.ratio_upper_max:
        raise InputError(
            f"`delta` is {config.delta}, below `ratio_upper_max`, which is {config.ratio_upper_max}: it would cap "
            "positive tokens before the upper bound does. Raise `delta` to at least that, or unset it."
        )
    window, generation = config.gradient_accumulation_steps, config.micro_batches_per_generation
    if config.search_scope != "micro_batch" and config.is_adaptive and generation % window != 0:
        raise InputError(
            f"`search_scope` is {config.search_scope!r}, but an optimizer step of {window} micro-batches "
            f"(`gradient_accumulation_steps`) would span two generations of {generation} (`steps_per_generation` "
            "x `num_iterations`), and the second is not sampled yet. Set `gradient_accumulation_steps` to a divisor "
            f"of {generation}, `steps_per_generation` to a multiple of {window}, or `search_scope` to 'micro_batch'."
        )


def check_bounds(config: Any) -> None:
    """Raise an error for clip bounds that are none, or a target that nothing moves the share to (`InputError`)."""
    BoundGrid(**{part: getattr(config, f"ratio_{part}") for part in BOUND_PARTS})  # checks the bounds
    default_target = type(config).positive_contribution_target
    moves_share = config.is_adaptive or config.has_constant_weight
    if not moves_share and config.positive_contribution_target != default_target:
        reason = "both clip bounds are fixed"
        if not config.has_clip_bounds:
            reason = f"`loss_type` {config.loss_type!r} has no clip bounds"
        raise InputError(
            f"`positive_contribution_target` is {config.positive_contribution_target}, but nothing moves the share: "
            f"{reason}, and `negative_weight_min` is 1. Set `negative_weight_min` below 1, e.g. 0.05, or leave the "
            f"target at {default_target}."
        )


def check_epsilons(config: Any) -> None:
    """Raise an error for TRL's clip bounds, where the loss does not read them (`InputError`)."""
    for name in ("epsilon", "epsilon_high"):
        if getattr(config, name) is not None:
            _check_epsilon(config, name)


def _check_epsilon(config: Any, name: str) -> None:
    value = getattr(config, name)
    if config.has_ratio_cap:
        if not (value > 0 and math.isfinite(value)):
            raise InputError(
                f"`{name}` is {value}, the cap on the ratio under '{config.loss_type}': set it above 0, e.g. 5.0."
            )
    elif config.has_clip_bounds:
        raise InputError(
            f"`{name}` is {value}, but it has no effect under BAPO, which searches the clip bounds. Remove it; to fix "
            "both bounds as in GRPO, set `ratio_lower_start` = `ratio_lower_max` (1 - epsilon) and "
            "`ratio_upper_start` = `ratio_upper_max` (1 + epsilon_high)."
        )
    else:
        raise InputError(
            f"`{name}` is {value}, but it has no effect under `loss_type` {config.loss_type!r}: remove it."
        )


def _check_unclipped_loss(config: Any) -> None:
    of_bounds = (*(f"ratio_{part}" for part in BOUND_PARTS), "contribution_measure", "contribution_weighting")
    for name in (*of_bounds, "search_order", "delta"):
        if getattr(config, name) != getattr(type(config), name):
            raise InputError(
                f"`{name}` is {getattr(config, name)!r}, but `loss_type` {config.loss_type!r} has no clip bounds: "
                f"leave it out, or choose a loss type with bounds ({', '.join(map(repr, CLIPPED_LOSS_TYPES))})."
            )


def _check_partial_rollouts(config: Any) -> None:
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
    if config.groups_carried_over == 0:
        groups, fix = config.groups_per_generation, "raise `steps_per_generation` or `per_device_train_batch_size`"
        if groups > 1:
            fix = f"raise it above {1 + 0.5 / groups:.4g}, e.g. to {1 + 1 / groups:.4g}, or raise "
            fix += "`steps_per_generation`"
        raise InputError(
            f"`partial_rollout_oversampling` is {config.partial_rollout_oversampling}, which carries over none of the "
            f"{groups} groups of a generation on each rank: {fix}."
        )
    needed = config.staleness_if_paused
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
            "where a completion is sampled in several calls. Remove it, or set `partial_rollout_oversampling` to 1.0."
        )


def _check_overlap(config: Any) -> None:
    if not config.overlap_generation:
        return
    if not (config.use_vllm and config.vllm_mode == "server"):
        raise InputError(
            f"`overlap_generation` is True, but `use_vllm` is {config.use_vllm} and `vllm_mode` is "
            f"'{config.vllm_mode}': only a vLLM server generates while the trainer trains. Set `use_vllm` to True and "
            "`vllm_mode` to 'server', or `overlap_generation` to False."
        )
    if config.uses_partial_rollouts:
        raise InputError(
            f"`overlap_generation` is True, but `partial_rollout_oversampling` is "
            f"{config.partial_rollout_oversampling}: partial rollouts do not overlap yet. Set one of them back."
        )
    if config.off_policy_mask_threshold is not None:
        raise InputError(
            f"`off_policy_mask_threshold` is {config.off_policy_mask_threshold}, but with `overlap_generation` the "
            "trainer does not score samples under the policy that sampled them: leave it out, or set "
            "`overlap_generation` to False."
        )
    if config.biased_settings:
        raise InputError(
            f"{', '.join(config.biased_settings)}: that samples from another distribution than the policy's, but with "
            "`overlap_generation` the ratio is over the sampler's log-probabilities. Leave it out, or set "
            "`overlap_generation` to False."
        )


def _check_replay(config: Any) -> None:
    if not config.uses_replay:
        return
    if config.sync_ref_model:
        raise InputError(
            "`sync_ref_model` is True, but queued samples keep the log-probabilities of the reference model that "
            "scored them, which no longer exists. Set `sync_ref_model` to False, or, for no replay queue, "
            "`replay_fraction` to 0 and `replay_zero_advantage` to False."
        )
    if config.enable_jit_checkpoint:
        raise InputError(
            "`enable_jit_checkpoint` is True, which saves before an optimizer step, when the queue has given and got "
            "the samples of that step: leave it out. `bapo-trl train` saves after the update on SIGTERM, and so does "
            "`StopSignals` in Python."
        )
    if config.steps_per_generation % config.gradient_accumulation_steps != 0:
        raise InputError(
            f"`steps_per_generation` is {config.steps_per_generation}: with a replay queue it must be a multiple of "
            f"`gradient_accumulation_steps` ({config.gradient_accumulation_steps}), so that each optimizer step is "
            "drawn at once."
        )
    rows = config.rows_per_generation
    if config.replay_capacity < rows:
        raise InputError(
            f"`replay_capacity` is {config.replay_capacity}, less than the {rows} samples of a generation on each "
            f"rank: set it to at least {rows}."
        )
    if 0 < config.replay_fraction <= 0.5 / rows:
        raise InputError(
            f"`replay_fraction` is {config.replay_fraction}, less than one of the {rows} samples of a batch on each "
            f"rank: set it to at least {1 / rows:.3g}, or to 0."
        )
    updates = config.updates_per_pass
    num_replayed = rows if config.replay_zero_advantage else round(config.replay_fraction * rows)
    needed = smallest_capacity(rows, num_replayed, updates, config.num_iterations, config.replay_min_staleness)
    if config.replay_capacity < needed:
        raise InputError(
            f"`replay_min_staleness` is {config.replay_min_staleness}, but a queue with a `replay_capacity` of "
            f"{config.replay_capacity} lets samples go before enough of them are that old, at {rows} samples a "
            f"generation on each rank and {updates * config.num_iterations} updates on them: set `replay_capacity` "
            f"to at least {needed}, or lower `replay_min_staleness`."
        )
    oldest = smallest_max_staleness(updates, config.num_iterations, config.replay_min_staleness)
    if config.uses_partial_rollouts or config.overlap_generation:  # rows are up to a generation old when they enter
        oldest += config.updates_per_generation
    if config.replay_max_staleness is not None and config.replay_max_staleness < oldest:
        raise InputError(
            f"`replay_max_staleness` is {config.replay_max_staleness}, but with {updates} updates in a pass, "
            f"`num_iterations` {config.num_iterations} and `replay_min_staleness` {config.replay_min_staleness} a "
            f"queued sample is {oldest} versions old before the first pass over a generation has trained it: set "
            f"it to at least {oldest}."
        )
    if config.replay_max_reuse is not None and config.replay_max_reuse <= config.num_iterations:
        raise InputError(
            f"`replay_max_reuse` is {config.replay_max_reuse}: the passes over a generation (`num_iterations` "
            f"{config.num_iterations}) use its samples up, and the first pass over the next one finds none in the "
            f"queue. Set `replay_max_reuse` to at least {config.num_iterations + 1}."
        )


def _check_vllm(config: Any) -> None:
    longest = config.vllm_request_timeout + config.vllm_server_timeout
    if config.use_vllm and config.vllm_mode == "server" and config.world_size > 1 and longest > config.ddp_timeout:
        raise InputError(
            f"`vllm_request_timeout` is {config.vllm_request_timeout:g} and `vllm_server_timeout` "
            f"{config.vllm_server_timeout:g}: the other ranks wait for the main process that long, but give up after "
            f"`ddp_timeout`, which is {config.ddp_timeout}. Raise that to {math.ceil(longest)} at least."
        )
    corrects = config.use_vllm and config.vllm_importance_sampling_correction
    takes_tokens = config.vllm_importance_sampling_mode in _MODES_OF_VESPO
    if corrects and LOSSES[config.loss_type].is_of_sequences and not takes_tokens:
        raise InputError(
            f"`vllm_importance_sampling_mode` is '{config.vllm_importance_sampling_mode}', but `loss_type` "
            f"'{config.loss_type}' takes vLLM's correction by tokens: set it to 'token_truncate' (or 'token_mask')."
        )
