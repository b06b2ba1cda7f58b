"""Warnings at the start of a run about valid settings that may not have the intended effect."""

from collections.abc import Mapping
from typing import Any

from transformers.trainer_utils import HubStrategy

from .generation_config import FILE
from .sampling_settings import biased_settings


_WITH_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


def setting_warnings(config: Any, of_model: Mapping[str, Any] | None = None) -> list[str]:
    """
    Return the warnings about a [`BAPOConfig`], in full sentences.

    `of_model` are the settings of the model's `generation_config` that a generation uses.
    """
    messages = []
    if config.biased_settings:
        messages.append(
            f"Samples are drawn with {', '.join(config.biased_settings)}, so the importance ratios are biased: they "
            "compare probabilities of the unmodified policy. Leave these settings neutral for off-policy training."
        )
    from_model = biased_settings(of_model or {}, config.temperature)
    if from_model:
        messages.append(
            f"Samples are drawn with {', '.join(from_model)} from the model's `generation_config`, so the importance "
            "ratios are biased: they compare probabilities of the unmodified policy. Remove these settings from "
            f"{FILE}, or set neutral values in `generation_kwargs`."
        )
    if config.has_clip_bounds and config.delta is not None and config.delta < config.ratio_upper_max:
        messages.append(
            f"`delta` is {config.delta}, below `ratio_upper_max`, which is {config.ratio_upper_max}: `delta` caps all "
            f"ratios, so the upper clip bound is at most {config.delta}."
        )
    saves_samples = (config.uses_replay or config.uses_partial_rollouts) and not config.save_only_model
    if saves_samples and config.push_to_hub and config.hub_strategy in _WITH_CHECKPOINTS:
        messages.append(
            f"`hub_strategy` is '{config.hub_strategy.value}', which uploads checkpoints with the prompts and "
            "completions of the replay buffer and unfinished rollouts. To upload no samples, set it to 'every_save'."
        )
    return messages
