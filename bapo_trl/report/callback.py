"""Keeps the report of a run up to date while it trains."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .logs import Logs
from .masks import without_secrets
from .runs import SETTINGS_FILE
from .write import save_report


class ReportCallback(TrainerCallback):
    """
    Writes `report.html` and `report.png` into `output_dir` at each save, and `run_settings.json` at the start.

    Only the main process writes. Secrets in the settings are masked. Nothing that goes wrong here stops the training:
    it is warned of, once.

    Args:
        settings (mapping, *optional*): What else the run depends on and the trainer's arguments do not hold, such as
            the data. It is saved with them, to tell runs that differ from seeds of one setting.

    Example:

        trainer.add_callback(ReportCallback({"dataset_name": "org/problems"}))
    """

    def __init__(self, settings: Mapping[str, Any] | None = None):
        self.settings = dict(settings or {})
        self._has_warned = False

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if state.is_world_process_zero:
            self._try(self._write_settings, args, model)

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero and len(Logs(state.log_history)):
            self._try(save_report, state.log_history, Path(args.output_dir) / "report.png")

    def _write_settings(self, args, model) -> None:
        name = getattr(getattr(model, "config", None), "_name_or_path", None)
        settings = {"model": name, **self.settings, **args.to_dict()}
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(without_secrets(settings), indent=2, sort_keys=True)
        (folder / SETTINGS_FILE).write_text(text + "\n", encoding="utf-8")

    def _try(self, write: Callable[..., object], *arguments) -> None:
        try:
            write(*arguments)
        except Exception as error:
            if not self._has_warned:
                warnings.warn(f"The report is not written, and the training goes on without it: {error}")
            self._has_warned = True
