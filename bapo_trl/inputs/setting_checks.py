"""What settings are refused whatever they are for, and what TRL and transformers fail at in words that name none."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field
from typing import Any

import numpy as np
import torch
from transformers import training_args

from ..errors import InputError


# Of TRL and transformers, those that settings of BAPO are computed from: the smallest value of each
_SIZES = {
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "steps_per_generation": 1,
    "generation_batch_size": 1, "num_generations": 2, "num_iterations": 1,
}  # fmt: skip
# And what these fail at in words that name no setting
_COUNTS = {
    **_SIZES, "per_device_eval_batch_size": 1, "num_generations_eval": 0, "max_completion_length": 1, "top_k": 0,
}  # fmt: skip
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
    "steps_per_generation", "generation_batch_size", "num_generations_eval", "max_completion_length", "top_k", "min_p",
    "off_policy_mask_threshold",
}  # fmt: skip
_CHOICES = {
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "scale_rewards": ("group", "batch", "none", True, False),
}
_NAMES_OF_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def take_numpy_numbers(config: Any, own_fields: Iterable[Field]) -> None:
    """Put Python's numbers in the place of NumPy's; in the fields that `BAPOConfig` adds, of arrays of one too."""
    own = {f.name for f in own_fields}
    for name, value in vars(config).items():
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1 and name in own):
            setattr(config, name, value.item())


def check_types(config: Any, own_fields: Iterable[Field], types: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse values of another type than their fields, those that `BAPOConfig` adds, have."""
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


def check_values_of_trl(config: Any) -> None:
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


def check_eval_groups(config: Any) -> None:
    """Refuse batches of an evaluation that are no whole groups."""
    group, size = config.num_generations_eval or config.num_generations, config.per_device_eval_batch_size
    processes = config.world_size
    if size * processes % group != 0:
        raise InputError(
            f"`per_device_eval_batch_size` is {size} on {processes} processes, which are no whole groups of {group} "
            "(`num_generations_eval`, else `num_generations`): set it to a multiple of "
            f"{group // math.gcd(group, processes)}, or `num_generations_eval` to a divisor of {size * processes}."
        )


def check_numbers(config: Any) -> None:
    """Refuse numbers that are none, of any field."""
    weights = () if config.reward_weights is None else config.reward_weights
    if not all(math.isfinite(weight) for weight in weights if isinstance(weight, (float, np.floating))):
        raise InputError(f"`reward_weights` is {list(weights)}: set it to a list of finite numbers, one a reward.")
    for name, value in vars(config).items():
        if isinstance(value, float) and math.isnan(value):  # no comparison would notice
            raise InputError(f"`{name}` is nan: set it to a number.")


def check_device(config: Any) -> None:
    """Refuse bfloat16, TRL's default, where neither a GPU nor a CPU was asked for that could be used."""
    wants_bf16 = config.bf16 or config.bf16_full_eval or (config.bf16 is None and not config.fp16)
    has_bf16 = torch.cuda.is_available() or training_args.is_torch_bf16_gpu_available()
    if wants_bf16 and not config.use_cpu and not has_bf16:
        raise InputError(
            "`use_cpu` is false, but no GPU was found: set `use_cpu` to true (--use_cpu true), and `bf16` to false "
            "unless the processor computes in bfloat16 (--bf16 false)."
        )


def check_sizes(config: Any) -> None:
    """Refuse sizes of TRL's and transformers' that settings of BAPO could not be computed from."""
    _check_counts(config, _SIZES)


def check_ratios(config: Any) -> None:
    """Refuse bounds of ratios that float32, their type, does not hold: torch raises without a name."""
    for name in ("delta", "epsilon", "epsilon_high"):
        value = getattr(config, name)
        if value is None:
            continue
        _check_number(name, value)
        if torch.finfo(torch.float32).max < abs(value) < math.inf:
            raise InputError(f"`{name}` is {value}, more than float32 holds: set it to a ratio, e.g. 4.0, or to None.")


def _check_counts(config: Any, counts: Mapping[str, int]) -> None:
    for name, smallest in counts.items():
        value = getattr(config, name)
        if not ((value is None and name in _OPTIONAL) or (isinstance(value, int) and value >= smallest)):
            raise InputError(f"`{name}` is {value!r}: set it to a whole number, at least {smallest}.")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"`{name}` is {value!r}: set it to a number.")
