"""Errors of one rank, raised on all of them where the others would wait for it."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.utils import gather_object

from ..errors import InputError


def raise_on_all_ranks(error: Exception | None) -> None:
    """
    Raise the error of a rank on all of them. All ranks make this call together.

    The others raise one that quotes the first, an `InputError` if that was one, else a `RuntimeError`.
    """
    text = None if error is None else "\n".join([str(error), *getattr(error, "__notes__", ())])
    texts = gather_object([(text, isinstance(error, InputError))])
    if error is not None:
        raise error
    for rank, (text, is_of_user) in enumerate(texts):
        if text is not None:
            raise (InputError if is_of_user else RuntimeError)(f"On rank {rank}: {text}")


@contextmanager
def raising_on_all_ranks() -> Iterator[None]:
    """Raise at its end, on all ranks, what one of them raises within, where none waits for another: see above."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_on_all_ranks(error)
