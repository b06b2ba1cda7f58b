"""Time to an accuracy: TRL's `GRPOTrainer` with TRL's defaults, and the recommendation, as runs of a study."""

import hashlib
import importlib.util
import json
import statistics
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bapo_trl.compare.execution import make_runs
from bapo_trl.compare.results import FOLDER
from bapo_trl.compare.study import Study
from bapo_trl.report.runs import Logs
from bapo_trl.report.times import seconds_of
from bapo_trl.tasks.cache import cached_folder
from benchmarks.chat_task import write_task
from benchmarks.gpu_first_run.qlora import over_vllm
from benchmarks.gpu_first_run.trainers import Case, Setup


TASK = "chain_sum"
# As on a CPU: task, methods, rates, updates and the lower of the two targets of benchmarks/studies/time_chat.yaml
METHODS: dict[str, dict[str, Any]] = {
    "TRL": {"method": "trl", "learning_rate": 4e-4},
    "recommendation": {
        "method": "vespo", "steps_per_generation": 16, "replay_zero_advantage": True, "replay_capacity": 1024,
        "learning_rate": 2e-4, "vllm_importance_sampling_mode": "token_truncate",
    },
}  # fmt: skip
SEEDS = [0, 1, 2]
TARGET = 0.348
BASE = {
    "reward_funcs": "bapo_trl.tasks.gym_reward", "use_peft": True, "lora_r": 16, "lora_alpha": 32,
    "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj"], "num_generations": 8,
    "gradient_accumulation_steps": 1, "lr_scheduler_type": "constant",
}  # fmt: skip
PHASES = ("generation", "rewards", "training", "other")  # of each method and sampler
PHASES_WITH_VLLM = (*PHASES, "weights", "scoring")


def time_to_accuracy(setup: Setup) -> dict[str, Case]:
    lacks = None if setup.chat_model else "needs a model: `--chat_model FOLDER`"
    lacks = lacks if importlib.util.find_spec("reasoning_gym") else "reasoning-gym is not installed"
    return {
        f"{method}, seed {seed}": Case(partial(_measure, setup, method, seed), lacks)
        for seed in SEEDS
        for method in METHODS
    }


def make_study(setup: Setup, task: Path) -> Study:
    """Return the study whose runs are the cases. Without vLLM, they sample with transformers."""
    uses_vllm = importlib.util.find_spec("vllm") is not None
    base = {
        **BASE, "model_name_or_path": str(task / "model"), "dataset_name": str(task / "train.jsonl"),
        "use_cpu": not setup.on_gpu, "bf16": setup.on_gpu, "dataloader_pin_memory": setup.on_gpu,
        **(over_vllm(0.15) if uses_vllm and setup.on_gpu else {}), **setup.sizes.timed_flags,
    }  # fmt: skip
    base.pop("vllm_importance_sampling_mode", None)  # TRL has its own default
    measure = {"every": setup.sizes.timed_every, "avg_at": 1, "target": TARGET, "dataset": str(task / "test.jsonl")}
    return Study(base, METHODS, {}, SEEDS, measure)


def _measure(setup: Setup, method: str, seed: int) -> dict:
    """Train once, and return the seconds until the accuracy, in each phase, and the rewards."""
    study = make_study(setup, _make_task(setup))
    (run,) = (run for run in study.runs() if (run.arm, run.seed) == (method, seed))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_runs(study, [run], folder, jobs=1)
        row = json.loads((folder / FOLDER / f"{run.key}.json").read_text())
        if row["error"] is not None:
            raise RuntimeError(row["error"])
        history = json.loads((folder / "logs" / f"{run.key}.trainer_state.json").read_text())["log_history"]
    logs = Logs(history)
    return {
        "uses_vllm": run.flags.get("use_vllm", False),
        **{key: row[key] for key in ("curve", "costs", "to_target", "seconds")},
        "seconds_of_phases": seconds_of(logs),
        "rewards": logs.points("reward").values.tolist(),
    }


def _make_task(setup: Setup) -> Path:
    """Return the folder of the task's files, with the model after its short supervised start."""
    model, steps = setup.chat_model.resolve(), setup.sizes.timed_start_steps
    digest = hashlib.sha256(f"{model} {steps}".encode()).hexdigest()[:12]
    return cached_folder(
        f"chat_{TASK}-{digest}",
        f"the task {TASK} and its start",
        lambda folder: write_task(TASK, folder, steps, model),
    )


def mean_rewards(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the mean rewards of the first and of the last quarter of a run's rollout batches."""
    count = max(1, len(row["rewards"]) // 4)
    return statistics.fmean(row["rewards"][:count]), statistics.fmean(row["rewards"][-count:])


def learned_in_time(row: Mapping[str, Any]) -> bool:
    """Return whether the reward rose, and each phase that the run has took time."""
    first, last = mean_rewards(row)
    phases = PHASES_WITH_VLLM if row["uses_vllm"] else PHASES
    return last > first and all(row["seconds_of_phases"].get(name, 0) > 0 for name in phases)
