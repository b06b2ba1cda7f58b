"""Refuses rows of a dataset that a checkpoint, which keeps them as JSON, could not give back as they are."""

from typing import Any

from datasets import Dataset, Value

from ..errors import InputError


_FOREIGN_TYPES = ("timestamp", "date", "time", "duration", "binary", "large_binary", "decimal")


def check_row(row: dict[str, Any]) -> None:
    """
    Refuse a row of the dataset that a checkpoint could not give back as it is.

    Raises:
        InputError: If a value is not made of what JSON knows, or of NaN; names the column.
    """
    for name, value in row.items():
        foreign = _foreign_part(value)
        if foreign is not None:
            raise _cannot_keep(name, foreign)


def check_dataset(dataset: Dataset) -> None:
    """
    Refuse a dataset by its types and its first row. What a transform makes of the other rows is not known yet.

    Raises:
        InputError: As [`check_row`].
    """
    if not len(dataset) or dataset.format["type"] == "custom":
        return
    check_row(dataset[0])
    for name in dataset.format["columns"]:
        foreign = _foreign_feature(dataset.features[name])
        if foreign is not None:
            raise _cannot_keep(name, foreign)


def _foreign_part(value: Any) -> str | None:
    """Return the name of the type that JSON does not know; `None` if there is none."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    if isinstance(value, list):
        parts = value
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        parts = list(value.values())
    else:
        return type(value).__name__
    return next((foreign for part in parts if (foreign := _foreign_part(part)) is not None), None)


def _foreign_feature(feature: Any) -> str | None:
    """Return the type in a column's declared types that JSON does not know; `None` if there is none."""
    if isinstance(feature, Value):
        return feature.dtype if feature.dtype.startswith(_FOREIGN_TYPES) else None
    parts = feature.values() if isinstance(feature, dict) else [feature.feature] if hasattr(feature, "feature") else []
    return next((foreign for part in parts if (foreign := _foreign_feature(part)) is not None), None)


def _cannot_keep(column: str, foreign: str) -> InputError:
    return InputError(
        f"The column `{column}` has a {foreign}, which a checkpoint of partial rollouts cannot keep: make it of "
        "strings, numbers, lists and dictionaries with strings as keys (without `with_format`), remove it, or set "
        "`partial_rollout_oversampling` to 1.0."
    )
