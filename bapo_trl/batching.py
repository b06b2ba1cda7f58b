"""Cut TRL's padded batch into rows and put rows together into a batch again: the only code that pads, cuts or merges.

A row holds the tensors of one sample without padding, on the CPU, token ids and masks in the smallest type that keeps
their values. Cutting and putting together again gives every value back, bit for bit. Legend: `B` rows, `P` prompt
tokens, `T` completion tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


Row = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Field:
    """How a tensor of the batch is cut: along which side it is padded, with what, and in which type it is kept."""

    side: str | None  # side of the padding; `None` for one value a row
    padding: float = 0
    kept_as: torch.dtype | None = None


# What TRL pads with, by key. Prompts are padded on the left, completions on the right.
_FIELDS = {
    "prompt_ids": _Field("left", kept_as=torch.int32),
    "prompt_mask": _Field("left", kept_as=torch.bool),
    "completion_ids": _Field("right", kept_as=torch.int32),
    "completion_mask": _Field("right", kept_as=torch.bool),
    "tool_mask": _Field("right", padding=1, kept_as=torch.bool),
    "old_per_token_logps": _Field("right"),
    "sampling_per_token_logps": _Field("right"),
    "ref_per_token_logps": _Field("right"),
    "importance_sampling_ratio": _Field("right", padding=1),
    "advantages": _Field("right"),
    "policy_version": _Field(None),
}
_PER_BATCH = ("num_items_in_batch",)
_MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "image_position_ids",
    "token_type_ids",
    "mm_token_type_ids",
    "num_images",
    "num_tiles",
)


def cut_into_rows(batch: Mapping[str, torch.Tensor], pad_token_id: int) -> list[Row]:
    """
    Cut a padded batch into rows.

    Args:
        batch (mapping of `str` to `torch.Tensor`):
            TRL's batch: `prompt_ids` `(B, P)`, `completion_ids` `(B, T)`, their masks, and whatever else TRL puts in:
            tensors of shape `(B, T)`, `(B, 1)` or `(B,)`. Values of the whole batch (`num_items_in_batch`) are left
            out: they have to be computed anew for each batch.
        pad_token_id (`int`):
            Token that pads `completion_ids`. Masked tokens at the end that are not padding are kept.

    Returns:
        `B` rows.

    Raises:
        ValueError: If the batch has images, or a key that nobody knows how to cut into rows.
    """
    for key in batch:
        if key in _MULTIMODAL:
            raise ValueError(f"The batch has `{key}`: multimodal samples cannot be replayed. Turn replay off.")
        if key not in _FIELDS and key not in _PER_BATCH:
            raise ValueError(f"The batch has `{key}`, which cannot be cut into rows: known are {', '.join(_FIELDS)}.")

    kept = {}
    for key, field in _FIELDS.items():
        if key in batch:
            tensor = batch[key].detach().cpu()
            kept[key] = tensor if field.kept_as is None else tensor.to(field.kept_as)
    prompt_starts = kept["prompt_mask"].int().argmax(dim=1).tolist()
    is_token = kept["completion_mask"] | (kept["completion_ids"] != pad_token_id)
    completion_tokens = (is_token * torch.arange(1, is_token.shape[1] + 1)).amax(dim=1).tolist()

    length, completion_length = len(is_token), is_token.shape[1]
    rows: list[Row] = [{} for _ in range(length)]
    for key, tensor in kept.items():
        side = _FIELDS[key].side
        for index, row in enumerate(rows):
            if side == "left":
                value = tensor[index, prompt_starts[index] :]
            elif side == "right" and tensor.dim() == 2 and tensor.shape[1] == completion_length > 1:
                value = tensor[index, : completion_tokens[index]]
            else:
                value = tensor[index]
            row[key] = value.clone()  # a view would keep the whole batch alive
    return rows


def put_together(
    rows: Sequence[Row], pad_token_id: int, device: torch.device | str, pad_to_multiple_of: int | None = None
) -> dict[str, torch.Tensor]:
    """
    Put rows together into a padded batch, as TRL would have made it.

    Args:
        rows (sequence of rows):
            At least one row; all with the same keys.
        pad_token_id (`int`):
            Token that pads `prompt_ids` and `completion_ids`.
        device (`torch.device`):
            Device of the batch. `policy_version` stays on the CPU.
        pad_to_multiple_of (`int`, *optional*):
            Pad lengths to a multiple of this.

    Returns:
        The batch, without values of the whole batch such as `num_items_in_batch`.

    Raises:
        ValueError: If a row lacks a key that another has.
    """
    keys = set(rows[0])
    for row in rows:
        if set(row) != keys:
            raise ValueError(
                f"The rows differ in {sorted(keys ^ set(row))}: do not mix samples of different settings."
            )
    batch = {}
    for key in rows[0]:
        field, values = _FIELDS[key], [row[key] for row in rows]
        if values[0].dim() == 0 or field.side is None or (values[0].dim() == 1 and _is_row_value(key, rows)):
            tensor = torch.stack(values)
        else:
            padding = pad_token_id if key in ("prompt_ids", "completion_ids") else field.padding
            tensor = _pad(values, padding, field.side, pad_to_multiple_of)
        if field.kept_as is not None:
            tensor = tensor.to(torch.int64)
        batch[key] = tensor if key == "policy_version" else tensor.to(device)
    return batch


def _is_row_value(key: str, rows: Sequence[Row]) -> bool:
    """Whether a one-dimensional tensor holds one value for the row (sequence-level ratios), not one a token."""
    return any(row[key].shape != row["completion_ids"].shape for row in rows) and all(
        row[key].shape == (1,) for row in rows
    )


def _pad(values: Sequence[torch.Tensor], padding: float, side: str, multiple: int | None) -> torch.Tensor:
    length = max(len(value) for value in values)
    if multiple is not None:
        length = -(-length // multiple) * multiple
    padded = values[0].new_full((len(values), length), padding)
    for row, value in zip(padded, values, strict=True):
        if side == "left":
            row[length - len(value) :] = value
        else:
            row[: len(value)] = value
    return padded


def masked_copy(row: Row) -> Row:
    """Return the row with no token that counts: it keeps the shape of a batch and trains nothing."""
    return {**row, "completion_mask": torch.zeros_like(row["completion_mask"])}
