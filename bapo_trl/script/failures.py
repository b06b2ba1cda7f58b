"""How a command ends that fails: an error of its user in one line, anything else with its traceback."""

import errno
import hashlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InputError


FLAG = "--traceback"
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as in a shell."""

_TERMINAL_IS_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


def run_command(function: Callable[[Sequence[str]], Any], arguments: Sequence[str], program: str) -> Any:
    """
    Run a command as a process does: report what it raises on stderr, and end the process with 1 (130 after Ctrl-C).

    [`~errors.InputError`] and Ctrl-C take one line; `--traceback` among the arguments shows where they come from. Of
    several processes of a launcher, one reports what all of them have to say. A terminal that is gone stops nothing;
    output that cannot be written, as on a full disk, is an error at the end.
    """
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), _OutlivesTerminal):
            setattr(sys, name, _OutlivesTerminal(getattr(sys, name)))
    try:
        result, ended = None, None
        try:
            result = function([argument for argument in arguments if argument != FLAG])
        except SystemExit as error:  # as after a help text
            ended = error
        if ended is None or not ended.code:
            sys.stdout.flush()
            if isinstance(sys.stdout, _OutlivesTerminal) and sys.stdout.lost is not None:
                raise InputError(f"the output could not be written: {sys.stdout.lost}")
    except (Exception, KeyboardInterrupt) as error:
        is_interrupt = isinstance(error, KeyboardInterrupt)
        text = "".join(traceback.format_exception(error))
        if (is_interrupt or isinstance(error, InputError)) and FLAG not in arguments:
            line = " ".join(" ".join([str(error), *getattr(error, "__notes__", ())]).split())
            text = f"{program}: interrupted\n" if is_interrupt else f"{program}: error: {line}\n"
        _report_once(text, re.sub(r"^On rank \d+: ", "", str(error)))  # others' words for it
        raise SystemExit(INTERRUPTED if is_interrupt else 1) from None
    if ended is not None:
        raise ended
    return result


def reject(program: str, message: str) -> NoReturn:
    """End the process with code 2 and one line on stderr, once of several processes, for flags that cannot be read."""
    _report_once(f"{program}: error: {message}\n", message)
    raise SystemExit(2)


def _report_once(text: str, message: str) -> None:
    """Write to stderr, unless another process of the launcher on this node did: it left a file beside its errors."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None and "TORCHELASTIC_RUN_ID" in os.environ:  # without a launcher, the file is the user's own
        said = Path(file).parents[1] / f"said-{hashlib.sha256(message.encode(errors='replace')).hexdigest()[:16]}"
        try:
            said.touch(exist_ok=False)
        except FileExistsError:
            return
    print(text, end="", file=sys.stderr)


class _OutlivesTerminal:
    """
    A stream whose text goes nowhere once the terminal is gone, and which replaces what the terminal cannot encode.

    `lost` is the first other error, as of a full disk.
    """

    def __init__(self, stream: Any):
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115 -- for as long as the process lives
        self.lost: OSError | None = None
        if getattr(self._stream, "errors", None) in ("strict", "surrogateescape"):
            self._stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._call("write", text)
        return len(text)

    def flush(self) -> None:
        self._call("flush")

    def _call(self, name: str, *arguments: str) -> None:
        try:
            getattr(self._stream, name)(*arguments)
        except OSError as error:
            if error.errno not in _TERMINAL_IS_GONE:
                self.lost = self.lost or error
