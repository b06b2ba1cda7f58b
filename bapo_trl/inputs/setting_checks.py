"""Checks of single settings: type, allowed values and range, NaN, and bfloat16 support."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field
from numbers import Integral, Real
from types import NoneType
from typing import Any

import torch
from transformers import training_args

from ..errors import InputError


_NAMES_OF_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def check_fields(config: Any, fields: Iterable[Field], types: Mapping[str, tuple[Any, ...]]) -> None:
    """
    Raise an `InputError` if a value is not one of the `choices` in its field's metadata, has the wrong type, or is
    outside the field's `range`, an interval such as "(0, 1]". Numbers of other types are converted to the field's.
    """
    for f in fields:
        name, value, choices = f.name, getattr(config, f.name), f.metadata.get("choices")
        if choices is not None:
            if value not in choices:
                raise InputError(f"`{name}` is {value!r}: choose one of {', '.join(map(repr, choices))}.")
            continue
        if value is None and NoneType in types[name]:
            continue
        kind = next(each for each in types[name] if each is not NoneType)
        of_kind = {int: Integral, float: Real}.get(kind)
        if of_kind is not None and isinstance(value, of_kind) and not isinstance(value, bool):  # or of NumPy
            value = kind(value)
            setattr(config, name, value)
        interval = f.metadata.get("range", "")
        if type(value) is not kind or not _is_in(value, interval):
            wanted = _NAMES_OF_TYPES[kind] + (f" in {interval}" if interval else "")
            raise InputError(f"`{name}` is {value!r}: set it to {wanted}{', or None' * (NoneType in types[name])}.")


def _is_in(value: Any, interval: str) -> bool:
    if not interval:
        return True
    low, high = map(float, interval[1:-1].split(","))
    is_above = low <= value if interval[0] == "[" else low < value
    return is_above and (value <= high if interval[-1] == "]" else value < high)


def check_numbers(config: Any) -> None:
    """Raise an `InputError` if any setting is NaN, which no comparison would detect."""
    for name, value in vars(config).items():
        if isinstance(value, Real) and value != value:
            raise InputError(f"`{name}` is nan: set it to a number.")
    weights = () if config.reward_weights is None else config.reward_weights
    if not all(math.isfinite(weight) for weight in weights if isinstance(weight, Real)):
        raise InputError(f"`reward_weights` is {list(weights)}: set it to a list of finite numbers, one per reward.")


def check_device(config: Any) -> None:
    """Raise an `InputError` for bfloat16, TRL's default, if there is no GPU and `use_cpu` is not set."""
    wants_bf16 = config.bf16 or config.bf16_full_eval or (config.bf16 is None and not config.fp16)
    has_bf16 = torch.cuda.is_available() or training_args.is_torch_bf16_gpu_available()
    if wants_bf16 and not config.use_cpu and not has_bf16:
        raise InputError(
            "`use_cpu` is false, but no GPU was found: set `use_cpu` to true (--use_cpu true), and `bf16` to false "
            "(--bf16 false) unless your CPU supports bfloat16."
        )
