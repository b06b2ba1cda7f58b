"""
What makes training of a real language model bearable on CPUs.

Each function is one measure. None of them does anything on a GPU: [`speed_up_cpu`], which applies them all, looks at
the trainer's device. Each leaves the results as they were, up to rounding (2e-5 in log-probabilities), but for
bfloat16, which rounds as on a GPU. `benchmarks/llm_speed.py` measures each.
"""

import ctypes
import functools
import os
import sys
from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedModel
from trl import GRPOConfig
from trl.trainer import utils as trl_utils


if TYPE_CHECKING:  # the settings, which ask for the processor, need no trainer
    from trl import GRPOTrainer


M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h
FEW_CORES = 2


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
        *(["freed memory is kept"] if keep_freed_memory() else []),
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
    is_amx, is_avx512 = (
        getattr(torch.cpu, name, lambda: False)  # private names of torch
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    return is_amx() or is_avx512()


def limit_threads() -> int:
    """
    Let torch compute with one thread where the process has two cores or fewer, and return the number of threads.

    On cores that other processes use too, torch's threads wait for one another: two were 6 times slower than one on a
    busy machine with two cores. A set `OMP_NUM_THREADS` counts instead, and so does the number that a launcher of
    several processes sets.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() <= FEW_CORES:
        torch.set_num_threads(1)
    return torch.get_num_threads()


def keep_freed_memory() -> bool:
    """
    Have glibc serve all threads from one heap and never give freed memory back, and return whether it does.

    Tensors of logits are allocated and freed all the time. glibc gives each of them back to the system, and takes the
    time of a page fault for each of their pages when it asks for them again. Variables `MALLOC_*` of the user's own
    are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    settings = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1))
    answers = [mallopt(option, value) == 1 for option, value in settings]
    return all(answers)


def make_head_input_contiguous(model: torch.nn.Module) -> bool:
    """
    Give a frozen head contiguous hidden states, and return whether the model has one.

    To write the first token, transformers gives the head the last position of each row, a slice that is not
    contiguous. torch then multiplies row by row, and copies the matrix of the vocabulary for each row if it needs no
    gradient. A head that is trained later is left alone then. Needed up to torch 2.13 at least.
    """
    head = cast(PreTrainedModel, model).get_output_embeddings()
    if head is None or head.weight.requires_grad:
        return False
    head.register_forward_pre_hook(_contiguous)
    return True


def _contiguous(head, inputs):
    hidden_states, *rest = inputs
    if hidden_states.device.type == "cpu" and not head.weight.requires_grad:
        return hidden_states.contiguous(), *rest
    return None


def score_completions_only() -> bool:
    """
    Let TRL's fused head score positions that have a label, on CPUs as it does on GPUs; return whether it has one.

    Without Triton it scores all positions, so that a compiler sees one shape. Most of them are prompt here, and
    masked afterwards. Needed up to TRL 1.16 at least; versions before 1.16 have no such head.
    """
    name = "_use_triton"  # which decides, in this module, over that alone
    scores_only_labels = getattr(trl_utils, name, None)
    if scores_only_labels is None:
        return False
    if not hasattr(scores_only_labels, "also_on_cpu"):

        @functools.wraps(scores_only_labels)
        def on_cpu_too(device: torch.device) -> bool:
            return device.type == "cpu" or scores_only_labels(device)

        on_cpu_too.also_on_cpu = True  # type: ignore[attr-defined]
        setattr(trl_utils, name, on_cpu_too)
    return True
