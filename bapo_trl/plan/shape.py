"""What a model is made of, by its configuration alone: no weight is loaded."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """
    Sizes of a model.

    Attributes:
        config ([`~transformers.PreTrainedConfig`]): Configuration of its text model.
        parameters (`int`): Parameters, an adapter's among them.
        trained (`int`): Those that a training changes.
        cache_numbers (`int`): Keys and values of one token, in all layers; 0 where the configuration does not tell.
    """

    config: Any
    parameters: int
    trained: int
    cache_numbers: int


def empty_model(name: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """
    Build a model without its weights.

    Args:
        name (`str`): A folder or an id on the Hub.
        revision (`str`, *optional*): Revision of an id.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code in the model's folder may run.

    Raises:
        Exception: Whatever transformers raises for a model that it cannot find or build.
    """
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    architecture: Any = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config) if architecture is None else architecture._from_config(config)


def shape_of(model: PreTrainedModel, peft_config: Any = None) -> Shape:
    """
    Return the sizes of a model.

    Args:
        model ([`~transformers.PreTrainedModel`]): With or without weights. It is left as it is.
        peft_config ([`~peft.PeftConfig`], *optional*): An adapter to train on it.
    """
    config = model.config.get_text_config()
    if peft_config is not None:
        from peft import get_peft_model

        with torch.device("meta"):
            architecture: Any = type(model)
            model = get_peft_model(architecture._from_config(copy.deepcopy(model.config)), peft_config)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return Shape(
        config,
        parameters=sum(size for size, _ in sizes),
        trained=sum(size for size, is_trained in sizes if is_trained),
        cache_numbers=_cache_numbers(config),
    )


def _cache_numbers(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0)
    shared = getattr(config, "num_key_value_heads", None) or heads or 0
    return 2 * getattr(config, "num_hidden_layers", 0) * shared * width
