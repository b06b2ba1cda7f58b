"""Reads files of logs one log at a time, so that a file is never in memory as a whole."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ..errors import InputError


STATE_FILE = "trainer_state.json"

_CHUNK_CHARACTERS = 2**20
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def logs_in(file: Path) -> Iterator[dict]:
    """
    Yield the logs of a `trainer_state.json`, or of a file of one JSON object a line (jsonl).

    Raises:
        InputError: If the file cannot be read, is damaged, or holds something else; names file and line.
    """
    with open_text(file) as text:
        yield from _lines(text, file) if file.suffix == ".jsonl" else _history(text, file)


def read_json(file: Path) -> Any:
    """Return what a JSON file holds; errors as in [`logs_in`]."""
    with open_text(file) as text:
        return _parse(text.read(), file)


def open_text(file: Path) -> TextIO:
    """Open a text file in the encoding that its first bytes tell, with a byte order mark or without."""
    try:
        with open(file, "rb") as start:
            encoding = json.detect_encoding(start.read(4))
        return open(file, encoding=encoding, errors="replace")
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None


def _lines(text: TextIO, file: Path) -> Iterator[dict]:
    for number, line in enumerate(text, 1):
        if line.isspace():
            continue
        try:
            log = _parse(line, file, number)
        except InputError:
            if line.endswith("\n"):
                raise
            return  # a run that still writes, or was killed, may leave a part of a line
        yield _checked(log, file, number)


def _history(text: TextIO, file: Path) -> Iterator[dict]:
    json_text = _JsonText(text)
    try:
        for log in json_text.items() if json_text.peek() == "[" else json_text.items_of("log_history"):
            yield log if isinstance(log, dict) else _checked(log, file, json_text.line)
        json_text.end()
    except (json.JSONDecodeError, RecursionError) as error:
        raise _damaged(file, json_text.line_of(error), error) from None


def _checked(log: Any, file: Path, line: int) -> dict:
    if not isinstance(log, dict):
        raise InputError(
            f"RUN {file} holds no logs: give a {STATE_FILE}, or a jsonl file of one log a line (line {line} is none)."
        )
    return log


def _parse(text: str, file: Path, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, first_line - 1 + getattr(error, "lineno", 1), error) from None


def _damaged(file: Path, line: int, error: Exception) -> InputError:
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    fix = "Mend or remove it." if file.suffix == ".jsonl" else "Give another checkpoint of the run."
    return InputError(f"{file} is damaged: line {line}: {reason}. {fix}")


class _JsonText:
    """A JSON text that is read value by value. What was read is dropped: the text held begins at line `_line`."""

    def __init__(self, text: TextIO):
        self._text = text
        self._held, self._at, self._line = "", 0, 1

    def peek(self) -> str:
        """Return the next character that is no white space, nothing at the end."""
        while True:
            self._at = _SPACE.match(self._held, self._at).end()
            if self._at < len(self._held) or not self._read_on():
                return self._held[self._at : self._at + 1]

    def value(self) -> Any:
        """Return the next value."""
        self.peek()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._held, self._at)
            except json.JSONDecodeError:
                if not self._read_on():
                    raise
                continue
            if end < len(self._held) or not self._read_on():  # a number could go on
                self._at = end
                return value

    def items(self) -> Iterator[Any]:
        """Yield the items of a list."""
        self._take("[")
        if self.peek() == "]":
            self._take("]")
            return
        while True:
            yield self.value()
            if self._take(",", "]") == "]":
                return

    def items_of(self, wanted: str) -> Iterator[Any]:
        """Yield the items of the list that an object has by name; `None` if there is no such list."""
        is_there = False
        if self.peek() == "{":
            self._take("{")
            while self.peek() != "}":
                name = self.value()
                self._take(":")
                if name == wanted and self.peek() == "[":
                    is_there = True
                    yield from self.items()
                else:
                    self.value()
                if self.peek() != "}":
                    self._take(",")
            self._take("}")
        else:
            self.value()
        if not is_there:
            yield None

    def end(self) -> None:
        """Refuse what comes behind the whole."""
        if self.peek():
            raise json.JSONDecodeError("Extra data", self._held, self._at)

    @property
    def line(self) -> int:
        """Line of the text up to which it is read."""
        return self._line + self._held.count("\n", 0, self._at)

    def line_of(self, error: Exception) -> int:
        """Return the line of the text that an error is about."""
        return self._line - 1 + error.lineno if isinstance(error, json.JSONDecodeError) else self.line

    def _take(self, *allowed: str) -> str:
        found = self.peek()
        if found not in allowed:
            raise json.JSONDecodeError(f"Expecting {' or '.join(map(repr, allowed))}", self._held, self._at)
        self._at += 1
        return found

    def _read_on(self) -> bool:
        """Drop what was read and read as much as is held again, at least a chunk; return whether there was more."""
        more = self._text.read(max(_CHUNK_CHARACTERS, len(self._held) - self._at))
        if more:
            self._line += self._held.count("\n", 0, self._at)
            self._held, self._at = self._held[self._at :] + more, 0
        return bool(more)
