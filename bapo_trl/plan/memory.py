"""
What a model is made of, by its configuration alone, and what lies of it on each GPU.

Bytes of weights, gradients and optimizer, by the way that they are sharded; not of activations.
"""

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module


ENGINES = {
    "none": "no sharding", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp1": "FSDP1", "fsdp2": "FSDP2",
}  # fmt: skip
"""Ways to shard a training, by name, and how they are written."""

_STATES = {  # bytes of a float32 state of each trained parameter; others are not known here
    "adamw_torch": 8, "adamw_torch_fused": 8, "adamw_torch_8bit": 2, "adamw_8bit": 2, "adamw_bnb_8bit": 2,
    "paged_adamw_8bit": 2, "sgd": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    config: Any  # of its text model
    parameters: int  # an adapter's among them
    trained: int
    cache_numbers: int  # keys and values of one token, in all layers; 0 where the configuration does not tell


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


def shape_of(model: PreTrainedModel, peft_config: Any = None) -> Shape:
    """Return the sizes of a model, with or without weights, and of an adapter to train on it. It is left as it is."""
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


@dataclass(frozen=True)
class Layout:
    """Where a training runs."""

    processes: int = 1  # a GPU each
    engine: str = "none"  # one of `ENGINES`
    offloaded: frozenset[str] = frozenset()  # what lies in CPU memory instead: `weights`, `optimizer`


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: float | None  # `None` for a quantized model
    gradients: float
    optimizer: float | None  # with the float32 weights that DeepSpeed keeps; `None` for one that is not known here
    reference: float | None  # the reference model of `beta`; `None` for a quantized one

    @property
    def total(self) -> float:
        """Sum of what is known."""
        return sum(part or 0.0 for part in (self.weights, self.gradients, self.optimizer, self.reference))


def memory_of(
    parameters: int,
    trained: int,
    weight_bytes: int | None,
    layout: Layout,
    is_mixed: bool,
    has_reference: bool,
    optim: str,
) -> Memory:
    """
    Return what lies on one GPU before the first activation.

    The parameters are those of the model, with an adapter's; `weight_bytes` are of one as it is loaded, `None` for a
    quantized model. Of a model that computes in half precision (`is_mixed`), DeepSpeed keeps weights and gradients in
    that, and a float32 copy beside the states of the optimizer; elsewhere the weights stay as they are loaded.
    """
    states = _STATES.get(str(getattr(optim, "value", optim)))
    frozen = parameters - trained
    is_deepspeed = layout.engine in ("zero1", "zero2", "zero3")
    is_quantized, weight_bytes = weight_bytes is None, weight_bytes or 0
    if is_deepspeed:
        held = 2 if is_mixed else 4
        weights, gradients, of_reference = parameters * held, trained * held, parameters * held
        master = 4 if is_mixed else 0
    else:
        held = weight_bytes if trained == parameters else 4  # peft keeps an adapter in float32
        weights, gradients = frozen * weight_bytes + trained * held, trained * held
        of_reference, master = parameters * weight_bytes, 0
    optimizer = None if states is None else trained * (master + states)
    shards = layout.processes if layout.engine != "none" else 1
    weight_shards = 1 if layout.engine in ("zero1", "zero2") else shards
    return Memory(
        weights=None if is_quantized else 0.0 if "weights" in layout.offloaded else weights / weight_shards,
        gradients=gradients / (1 if layout.engine == "zero1" else shards),
        optimizer=0.0 if "optimizer" in layout.offloaded else None if optimizer is None else optimizer / shards,
        reference=0.0 if not has_reference else None if is_quantized else of_reference / weight_shards,
    )


def layout_of_process(environment: Mapping[str, str] = os.environ, deepspeed: Any = None) -> Layout:
    """Return where this process trains, by the variables of its launcher and `deepspeed` of `TrainingArguments`."""
    processes = int(environment.get("WORLD_SIZE", 1))
    if deepspeed:
        return _deepspeed_layout(processes, deepspeed)
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        return _deepspeed_layout(processes, file or environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    if environment.get("ACCELERATE_USE_FSDP") == "true":
        strategy = environment.get("FSDP_SHARDING_STRATEGY")
        return Layout(processes, _fsdp_engine(environment.get("FSDP_VERSION", "1"), strategy))
    return Layout(processes)


def layout_of_launch(launch: Any) -> Layout:
    """Return where the processes of `accelerate launch` would train, by its validated arguments."""
    processes = launch.num_processes or 1
    if launch.use_deepspeed:
        return _deepspeed_layout(processes, launch.deepspeed_config_file or str(launch.zero_stage))
    if launch.use_fsdp:
        return Layout(processes, _fsdp_engine(launch.fsdp_version, launch.fsdp_sharding_strategy))
    return Layout(processes)


def _fsdp_engine(version: str | int, strategy: str | None) -> str:
    if str(version) == "2":
        return "fsdp2"
    return "none" if strategy in ("NO_SHARD", "3") else "fsdp1"


def _deepspeed_layout(processes: int, config: Any) -> Layout:
    """Return the layout of a DeepSpeed configuration: a stage, a file or its content."""
    if isinstance(config, str):
        stage = {"zero_optimization": {"stage": int(config)}} if config.isdigit() else None
        config = stage or json.loads(Path(config).read_text(encoding="utf-8"))
    zero = config.get("zero_optimization", {})
    engine = {1: "zero1", 2: "zero2", 3: "zero3"}.get(zero.get("stage", 0), "none")
    names = {"offload_param": "weights", "offload_optimizer": "optimizer"}
    offloaded = {what for name, what in names.items() if (zero.get(name) or {}).get("device", "none") != "none"}
    return Layout(processes, engine, frozenset(offloaded))
