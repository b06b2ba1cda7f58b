"""Settings are checked against the machine that reads them. A dry run reads those of another machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainingArguments, training_args


@contextmanager
def as_on_gpus(processes: int) -> Iterator[None]:
    """
    Have settings read as on GPUs that compute in bfloat16, in one of so many processes.

    Args:
        processes (`int`): What `world_size` is.
    """
    pretended: tuple[tuple[Any, str, Any], ...] = (
        (TrainingArguments, "world_size", property(lambda self: processes)),
        (training_args, "is_torch_bf16_gpu_available", lambda: True),
    )
    originals = [getattr(owner, name) for owner, name, _ in pretended]
    for owner, name, value in pretended:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(pretended, originals, strict=True):
            setattr(owner, name, original)
