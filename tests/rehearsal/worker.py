"""
Rehearse an update of GRPOTrainer and BAPOTrainer in many settings, in a process of its own.

    python -m tests.rehearsal.worker OUTPUT.json

Two updates are trained on the CPU for real, six for samples that outlive a generation. Then weights and buffer are put
on the accelerator, where they lie on a GPU: all there, but `policy_version` and `token_versions`. Then comes one more
update.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from peft import LoraConfig
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.clip_bounds import SCOPES
from tests.helpers.toy import ending_model, toy_dataset, toy_model, toy_trainer
from tests.rehearsal.accelerator import Rehearsal, register


SECOND_GENERATION = {"max_steps": 6}  # of four updates each
CASES: dict[str, dict[str, Any]] = {
    "batch": {"search_scope": "batch"},
    "micro_batch": {"search_scope": "micro_batch"},
    "carried_over": {"search_scope": "carried_over"},
    "a weight": {"negative_weight_min": 0.3},
    "VESPO with half the weight": {
        "loss_type": "vespo", "negative_weight_min": 0.5, "positive_contribution_target": 1.0
    },
    "replay": {"replay_fraction": 0.5, **SECOND_GENERATION},
    "partial rollouts": {
        "partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 2, "max_completion_length": 30,
        "model": ending_model, **SECOND_GENERATION,
    },
    "LoRA": {"lora": True},
    "bfloat16": {"autocast": True},
    "a reference": {"beta": 0.1},
    "the off-policy mask": {"off_policy_mask_threshold": 0.5},
    "evaluation": {"evaluates": True},
}  # fmt: skip
ROWS = 2  # of a micro-batch that is given other lengths
COLLECTIVES = [
    name for name in torch.distributed.distributed_c10d.__all__
    if name.removeprefix("monitored_").removeprefix("batch_").partition("_")[0]
    in ("all", "barrier", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "scatter", "send")
]  # fmt: skip
OURS = {f for f in BAPOConfig.__dataclass_fields__ if f not in GRPOConfig.__dataclass_fields__}


def make(is_ours: bool, **settings: Any) -> GRPOTrainer:
    """Return a trainer after two updates on the CPU."""
    given: dict[str, Any] = {"eval_dataset": toy_dataset(6)}
    if settings.pop("lora", False):
        given["peft_config"] = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1)
    folder = tempfile.mkdtemp()
    settings.pop("model", toy_model)().save_pretrained(folder)  # a reference is loaded from there
    trainer = toy_trainer(
        folder, folder, trainer_class=BAPOTrainer if is_ours else GRPOTrainer,
        config_class=BAPOConfig if is_ours else GRPOConfig, trainer_args=given,
        **{"gradient_checkpointing": True, "max_steps": 2, **settings},
    )  # fmt: skip
    trainer.train()
    return trainer


def place(trainer: Any, stage: Rehearsal, lengths: tuple[int, int] | None = None) -> list[dict[str, Any]]:
    """Put a trainer on the accelerator, at the beginning of a run; return its micro-batches, as long as asked for."""
    stage.place_module(trainer.model)
    if trainer.ref_model is not None:
        stage.place_module(trainer.ref_model)
    buffer = [_place_batch(batch, stage, lengths) for batch in trainer._buffered_inputs]
    for state in (PartialState(), trainer.accelerator.state):  # the second is made of the first now and then
        state.device = stage.device
    if isinstance(trainer, BAPOTrainer):
        with stage.running():
            trainer._reset_run_state()
        trainer.sampled_by = None  # samples are stale: the search runs its forward passes
    trainer._buffered_inputs, trainer._step = buffer, 0
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.train()
    return buffer


def _place_batch(batch: dict[str, Any], stage: Rehearsal, lengths: tuple[int, int] | None) -> dict[str, Any]:
    sizes = {} if lengths is None else dict(
        zip((batch["prompt_ids"].shape[1], batch["completion_ids"].shape[1]), lengths, strict=True)
    )  # fmt: skip
    placed = {}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor):
            placed[name] = value
            continue
        rows = [min(count, ROWS) for count in value.shape[:1]]
        shape = (*rows, *(sizes.get(size, size) for size in value.shape[1:]))
        placed[name] = stage.place(value, shape if sizes else None)
    return placed


def micro_batch(trainer: Any, stage: Rehearsal, position: int, autocast: bool = False) -> None:
    """Make the forward and backward pass of one micro-batch of an update."""
    is_last = position == trainer.args.gradient_accumulation_steps - 1
    trainer.accelerator.gradient_state._set_sync_gradients(is_last)
    stage.watch.phase = "last micro-batch" if is_last else "micro-batch"
    with torch.autocast(stage.device.type, torch.bfloat16) if autocast else nullcontext():
        loss = trainer._compute_loss(trainer.model, trainer._buffered_inputs[trainer._step])
    stage.watch.phase = "backward"
    loss.backward()
    trainer._step += 1


def update(trainer: Any, stage: Rehearsal, autocast: bool = False) -> None:
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters)
    with stage.running() as watch:
        for position in range(trainer.args.gradient_accumulation_steps):
            micro_batch(trainer, stage, position, autocast)
        watch.phase = "step"
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        trainer._get_grad_norm(trainer.model, norm)  # on every update, as in `Trainer._run_epoch`
        optimizer.step()


def rehearse(is_ours: bool, settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the reads and copies of an update."""
    settings = dict(settings)
    autocast, evaluates = settings.pop("autocast", False), settings.pop("evaluates", False)
    trainer, stage = make(is_ours, **settings), Rehearsal(device)
    rows = _rows(trainer) if is_ours else {}
    buffer = place(trainer, stage)
    if evaluates:
        trainer.model.eval()
        with stage.running(), torch.no_grad():
            trainer._compute_loss(trainer.model, buffer[0])
    else:
        update(trainer, stage, autocast)
    watch = stage.watch
    return {"reads": watch.reads + watch.copies_down, "copies": watch.copies_up, "rows": rows}


def _rows(trainer: BAPOTrainer) -> dict[str, Any]:
    """Return which policy versions sampled the buffer, the most in a row, and the share that replay drew of it."""
    versions, most = set(), 1
    for batch in trainer._buffered_inputs:
        of_tokens = batch.get("token_versions", batch["policy_version"].unsqueeze(1))
        for row, mask in zip(of_tokens, batch["completion_mask"].bool(), strict=True):
            of_row = set(row.expand(len(mask))[mask].tolist())
            versions, most = versions | of_row, max(most, len(of_row))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    drawn = logs[-1 - (trainer.state.global_step - 1) % trainer.args.updates_per_pass].get("replay/fraction", 0.0)
    return {"versions": sorted(versions), "in_a_row": most, "drawn": drawn}


def main(output: str) -> None:
    torch.set_num_threads(1)
    device = register()
    found: dict[str, Any] = {}
    of_grpo: dict[str, Any] = {}  # by its settings: those of ours mean nothing to it
    for name, case in CASES.items():
        theirs = {setting: value for setting, value in case.items() if setting not in OURS}
        key = json.dumps(theirs, default=str)
        of_grpo[key] = of_grpo.get(key) or rehearse(False, theirs, device)
        found[name] = {"GRPO": of_grpo[key], "BAPO": rehearse(True, case, device)}
    found["held"] = held(device)
    found["collectives"] = collectives(device)
    Path(output).write_text(json.dumps(found))


SHAPES = {  # hidden size, vocabulary, tokens; two layers of each: what we hold does not depend on their number
    "0.5B": (896, 151936, 2048), "7B": (3584, 152064, 8192), "32B": (5120, 152064, 32768),
}  # fmt: skip


def held(device: torch.device) -> list[dict[str, Any]]:
    """Return the bytes that BAPOTrainer holds between two micro-batches beyond GRPOTrainer, and shapes of our own."""
    trained = {scope: make(True, search_scope=scope) for scope in SCOPES}
    trained["GRPO"] = make(False)
    rows = []
    for shape, (hidden, vocabulary, length) in SHAPES.items():
        alive = {
            name: _alive(copy.copy(trainer), device, hidden, vocabulary, length) for name, trainer in trained.items()
        }
        of_grpo, shapes_of_grpo = alive.pop("GRPO")
        for scope, (size, shapes) in alive.items():
            wide = [list(each) for each in shapes - shapes_of_grpo if vocabulary in each]
            tokens = ROWS * length
            rows.append({"scope": scope, "shape": shape, "tokens": tokens, "bytes": size - of_grpo, "wide": wide})
    return rows


def _alive(trainer: Any, device: torch.device, hidden: int, vocabulary: int, length: int) -> tuple[int, set]:
    # A callback holds its trainer: in a list that the copies share, it would outlive this measurement
    trainer.callback_handler = copy.copy(trainer.callback_handler)
    trainer.callback_handler.callbacks = list(trainer.callback_handler.callbacks)
    with torch.device("meta"):
        trainer.model = toy_model(
            hidden_size=hidden, vocab_size=vocabulary, num_hidden_layers=2, intermediate_size=4 * hidden,
            num_attention_heads=hidden // 128,
        )  # fmt: skip
    trl_utils.add_fused_lm_head(trainer.model, outputs=("log_probs", "entropy"))
    stage = Rehearsal(device)
    place(trainer, stage, (200, length))
    with stage.running():
        micro_batch(trainer, stage, 0)
        return stage.alive()


def collectives(device: torch.device) -> dict[str, list]:
    """Return what two of eight ranks call in an update, on samples of different lengths, by scope."""
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    found = {}
    for scope in SCOPES:
        trainer = make(True, search_scope=scope)
        found[scope] = [_calls(trainer, device, lengths) for lengths in ((200, 2048), (31, 700))]
    return found


def _calls(trainer: Any, device: torch.device, lengths: tuple[int, int]) -> list:
    stage, calls = Rehearsal(device), []
    place(trainer, stage, lengths)

    def noted(name: str) -> Callable:
        def call(*arguments: Any, **kwargs: Any) -> None:
            sent = [each for each in tree_leaves((arguments, kwargs)) if isinstance(each, torch.Tensor)]
            calls.append([name, *((list(each.shape), str(each.dtype), each.device.type) for each in sent)])

        return call

    state = {"num_processes": 8, "distributed_type": DistributedType.MULTI_GPU, "backend": "nccl", "device": device}
    with ExitStack() as patches:
        patches.enter_context(patch.dict(PartialState._shared_state, state))
        patches.enter_context(patch.dict(AcceleratorState._shared_state, state))
        for name in COLLECTIVES:
            patches.enter_context(patch.object(torch.distributed, name, noted(name)))
        update(trainer, stage)
    return calls


if __name__ == "__main__":
    main(sys.argv[1])
