"""
Read JSON and CSV files with their values as written.

`datasets` gives each column one Arrow type, which changes values: 42 becomes 42.0 beside 3.5, a date in text becomes a
`datetime`, an integer beyond 64 bits makes the column floating-point, and an object gets the fields of all others.
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import fsspec
import pandas
import pyarrow
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, Value
from datasets.features.features import register_feature

from ... import __version__
from ...inputs.written_values import DECODER, as_number, to_json


_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")  # of JSON
_NEXT = re.compile(r"\s*(?=\S)")


@dataclass
class AsWritten:
    """Feature of a column whose values are stored as the bytes of their JSON, so that they need not have one type."""

    pa_type: ClassVar[Any] = pyarrow.binary()
    _type: str = field(default="AsWritten", init=False, repr=False)

    def __call__(self):
        return self.pa_type

    def encode_example(self, value: Any) -> bytes:
        return to_json(value).encode()

    def decode_example(self, value: bytes | None, token_per_repo_id: Any = None) -> Any:
        return None if value is None else DECODER.decode(value.decode())

    def cast_storage(self, storage: pyarrow.Array) -> pyarrow.Array:
        if pyarrow.types.is_binary(storage.type):
            return storage
        return pyarrow.array(map(self.encode_example, storage.to_pylist()), self.pa_type)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # "experimental"
    register_feature(AsWritten, "AsWritten")


def load_as_written(
    files: Mapping[str, Sequence[str]], separator: str | None = None, streaming: bool = False
) -> DatasetDict | IterableDatasetDict:
    """
    Load the JSON files of each split or, with a `separator`, its CSV files.

    A column that a row lacks is `None` there. Raises a `ValueError` for a file that is damaged or has no rows.
    """
    splits = {}
    for split, paths in files.items():
        is_text: dict[str, bool] = {}  # by column
        for name, value in chain.from_iterable(row.items() for path in paths for row in _read(path, separator)):
            is_text[name] = is_text.get(name, True) and isinstance(value, str | None)
        if not is_text:
            raise ValueError(f"it has no rows in the split '{split}'")
        features = Features({name: Value("string") if text else AsWritten() for name, text in is_text.items()})
        stats = [(status.st_size, status.st_mtime_ns) for status in map(os.stat, paths)]
        made_of = {"paths": list(paths), "separator": separator, "version": (__version__, *stats)}
        kind: Any = IterableDataset if streaming else Dataset
        splits[split] = kind.from_generator(_rows, features=features, gen_kwargs={**made_of, "columns": (*is_text,)})
    return IterableDatasetDict(splits) if streaming else DatasetDict(splits)


def is_as_written(dataset: Dataset | IterableDataset) -> bool:
    """Return whether the dataset has columns of files with their values as written."""
    return any(isinstance(feature, AsWritten) for feature in (dataset.features or {}).values())


def with_columns(
    dataset: Dataset | IterableDataset, make: Callable[[dict[str, Any]], dict[str, Any]], removed: list[str]
) -> Dataset | IterableDataset:
    """Return the dataset with the columns that `make` returns for each row, and without the removed columns."""
    features = dataset.features
    if isinstance(dataset, IterableDataset) or not is_as_written(dataset):
        return dataset.map(make, remove_columns=removed)

    def extend(table: pyarrow.Table) -> pyarrow.Table:
        made = [make(features.decode_example(row)) for row in table.to_pylist()]
        for name in made[0]:
            column = pyarrow.array([AsWritten().encode_example(values[name]) for values in made])
            table = (table.drop_columns(name) if name in table.column_names else table).append_column(name, column)
        return table.drop_columns([name for name in removed if name in table.column_names])

    # As Arrow, since `map` would find types for decoded values
    made = dict.fromkeys(make(dataset[0]), AsWritten())
    all_features = Features({name: each for name, each in features.items() if name not in (*made, *removed)} | made)
    return dataset.with_format("arrow").map(extend, batched=True, features=all_features).with_format(None)


def _rows(paths: list[str], separator: str | None, version: Any, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the rows of files; the `version` is only for the cache of `datasets`, whose key has all arguments."""
    for path in paths:
        for row in _read(path, separator):
            yield {name: row.get(name) for name in columns}


def _read(path: str, separator: str | None) -> Iterator[dict[str, Any]]:
    return _read_json(path) if separator is None else _read_csv(path, separator)


def _read_csv(path: str, separator: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV file: a cell that is a number in JSON is a number, and an empty cell is `None`."""
    settings: dict[str, Any] = {"sep": separator, "dtype": str, "keep_default_na": False, "chunksize": 1000}
    for rows in pandas.read_csv(path, **settings):
        for row in rows.to_dict("records"):
            yield {name: as_number(cell) if _NUMBER.fullmatch(cell) else cell or None for name, cell in row.items()}


def _read_json(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON file: an object per line, objects over several lines, or an array (of texts too)."""
    number = None  # of the line, if each line has its own object
    try:
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            start, first = next(lines, (1, ""))
            if not _is_object(first):
                yield from _read_values("\n" * (start - 1) + first + file.read())
                return
            for number, line in chain([(start, first)], lines):  # noqa: B007 - read where an error is caught
                row = DECODER.decode(line)
                if not isinstance(row, dict):
                    raise json.JSONDecodeError("the line is not an object", line, 0)
                yield row
    except json.JSONDecodeError as error:
        at = f"line {number or error.lineno}: {error.msg} at column {error.colno}"
        raise ValueError(f"'{path}' has a JSON parse error in {at}") from error


def _is_object(line: str) -> bool:
    try:
        return isinstance(DECODER.decode(line), dict)
    except json.JSONDecodeError:
        return False


def _read_values(text: str) -> Iterator[dict[str, Any]]:
    end = 0
    while begin := _NEXT.match(text, end):
        value, end = DECODER.raw_decode(text, begin.end())
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict | str):
                raise json.JSONDecodeError("an item is not an object", text, begin.end())
            yield {"text": item} if isinstance(item, str) else item
