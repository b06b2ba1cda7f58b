"""
Models whose base weights bitsandbytes has quantized, in 4 or 8 bits, and a vLLM engine that holds them unquantized.

The engine gets the weights that the trainer's forward pass uses, with the adapter added: vLLM can neither merge an
adapter into packed weights nor take merged weights for packed ones. The trainer's packed weights never change.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from trl.generation import vllm_generation

from ..errors import InputError
from ..upstream.fixes import restoring
from ..upstream.stored_model import stored_quantization
from ..upstream.trl_compat import VLLMGeneration


_LAYERS = {"Linear4bit": "Params4bit", "Linear8bitLt": "Int8Params"}  # of bitsandbytes, and their weights
_BYTES = 2  # of a weight in the engine: vLLM holds float32 models in bfloat16 as well


def is_quantized(layer: torch.nn.Module) -> bool:
    """Return whether a layer has a weight that bitsandbytes quantized, itself: an adapter's layer has none."""
    weight = layer._parameters.get("weight")
    if hasattr(weight, "full_tensor"):  # sharded under FSDP2, it has lost its type
        return getattr(layer, "quant_state", None) is not None
    return type(weight).__name__ in _LAYERS.values()


def has_quantized_layers(model: torch.nn.Module) -> bool:
    """Return whether bitsandbytes quantized some of a model's layers."""
    return any(map(is_quantized, model.modules()))


def unsharded(tensor: Any) -> torch.Tensor:
    """Return a tensor that may be sharded over the ranks, as under FSDP2, as a whole."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor.detach()


def full_layer(layer: Any) -> torch.nn.Linear:
    """Return a float32 copy of a quantized layer, with the weight that its forward pass uses."""
    weight = _full_weight(layer).float()
    full = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    full.weight = torch.nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        full.bias = torch.nn.Parameter(unsharded(layer.bias).to(torch.float32, copy=True), requires_grad=False)
    return full


@torch.no_grad()
def _full_weight(layer: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant  # of an extra

    weight = layer.weight
    if type(weight).__name__ == "Int8Params":
        scales = layer.state.SCB if weight.SCB is None else weight.SCB  # the first forward pass moves them
        return int8_vectorwise_dequant(weight.data, scales)
    state = copy.copy(layer.quant_state)
    state.dtype = layer.compute_dtype or state.dtype  # a forward pass rounds to the type that it computes in
    return dequantize_4bit(unsharded(weight), state)


def float_class(layer: Any) -> type:
    """Return peft's class for the same adapter on a layer that is not quantized."""
    module = import_module(type(layer).__module__.removesuffix(".bnb") + ".layer")
    return getattr(module, type(layer).__name__.removesuffix("4bit").removesuffix("8bitLt"))


def prepare_quantized(model: torch.nn.Module, is_sharded: bool) -> None:
    """
    Raise an `InputError` for a quantized model that cannot be trained; keep the weights of the others as they are.

    On CPUs with AVX512-BF16, a forward pass in evaluation mode repacks 4-bit weights and rounds their scales. The
    layer then has no gradient any more, and cannot be dequantized. Needed up to bitsandbytes 0.50 at least.
    """
    for name, layer in model.named_modules():
        if type(layer).__name__ not in _LAYERS or not type(layer).__module__.startswith("bitsandbytes."):
            continue
        if not is_quantized(layer):
            raise InputError(
                f"The layer {name} is quantized, but its weight is tied to another module's: add "
                f"'{name.rpartition('.')[2]}' to `llm_int8_skip_modules` of the `BitsAndBytesConfig`."
            )
        if is_sharded and not layer.weight.is_floating_point():
            advice = "set `bnb_4bit_quant_storage` to the type of the other weights, such as bfloat16"
            if type(layer).__name__ != "Linear4bit":
                advice = "use `load_in_4bit` with `bnb_4bit_quant_storage`"
            raise InputError(
                f"The quantized weights are stored as {str(layer.weight.dtype).removeprefix('torch.')}, which ZeRO-3 "
                f"and FSDP cannot divide over the ranks with the others: {advice}."
            )
        layer.support_avx512bf16_for_cpu = False


@contextmanager
def unquantized_engine() -> Iterator[None]:
    """
    Have TRL make vLLM's engine without quantization, and check that the weights fit.

    For a model in 4 bits, TRL would make an engine in 4 bits; in 8 bits, it raises an error. Needed up to TRL 1.16 at
    least.
    """
    of_trl: Any = VLLMGeneration
    init = of_trl._init_vllm

    def init_unquantized(generation: Any) -> None:
        if has_quantized_layers(generation.model):  # as vLLM would load them, if they are stored quantized
            check_engine(generation.model, {"quantization": stored_quantization(generation.model.name_or_path)})
        if generation.accelerator.device.type == "cuda":
            total = torch.cuda.get_device_properties(generation.accelerator.device).total_memory
            check_engine_memory(generation, total)
        vllm_generation.is_bitsandbytes_available = lambda: False
        init(generation)

    with restoring([of_trl], "_init_vllm"), restoring([vllm_generation], "is_bitsandbytes_available"):
        of_trl._init_vllm = init_unquantized
        yield


def check_engine_memory(generation: Any, gpu_memory: int) -> None:
    """Raise an `InputError` if vLLM's share of a GPU has no room for the full weights of a quantized model."""
    layers = [layer for layer in generation.model.modules() if is_quantized(layer)]
    if not layers:
        return
    packed = sum(layer.weight.numel() for layer in layers)
    full = sum(layer.in_features * layer.out_features for layer in layers)
    needed = _BYTES * (sum(each.numel() for each in generation.model.parameters()) - packed + full)
    share = needed / generation.tensor_parallel_size / gpu_memory
    if generation.gpu_memory_utilization <= share:
        raise InputError(
            f"`vllm_gpu_memory_utilization` is {generation.gpu_memory_utilization:g}, but vLLM holds the model "
            f"unquantized: its weights take {share:.2f} of the GPU ({needed / 2**30:.1f} GiB in all). Set it higher, "
            "to leave room for the cache, use a smaller model, or run vLLM as a server on another GPU."
        )


def engine_config(generation: Any) -> dict[str, Any]:
    """Return vLLM's `model_config`; of a server, only in the main process."""
    if generation.mode == "colocate":
        return vars(generation.llm.llm_engine.model_config)
    if not hasattr(getattr(generation, "vllm_client", None), "get_server_info"):
        return {}
    return generation.vllm_client.get_server_info()["model_config"]


def check_engine(model: torch.nn.Module, config: dict[str, Any]) -> None:
    """Raise an `InputError` for a quantized model whose weights vLLM holds quantized, too."""
    if config.get("quantization") is not None and has_quantized_layers(model):
        raise InputError(
            f"vLLM holds the model quantized ('{config['quantization']}'), so that it cannot take merged weights: "
            "train the unquantized model with `load_in_4bit`, and serve the unquantized model."
        )
