"""Settings of vLLM and transformers under which samples are not drawn from the policy that the loss is computed of."""

from collections.abc import Mapping
from typing import Any


NEUTRAL: dict[str, tuple] = {
    # Of both
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    # Of vLLM
    "allowed_token_ids": (),
    "bad_words": ([],),
    "extra_args": ({},),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "presence_penalty": (0.0,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # Of transformers
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "do_sample": (True,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1.0,),
    "watermarking_config": (),
}
"""Values, besides `None`, with which a setting leaves the distribution alone."""


def biased_settings(settings: Mapping[str, Any], temperature: float) -> list[str]:
    """
    Return the settings, with their values, that draw samples from another distribution than the policy's.

    Args:
        settings (`Mapping`): Settings of the sampler by name; those that do not change the distribution are passed
            over.
        temperature (`float`): Temperature of the policy that the loss is computed of.

    Example:

    ```python
    >>> biased_settings({"top_p": 0.9, "top_k": 0, "temperature": 0.7, "seed": 3}, temperature=1.0)
    ['`top_p` 0.9', '`temperature` 0.7']

    ```
    """
    neutral = {**NEUTRAL, "temperature": (temperature,)}
    return [
        f"`{name}` {value}"
        for name, value in settings.items()
        if name in neutral and value is not None and value not in neutral[name]
    ]


# Settings of the samplers that mean something else for a completion sampled in several calls: why, and neutral values
_BROKEN_ACROSS_CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(
        ("min_new_tokens", "min_tokens", "min_length", "presence_penalty", "frequency_penalty"),
        ("counts from the start of a call", (0,)),
    ),
    **dict.fromkeys(
        ("exponential_decay_length_penalty", "thinking_token_budget"), ("counts from the start of a call", ())
    ),
    **dict.fromkeys(
        ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "guidance_scale"),
        ("takes the completion so far for the prompt", (0, 1)),
    ),
    "truncate_prompt_tokens": ("cuts the completion so far", (-1,)),
    **dict.fromkeys(
        ("eos_token_id", "stop_token_ids", "ignore_eos"),
        (
            "changes for the sampler alone what ends a completion (set the model's `generation_config.eos_token_id`)",
            (False, []),
        ),
    ),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "max_length"), ("is the cap of a call", ())),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id"), ("acts at the start of a call", ([],))),
    "forced_eos_token_id": ("acts at the end of a call", ([],)),
    **dict.fromkeys(("num_beams", "num_return_sequences", "n"), ("makes several completions of one", (1,))),
    "use_beam_search": ("makes several completions of one", (False,)),
    "max_time": ("stops a call by the clock", ()),
    **dict.fromkeys(("stop", "stop_strings", "bad_words"), ("may fall across two calls", ([], ""))),
    **dict.fromkeys(
        ("structured_outputs", "guided_decoding", "response_format", "repetition_detection"),
        ("starts anew with each call", ({"type": "text"},)),
    ),
    "seed": ("makes each call draw the same", ()),
}


def broken_across_calls(settings: Mapping[str, Any]) -> list[str]:
    """
    Name the settings that mean something else for a completion that is sampled in several calls.

    Args:
        settings (mapping of `str` to any value): Settings of the sampler by name, `structured_outputs` among them.

    Returns:
        `list[str]`: Each with why, as words of a message.

    Example:

    ```python
    >>> broken_across_calls({"min_new_tokens": 3, "stop": None})
    ['`min_new_tokens` counts from the start of a call']

    ```
    """
    return [
        f"`{name}` {why}"
        for name, (why, neutral) in _BROKEN_ACROSS_CALLS.items()
        if settings.get(name) is not None and settings[name] not in neutral
    ]
