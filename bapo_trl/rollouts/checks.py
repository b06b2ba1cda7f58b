"""What partial rollouts refuse: settings, trainers, and columns that a checkpoint, which is JSON, cannot give back."""

from typing import Any

from datasets import Dataset, Value

from ..errors import InputError
from .sampling_settings import broken_across_calls


_FOREIGN_TYPES = ("timestamp", "date", "time", "duration", "binary", "large_binary", "decimal")


def check_partial_rollouts(config: Any) -> None:
    """Refuse values of the partial rollouts, and settings of the sampler that they do not go with."""
    if not 1 <= config.partial_rollout_oversampling < 2:
        raise InputError(
            f"`partial_rollout_oversampling` is {config.partial_rollout_oversampling}: set it to at least 1 (off) "
            "and less than 2."
        )
    for name, smallest in (("partial_rollout_chunk_length", 1), ("partial_rollout_max_staleness", 0)):
        value = getattr(config, name)
        if value is not None and value < smallest:
            raise InputError(f"`{name}` is {value}: set it to a whole number, at least {smallest}.")
    if not config.uses_partial_rollouts:
        return
    if config.max_completion_length is None:
        raise InputError(
            "`max_completion_length` is None, but partial rollouts cut a completion into calls of at most so many "
            "tokens in all: set it to a number, or set `partial_rollout_oversampling` to 1.0."
        )
    if config.rows_per_generation % config.num_generations != 0:
        raise InputError(
            f"`num_generations` is {config.num_generations}, but each rank has {config.rows_per_generation} samples "
            "of a generation (`per_device_train_batch_size` x `steps_per_generation`): with partial rollouts a "
            "group lives on one rank, so make that a multiple of it."
        )
    if config.groups_held == 0:
        raise InputError(
            f"`partial_rollout_oversampling` is {config.partial_rollout_oversampling}, which holds over none of the "
            f"{config.groups_per_generation} groups of a generation on each rank: raise it above "
            f"{1 + 0.5 / config.groups_per_generation:.4g}, e.g. to {1 + 1 / config.groups_per_generation:.4g}, or "
            "raise `steps_per_generation`."
            if config.groups_per_generation > 1
            else f"`partial_rollout_oversampling` is {config.partial_rollout_oversampling}, but each rank has one "
            "group a generation, and cannot hold one over: raise `steps_per_generation` or "
            "`per_device_train_batch_size`."
        )
    needed = config.updates_per_generation + config.largest_staleness
    if config.partial_rollout_max_staleness is not None and config.partial_rollout_max_staleness < needed:
        raise InputError(
            f"`partial_rollout_max_staleness` is {config.partial_rollout_max_staleness}, but a completion parked "
            f"for one generation is {needed} versions old at its last update: with less, nothing is ever parked. "
            f"Set it to at least {needed}, or to None."
        )
    settings = {**(config.generation_kwargs or {}), "structured_outputs": config.vllm_structured_outputs_regex}
    broken = broken_across_calls(settings)
    if broken:
        raise InputError(
            f"{'; '.join(broken)} (in `generation_kwargs` or by a field): that does not go with partial rollouts, "
            "where a completion is sampled in several calls. Remove it, or set `partial_rollout_oversampling` to "
            "1.0."
        )


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
