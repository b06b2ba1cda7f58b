"""Logs as a healthy run leaves them, to be changed by a test."""

import json
from pathlib import Path


HEALTHY = {
    "loss": 0.01, "reward": 0.5, "completions/mean_length": 12.0, "completions/max_length": 31.0,
    "completions/clipped_ratio": 0.1, "frac_reward_zero_std": 0.3, "entropy": 1.0, "bapo/entropy_covariance": 0.1,
    "grad_norm": 0.4, "bapo/positive_share": 0.5, "bapo/positive_share_initial": 0.4, "bapo/target_met": 1.0,
    "bapo/clip_low": 0.6, "bapo/clip_high": 1.4, "bapo/negative_weight": 1.0, "clip_ratio/high_mean": 0.02,
    "clip_ratio/low_mean": 0.01, "ratio/mean": 1.0, "ratio/min": 0.4, "ratio/max": 2.5, "ratio/ess": 0.9,
    "ratio/chi2": 0.1, "staleness/mean": 3.5, "staleness/max": 7.0, "bapo/search_steps": 5.0, "bapo/masked_share": 0.0,
    "time/generation": 6.0, "time/training": 3.0, "time/other": 1.0,
}  # fmt: skip


def made_logs(size: int = 20, first: int = 1, every: int = 1, **changes) -> list[dict]:
    """Return logs of updates; a change is a value, or a list of values of which the last one stays."""
    logs = []
    for index in range(size):
        values = {
            name: value[min(index, len(value) - 1)] if isinstance(value, list) else value
            for name, value in changes.items()
        }
        logs.append({**HEALTHY, **values, "step": first + index * every})
    return logs


def save_run(folder: Path, logs: list[dict], settings: dict | None = None, summary: bool = True) -> Path:
    """Leave a run's files in a folder, as transformers and the callback do."""
    folder.mkdir(parents=True, exist_ok=True)
    history = [*logs, {"step": logs[-1]["step"], "train_runtime": 3.0}] if summary else logs
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": logs[-1]["step"], "log_history": history}))
    if settings is not None:
        (folder / "run_settings.json").write_text(json.dumps(settings))
    return folder
