"""The model's own `generation_config`: what a generation takes from it, and whether it can be saved."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, ProcessorMixin

from ..errors import InputError
from .sampling_settings import check_across_calls


FILE = "the model's generation_config.json (in Python, `model.generation_config`)"

_SET_BY_TRL = ("do_sample", "eos_token_id", "max_length", "max_new_tokens")


def settings_of_model(args: Any, generation_config: GenerationConfig, processing_class: Any) -> dict[str, Any]:
    """
    Return the settings that a generation takes from the model's `generation_config`, as `args` leave them unset.

    Only `generate` of transformers does so. Its continuous batching does not, and to vLLM, TRL sends each setting that
    vLLM would take from the model.
    """
    if args.use_vllm or args.use_transformers_continuous_batching:
        return {}
    given = {name for name, value in args.sampling_settings.items() if value is not None}
    if isinstance(processing_class, ProcessorMixin):  # TRL suppresses the token of an image
        given.add("suppress_tokens")
    used = generation_config.to_dict().items()
    return {name: value for name, value in used if value is not None and name not in given and name not in _SET_BY_TRL}


def check_for_partial_rollouts(settings: Mapping[str, Any]) -> None:
    """Raise an `InputError` for [`settings_of_model`] that partial rollouts do not support."""
    fix = f"Remove it from {FILE}, set a neutral value in `generation_kwargs`"
    check_across_calls(settings, "the model's `generation_config`", fix)


def check_can_be_saved(generation_config: GenerationConfig) -> None:
    """Raise an `InputError` if the model's `generation_config` could not be saved with the weights."""
    try:
        generation_config.validate(strict=True)  # as transformers does before it saves
    except ValueError as error:
        raise InputError(
            "The model's `generation_config` cannot be saved with the weights, so the run would end at its first "
            f"save: {' '.join(str(error).split())} Change {FILE}."
        ) from error
