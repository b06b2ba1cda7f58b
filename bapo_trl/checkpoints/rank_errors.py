"""Raise the error of one rank on all ranks, which would otherwise wait for the failed rank."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from ..errors import InputError


P = ParamSpec("P")
T = TypeVar("T")
_KINDS: tuple[type[Exception], ...] = (InputError, OSError)


@contextmanager
def raising_on_all_ranks(explain: Callable[[], str] | None = None, at_once: bool = False) -> Iterator[None]:
    """
    Raise an error inside this context on all ranks, at its end. All ranks make this call together.

    The other ranks raise an error that quotes it: an `InputError`, an `OSError` or, for other types, a `RuntimeError`.
    `explain` returns a note on the error. Inside, no rank may wait for another, unless a rank raises its error
    `at_once`: the launcher then ends the others.
    """
    error: Exception | None = None
    described: tuple[str, type[Exception]] | None = None
    try:
        yield
    except Exception as caught:
        if explain is not None:
            caught.add_note(explain())
        if at_once:
            raise
        error, text = caught, "\n".join([str(caught), *getattr(caught, "__notes__", ())])
        described = text, next((kind for kind in _KINDS if isinstance(caught, kind)), RuntimeError)
    of_ranks = gather_object([described])
    if error is not None:
        raise error
    for rank, found in enumerate(of_ranks):
        if found is not None:
            text, kind = found
            raise kind(f"On rank {rank}: {text}")


def on_main_process(call: Callable[[], T]) -> T:
    """Call a function in the main process only, and return its result, or raise its error, on all ranks."""
    results: list[Any] = [None]
    with raising_on_all_ranks():
        if PartialState().is_main_process:
            results = [call()]
    return broadcast_object_list(results)[0]


def from_main_process(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that the main process alone runs; all ranks call it, and get its result or its error."""

    @functools.wraps(function)
    def of_main(*args: P.args, **kwargs: P.kwargs) -> T:
        return on_main_process(lambda: function(*args, **kwargs))

    return of_main
