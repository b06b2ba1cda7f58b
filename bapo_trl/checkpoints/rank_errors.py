"""Errors of one rank, raised on all ranks where the others would wait for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from ..errors import InputError


T = TypeVar("T")
_KINDS: tuple[type[Exception], ...] = (InputError, OSError, RuntimeError)
"""What the other ranks raise: the first of these that the error is, else the last."""


def raise_on_all_ranks(error: Exception | None) -> None:
    """
    Raise the error of a rank on all of them. All ranks make this call together.

    The others raise one that quotes the first: an `InputError` or an `OSError` if that was one, else a `RuntimeError`.
    """
    described = gather_object([_describe(error)])
    if error is not None:
        raise error
    for rank, description in enumerate(described):
        _raise(rank, description)


@contextmanager
def raising_on_all_ranks() -> Iterator[None]:
    """Raise at its end, on all ranks, what one of them raises within, where none waits for another: see above."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_on_all_ranks(error)


def on_main_process(call: Callable[[], T]) -> T:
    """
    Return on all ranks what a function returns in the main process, which alone calls it; raise what it raises there.

    All ranks make this call together. What the others raise is that of [`raise_on_all_ranks`].
    """
    result, error = None, None
    if PartialState().is_main_process:
        try:
            result = call()
        except Exception as caught:
            error = caught
    ((result, description),) = broadcast_object_list([(result, _describe(error))])
    if error is not None:
        raise error
    _raise(0, description)
    return result


def _describe(error: Exception | None) -> tuple[str, type[Exception]] | None:
    """Return what the other ranks raise: the text with its notes, and the kind."""
    if error is None:
        return None
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    return text, next((kind for kind in _KINDS if isinstance(error, kind)), _KINDS[-1])


def _raise(rank: int, description: tuple[str, type[Exception]] | None) -> None:
    if description is not None:
        text, kind = description
        raise kind(f"On rank {rank}: {text}")
