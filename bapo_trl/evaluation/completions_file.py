"""
The completions of an evaluation on disk, one line each, such that an evaluation that was killed goes on.

Invariants: the completions of a batch are in the file before the next is sampled; a line that a kill cut in two is
dropped, and no other with it; completions of another evaluation (of another model, other prompts or other sampling)
are never taken for this one's, and never deleted: their file is put aside, under a name with their evaluation in it,
from where it comes back for that evaluation.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class CompletionsFile:
    """A jsonl file of completions."""

    def __init__(self, path: Path, evaluation: str, num_completions: int):
        self.path, self.evaluation, self.num_completions = path, evaluation, num_completions
        self._records: dict[tuple[int, int], dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _lines(path)
        other = next((record["evaluation"] for record in map(_as_record, lines) if record is not None), evaluation)
        if other != evaluation:
            path.replace(self._aside(other))
            if self._aside(evaluation).exists():
                self._aside(evaluation).replace(path)
            lines = _lines(path)
        records = [record for record in map(_as_record, lines) if record is not None]
        self._records = {
            (record["prompt_index"], record["number"]): record
            for record in records
            if record["evaluation"] == evaluation
        }
        if len(self._records) < len(lines):
            self._rewrite()

    def missing(self, num_prompts: int) -> list[tuple[int, int]]:
        """Return the completions that are not there, as numbers of prompt and completion, in order."""
        wanted = ((prompt, number) for prompt in range(num_prompts) for number in range(self.num_completions))
        return [key for key in wanted if key not in self._records]

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Write completions, each with its `prompt_index` and its `number`; those that are there are left out."""
        with self.path.open("ab") as file:
            for record in records:
                key = record["prompt_index"], record["number"]
                if key not in self._records:
                    self._records[key] = {**record, "evaluation": self.evaluation}
                    file.write(_as_line(self._records[key]))
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[dict[str, Any]]:
        """Return the completions by prompt, and for each in order."""
        return [self._records[key] for key in sorted(self._records)]

    def replace(self, records: Iterable[dict[str, Any]]) -> None:
        """Write completions that are there anew, at once."""
        for record in records:
            self._records[record["prompt_index"], record["number"]] = {**record, "evaluation": self.evaluation}
        self._rewrite()

    def _aside(self, evaluation: str) -> Path:
        return self.path.with_name(f"{self.path.stem}-{evaluation}{self.path.suffix}")

    def _rewrite(self) -> None:
        part = self.path.with_name(self.path.name + ".part")
        part.write_bytes(b"".join(map(_as_line, self.records())))
        part.replace(self.path)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _as_record(line: bytes) -> dict[str, Any] | None:
    """Return the completion of a line; `None` for what is none, or cut in two."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_whole = line.endswith(b"\n") and isinstance(record, dict) and "evaluation" in record
    return record if is_whole else None


def _as_line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n"
