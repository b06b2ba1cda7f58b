"""
Fingerprints of training: the same losses, gradients, weights and logs, before and after the code was moved.

    python -m scripts.fingerprints            # compare with scripts/fingerprints.json; exit 1 where one differs
    python -m scripts.fingerprints --write    # write them
    python -m scripts.fingerprints NAME ...   # those whose names contain one of these
"""

import hashlib
import json
import struct
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from tests.helpers.alike import TIMES
from tests.helpers.forked import run_python
from tests.helpers.toy import ending_model, toy_dataset, toy_trainer, training_logs


FILE = Path(__file__).with_suffix(".json")
LORA = {"lora": True}
REPLAY = {"replay_fraction": 0.5, "replay_capacity": 48, "replay_max_staleness": 20}
PARTIAL = {
    "partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 2, "max_completion_length": 24,
    "per_device_train_batch_size": 6, "num_generations": 3, "num_iterations": 1,
}  # fmt: skip
ONE_BATCH = {"gradient_accumulation_steps": 1}
WEIGHT = {"negative_weight_min": 0.4, "positive_contribution_target": 0.7}
FIXED = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2}

SETTINGS: dict[str, dict[str, Any]] = {
    **{f"scope {scope}": {"search_scope": scope} for scope in ("batch", "carried_over", "micro_batch")},
    **{
        f"scope {scope}, one micro-batch": {"search_scope": scope, **ONE_BATCH}
        for scope in ("batch", "carried_over", "micro_batch")
    },
    **{f"loss {loss}": {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "luspo", "vespo", "sapo")},
    "loss cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sequence level": {"importance_sampling_level": "sequence"},
    "sequence level, batch scope": {"importance_sampling_level": "sequence", "search_scope": "batch"},
    "surrogate": {"contribution_measure": "surrogate", "search_scope": "batch"},
    "behavior_prob": {"contribution_weighting": "behavior_prob"},
    "lower_first": {"search_order": "lower_first", "search_scope": "micro_batch"},
    "fixed bounds": FIXED,
    "weight": WEIGHT,
    "weight, batch": {**WEIGHT, "search_scope": "batch"},
    "constant weight, vespo": {"negative_weight_min": 0.5, "positive_contribution_target": 1.0, "loss_type": "vespo"},
    "beta, delta": {"beta": 0.05, "delta": 4.0},
    "sync_ref_model": {"beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 2, "resume": 3},
    "masked truncation, grpo": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "resume": {"resume": 2},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 6},
    "replay": REPLAY,
    "replay, batch, resume": {**REPLAY, "search_scope": "batch", "resume": 4, "num_iterations": 1},
    "replay, zero advantages": {**REPLAY, "replay_zero_advantage": True, "replay_min_staleness": 1, "tied": True},
    "replay, grpo, micro_batch": {**REPLAY, "loss_type": "grpo", "search_scope": "micro_batch"},
    "replay, vespo": {**REPLAY, "loss_type": "vespo"},
    "partial": PARTIAL,
    "partial, grpo, batch": {**PARTIAL, "loss_type": "grpo", "search_scope": "batch"},
    "partial, replay, resume": {**PARTIAL, **REPLAY, "resume": 4},
    "partial, max staleness": {
        **PARTIAL,
        "partial_rollout_max_staleness": 3,
        "max_completion_length": 60,
        "partial_rollout_oversampling": 1.9,
    },
    "lora": LORA,
    "lora, replay, batch": {**LORA, **REPLAY, "search_scope": "batch"},
    "lora, partial, beta": {**LORA, **PARTIAL, "beta": 0.05},
    "two ranks": {"ranks": 2},
    "two ranks, partial, replay, batch": {**PARTIAL, **REPLAY, "search_scope": "batch", "ranks": 2},
}


def by_length(completions, **kwargs) -> list[float]:
    """Reward in three steps, so that groups tie."""
    return [float(len(text) % 3 == 0) for text in completions]


def model_of(folder: str) -> str:
    """Save the model to a folder of its own: the reference model is made from there."""
    path = Path(folder, "model")
    if not path.exists():
        ending_model().save_pretrained(path)
    return str(path)


def train(folder: str, given: dict[str, Any]) -> Any:
    settings = {"max_steps": 8, "save_strategy": "no", **given}
    resume = settings.pop("resume", None)
    settings.pop("ranks", None)
    options: dict[str, Any] = {"reward_funcs": by_length} if settings.pop("tied", False) else {}
    trainer_args: dict[str, Any] = {}
    if settings.pop("lora", False):
        trainer_args["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    if "eval_strategy" in settings:
        trainer_args["eval_dataset"] = toy_dataset(6)
    if resume is not None:
        settings |= {"save_strategy": "steps", "save_steps": resume}
        first = {**settings, "max_steps": resume}
        toy_trainer(folder, model=model_of(folder), trainer_args=trainer_args, **first, **options).train()
    trainer = toy_trainer(folder, model=model_of(folder), trainer_args=trainer_args, **settings, **options)
    trainer.train(resume_from_checkpoint=None if resume is None else f"{folder}/checkpoint-{resume}")
    return trainer


def exact(value: Any) -> str:
    return struct.pack("<d", value).hex() if isinstance(value, float) else str(value)


def digest(parts: Any) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sha.hexdigest()[:16]


def fingerprint(trainer: Any) -> dict[str, str]:
    logs = [{k: v for k, v in log.items() if k not in TIMES} for log in training_logs(trainer)]
    return {
        "weights": digest(
            name.encode() + weight.detach().contiguous().view(torch.uint8).numpy().tobytes()
            for name, weight in sorted(trainer.model.state_dict().items())
        ),
        "loss and gradient": digest(exact(log[key]).encode() for log in logs for key in ("loss", "grad_norm")),
        "log": digest(f"{key} {exact(log[key])}".encode() for log in logs for key in sorted(log)),
        "names": digest(key.encode() for log in logs for key in sorted(log)),
    }


def measure(name: str) -> dict[str, str]:
    ranks = SETTINGS[name].get("ranks", 1)
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            return fingerprint(train(folder, SETTINGS[name]))
        result = run_python(["-m", "scripts.fingerprints", "--rank", name, folder], ranks)
        if result.returncode:
            sys.exit(result.stderr[-4000:])
        return json.loads(Path(folder, "0.json").read_text())


def main(*arguments: str) -> None:
    warnings.simplefilter("ignore")
    if arguments[:1] == ("--rank",):
        trainer = train(arguments[2], SETTINGS[arguments[1]])
        rank = trainer.accelerator.process_index
        Path(arguments[2], f"{rank}.json").write_text(json.dumps(fingerprint(trainer)))
        trainer.accelerator.end_training()
        return
    writes, parts = "--write" in arguments, [part for part in arguments if not part.startswith("--")]
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    different = 0
    for name in SETTINGS:
        if parts and not any(part in name for part in parts):
            continue
        found = measure(name)
        changed = [key for key in found if found[key] != known.get(name, {}).get(key)]
        print(f"{name}: {'differs in ' + ', '.join(changed) if changed else 'equal'}", file=sys.stderr, flush=True)
        different += bool(changed)
        if writes:
            known[name] = found
    if writes:
        FILE.write_text(json.dumps(known, indent=1) + "\n")
    else:
        sys.exit(f"{different} differ" if different else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
