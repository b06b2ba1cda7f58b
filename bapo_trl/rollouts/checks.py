"""What partial rollouts refuse: trainers, and columns that a checkpoint, which is JSON, cannot give back."""

from typing import Any

from datasets import Dataset, Value

from ..errors import InputError
from .sampling_settings import broken_across_calls


_FOREIGN_TYPES = ("timestamp", "date", "time", "duration", "binary", "large_binary", "decimal")


def check_trainer(trainer: Any) -> None:
    """
    Refuse trainers whose completions cannot be parked on token ids alone, or not be sampled in several calls; and a
    dataset with a column that a checkpoint cannot keep.
    """
    reasons = {
        "`tools`": bool(trainer.tools),
        "`environment_factory`": trainer.environment_factories is not None,
        "`rollout_func`": trainer.rollout_func is not None,
        "a model that takes images": trainer._is_vlm,
    }
    for name, is_there in reasons.items():
        if is_there:
            raise InputError(
                f"The trainer has {name}, which does not go with partial rollouts: an unfinished completion is kept "
                "as token ids, and goes on from these alone. Set `partial_rollout_oversampling` to 1.0."
            )
    if isinstance(trainer.train_dataset, Dataset) and not trainer.args.remove_unused_columns:
        check_dataset(trainer.train_dataset)
    if trainer.use_vllm:
        return
    # transformers takes from there what the trainer does not set. `max_length` gives way to `max_new_tokens`
    generation_config: Any = trainer.model.generation_config
    settings = generation_config.to_diff_dict() | {"max_length": None}
    broken = broken_across_calls({k: v for k, v in settings.items() if trainer.generation_kwargs.get(k) is None})
    if broken:
        raise InputError(
            "The model's generation config does not go with partial rollouts, where a completion is sampled in "
            f"several calls: {'; '.join(broken)}. Remove it from `model.generation_config`, or set "
            "`partial_rollout_oversampling` to 1.0."
        )


def check_row(row: dict[str, Any]) -> None:
    """Refuse a row of the dataset with a value that is not made of what JSON knows, or of NaN; name the column."""
    for name, value in row.items():
        foreign = _foreign_part(value)
        if foreign is not None:
            raise _cannot_keep(name, foreign)


def check_dataset(dataset: Dataset) -> None:
    """Refuse a dataset by its types and its first row. What a transform makes of the other rows is not known yet."""
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
