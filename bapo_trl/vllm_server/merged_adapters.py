"""
Send merged weights of a model with an adapter to vLLM, without changing the trainer's weights.

TRL merges the adapter into the model, sends `named_parameters()`, and unmerges. In bfloat16, this merge loses changes
below half a unit in the last place of a weight, as an adapter's are for hundreds of updates, and unmerging does not
restore the weights exactly. Here, one layer at a time is copied, merged in float32, and rounded stochastically.
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
from .stochastic_rounding import noise_seed, round_stochastically


_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def send_merged_copies(trainer: Any) -> None:
    """Have `vllm_generation` send merged copies of the layers with an adapter. Needed up to TRL 1.16 at least."""
    if not merges_floats(trainer.model):
        return
    check_tied_weights(trainer.model)
    generation = trainer.vllm_generation
    types = Types(engine_dtype(generation), AUTOCAST.get(trainer.accelerator.mixed_precision))
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
        layer_path, _, own_name = name.partition(".base_layer.")
        layer = model.get_submodule(layer_path) if own_name else None
        if not _has_adapter(layer):
            if ".trainable_tokens_" not in name:  # of `trainable_token_indices`: TRL up to 1.16 at least sends them
                yield name, parameter
            continue
        dtype = types.engine or parameter.dtype
        if layer_path != path:  # a layer's parameters come one after another
            # Under autocast, the forward pass rounds only the base weight, to the nearest
            path, merged = layer_path, merged_copy(layer, dtype if dtype == types.forward else torch.float32)
        weight = merged[f"base_layer.{own_name}"]
        # With `target_parameters`, the forward pass adds the adapter to the weight, and rounds the sum to the nearest
        if dtype != torch.float32 and not hasattr(layer, "parameter_name"):
            weight = round_stochastically(weight, dtype, noise_seed(version, name))
        # The same dtype in every transfer, as TRL announces the dtypes once
        weight = weight.to(dtype).to(torch.promote_types(dtype, parameter.dtype))
        # TRL keeps the adapter's module in the name
        yield name.replace(".token_adapter.", "."), _placed_like(weight, parameter)


def merged_copy(layer: torch.nn.Module, base_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """
    Merge the active adapters of a layer into a float32 copy, with its base weights rounded to `base_dtype`.

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
    copied = copy.copy(module)
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


def _float32(tensor: Any) -> torch.Tensor:  # or a DTensor
    if hasattr(tensor, "full_tensor"):  # sharded over ranks under FSDP2
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor.detach().to(torch.float32, copy=True)


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


def merges_floats(model: Any) -> bool:
    """Return whether the model has adapters to merge, and none on quantized weights, which peft merges itself."""
    if not is_peft_model(model):
        return False
    layers = [module for module in model.modules() if _has_adapter(module)]
    types = [{parameter.dtype for parameter in layer.get_base_layer().parameters()} for layer in layers]
    return bool(layers) and all(each and each <= set(_FLOATS.values()) for each in types)


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


def engine_dtype(generation: Any) -> torch.dtype | None:
    """Return the dtype of the engine's weights; for a server, only in the main process, which sends them."""
    if generation.mode == "colocate":
        return getattr(generation.llm.llm_engine.model_config, "dtype", None)
    if not hasattr(getattr(generation, "vllm_client", None), "get_server_info"):  # up to TRL 1.15
        return None
    return _FLOATS.get(str(generation.vllm_client.get_server_info()["model_config"].get("dtype")).split(".")[-1])
