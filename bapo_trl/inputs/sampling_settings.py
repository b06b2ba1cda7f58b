"""Settings of vLLM and transformers with which samples are not drawn from the policy that the loss assumes."""

from collections.abc import Mapping
from typing import Any

from ..errors import InputError


_BIASING: dict[str, tuple] = {
    **dict.fromkeys(
        ("top_p", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams", "typical_p"),
        (1,),
    ),
    **dict.fromkeys(
        ("min_p", "frequency_penalty", "presence_penalty", "min_tokens", "min_length", "min_new_tokens",
         "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), (0,),
    ),
    **dict.fromkeys(
        ("bad_words", "bad_words_ids", "extra_args", "logit_bias", "logits_processors", "sequence_bias",
         "suppress_tokens", "begin_suppress_tokens"), ([], {}),
    ),
    **dict.fromkeys(
        ("allowed_token_ids", "exponential_decay_length_penalty", "forced_eos_token_id", "max_time",
         "structured_outputs", "thinking_token_budget", "top_h", "watermarking_config"), (),
    ),
    "top_k": (0, -1),
    "truncate_prompt_tokens": (-1,),
    "do_sample": (True,),
    "response_format": ({"type": "text"},),
}  # fmt: skip
"""Values, besides `None`, with which a setting does not change the distribution."""

_NEUTRAL = {
    **_BIASING,
    **dict.fromkeys(("eos_token_id", "stop_token_ids", "ignore_eos"), (False, [])),
    **dict.fromkeys(("num_return_sequences", "n"), (1,)),
    **dict.fromkeys(("stop", "stop_strings"), ([], "")),
}
"""The same, with the values at which settings that do not bias the distribution have no effect."""

_BROKEN_ACROSS_CALLS: dict[str, tuple[str, ...]] = {
    "counts from the start of a call": (
        "min_new_tokens", "min_tokens", "min_length", "presence_penalty", "frequency_penalty",
        "exponential_decay_length_penalty", "thinking_token_budget", "begin_suppress_tokens",
    ),
    "forces the last token of a call": ("forced_eos_token_id",),
    "treats the completion so far as prompt": (
        "guidance_scale", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size",
    ),
    "truncates the completion so far": ("truncate_prompt_tokens",),
    "changes only for the sampler which token ends a completion (set the model's `generation_config.eos_token_id`)": (
        "eos_token_id", "stop_token_ids", "ignore_eos",
    ),
    "limits the tokens of a call": ("max_new_tokens", "max_tokens", "max_length"),
    "returns several completions for one": ("num_beams", "num_return_sequences", "n"),
    "limits the time of a call": ("max_time",),
    "may match across two calls": ("stop", "stop_strings", "bad_words"),
    "starts over in each call": ("structured_outputs", "response_format"),
    "makes each call draw the same": ("seed",),
}  # fmt: skip
"""Settings that behave differently if a completion is sampled in several calls, by reason."""


def biased_settings(settings: Mapping[str, Any], temperature: float) -> list[str]:
    """
    Return the settings, with their values, that draw samples from another distribution than the policy's.

    `temperature` is the temperature of the policy in the loss.
    """
    neutral = {**_BIASING, "temperature": (temperature,)}
    return [
        f"`{name}` {value}"
        for name, value in settings.items()
        if name in neutral and value is not None and value not in neutral[name]
    ]


def check_across_calls(settings: Mapping[str, Any], where: str, fix: str) -> None:
    """Raise an `InputError` for settings that behave differently if a completion is sampled in several calls."""
    broken = [
        f"`{name}` {why} (its value is {settings[name]})"
        for why, names in _BROKEN_ACROSS_CALLS.items()
        for name in names
        if settings.get(name) is not None and settings[name] not in _NEUTRAL.get(name, ())
    ]
    if broken:
        raise InputError(
            f"{'; '.join(broken)}, in {where}: partial rollouts sample a completion in several calls, and do not "
            f"support this. {fix}, or set `partial_rollout_oversampling` to 1.0."
        )
