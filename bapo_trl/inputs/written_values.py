"""JSON that keeps how its numbers were written, for the values of files and for rows in checkpoints."""

import json
from collections.abc import Mapping
from typing import Any


_MOST_DIGITS = 4000  # of an `int`: Python converts no longer text


class WrittenNumber(float):
    """A number that Python would write in another way, such as 0.10 or 1E400: `str()` returns it as written."""

    text: str

    def __new__(cls, text: str):
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __repr__(self) -> str:
        return self.text


def as_number(text: str) -> int | float:
    """Return the number that a JSON text means."""
    is_int = text.lstrip("-").isdecimal() and len(text) < _MOST_DIGITS
    number = int(text) if is_int else float(text)
    return number if str(number) == text else WrittenNumber(text)


DECODER = json.JSONDecoder(parse_float=as_number, parse_int=as_number, parse_constant=WrittenNumber)


def to_json(value: Any) -> str:
    """Return the JSON from which [`DECODER`] reads an equal value; raise a `TypeError` if there is none."""
    if isinstance(value, WrittenNumber):
        return value.text
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{json.dumps(str(key))}: {to_json(item)}' for key, item in value.items())}}}"
    return f"[{', '.join(map(to_json, value))}]" if isinstance(value, list) else json.dumps(value)
