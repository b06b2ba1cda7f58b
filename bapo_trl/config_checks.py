"""What `BAPOConfig` refuses: each check raises `ValueError` with the parameter, its value and the fix."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.utils import is_torch_bf16_gpu_available

from .clip_bounds import MEASURES, SEARCH_ORDERS
from .clip_bounds.grid import BoundGrid
from .clip_bounds.loss_kernels import UNCLIPPED_LOSS_TYPES
from .clip_bounds.tokens import WEIGHTINGS
from .errors import InputError
from .replay.mixer import smallest_capacity
from .rollouts.sampling_settings import broken_across_calls


if TYPE_CHECKING:
    from .bapo_config import BAPOConfig


SCOPES = ("batch", "micro_batch", "carried_over")
CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
BOUND_PARTS = tuple(part.name for part in fields(BoundGrid))

# Of TRL and transformers, those that settings of BAPO are computed from: the smallest value of each
_SIZES = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "generation_batch_size": 1,
    "num_generations": 2,
    "num_iterations": 1,
}
# And what these fail at in words that name no setting
_COUNTS = {
    **_SIZES,
    "per_device_eval_batch_size": 1,
    "num_generations_eval": 0,
    "max_completion_length": 1,
    "top_k": 0,
}
# The range of each, and whether it has its lower end
_RANGES = {
    "temperature": (0, math.inf, False),
    "top_p": (0, math.inf, True),
    "min_p": (0, 1, True),
    "repetition_penalty": (0, math.inf, False),
    "beta": (-math.inf, math.inf, True),
    "max_grad_norm": (-math.inf, math.inf, True),
    "top_entropy_quantile": (0, math.inf, True),
    "off_policy_mask_threshold": (-math.inf, math.inf, True),
}
_OPTIONAL = {
    "steps_per_generation",
    "generation_batch_size",
    "num_generations_eval",
    "max_completion_length",
    "top_k",
    "min_p",
    "off_policy_mask_threshold",
}
_CHOICES = {
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "scale_rewards": ("group", "batch", "none", True, False),
}
_NAMES_OF_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def take_numpy_numbers(config: "BAPOConfig", own_fields: Iterable[Field]) -> None:
    """Put Python's numbers in the place of NumPy's; in the fields that `BAPOConfig` adds, of arrays of one too."""
    own = {f.name for f in own_fields}
    for name, value in vars(config).items():
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1 and name in own):
            setattr(config, name, value.item())


def check_types(config: "BAPOConfig", own_fields: Iterable[Field], types: Mapping[str, tuple[Any, ...]]) -> None:
    """
    Refuse values of another type than their fields have.

    Args:
        config ([`BAPOConfig`]):
            The settings as they were given.
        own_fields (iterable of `dataclasses.Field`):
            The fields that `BAPOConfig` adds.
        types (mapping of `str` to tuple):
            The types of each field.
    """
    optional = {name for name, of_field in types.items() if type(None) in of_field} - {"num_generations"}
    for f in own_fields:
        of_field, value = types[f.name], getattr(config, f.name)
        if float in of_field and type(value) is int:  # torch takes no large ones
            setattr(config, f.name, float(value) if abs(value) < 1e300 else math.inf)
            continue
        if "choices" in f.metadata or type(value) in of_field:
            continue
        wanted = " or ".join(words for type_, words in _NAMES_OF_TYPES.items() if type_ in of_field)
        raise InputError(f"`{f.name}` is {value!r}: set it to {wanted}{' or None' if f.name in optional else ''}.")


def check_values_of_trl(config: "BAPOConfig") -> None:
    """Refuse values that TRL and transformers fail at. To be asked when they did, not before: it is theirs to say."""
    _check_counts(config, _COUNTS)
    for name, (low, high, is_closed) in _RANGES.items():
        value = getattr(config, name)
        if value is None and name in _OPTIONAL:
            continue
        _check_number(name, value)
        is_inside = (low <= value if is_closed else low < value) and value <= high
        if not is_inside:
            least = "" if low == -math.inf else f" {'at least' if is_closed else 'above'} {low}"
            most = "" if high == math.inf else f", at most {high}"
            raise InputError(f"`{name}` is {value}: set it to a finite number{least}{most}.")
    for name, choices in _CHOICES.items():
        if getattr(config, name) not in choices:
            raise InputError(f"`{name}` is {getattr(config, name)!r}: choose one of {', '.join(map(repr, choices))}.")
    weights = config.reward_weights
    is_list = isinstance(weights, Iterable) and not any(isinstance(weight, str | None) for weight in weights)
    if weights is not None and not is_list:
        raise InputError(f"`reward_weights` is {weights!r}: set it to a list of finite numbers, one a reward.")


def check_eval_groups(config: "BAPOConfig") -> None:
    """Refuse batches of an evaluation that are no whole groups."""
    group, size = config.num_generations_eval or config.num_generations, config.per_device_eval_batch_size
    processes = config.world_size
    if size * processes % group != 0:
        raise InputError(
            f"`per_device_eval_batch_size` is {size} on {processes} processes, which are no whole groups of {group} "
            "(`num_generations_eval`, else `num_generations`): set it to a multiple of "
            f"{group // math.gcd(group, processes)}, or `num_generations_eval` to a divisor of {size * processes}."
        )


def check_run(config: "BAPOConfig") -> None:
    """Refuse values of the run that no search, queue or pool depends on."""
    weights = () if config.reward_weights is None else config.reward_weights
    if not all(math.isfinite(weight) for weight in weights if isinstance(weight, (float, np.floating))):
        raise InputError(f"`reward_weights` is {list(weights)}: set it to a list of finite numbers, one a reward.")
    if config.vllm_logp_tolerance is not None and not config.vllm_logp_tolerance > 0:
        raise InputError(
            f"`vllm_logp_tolerance` is {config.vllm_logp_tolerance}: set it above 0, in nats a token, or to None "
            "for no check."
        )
    if not config.vllm_request_timeout > 0:
        raise InputError(f"`vllm_request_timeout` is {config.vllm_request_timeout}: set it above 0, in seconds.")
    longest = config.vllm_request_timeout + config.vllm_server_timeout
    if config.use_vllm and config.vllm_mode == "server" and config.world_size > 1 and longest > config.ddp_timeout:
        raise InputError(
            f"`vllm_request_timeout` is {config.vllm_request_timeout:g} and `vllm_server_timeout` "
            f"{config.vllm_server_timeout:g}: the other ranks wait for the main process that long, but give up after "
            f"`ddp_timeout`, which is {config.ddp_timeout}. Raise that to {math.ceil(longest)} at least."
        )
    for name, value in vars(config).items():
        if isinstance(value, float) and math.isnan(value):  # no comparison would notice
            raise InputError(f"`{name}` is nan: set it to a number.")


def check_search(config: "BAPOConfig") -> None:
    """Refuse values of the bound search, and losses and updates that it does not go with."""
    _check_counts(config, _SIZES)
    if config.delta is not None:
        _check_number("delta", config.delta)
    for name in ("epsilon", "epsilon_high"):
        _check_epsilon(config, name)
    for name in ("positive_contribution_target", "negative_weight_min", *(f"ratio_{part}" for part in BOUND_PARTS)):
        _check_number(name, getattr(config, name))
    if not 0 < config.positive_contribution_target <= 1:
        raise InputError(
            f"`positive_contribution_target` is {config.positive_contribution_target}: set it to a share in (0, 1] "
            "(odds tau are the share tau / (1 + tau))."
        )
    for name, choices in (
        ("contribution_measure", MEASURES),
        ("contribution_weighting", WEIGHTINGS),
        ("search_order", SEARCH_ORDERS),
        ("search_scope", SCOPES),
        ("loss_type", (*CLIPPED_LOSS_TYPES, *UNCLIPPED_LOSS_TYPES)),
    ):
        if getattr(config, name) not in choices:
            raise InputError(f"`{name}` is {getattr(config, name)!r}: choose one of {', '.join(map(repr, choices))}.")
    _check_unclipped_loss(config)
    _check_handles(config)
    BoundGrid(**{part: getattr(config, f"ratio_{part}") for part in BOUND_PARTS})  # checks the bounds
    if config.has_clip_bounds and config.delta is not None and not config.delta >= config.ratio_upper_max:
        raise InputError(
            f"`delta` is {config.delta}, below `ratio_upper_max`, which is {config.ratio_upper_max}: it would cap "
            "positive tokens before the upper bound does. Raise `delta` to at least that, or unset it."
        )
    default_target = type(config).positive_contribution_target
    moves_share = config.is_adaptive or config.has_constant_weight
    if not moves_share and config.positive_contribution_target != default_target:
        reason = (
            "both clip bounds are fixed" if config.has_clip_bounds else f"`loss_type` {config.loss_type!r} has none"
        )
        raise InputError(
            f"`positive_contribution_target` is {config.positive_contribution_target}, but nothing moves the share: "
            f"{reason}, and `negative_weight_min` is 1. Set `negative_weight_min` below 1, e.g. 0.05, or leave the "
            f"target at {default_target}."
        )
    window, generation = config.gradient_accumulation_steps, config.micro_batches_per_generation
    if config.search_scope != "micro_batch" and config.is_adaptive and generation % window != 0:
        raise InputError(
            f"`search_scope` is {config.search_scope!r}, but an optimizer step of {window} micro-batches "
            f"(`gradient_accumulation_steps`) would span two generations of {generation} micro-batches "
            "(`steps_per_generation` x `num_iterations`), and the second is not sampled yet when the search runs. "
            f"Set `gradient_accumulation_steps` to a divisor of {generation}, make `steps_per_generation` a "
            f"multiple of {window}, or set `search_scope` to 'micro_batch'."
        )


def _check_epsilon(config: "BAPOConfig", name: str) -> None:
    value = getattr(config, name)
    if value is None:
        return
    if config.loss_type == "cispo":
        _check_number(name, value)
        if not (value > 0 and math.isfinite(value)):
            raise InputError(f"`{name}` is {value}, the cap on the ratio under 'cispo': set it above 0, e.g. 5.0.")
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


def _check_unclipped_loss(config: "BAPOConfig") -> None:
    if config.has_clip_bounds:
        return
    of_bounds = (*(f"ratio_{part}" for part in BOUND_PARTS), "contribution_measure", "contribution_weighting")
    for name in (*of_bounds, "search_order", "delta"):
        if getattr(config, name) != getattr(type(config), name):
            raise InputError(
                f"`{name}` is {getattr(config, name)!r}, but `loss_type` {config.loss_type!r} has no clip bounds: "
                "leave it out, or choose a loss type with bounds "
                f"({', '.join(map(repr, CLIPPED_LOSS_TYPES))})."
            )


def _check_handles(config: "BAPOConfig") -> None:
    if not 0 < config.negative_weight_min <= 1:
        raise InputError(
            f"`negative_weight_min` is {config.negative_weight_min}: set it to a weight in (0, 1], 1 for none."
        )
    cap = config.negative_ratio_cap
    if cap is None:
        return
    _check_number("negative_ratio_cap", cap)
    if not (cap >= 1 and math.isfinite(cap)):
        raise InputError(f"`negative_ratio_cap` is {cap}: set it to a ratio of at least 1, e.g. 3.0, or to None.")
    if config.delta is not None:
        raise InputError(
            f"`negative_ratio_cap` is {cap}, but `delta` ({config.delta}) takes the gradient of tokens above it away: "
            "set one of the two."
        )
    if config.loss_type in ("sapo", "vespo"):
        raise InputError(
            f"`negative_ratio_cap` is {cap}, but `loss_type` {config.loss_type!r} bounds the gradient of large ratios "
            "itself: leave it out."
        )


def check_device(config: "BAPOConfig") -> None:
    """Refuse bfloat16, TRL's default, where neither a GPU nor a CPU was asked for that could be used."""
    wants_bf16 = config.bf16 or config.bf16_full_eval or (config.bf16 is None and not config.fp16)
    if wants_bf16 and not config.use_cpu and not torch.cuda.is_available() and not is_torch_bf16_gpu_available():
        raise InputError(
            "`use_cpu` is false, but no GPU was found: set `use_cpu` to true (--use_cpu true), and `bf16` to false "
            "unless the processor computes in bfloat16 (--bf16 false)."
        )


def check_batch_sizes(config: "BAPOConfig") -> None:
    """Say what to change where the samples of a generation, or of an evaluation step, are no whole groups."""
    processes = config.world_size
    size, steps, samples = (
        config.per_device_train_batch_size,
        config.steps_per_generation,
        config.generation_batch_size,
    )
    if samples is not None and steps is not None and samples != size * processes * steps:
        raise InputError(
            f"`generation_batch_size` is {samples} and `steps_per_generation` is {steps}, which both say how many "
            "samples a generation has: leave one of them out (`null` in a recipe)."
        )
    if samples is not None and samples % (size * processes) != 0:
        raise InputError(
            f"`generation_batch_size` is {samples}, which does not divide into micro-batches of {size} "
            f"(`per_device_train_batch_size`) on {processes} processes: make it a multiple of {size * processes}."
        )
    group = config.num_generations
    if samples is not None and steps is not None and samples % group != 0:
        factor = group // math.gcd(group, processes * steps)
        raise InputError(
            f"`num_generations` is {group}, but a generation has {samples} samples (`per_device_train_batch_size` "
            f"{size} x `steps_per_generation` {steps} x {processes} processes), which are no whole groups: set "
            f"`per_device_train_batch_size` to a multiple of {factor}, or `num_generations` to a divisor of {samples}."
        )
    if config.do_eval and config.eval_strategy != "no":
        check_eval_groups(config)


def check_partial_rollouts(config: "BAPOConfig") -> None:
    """Refuse values of the partial rollouts, and settings of the sampler that they do not go with."""
    _check_number("partial_rollout_oversampling", config.partial_rollout_oversampling)
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


def check_replay(config: "BAPOConfig") -> None:
    """Refuse values of the replay queue, and those under which it would hold nothing to draw."""
    if not 0 <= config.replay_fraction <= 1:
        raise InputError(f"`replay_fraction` is {config.replay_fraction}: set it to a share in [0, 1].")
    for name, smallest in (("replay_capacity", 1), ("replay_max_reuse", 1), ("replay_max_staleness", 0)):
        value = getattr(config, name)
        if value is not None and value < smallest:
            raise InputError(f"`{name}` is {value}: set it to at least {smallest}.")
    if config.replay_min_staleness < 0:
        raise InputError(f"`replay_min_staleness` is {config.replay_min_staleness}: set it to at least 0.")
    if not config.uses_replay:
        return
    if config.sync_ref_model:
        raise InputError(
            "`sync_ref_model` is True, but queued samples keep the log-probabilities of the reference model that "
            "scored them: the KL term would hold the policy to references that no longer exist. Set "
            f"`sync_ref_model` to False, or, for no replay queue, {config.without_replay}."
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
    needed = smallest_capacity(
        rows,
        rows if config.replay_zero_advantage else round(config.replay_fraction * rows),
        updates,
        config.num_iterations,
        config.replay_min_staleness,
    )
    if config.replay_capacity < needed:
        raise InputError(
            f"`replay_min_staleness` is {config.replay_min_staleness}, but a queue with a `replay_capacity` of "
            f"{config.replay_capacity} lets samples go before enough of them are that old, at {rows} samples a "
            f"generation on each rank and {updates * config.num_iterations} updates on them: set `replay_capacity` "
            f"to at least {needed}, or lower `replay_min_staleness`."
        )
    # Rows are drawn at the start of a pass, and grow older until its last update. Without a share of the first
    # pass to fill, it is enough that a later one draws.
    passes = max(1, -(-config.replay_min_staleness // updates), config.num_iterations - 1)
    oldest = config.smallest_max_staleness if config.replay_fraction > 0 else passes * updates + updates - 1
    if config.uses_partial_rollouts:  # rows are up to a generation old when they enter
        oldest += config.updates_per_generation
    if config.replay_max_staleness is not None and config.replay_max_staleness < oldest:
        raise InputError(
            f"`replay_max_staleness` is {config.replay_max_staleness}, but with {updates} updates in a pass, "
            f"`num_iterations` {config.num_iterations} and `replay_min_staleness` {config.replay_min_staleness} a "
            f"queued sample is {oldest} versions old before "
            f"{'the first pass over a generation' if config.replay_fraction > 0 else 'a pass'} has trained it: set "
            f"it to at least {oldest}."
        )
    if config.replay_max_reuse is not None and config.replay_max_reuse < config.num_iterations:
        raise InputError(
            f"`replay_max_reuse` is {config.replay_max_reuse}, but `num_iterations` ({config.num_iterations}) passes "
            f"train each sample that many times on average: set it to at least {config.num_iterations}."
        )
    # From an empty queue, the passes over a generation use up all that it brings.
    draws_its_own = config.num_iterations > 1 and config.replay_min_staleness <= updates * (config.num_iterations - 1)
    if config.replay_max_reuse == config.num_iterations and (config.replay_fraction > 0 or not draws_its_own):
        raise InputError(
            f"`replay_max_reuse` is {config.replay_max_reuse}: the {config.num_iterations} passes over a generation "
            "(`num_iterations`) use its samples up, and the first pass over the next one finds none in the "
            f"queue. Set `replay_max_reuse` to at least {config.num_iterations + 1}."
        )


def _check_counts(config: "BAPOConfig", counts: Mapping[str, int]) -> None:
    for name, smallest in counts.items():
        value = getattr(config, name)
        if not ((value is None and name in _OPTIONAL) or (isinstance(value, int) and value >= smallest)):
            raise InputError(f"`{name}` is {value!r}: set it to a whole number, at least {smallest}.")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"`{name}` is {value!r}: set it to a number.")
