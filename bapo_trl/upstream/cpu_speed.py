"""
Speed-ups for training language models on CPUs; [`speed_up_cpu`] applies all of them.

Each speed-up leaves the results unchanged, up to rounding (2e-5 in log-probabilities), except for bfloat16, which
rounds as on a GPU. `benchmarks/costs.py` measures them.
"""

import functools
import os
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel
from trl import GRPOConfig
from trl.trainer import utils as trl_utils


if TYPE_CHECKING:  # the settings import this module and need no trainer
    from trl import GRPOTrainer


def speed_up_cpu(trainer: "GRPOTrainer") -> str | None:
    """Apply all measures to a run on CPUs that is about to begin; return a line on them, or `None` on a GPU."""
    if trainer.accelerator.device.type != "cpu":
        return None
    threads, dtype = limit_threads(), "bfloat16" if trainer.args.bf16 else "float32"
    support = "" if has_bfloat16() else " (no bfloat16 support)"
    make_head_input_contiguous(trainer.model)
    score_completions_only()
    return f"CPU: {threads} thread{'s' * (threads > 1)}, {dtype}{support}"


def base_dtype(args: GRPOConfig, trains_adapter: bool, is_quantized: bool = False) -> str:
    """
    Return the dtype to load the weights in, if the user has not set one.

    Frozen weights under bfloat16 autocast can be bfloat16 themselves, which makes generation, outside of autocast,
    twice as fast. So they are beside quantized weights, on any device. Trained weights stay float32, as in TRL.
    """
    return "bfloat16" if args.bf16 and (is_quantized or (args.use_cpu and trains_adapter)) else "float32"


def has_bfloat16() -> bool:
    """Return whether the processor has instructions for bfloat16 matrices (AMX or AVX512-BF16)."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def limit_threads() -> int:
    """
    Limit torch to one thread if the process has two cores or fewer, and return the number of threads.

    If other processes use the cores too, torch's threads wait for each other: on a busy machine with two cores, two
    threads were 6 times slower than one. `OMP_NUM_THREADS`, which launchers also set, takes precedence.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() <= 2:
        torch.set_num_threads(1)
    return torch.get_num_threads()


def make_head_input_contiguous(model: torch.nn.Module) -> bool:
    """
    Make the hidden states contiguous before a frozen head, and return whether the model has one.

    For the first token, transformers passes the last position of each sequence to the head, a slice that is not
    contiguous. torch then multiplies row by row, and copies the vocabulary matrix for each row if it needs no
    gradient. Needed up to torch 2.13 at least.
    """
    head = cast(PreTrainedModel, model).get_output_embeddings()
    if head is None or head.weight.requires_grad:
        return False
    head.register_forward_pre_hook(lambda head, inputs: (inputs[0].contiguous(), *inputs[1:]))
    return True


def score_completions_only() -> None:
    """
    Let TRL's fused head score only positions with a label on CPUs, as on GPUs.

    Without Triton, TRL scores all positions, for a constant shape. Most of them are prompt tokens, which are masked
    afterwards. Needed up to TRL 1.16 at least.
    """
    scores_only_labels: Any = trl_utils._use_triton  # decides nothing else in that module
    if not hasattr(scores_only_labels, "__wrapped__"):  # not yet patched by an earlier run

        @functools.wraps(scores_only_labels)
        def also_on_cpu(device: torch.device) -> bool:
            return device.type == "cpu" or scores_only_labels(device)

        trl_utils._use_triton = also_on_cpu
