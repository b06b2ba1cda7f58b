"""Check that `GRPOTrainer` and all features of `BAPOTrainer` train."""

import math
import tempfile
from functools import partial
from typing import Any

import torch
from trl import GRPOTrainer

from benchmarks import partial_rollouts
from benchmarks.gpu_first_run.shapes import lora
from benchmarks.gpu_first_run.trainers import (
    PROMPT_TOKENS,
    Case,
    Progress,
    Setup,
    free,
    make_trainer,
    settings_for,
    trained_model,
)
from benchmarks.lognormal_model import lognormal_model, lognormal_tokenizer


FIXED = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2}
HALF_WEIGHT = {"loss_type": "vespo", "negative_weight_min": 0.5, "positive_contribution_target": 1.0}
REPLAY = {"replay_capacity": 64, "replay_fraction": 0.5, "replay_max_staleness": 8}
PARTIAL: dict[str, Any] = {
    "partial_rollout_oversampling": 1.5,
    "partial_rollout_chunk_length": 4,
    "max_completion_length": 32,
}
PARTIAL_MEDIAN_TOKENS = 8  # of lengths that differ: else all end at once, and none is carried over


def runs(setup: Setup) -> dict[str, Case]:
    later = {"max_steps": 4}  # the second generation meets what the first has left
    settings: dict[str, tuple[str, dict, bool]] = {
        "GRPOTrainer": ("grpo", {}, False),
        "batch": ("batch", {}, False),
        "micro_batch": ("micro_batch", {}, False),
        "carried_over": ("carried_over", {"negative_weight_min": 0.5}, False),
        "replay": ("batch", {**REPLAY, **later}, False),
        "partial rollouts": ("batch", {**PARTIAL, **later}, False),
        "LoRA": ("batch", {}, True),
        "VESPO, half the weight": ("batch", HALF_WEIGHT, False),
    }
    cases = {name: Case(partial(_train, setup, name, *given)) for name, given in settings.items()}
    return {**cases, "fixed bounds against GRPOTrainer": Case(partial(_compare_fixed_bounds, setup))}


def _train(setup: Setup, name: str, kind: str, settings: dict, uses_lora: bool) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        shape = setup.sizes.trained
        given = settings_for(setup, 4, setup.sizes.completion_tokens, **settings)
        options = {"peft_config": lora() if uses_lora else None, "callbacks": [Progress(name)]}
        if PARTIAL.items() <= settings.items():
            cap = PARTIAL["max_completion_length"]
            model = lognormal_model(
                PARTIAL_MEDIAN_TOKENS, partial_rollouts.TAIL, PROMPT_TOKENS, cap, shape.hidden, shape.layers
            )
            options["processing_class"] = lognormal_tokenizer()
        else:
            model = trained_model(setup, shape, uses_lora)
        trainer = make_trainer(kind, model, folder, given, **options)
        before = [weight.detach().clone() for weight in _trained_weights(trainer)]
        trainer.train()
    changes = [(weight - was).abs().max() for weight, was in zip(_trained_weights(trainer), before, strict=True)]
    return {**_describe(setup, kind, trainer), "largest_change_of_a_weight": torch.stack(changes).max().item()}


def _trained_weights(trainer: GRPOTrainer) -> list[torch.Tensor]:
    return [weight.detach() for weight in trainer.model.parameters() if weight.requires_grad]


def _describe(setup: Setup, kind: str, trainer: GRPOTrainer) -> dict:
    logs = [log for log in trainer.state.log_history if "loss" in log]
    numbers = [log[key] for log in logs for key in ("loss", "grad_norm")]
    bounds = [] if kind == "grpo" else vars(trainer.clip_bounds).values()
    tensors = [value for value in bounds if isinstance(value, torch.Tensor)]
    misplaced = [str(tensor.device) for tensor in tensors if tensor.device.type != setup.device]
    row = {
        "updates": trainer.state.global_step,
        "losses": [log["loss"] for log in logs],
        "gradient_norms": [log["grad_norm"] for log in logs],
        "is_finite": all(math.isfinite(number) for number in numbers),
        "misplaced_tensors": misplaced,
        "dtypes": sorted({str(weight.dtype) for weight in trainer.model.parameters()}),
        "gradient_checkpointing": trainer.args.gradient_checkpointing,
        "bf16": trainer.args.bf16,
    }
    own = ("bapo/clip_low", "bapo/clip_high", "replay/fraction", "partial/segments_max", "staleness/max")
    return {**row, **{key: [log.get(key) for log in logs] for key in own if any(key in log for log in logs)}}


def _compare_fixed_bounds(setup: Setup) -> dict:
    """Train twice with GRPOTrainer and once with BAPOTrainer at the same bounds; the first pair measures noise."""
    weights = []
    for kind, settings in (("grpo", {}), ("grpo", {}), ("batch", FIXED)):
        with tempfile.TemporaryDirectory() as folder:
            given = settings_for(setup, 4, setup.sizes.completion_tokens, **settings)
            trainer = make_trainer(kind, trained_model(setup, setup.sizes.trained, False), folder, given)
            trainer.train()
        weights.append([weight.detach().cpu() for weight in trainer.model.parameters()])
        del trainer
        free()
    untrained = [weight.detach().cpu() for weight in trained_model(setup, setup.sizes.trained, False).parameters()]
    first, again, fixed = weights

    def largest_difference(others: list[torch.Tensor]) -> float:
        return max((one - other).abs().max().item() for one, other in zip(first, others, strict=True))

    return {
        "largest_difference": largest_difference(fixed),
        "largest_difference_of_grpo_from_itself": largest_difference(again),
        "largest_change_of_a_weight": largest_difference(untrained),
    }
