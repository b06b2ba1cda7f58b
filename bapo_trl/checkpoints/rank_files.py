"""The states of a run's components in a checkpoint folder: one safetensors file per component and rank. No pickle.

A component's `state_dict()` is written to the file, and read again for its `load_state_dict()`: tensors are stored as
they are, everything else as JSON in the bytes of a tensor (a header is limited to 100 MB). A checksum over the file's
contents and name detects later changes.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import InputError


STATE = "state"
"""Name of the JSON among the tensors."""

SENSELESS = (ArithmeticError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError)
"""Errors that are raised while reading a file with invalid contents."""


@dataclass(frozen=True)
class RankFiles:
    """The files of one kind of state."""

    name: str  # name of the state in messages, and, with `_` for blanks, the start of the file names
    version: str  # version of the format
    remedy: str  # what a user can do if a file cannot be read, for messages

    @property
    def format(self) -> str:
        """Format name that is stored in each file."""
        return f"bapo_trl {self.name} {self.version}"

    def path(self, folder: str | Path, rank: int, num_ranks: int) -> Path:
        """Return the file of a rank."""
        return Path(folder) / f"{self.name.replace(' ', '_')}_{rank:05d}_of_{num_ranks:05d}.safetensors"

    def num_ranks_of(self, file_name: str) -> int | None:
        """Return the number of ranks of the run that wrote a file of this name; `None` for any other file."""
        match = re.fullmatch(rf"{self.name.replace(' ', '_')}_\d{{5}}_of_(\d{{5}})\.safetensors", file_name)
        return int(match[1]) if match else None

    def write(self, folder: str | Path, rank: int, num_ranks: int, state: Mapping[str, Any]) -> Path:
        """Write the state of one rank, with tensors and JSON values by name; the folder is created if missing."""
        path = self.path(folder, rank, num_ranks)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        text = json.dumps({name: value for name, value in state.items() if name not in tensors})
        metadata = {"format": self.format, "checksum": checksum(path.name, text, tensors)}
        state_bytes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        save_file({**tensors, STATE: state_bytes}, path, metadata=metadata)
        return path

    def find(self, folder: str | Path) -> list[Path]:
        """Return the files of all ranks, in the order of the ranks; an empty list if the folder has none."""
        sizes = {size for path in Path(folder).iterdir() if (size := self.num_ranks_of(path.name)) is not None}
        if len(sizes) > 1:
            raise InputError(f"{folder} has {self.name}s of runs with {sorted(sizes)} processes: {self.remedy}.")
        return [self.path(folder, rank, size) for size in sizes for rank in range(size)]

    def read(self, path: Path) -> dict[str, Any]:
        """Return the state in a file; raise an `InputError` if the file is missing, damaged or of another format."""
        if not path.exists():
            raise InputError(
                f"The {self.name} {path} is missing, but the files of other ranks exist: the checkpoint is damaged."
            )
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != self.format:  # checked before any tensor is read
                    raise ValueError(f"its format is {metadata.get('format')!r}, not {self.format!r}")
                # Copies, as the tensors are views of the file
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
            text = bytes(tensors.pop(STATE).numpy()).decode()
            if checksum(path.name, text, tensors) != metadata["checksum"]:
                raise ValueError("its checksum does not match its contents and name")
            return {**tensors, **json.loads(text)}
        except (SafetensorError, OSError, *SENSELESS) as error:
            raise self.damaged(path, error) from error

    def load(
        self,
        folder: str | Path,
        rank: int,
        num_ranks: int,
        load_state_dict: Callable[[dict[str, Any]], Any],
        deal_out: Callable[[Iterable[dict[str, Any]], int, int], dict[str, Any]],
    ) -> bool:
        """
        Restore the state of one rank from a folder; return whether the folder has one.

        If another number of ranks wrote it, `deal_out` computes this rank's state from all saved states, in order.
        """
        paths = self.find(folder)
        if not paths:
            return False
        is_own = len(paths) == num_ranks
        try:
            load_state_dict(self.read(paths[rank]) if is_own else deal_out(map(self.read, paths), rank, num_ranks))
        except InputError:
            raise
        except SENSELESS as error:
            raise self.damaged(paths[rank] if is_own else folder, error) from error
        return True

    def damaged(self, path: str | Path, error: Exception) -> InputError:
        """Return the error for a file with invalid contents."""
        return InputError(f"The {self.name} {path} is damaged ({error}): {self.remedy}.")


def checksum(name: str, state: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the checksum of a file of this name, with this state as JSON and these tensors."""
    digest = xxhash.xxh3_128(f"{name} {state}".encode())
    for key in sorted(tensors):
        digest.update(f"{key} {tensors[key].dtype} {tuple(tensors[key].shape)}".encode())
        digest.update(tensors[key].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
