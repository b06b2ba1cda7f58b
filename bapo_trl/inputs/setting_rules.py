"""Check that the settings of a [`BAPOConfig`] fit together. The value of each field has been checked before."""

import math
from numbers import Real
from typing import Any

from ..batch.losses import CLIPPED_LOSS_TYPES, LOSSES
from ..clip_bounds import BOUND_PARTS
from ..clip_bounds.grid import BoundGrid
from ..errors import InputError
from .sampling_settings import check_across_calls


def check_rules(config: Any) -> None:
    """Raise an `InputError` if settings in the config of a run contradict each other."""
    # Settings of TRL that the rules below divide by
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"):
        if not getattr(config, name) >= 1:
            raise InputError(f"`{name}` is {getattr(config, name)!r}: set it to a whole number, at least 1.")
    _check_search(config)
    if config.world_size > 1 and (config.uses_partial_rollouts or config.uses_replay):
        _check_batches_are_whole(config)
    _check_partial_rollouts(config)
    _check_overlap(config)
    _check_sampler_logps(config)
    _check_replay(config)
    _check_vllm(config)


def _check_search(config: Any) -> None:
    if config.loss_type not in LOSSES:
        raise InputError(f"`loss_type` is {config.loss_type!r}: choose one of {', '.join(map(repr, LOSSES))}.")
    check_epsilons(config)
    if not config.has_clip_bounds:
        _check_unclipped_loss(config)
    if config.has_clip_bounds and config.delta is not None and not config.delta >= 1:
        raise InputError(
            f"`delta` is {config.delta}: below 1, it stops the gradient of fresh samples, whose ratios are 1. Set it "
            "to at least 1, e.g. 3.0, or unset it."
        )
    check_bounds(config)
    _check_constant_weight(config)


def _check_constant_weight(config: Any) -> None:
    if config.negative_weight == 1:
        return
    if not config.bound_grid.is_fixed:
        raise InputError(
            f"`negative_weight` is {config.negative_weight}, but BAPO searches the clip bounds: set each "
            "`ratio_..._start` equal to its `ratio_..._max`, or choose a `loss_type` without bounds, e.g. 'vespo'."
        )
    for name, constant in (("negative_weight_min", config.negative_weight), ("positive_contribution_target", 1.0)):
        if getattr(config, name) not in (getattr(type(config), name), constant):
            raise InputError(
                f"`negative_weight` is {config.negative_weight}, a constant, but `{name}` is {getattr(config, name)}: "
                "remove one of them."
            )


def check_bounds(config: Any) -> None:
    """Raise an `InputError` for invalid clip bounds, or for a target that no setting can work towards."""
    BoundGrid(**{part: getattr(config, f"ratio_{part}") for part in BOUND_PARTS})  # checks the bounds
    default_target = type(config).positive_contribution_target
    moves_share = config.is_adaptive or config.has_constant_weight
    if not moves_share and config.positive_contribution_target != default_target:
        reason = "both clip bounds are fixed"
        if not config.has_clip_bounds:
            reason = f"`loss_type` {config.loss_type!r} has no clip bounds"
        raise InputError(
            f"`positive_contribution_target` is {config.positive_contribution_target}, but it has no effect: {reason} "
            "and `negative_weight_min` is 1. Set `negative_weight_min` below 1, e.g. 0.05, or leave the target at "
            f"{default_target}."
        )


def check_epsilons(config: Any) -> None:
    """Raise an error for TRL's clip bounds, where the loss does not read them (`InputError`)."""
    given = {name: getattr(config, name) for name in ("epsilon", "epsilon_high")}
    given = {name: value for name, value in given.items() if value is not None}
    if config.has_ratio_cap:
        for name, value in given.items():
            if not (value > 0 and math.isfinite(value)):
                raise InputError(
                    f"`{name}` is {value}, the cap on the ratio under '{config.loss_type}': set it above 0, e.g. 5.0."
                )
    elif given:
        what = " and ".join(f"`{name}` is {value}" for name, value in given.items())
        if not config.has_clip_bounds:
            raise InputError(f"{what}, but `loss_type` {config.loss_type!r} has no clip bounds: remove it.")
        fix = "remove it; to fix the clip bounds, set each `ratio_..._start` equal to its `ratio_..._max`"
        epsilon = given.get("epsilon", 0.2)  # TRL's default
        if all(isinstance(value, Real) and 0 <= float(value) < 1 for value in given.values()):
            lower, upper = f"{1 - epsilon:g}", f"{1 + given.get('epsilon_high', epsilon):g}"
            fix = (
                f"remove it. To keep fixed clip bounds of {lower} and {upper}, set `ratio_lower_start` and "
                f"`ratio_lower_max` to {lower}, and `ratio_upper_start` and `ratio_upper_max` to {upper}"
            )
        raise InputError(f"{what}, but BAPO searches the clip bounds and does not read this setting: {fix}.")


def _check_unclipped_loss(config: Any) -> None:
    of_bounds = (*(f"ratio_{part}" for part in BOUND_PARTS), "contribution_measure", "contribution_weighting")
    for name in (*of_bounds, "search_order", "delta"):
        if getattr(config, name) != getattr(type(config), name):
            raise InputError(
                f"`{name}` is {getattr(config, name)!r}, but `loss_type` {config.loss_type!r} has no clip bounds: "
                f"leave it out, or choose a loss type with bounds ({', '.join(map(repr, CLIPPED_LOSS_TYPES))})."
            )


def _check_batches_are_whole(config: Any) -> None:
    if config.accelerator_config.split_batches:
        raise InputError(
            "`split_batches` is True in `accelerator_config`, so each rank would get only a part of the "
            f"{config.rows_per_generation} samples per generation step (`per_device_train_batch_size` x "
            "`steps_per_generation`) that partial rollouts and the replay buffer need on each rank. Set "
            "`split_batches` to False."
        )


def _check_partial_rollouts(config: Any) -> None:
    if not config.uses_partial_rollouts:
        return
    if config.max_completion_length is None:
        raise InputError(
            "`max_completion_length` is None, but partial rollouts need a limit on the tokens of a completion: set it "
            "to a number, or set `partial_rollout_oversampling` to 1.0."
        )
    if config.rows_per_generation % config.num_generations != 0:
        raise InputError(
            f"`num_generations` is {config.num_generations}, but each rank has {config.rows_per_generation} samples "
            "per generation step (`per_device_train_batch_size` x `steps_per_generation`). With partial rollouts, a "
            "group cannot span ranks: make the number of samples a multiple of `num_generations`."
        )
    if config.groups_carried_over == 0:
        groups, fix = config.groups_per_generation, "raise `steps_per_generation` or `per_device_train_batch_size`"
        if groups > 1:
            fix = f"raise it above {1 + 0.5 / groups:.4g}, e.g. to {1 + 1 / groups:.4g}, or raise "
            fix += "`steps_per_generation`"
        raise InputError(
            f"`partial_rollout_oversampling` is {config.partial_rollout_oversampling}, which rounds to 0 carried-over "
            f"groups, at {groups} groups per generation step on each rank: {fix}."
        )
    needed = config.staleness_if_paused
    if config.partial_rollout_max_staleness is not None and config.partial_rollout_max_staleness < needed:
        raise InputError(
            f"`partial_rollout_max_staleness` is {config.partial_rollout_max_staleness}, but a completion that is "
            f"paused for one generation step has a staleness of {needed} at its last update, so none could be paused. "
            f"Set it to at least {needed}, or to None."
        )
    settings = {**(config.generation_kwargs or {}), "structured_outputs": config.vllm_structured_outputs_regex}
    check_across_calls(settings, "`generation_kwargs` or a setting", "Remove it")


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
            f"{config.partial_rollout_oversampling}: the two cannot be combined yet. Set `overlap_generation` to "
            "False or `partial_rollout_oversampling` to 1.0."
        )


def _check_sampler_logps(config: Any) -> None:
    if config.use_sampler_logps and not config.use_vllm:
        raise InputError(
            "`use_sampler_logps` is True, but `use_vllm` is False: only vLLM reports the log-probabilities of its "
            "samples. Set `use_vllm` to True, or `use_sampler_logps` to False."
        )
    if not config.takes_sampler_logps:
        return
    name = "overlap_generation" if config.overlap_generation else "use_sampler_logps"
    if config.off_policy_mask_threshold is not None:
        raise InputError(
            f"`off_policy_mask_threshold` is {config.off_policy_mask_threshold}, but with `{name}` the trainer does "
            f"not score samples under the policy that sampled them: remove it, or set `{name}` to False."
        )
    if config.biased_settings:
        raise InputError(
            f"{', '.join(config.biased_settings)}: this samples from another distribution than the policy's, but with "
            f"`{name}` the importance ratios use the sampler's log-probabilities. Remove it, or set `{name}` to False."
        )


def _check_replay(config: Any) -> None:
    if not config.uses_replay:
        return
    if config.sync_ref_model:
        raise InputError(
            "`sync_ref_model` is True, but samples in the replay buffer keep the log-probabilities of an earlier "
            "reference model. Set `sync_ref_model` to False or, to turn replay off, set `replay_fraction` to 0 and "
            "`replay_zero_advantage` to False."
        )
    if config.enable_jit_checkpoint:
        raise InputError(
            "`enable_jit_checkpoint` is True, which saves before an optimizer step, when that step's samples are "
            "already counted in the replay buffer: remove it. On SIGTERM, `bapo-trl train` saves after the update; in "
            "Python, use `StopSignals`."
        )
    if config.steps_per_generation % config.gradient_accumulation_steps != 0:
        raise InputError(
            f"`steps_per_generation` is {config.steps_per_generation}: with a replay buffer, set it to a multiple of "
            f"`gradient_accumulation_steps` ({config.gradient_accumulation_steps}), so that the samples of an "
            "optimizer step are drawn together."
        )
    rows = config.rows_per_generation
    if 0 < config.replay_fraction <= 0.5 / rows:
        raise InputError(
            f"`replay_fraction` is {config.replay_fraction}, less than one of the {rows} samples of a batch on each "
            f"rank: set it to at least {1 / rows:.3g}, or to 0."
        )
    # With U updates in a pass and I passes, samples from d generation steps ago have a staleness of d U I + p U at
    # pass p (from 0), and U - 1 more at its last update. The first pass draws before its own samples are added
    updates, stalest = config.updates_per_pass, config.replay_min_staleness
    versions = updates * config.num_iterations
    ago = max(1, math.ceil(stalest / versions))
    drawn = rows if config.replay_zero_advantage else round(config.replay_fraction * rows)
    needed = max(rows, (ago - 1) * rows + drawn)
    if config.num_iterations > 1:
        needed = max(needed, (math.ceil(max(0, stalest - updates) / versions) + 1) * rows)
    if config.replay_capacity < needed:
        raise InputError(
            f"`replay_capacity` is {config.replay_capacity}, but each rank must hold {needed} samples ({rows} a "
            f"generation step), so that enough of them have a staleness of `replay_min_staleness` ({stalest}). Set "
            f"it to at least {needed}."
        )
    oldest = ago * versions + updates - 1
    if config.uses_partial_rollouts or config.overlap_generation:  # samples may enter a generation step late
        oldest += config.updates_per_generation
    if config.replay_max_staleness is not None and config.replay_max_staleness < oldest:
        raise InputError(
            f"`replay_max_staleness` is {config.replay_max_staleness}, but with {updates} updates in a pass, "
            f"`num_iterations` {config.num_iterations} and `replay_min_staleness` {config.replay_min_staleness}, a "
            f"sample from the buffer reaches a staleness of {oldest} in the first pass over a generation step: set it "
            f"to at least {oldest}."
        )
    if config.replay_max_reuse is not None and config.replay_max_reuse <= config.num_iterations:
        raise InputError(
            f"`replay_max_reuse` is {config.replay_max_reuse}: the passes over a generation step (`num_iterations` "
            f"{config.num_iterations}) use its samples that often, so none are left in the replay buffer for the next "
            f"step. Set `replay_max_reuse` to at least {config.num_iterations + 1}."
        )


def _check_vllm(config: Any) -> None:
    longest = config.vllm_request_timeout + config.vllm_server_timeout
    if config.use_vllm and config.vllm_mode == "server" and config.world_size > 1 and longest > config.ddp_timeout:
        raise InputError(
            f"`vllm_request_timeout` is {config.vllm_request_timeout:g} and `vllm_server_timeout` "
            f"{config.vllm_server_timeout:g}: the other ranks wait for the main process that long, but give up after "
            f"`ddp_timeout`, which is {config.ddp_timeout}. Raise `ddp_timeout` to at least {math.ceil(longest)}."
        )
    corrects = config.use_vllm and config.vllm_importance_sampling_correction
    takes_tokens = config.vllm_importance_sampling_mode in ("token_truncate", "token_mask")
    if corrects and LOSSES[config.loss_type].is_of_sequences and not takes_tokens:
        raise InputError(
            f"`vllm_importance_sampling_mode` is '{config.vllm_importance_sampling_mode}', but `loss_type` "
            f"'{config.loss_type}' needs vLLM's correction per token: set it to 'token_truncate' (or 'token_mask')."
        )
