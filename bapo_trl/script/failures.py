"""How a command ends that fails: an error of its user in one line, anything else in the frames that matter."""

import contextlib
import hashlib
import io
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..errors import InputError


FLAG = "--traceback"
PACKAGE = Path(__file__).resolve().parents[1]
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()

Result = TypeVar("Result")


def run_command(function: Callable[[Sequence[str]], Result], arguments: Sequence[str], program: str) -> Result:
    """
    Run a command as a process does: what it raises is said on stderr, and ends the process with 1.

    [`~errors.InputError`] is said in one line, without a traceback. Of any other error, and of those before it, the
    traceback keeps the frames of this package and of the user's code; those of libraries are counted. With
    `--traceback` among the arguments, all is shown. Of several processes of a launcher, one says what all of them have
    to say. A terminal that is gone, or cannot show a character, stops nothing.
    """
    shows_all = FLAG in arguments
    _use_robust_streams()
    try:
        return function([argument for argument in arguments if argument != FLAG])
    except Exception as error:
        if shows_all:
            text = "".join(traceback.format_exception(error))
        elif isinstance(error, InputError):
            text = f"{program}: error: {_in_one_line(error)}\n"
        else:
            text = "".join(_short_traceback(error)) + f"{FLAG} shows all frames.\n"
        if _is_first_to_say(re.sub(r"^On rank \d+: ", "", str(error))):  # which others say of it
            with contextlib.suppress(OSError):
                sys.stderr.write(text)
        raise SystemExit(1) from None


def refuse(program: str, message: str) -> NoReturn:
    """
    End the process with code 2 and one line on stderr, for flags that cannot be read. Of several processes of a
    launcher, one says it.
    """
    if _is_first_to_say(message):
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{program}: error: {message}\n")
    raise SystemExit(2)


def _in_one_line(error: BaseException) -> str:
    return " ".join(" ".join([str(error), *getattr(error, "__notes__", ())]).split())


def _short_traceback(error: BaseException, seen: frozenset[int] = frozenset()) -> Iterator[str]:
    seen |= {id(error)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and id(cause) not in seen:
        yield from _short_traceback(cause, seen)
        yield "\nFrom this came:\n\n" if error.__cause__ is None else "\nWhich was the cause of this:\n\n"
    yield "Traceback (most recent call last):\n"
    folded: list[str] = []
    for frame in traceback.extract_tb(error.__traceback__):
        library = _library_of(frame.filename)
        if library is not None:
            folded.append(library)
            continue
        yield from _counted(folded)
        folded = []
        yield from traceback.format_list([frame])
    yield from _counted(folded)
    yield from traceback.format_exception_only(error)
    for number, part in enumerate(getattr(error, "exceptions", ()), start=1):  # of a group
        if id(part) not in seen:
            yield f"\n{number} of them:\n\n"
            yield from _short_traceback(part, seen)


def _counted(folded: list[str]) -> Iterator[str]:
    if folded:
        number = "1 frame" if len(folded) == 1 else f"{len(folded)} frames"
        yield f"  ... {number} of {', '.join(dict.fromkeys(folded))}\n"


def _library_of(filename: str) -> str | None:
    """Return the library that a frame belongs to; `None` for one of ours or of the user's."""
    if filename.startswith("<frozen"):
        return "python"
    path = Path(filename).resolve()
    if path.is_relative_to(PACKAGE):
        return None
    for folder in ("site-packages", "dist-packages"):  # which may lie within the standard library's folder
        if folder in path.parts[:-1]:
            return path.parts[path.parts.index(folder) + 1].removesuffix(".py")
    return "python" if path.is_relative_to(_STANDARD_LIBRARY) else None


def _is_first_to_say(message: str) -> bool:
    """Whether no other process of the launcher on this node has said it: by a file beside those of its own errors."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return True
    name = hashlib.sha256(message.encode(errors="replace")).hexdigest()[:16]
    try:
        (Path(file).parents[1] / f"said-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _use_robust_streams() -> None:
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # closed before the process began
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 -- for as long as the process lives
        elif stream is getattr(sys, f"__{name}__") and not isinstance(stream.buffer, _Robust):
            robust: Any = _Robust(stream)
            new = io.TextIOWrapper(
                robust,
                stream.encoding,
                "backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)


class _Robust(io.RawIOBase):
    """Writes to a stream until its other end is gone, and nowhere from then on."""

    def __init__(self, stream: io.TextIOWrapper):
        self._stream = stream
        self._is_gone = False

    def writable(self) -> bool:
        return True

    @property
    def name(self) -> Any:
        return self._stream.name

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: Any) -> int:
        if not self._is_gone:
            try:
                self._stream.buffer.write(data)
                self._stream.buffer.flush()
            except OSError:  # a pipe without a reader, a terminal that was closed, a full disk behind it
                self._is_gone = True
        return len(data)
