"""
What makes training of a real language model bearable on CPUs: [`speed_up_cpu`] applies it all.

Each measure leaves the results as they were, up to rounding (2e-5 in log-probabilities), but for bfloat16, which
rounds as on a GPU. `benchmarks/llm_speed.py` measures each.
"""

import functools
import os
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel
from trl import GRPOConfig
from trl.trainer import utils as trl_utils


if TYPE_CHECKING:  # the settings, which ask for the processor, need no trainer
    from trl import GRPOTrainer


def speed_up_cpu(trainer: "GRPOTrainer") -> str | None:
    """Apply all measures to a run on CPUs that is about to begin, and return a line on them; `None` on a GPU."""
    if trainer.accelerator.device.type != "cpu":
        return None
    dtype = "bfloat16" if trainer.args.bf16 else "float32"
    base = str(trainer.model.dtype).removeprefix("torch.")
    processor = "with" if has_bfloat16() else "without"
    measures = [
        f"threads: {limit_threads()}",
        f"numbers: {dtype} ({base} weights, a processor {processor} bfloat16)",
        *(["rows of the frozen head are contiguous"] if make_head_input_contiguous(trainer.model) else []),
        *(["only completions are scored"] if score_completions_only() else []),
    ]
    return f"On CPUs: {', '.join(measures)}."


def base_dtype(args: GRPOConfig, trains_adapter: bool) -> str:
    """
    Return the type of the weights that are loaded, where the user has not said one.

    Frozen weights under bfloat16 autocast can be bfloat16 themselves: generation, which runs outside of autocast, is
    twice as fast then. Weights that are trained stay float32, as TRL has it.
    """
    return "bfloat16" if args.use_cpu and args.bf16 and trains_adapter else "float32"


def has_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 matrices itself (AMX or AVX512-BF16)."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def limit_threads() -> int:
    """
    Let torch compute with one thread where the process has two cores or fewer, and return the number of threads.

    On cores that other processes use too, torch's threads wait for one another: two were 6 times slower than one on a
    busy machine with two cores. `OMP_NUM_THREADS`, which launchers set too, counts instead.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() <= 2:
        torch.set_num_threads(1)
    return torch.get_num_threads()


def make_head_input_contiguous(model: torch.nn.Module) -> bool:
    """
    Give a frozen head contiguous hidden states, and return whether the model has one.

    To write the first token, transformers gives the head the last position of each row, a slice that is not
    contiguous. torch then multiplies row by row, and copies the matrix of the vocabulary for each row if it needs no
    gradient. Needed up to torch 2.13 at least.
    """
    head = cast(PreTrainedModel, model).get_output_embeddings()
    if head is None or head.weight.requires_grad:
        return False
    head.register_forward_pre_hook(lambda head, inputs: (inputs[0].contiguous(), *inputs[1:]))
    return True


def score_completions_only() -> bool:
    """
    Let TRL's fused head score positions that have a label, on CPUs as it does on GPUs; return whether it has one.

    Without Triton it scores all positions, so that a compiler sees one shape. Most of them are prompt here, and
    masked afterwards. Needed up to TRL 1.16 at least; versions before 1.16 have no such head.
    """
    scores_only_labels: Any = getattr(trl_utils, "_use_triton", None)  # which decides, there, over that alone
    if scores_only_labels is None:
        return False
    if not hasattr(scores_only_labels, "__wrapped__"):  # by an earlier run

        @functools.wraps(scores_only_labels)
        def also_on_cpu(device: torch.device) -> bool:
            return device.type == "cpu" or scores_only_labels(device)

        trl_utils._use_triton = also_on_cpu
    return True
