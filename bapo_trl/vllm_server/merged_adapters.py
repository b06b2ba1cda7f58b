"""
Send merged weights of a model with an adapter to vLLM, without changing the trainer's weights.

TRL merges the adapter into the model, sends `named_parameters()`, and unmerges. In bfloat16, this merge loses changes
below half a unit in the last place of a weight, as an adapter's are for hundreds of updates, and unmerging does not
restore the weights exactly. Here, one layer at a time is copied, merged in float32, and rounded stochastically. Layers
that bitsandbytes quantized are dequantized before.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_peft_model

from ..errors import InputError
from .quantized import check_engine, engine_config, float_class, full_layer, is_quantized, unsharded
from .stochastic_rounding import noise_seed, round_stochastically


_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def send_merged_copies(trainer: Any) -> None:
    """Have `vllm_generation` send merged copies of the layers with an adapter. Needed up to TRL 1.16 at least."""
    if not needs_copies(trainer.model):
        return
    generation = trainer.vllm_generation
    config = engine_config(generation)
    check_engine(trainer.model, config)
    types = Types(
        _FLOATS.get(str(config.get("dtype")).split(".")[-1]), AUTOCAST.get(trainer.accelerator.mixed_precision)
    )
    sync_weights = generation.sync_weights

    def sync_merged_copies():
        with merging_copies(generation.model, trainer.state.global_step, types):
            sync_weights()

    generation.sync_weights = sync_merged_copies


class Types(NamedTuple):
    """Dtypes of the engine's weights, and of weights under autocast; `None` for the dtype of the parameters."""

    engine: torch.dtype | None = None
    forward: torch.dtype | None = None


@contextmanager
def merging_copies(model: Any, version: int, types: Types) -> Iterator[None]:
    """
    Have `merge_adapter()` merge copies, which `named_parameters()` returns until `unmerge_adapter()`.

    The model itself does not change, so that there is nothing to undo if a transfer of the copies fails.
    """

    def merge_adapter():
        model.named_parameters = partial(named_merged, model, version, types)

    def unmerge_adapter():
        vars(model).pop("named_parameters", None)

    model.merge_adapter, model.unmerge_adapter = merge_adapter, unmerge_adapter
    try:
        yield
    finally:
        unmerge_adapter()
        del model.merge_adapter, model.unmerge_adapter


def named_merged(model: Any, version: int, types: Types) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's named parameters, with the adapters merged, one layer at a time."""
    path, merged = None, {}
    for name, parameter in type(model).named_parameters(model):
        layer_path = name.partition(".base_layer.")[0] if ".base_layer." in name else name.rpartition(".")[0]
        layer = model.get_submodule(layer_path)
        if not (is_quantized(layer) or (".base_layer." in name and _has_adapter(layer))):
            if ".trainable_tokens_" not in name:  # of `trainable_token_indices`: TRL up to 1.16 at least sends them
                yield name, parameter
            continue
        own_dtype = model.dtype if _base_is_quantized(layer) else parameter.dtype
        dtype = types.engine or own_dtype
        if layer_path != path:  # a layer's parameters come one after another
            # Under autocast, the forward pass rounds only the base weight, to the nearest
            path, merged = layer_path, merged_copy(layer, dtype if dtype == types.forward else torch.float32)
        weight = merged[name.removeprefix(f"{layer_path}.")]
        # With `target_parameters`, the forward pass adds the adapter to the weight, and rounds the sum to the nearest
        if dtype != torch.float32 and not hasattr(layer, "parameter_name"):
            weight = round_stochastically(weight, dtype, noise_seed(version, name))
        # The same dtype in every transfer, as TRL announces the dtypes once
        weight = weight.to(dtype).to(torch.promote_types(dtype, own_dtype))
        # TRL keeps the adapter's module in the name
        yield name.replace(".token_adapter.", "."), _placed_like(weight, parameter)


def merged_copy(layer: torch.nn.Module, base_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """
    Merge the active adapters of a layer, if it has any, into a float32 copy; round its base weights to `base_dtype`.

    peft does the merge, so that any kind of adapter works. Returns the copy's parameters by name.
    """
    with torch.no_grad():
        copied: Any = _copy_in_float32(layer)
        for name, parameter in copied.named_parameters():
            if name.startswith("base_layer."):
                parameter.copy_(parameter.to(base_dtype))
        for module in copied.modules():
            if _has_adapter(module):
                module.merge()
    return dict(copied.named_parameters())


def _copy_in_float32(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module and its tensors. `deepcopy` would also copy the engine, which ZeRO-3's hooks refer to."""
    if is_quantized(module):
        return full_layer(module)
    copied: Any = copy.copy(module)
    if _has_adapter(module) and _base_is_quantized(module):
        copied.__class__, copied.fan_in_fan_out = float_class(module), False
    attributes = vars(copied)
    for name, value in attributes.items():
        if isinstance(value, (dict, list)):  # such as the names of the merged adapters
            attributes[name] = copy.copy(value)
    attributes["_parameters"] = {
        name: value if value is None else torch.nn.Parameter(_float32(value), requires_grad=False)
        for name, value in module._parameters.items()
    }
    attributes["_buffers"] = {
        name: _float32(value) if value is not None and value.is_floating_point() else value
        for name, value in module._buffers.items()
    }
    attributes["_modules"] = {name: child and _copy_in_float32(child) for name, child in module._modules.items()}
    return copied


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return unsharded(tensor).to(torch.float32, copy=True)


def _placed_like(weight: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return a weight, the same on all ranks, in the form TRL expects: under FSDP2, with `full_tensor()`."""
    if not hasattr(parameter, "full_tensor"):
        return weight
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(weight, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _has_adapter(module: Any) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer  # of an extra

    return isinstance(module, BaseTunerLayer)


def _base_is_quantized(layer: Any) -> bool:
    return is_quantized(layer.get_base_layer() if _has_adapter(layer) else layer)


def needs_copies(model: Any) -> bool:
    """Return whether the model has adapters to merge; raise an `InputError` for those that cannot be merged."""
    layers = [module for module in model.modules() if _has_adapter(module)] if is_peft_model(model) else []
    for layer in layers:
        base = layer.get_base_layer()
        weights = [weight for name, weight in base.named_parameters() if name != "bias"]
        packed = {type(each).__name__ for each in weights} - {"Parameter", "DTensor"}  # torchao's, in a Linear
        if not is_quantized(base) and (
            packed or not weights or {each.dtype for each in weights} - set(_FLOATS.values())
        ):
            kind = type(base).__name__ + (f" with weights of type {', '.join(sorted(packed))}" if packed else "")
            raise InputError(
                f"The adapter is on layers of type {kind}, and cannot be merged into them for vLLM: "
                "load the unquantized model, with `load_in_4bit` to save memory, or set `use_vllm` to False."
            )
    if layers:
        check_tied_weights(model)
    return bool(layers)


def check_tied_weights(model: Any) -> None:
    """Raise an `InputError` for an adapter on only one of several modules that share a weight in vLLM."""
    if any(getattr(config, "ensure_weight_tying", False) for config in model.peft_config.values()):
        return
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.removeprefix("base_model.model."))
    for shared in names.values():
        modules = [re.sub(r"\.(base_layer|original_module|token_adapter)\b", "", name) for name in shared]
        if modules != shared and len(set(modules)) > 1:
            raise InputError(
                f"The adapter changes one of {', '.join(modules)}, which are one weight in vLLM, so vLLM would sample "
                "from another policy. Remove them from `target_modules` and `modules_to_save`, or load the model with "
                "`tie_word_embeddings` False."
            )
