"""A model of its configuration alone, without weights."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module


def empty_model(
    name: str, revision: str | None = None, trust_remote_code: bool = False, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Build a model of a folder or an id on the Hub without its weights; transformers raises where it cannot."""
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    architecture: Any = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is None and trust_remote_code:
        own: Mapping[str, str] = getattr(config, "auto_map", None) or {}
        # In TRL's order. `from_config` would register the class, and transformers add no generation to what is loaded
        for kind in ("AutoModelForImageTextToText", "AutoModelForCausalLM"):
            if architecture is None and kind in own:
                architecture = get_class_from_dynamic_module(own[kind], name, revision=revision)
    attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.device("meta"):
        if architecture is None:
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **attention)
        return architecture._from_config(config, **attention)
