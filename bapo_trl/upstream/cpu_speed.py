"""What makes training of a real language model bearable on CPUs. `benchmarks/llm_speed.py` measures it."""

import os
from typing import cast

import torch
from transformers import PreTrainedModel
from trl import GRPOConfig


FEW_CORES = 2


def base_dtype(args: GRPOConfig, trains_adapter: bool) -> str:
    """
    Return the type of the weights that are loaded, where the user has not said one.

    Frozen weights under bfloat16 autocast can be bfloat16 themselves: generation, which runs outside of autocast, is
    twice as fast then. Weights that are trained stay float32, as TRL has it.
    """
    return "bfloat16" if args.use_cpu and args.bf16 and trains_adapter else "float32"


def has_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 matrices itself (AMX or AVX512-BF16)."""
    is_amx, is_avx512 = (
        getattr(torch.cpu, name, lambda: False)  # private names of torch
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    return is_amx() or is_avx512()


def limit_threads() -> None:
    """
    Let torch compute with one thread where the process has two cores or fewer, unless `OMP_NUM_THREADS` is set.

    On cores that other processes use too, torch's threads wait for one another: two were 6 times slower than one on a
    busy machine with two cores.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() <= FEW_CORES:
        torch.set_num_threads(1)


def make_head_input_contiguous(model: torch.nn.Module, device: torch.device) -> None:
    """
    Give a frozen head in bfloat16, on a CPU, contiguous hidden states.

    To write the first token, transformers gives the head the last position of each row, a slice that is not
    contiguous. torch then multiplies row by row, and copies the matrix of the vocabulary for each row if it needs no
    gradient. In float32 that costs less, and results stay TRL's to the bit. Needed up to torch 2.13 at least.
    """
    head = cast(PreTrainedModel, model).get_output_embeddings()
    weight = getattr(head, "weight", None)
    if device.type == "cpu" and weight is not None and weight.dtype == torch.bfloat16 and not weight.requires_grad:
        head.register_forward_pre_hook(lambda head, inputs: (inputs[0].contiguous(), *inputs[1:]))
