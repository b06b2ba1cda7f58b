"""Keeps the report of a run up to date while it trains, and its settings without the secrets in them."""

import json
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import HubStrategy

from .logs import Logs
from .runs import SETTINGS_FILE
from .write import save_report


_SECRET_NAME = re.compile(
    r"secret|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!stop_)(?<!image_)(?<!mask_)token$"
    r"|(?:passw(?:or)?d|pwd|passphrase|[_-]key|apikey|credentials?|authorization|auth|cookie)$",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"(?<=://)[^/?#\s\"']+(?=@)"  # the name and the password before a host
    r"|\b(?:hf|api_org)_[A-Za-z0-9]{16,}"
    r"|\b(?:gh[a-z]|github_pat|glpat|sk|xox[a-z])[_-][\w-]{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|(?<=[?&]key=)[^&#\s\"']+|(?<=[?&]sig=)[^&#\s\"']+"
    r"|\beyJ[\w-]+\.[\w-]+\.[\w-]*"  # JSON web tokens
    r"|(?<=\bbearer )[\w.~+/-]{16,}=*|(?<=\bbasic )[\w+/-]{16,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*-----)?",
    re.IGNORECASE,
)
# token=..., "api_key": "...": the name, then its value
_NAMED = re.compile(
    r"((?:secret|token|passw(?:or)?d|(?:api|access)[_-]?key)(?:=|[\"']\s*:\s*)[\"']?)"
    r"(?!none|null|true|false)[^\s\"'&,;}]+",
    re.IGNORECASE,
)
_MASK = "<SECRET>"

_PAUSE_S = 60.0  # drawing takes seconds, for which the other processes wait


class ReportCallback(TrainerCallback):
    """
    Writes `report.html` and `report.png` into `output_dir`, at saves and at the end of the training, and
    `run_settings.json` at the start.

    Before the last update, the report is written at most once a minute. Where saves are pushed to the Hub, it is
    written before pushes instead, which read it while the training continues. Only the main process writes. Secrets in
    the settings are masked. Nothing that goes wrong here stops the training: it is warned of, once.

    `settings` are what else the run depends on and the trainer's arguments do not hold, such as the data. They are
    saved with these, to tell runs that differ from seeds of one setting.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None):
        self.settings = dict(settings or {})
        self._has_warned = False
        # Of this training: the updates logged when the report was written, and when, by `time.monotonic()`
        self._written: tuple[int, float] | None = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._written = None
        if state.is_world_process_zero:
            self._try(self._write_settings, args, model)

    def on_save(self, args, state, control, **kwargs):
        if not args.push_to_hub or args.hub_strategy == HubStrategy.END:
            self._save_report(args, state, is_last=False)

    # Before the upload, which reads the files while the training goes on
    def on_push_begin(self, args, state, control, **kwargs):
        self._save_report(args, state, is_last=state.global_step >= state.max_steps)

    def on_train_end(self, args, state, control, **kwargs):
        if not args.push_to_hub or args.hub_strategy == HubStrategy.END:
            self._save_report(args, state, is_last=True)

    def _save_report(self, args, state, is_last: bool) -> None:
        number, now = len(Logs(state.log_history)) if state.is_world_process_zero else 0, time.monotonic()
        logged_before, before = self._written or (0, -math.inf)
        if number > logged_before and (is_last or now >= before + _PAUSE_S):
            self._written = number, now
            self._try(save_report, state.log_history, Path(args.output_dir) / "report.png")

    def _write_settings(self, args, model) -> None:
        config = getattr(model, "config", None)
        name, dtype = (getattr(config, each, None) for each in ("_name_or_path", "dtype"))
        settings = {"model": name, **self.settings, **args.to_dict()}
        if dtype is not None:  # of the weights as they were loaded, whether it was asked for or not
            settings["dtype"] = str(dtype).removeprefix("torch.")
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


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return settings as JSON holds them, with what looks like a secret masked at any depth.

    A value is secret if its name says so (`token`, `api_key`, `password`, ...). In other text, credentials in a URL
    are, and what has the form of a token. What JSON does not know becomes text.
    """
    return _masked(json.loads(json.dumps(settings, default=str)))


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: f"<{name.upper()}>" if _is_secret(name, part) else _masked(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_masked(part) for part in value]
    return _NAMED.sub(rf"\1{_MASK}", _SHAPES.sub(_MASK, value)) if isinstance(value, str) else value


def _is_secret(name: str, value: Any) -> bool:
    """Whether a value is to be masked: `True` for a token says only where it is, and nothing hides nothing."""
    return _SECRET_NAME.search(name) is not None and not isinstance(value, bool) and value not in (None, "")
