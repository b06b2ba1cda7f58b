"""Shared code of the parts: the command's options, models, trainers, and the progress of a case."""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import character_tokenizer
from benchmarks.gpu_first_run.shapes import SIZES, Shape, Sizes, make_model
from benchmarks.warm_start import StudyTask, load_sums


MICRO_BATCHES = 4
PROMPT_TOKENS = len("00+01=")
SECONDS_BETWEEN_LINES = 2.0


@dataclass(frozen=True)
class Setup:
    """Options of the command."""

    device: str
    sizes_name: str
    seed: int
    chat_model: Path | None = None
    deepspeed: Path | None = None

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.sizes_name]

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def lacks_gpu(self) -> str | None:
        return None if self.on_gpu else f"needs a GPU, not {self.device}"


@dataclass(frozen=True)
class Case:
    """A measurement that returns a row of results, in its own process or a shared one."""

    measure: Callable[[], dict]
    lacks: str | None = None  # why it cannot run here


class Progress(TrainerCallback):
    """Callback that prints the progress of a case, at most every two seconds."""

    def __init__(self, name: str):
        self.name = name
        self._printed_at = time.monotonic()

    def say(self, text: str) -> None:
        if time.monotonic() - self._printed_at >= SECONDS_BETWEEN_LINES:
            self._printed_at = time.monotonic()
            print(f"  {self.name}: {text}", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        self.say(f"update {state.global_step} of {state.max_steps}")


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """
    Return rewards that differ between samples, so that almost no group has zero advantage.

    Computed from token ids: with a vocabulary larger than the tokenizer's, some sampled tokens decode to nothing.
    """
    return [((sum(ids) + len(ids)) % 7) / 7 for ids in completion_ids]


def settings_for(setup: Setup, rows: int, completion_tokens: int, **settings: Any) -> dict[str, Any]:
    """Return settings of GRPOConfig: TRL's defaults except for sizes, device and written files."""
    chosen = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_generation": MICRO_BATCHES,
        "num_iterations": 2,
        "num_generations": 4,
        "max_completion_length": completion_tokens,
        "max_steps": 2,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": setup.seed,
    }
    on_cpu = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
    return {**chosen, **({} if setup.on_gpu else on_cpu), **settings}


def make_trainer(kind: str, model: Any, folder: str, settings: dict[str, Any], **options: Any) -> GRPOTrainer:
    """Return a trainer: `kind` is "grpo", or the search scope of a `BAPOTrainer`."""
    data = Dataset.from_dict({"prompt": [f"{i:02}+{i + 1:02}=" for i in range(64)]})
    defaults = {
        "reward_funcs": reward, "train_dataset": data, "processing_class": character_tokenizer(), "callbacks": [],
    }  # fmt: skip
    options = {**defaults, **options}
    if kind == "grpo":
        trainer = GRPOTrainer(model, args=GRPOConfig(folder, **settings), **options)
    else:
        trainer = BAPOTrainer(model, args=BAPOConfig(folder, search_scope=kind, **settings), **options)
    trainer.remove_callback(PrinterCallback)
    return trainer


def trained_model(setup: Setup, shape: Shape, uses_lora: bool) -> Any:
    """Return a model on the device: in bfloat16 with LoRA, else in float32, which TRL trains under autocast."""
    dtype = torch.bfloat16 if uses_lora and setup.on_gpu else torch.float32
    return make_model(shape, setup.device, dtype, setup.seed)


def sums_task(setup: Setup) -> StudyTask:
    """Return the sums of the demo, with a model whose heads are wide enough for vLLM's kernels."""
    task = load_sums(setup.seed)
    wide = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 2}
    return replace(task, warm_start=replace(task.warm_start, model=wide, **setup.sizes.warm_start))


def first_gpu() -> dict[str, str]:
    """Return the environment of a process that sees one GPU of those that this process sees."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


def free() -> None:
    """Release unused memory of the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
