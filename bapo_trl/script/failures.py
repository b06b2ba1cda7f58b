"""How a command ends that fails: an error of its user in one line, anything else with its traceback."""

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InputError


FLAG = "--traceback"


def run_command(function: Callable[[Sequence[str]], Any], arguments: Sequence[str], program: str) -> Any:
    """
    Run a command as a process does: report what it raises on stderr, and end the process with 1.

    [`~errors.InputError`] takes one line; `--traceback` among the arguments shows where it comes from. Of several
    processes of a launcher, one reports what all of them have to say. A terminal that is gone stops nothing.
    """
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), _OutlivesTerminal):
            setattr(sys, name, _OutlivesTerminal(getattr(sys, name)))
    try:
        return function([argument for argument in arguments if argument != FLAG])
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        if isinstance(error, InputError) and FLAG not in arguments:
            line = " ".join(" ".join([str(error), *getattr(error, "__notes__", ())]).split())
            text = f"{program}: error: {line}\n"
        _report_once(text, re.sub(r"^On rank \d+: ", "", str(error)))  # others' words for it
        raise SystemExit(1) from None


def reject(program: str, message: str) -> NoReturn:
    """End the process with code 2 and one line on stderr, once of several processes, for flags that cannot be read."""
    _report_once(f"{program}: error: {message}\n", message)
    raise SystemExit(2)


def _report_once(text: str, message: str) -> None:
    """Write to stderr, unless another process of the launcher on this node did: it left a file beside its errors."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        said = Path(file).parents[1] / f"said-{hashlib.sha256(message.encode(errors='replace')).hexdigest()[:16]}"
        try:
            said.touch(exist_ok=False)
        except FileExistsError:
            return
    print(text, end="", file=sys.stderr)


class _OutlivesTerminal:
    """A stream whose text goes nowhere once the terminal is gone."""

    def __init__(self, stream: Any):
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115 -- for as long as the process lives

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()
