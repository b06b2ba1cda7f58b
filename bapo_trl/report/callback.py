"""Callback that keeps the report of a run up to date, and saves the settings of the run."""

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import HubStrategy

from ..bapo_config import BAPOConfig, own_fields
from .command import save_report
from .facts import facts_of
from .runs import SETTINGS_FILE, Logs


SAVED = (
    "model", "model_name_or_path", "dtype", "dataset_name", "eval_dataset", "reward_funcs", "prompt_template",
    "system_prompt", "run_name", "seed", "data_seed", "loss_type", "learning_rate", "lr_scheduler_type", "beta",
    "importance_sampling_level", "num_generations", "generation_batch_size", "per_device_train_batch_size",
    "gradient_accumulation_steps", "steps_per_generation", "num_iterations", "max_completion_length", "temperature",
    "use_vllm", "max_steps", "num_train_epochs", "logging_steps", *(each.name for each in own_fields()),
)  # fmt: skip
"""Settings that are saved. All others, which may hold secrets, only count in the fingerprint."""

OF_THE_SEED = frozenset(
    {
        "seed", "data_seed", "output_dir", "run_name", "logging_dir", "resume_from_checkpoint", "hub_model_id",
        "eval_output_dir", "local_rank", "project", "trackio_space_id", "vllm_server_base_url", "vllm_server_host",
        "vllm_server_port", "overwrite_output_dir",
    }
)  # fmt: skip
"""Settings in which the seeds of one setting may differ."""

_PAUSE_S = 60.0  # drawing takes seconds, for which the other processes wait


class ReportCallback(TrainerCallback):
    """
    Callback that writes `report.png` into `output_dir` whenever a checkpoint is saved and at the end of training.

    At the start it writes `run_settings.json`: the main settings, values derived from them, and a fingerprint of all
    settings except the seeds. The report is written at most once a minute, and in any case at the end. If checkpoints
    are pushed to the Hub, the report is written before each push. Only the main process writes. If writing fails,
    training continues with one warning.

    Args:
        settings (`Mapping[str, Any]`, *optional*):
            Further settings of the run that the trainer's arguments do not hold, such as the dataset. They count in
            the fingerprint, which tells seeds of the same settings from runs with different settings.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None):
        self.settings = dict(settings or {})
        self._has_warned = False
        # Of this training: the updates logged when the report was written, and when, by `time.monotonic()`
        self._written: tuple[int, float] = (0, -math.inf)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._written = (0, -math.inf)
        if state.is_world_process_zero:
            self._try(self._write_settings, args, model)

    def on_save(self, args, state, control, **kwargs):
        if not args.push_to_hub or args.hub_strategy == HubStrategy.END:
            self._save_report(args, state, is_last=False)

    # Before the upload, which reads the files while training continues
    def on_push_begin(self, args, state, control, **kwargs):
        self._save_report(args, state, is_last=state.global_step >= state.max_steps)

    def on_train_end(self, args, state, control, **kwargs):
        if not args.push_to_hub or args.hub_strategy == HubStrategy.END:
            self._save_report(args, state, is_last=True)

    def _save_report(self, args, state, is_last: bool) -> None:
        if not state.is_world_process_zero:
            return
        logged, now = len(Logs(state.log_history)), time.monotonic()
        logged_before, before = self._written
        if logged > logged_before and (is_last or now >= before + _PAUSE_S):
            self._written = logged, now
            self._try(save_report, state.log_history, Path(args.output_dir) / "report.png")

    def _write_settings(self, args, model) -> None:
        config = getattr(model, "config", None)
        settings = {"model": getattr(config, "_name_or_path", None), **self.settings, **args.to_dict()}
        dtype = getattr(config, "dtype", None)
        if dtype is not None:  # of the weights as they were loaded, whether it was asked for or not
            settings["dtype"] = str(dtype).removeprefix("torch.")
        setting = {name: value for name, value in settings.items() if name not in OF_THE_SEED}
        digest = hashlib.sha256(json.dumps(setting, sort_keys=True, default=str).encode())
        saved = {name: settings[name] for name in SAVED if name in settings}
        saved["fingerprint"] = digest.hexdigest()
        if isinstance(args, BAPOConfig):
            saved["facts"] = facts_of(args)
            if settings.get("method") == "trl":
                saved["facts"]["method"] = "GRPOTrainer"
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(saved, indent=2, sort_keys=True, default=str)
        (folder / SETTINGS_FILE).write_text(text + "\n", encoding="utf-8")

    def _try(self, write: Callable[..., object], *arguments) -> None:
        try:
            write(*arguments)
        except Exception as error:
            if not self._has_warned:
                warnings.warn(f"The report is not written, and training continues without it: {error}")
            self._has_warned = True
