"""Reads files of logs: a `trainer_state.json` as a whole, jsonl line by line."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from ..errors import InputError


STATE_FILE = "trainer_state.json"


def logs_in(file: Path) -> Iterator[dict]:
    """Yield the logs of a `trainer_state.json`, or of a jsonl file of one log a line; refuse others (`InputError`)."""
    for place, log in _lines(file) if file.suffix == ".jsonl" else _history(file):
        if not isinstance(log, dict):
            raise InputError(
                f"RUN {file} holds no logs: give a {STATE_FILE}, or a jsonl file of one log a line ({place} is none)."
            )
        yield log


def read_json(file: Path) -> Any:
    """Return what a JSON file holds; errors as in [`logs_in`]."""
    with _open(file) as text:
        return _parse(text.read(), file)


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    with _open(file) as text:
        for number, line in enumerate(text, 1):
            if line.isspace():
                continue
            try:
                log = _parse(line, file, number)
            except InputError:
                if line.endswith("\n"):
                    raise
                return  # a run that still writes, or was killed, may leave a part of a line
            yield f"line {number}", log


def _history(file: Path) -> Iterable[tuple[str, Any]]:
    state = read_json(file)
    history = state.get("log_history") if isinstance(state, dict) else state
    if not isinstance(history, list):
        return [("its `log_history`", None)]
    return ((f"log {number}", log) for number, log in enumerate(history, 1))


def _open(file: Path) -> TextIO:
    """Open a text file in the encoding that its first bytes tell, with a byte order mark or without."""
    try:
        with open(file, "rb") as start:
            encoding = json.detect_encoding(start.read(4))
        return open(file, encoding=encoding, errors="replace")
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}.") from None


def _parse(text: str, file: Path, line: int | None = None) -> Any:
    """Return the value of a line, or of a file as a whole."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        line = line or getattr(error, "lineno", None)
        where = f"line {line}: " if line else ""
        reason = getattr(error, "msg", error)
        fix = "Mend or remove it." if file.suffix == ".jsonl" else "Give another checkpoint of the run."
        raise InputError(f"{file} is damaged: {where}{reason}. {fix}") from None
