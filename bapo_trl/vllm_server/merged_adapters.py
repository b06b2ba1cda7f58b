"""Weights of vLLM when an adapter is trained: base weight plus adapter, with the model left as it is."""

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model


CHUNK_SIZE = 2**24
"""Elements that are rounded at a time, which bounds the memory for their random bits."""

_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of float32's 23 bits of mantissa


def round_stochastically(values: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """
    Round float32 values to `dtype`, up or down at random, such that the mean is the value itself.

    A value between two neighbours of `dtype` becomes the upper one with a probability of its distance to the lower one
    over the distance of the two. The same values, seed and type of device give the same result. Other types than
    bfloat16 and float16 are not rounded at random.
    """
    if dtype not in _DROPPED_BITS:
        return values.to(dtype)
    generator = torch.Generator(values.device).manual_seed(seed)
    smallest = torch.finfo(dtype).tiny
    rounded = torch.empty_like(values, dtype=dtype)
    for chunk, out in zip(values.flatten().split(CHUNK_SIZE), rounded.view(-1).split(CHUNK_SIZE), strict=True):
        # Below the smallest normal number, neighbours are as far apart as just above it
        shift = torch.where(chunk.abs() < smallest, chunk.sign() * smallest, 0.0)
        bits = (chunk + shift).view(torch.int32)
        noise = torch.randint(2 ** _DROPPED_BITS[dtype], bits.shape, generator=generator, device=bits.device)
        cut = (bits + noise.int()) >> _DROPPED_BITS[dtype] << _DROPPED_BITS[dtype]
        out.copy_(cut.view(torch.float32) - shift)
    return rounded


def noise_seed(version: int, name: str) -> int:
    """Return the seed for a tensor at a policy version: the same in every run, so that a resumed one sends the same."""
    return int.from_bytes(hashlib.sha256(f"{version} {name}".encode()).digest()[:8], "big", signed=True)


def merged_copy(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """
    Merge the active adapters of one layer in float32, on a copy of it.

    Whatever kind of adapter, the arithmetic is peft's own. Returns the copy's parameters by name.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    with torch.no_grad():
        copied = _copy_in_float32(layer)
        for module in copied.modules():
            if isinstance(module, BaseTunerLayer):
                module.merge()
    return dict(copied.named_parameters())


def _copy_in_float32(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module with its own tensors. `deepcopy` would copy the engines that the hooks of ZeRO-3 hold."""
    copied = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, (dict, list)):  # such as the names of the adapters that are merged
            vars(copied)[name] = copy.copy(value)
    vars(copied)["_parameters"] = {
        name: None if value is None else torch.nn.Parameter(_float32(value), requires_grad=False)
        for name, value in module._parameters.items()
    }
    vars(copied)["_buffers"] = {
        name: value if value is None or not value.is_floating_point() else _float32(value)
        for name, value in module._buffers.items()
    }
    vars(copied)["_modules"] = {
        name: child and _copy_in_float32(child) for name, child in module._modules.items()
    }
    return copied


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "full_tensor"):  # a part of it, under FSDP2
        tensor = tensor.full_tensor()
    return tensor.detach().to(torch.float32, copy=True)


def send_merged_copies(generation: Any, version: Callable[[], int]) -> None:
    """
    Have TRL's `VLLMGeneration` send merged copies of the layers that have an adapter; those of the model stay as they
    are.

    TRL merges the adapter into the model, sends `named_parameters()`, and unmerges. In bfloat16 the merge loses what
    is smaller than half a unit in the last place of a weight, and unmerging does not give the weight back. Merged
    copies are made in float32, one layer at a time, and rounded stochastically to the type of the parameter, or of the
    engine's weights if that is the smaller one. The noise depends on `version()`, that of the policy, and the name of
    the tensor. Needed up to TRL 1.16 at least.
    """
    sync_weights = generation.sync_weights

    def sync_merged_copies():
        model = generation.model
        # Quantized weights are merged by peft in its own way
        if is_peft_model(model) and all(parameter.is_floating_point() for parameter in model.parameters()):
            with merging_on_copies(model, version(), engine_dtype(generation)):
                sync_weights()
        else:
            sync_weights()

    generation.sync_weights = sync_merged_copies


@contextmanager
def merging_on_copies(model: Any, version: int, engine_dtype: torch.dtype | None) -> Iterator[None]:
    """
    Have `merge_adapter()` merge copies, which `named_parameters()` shows until `unmerge_adapter()`.

    Between the two, `named_parameters()` gives the names as ever, and for layers with an adapter merged copies. Nothing
    of the model changes, so that nothing is left to undo when what is done with the copies fails.
    """

    def merge_adapter():
        model.named_parameters = partial(_named_merged, model, version, engine_dtype)

    def unmerge_adapter():
        vars(model).pop("named_parameters", None)

    model.merge_adapter, model.unmerge_adapter = merge_adapter, unmerge_adapter
    try:
        yield
    finally:
        unmerge_adapter()
        del model.merge_adapter, model.unmerge_adapter


def _named_merged(model: Any, version: int, engine_dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    path, merged = None, {}
    for name, parameter in type(model).named_parameters(model):
        layer_path, _, own_name = name.partition(".base_layer.")
        if not own_name or not isinstance(model.get_submodule(layer_path), BaseTunerLayer):
            yield name, parameter
            continue
        if layer_path != path:  # a layer's parameters come one after another
            path, merged = layer_path, merged_copy(model.get_submodule(layer_path))
        dtype = parameter.dtype
        if engine_dtype is not None and engine_dtype.itemsize < dtype.itemsize:
            dtype = engine_dtype
        rounded = round_stochastically(merged[f"base_layer.{own_name}"], dtype, noise_seed(version, name))
        yield name, rounded.to(parameter.dtype)


def engine_dtype(generation: Any) -> torch.dtype | None:
    """Return the type of the engine's weights, if it says so here: each rank's own one, or in the main process."""
    if generation.mode == "colocate":
        dtype = getattr(generation.llm.llm_engine.model_config, "dtype", None)
    elif hasattr(getattr(generation, "vllm_client", None), "get_server_info"):
        dtype = generation.vllm_client.get_server_info()["model_config"].get("dtype")
    else:
        return None
    return dtype if isinstance(dtype, torch.dtype) or dtype is None else getattr(torch, str(dtype).split(".")[-1])
