"""BAPO (Balanced Policy Optimization with Adaptive Clipping, arXiv 2510.18927) as a TRL trainer."""

import importlib


__all__ = [
    "BAPOConfig",
    "BAPOTrainer",
    "ReportCallback",
    "StaleServerError",
    "StopSignals",
    "check_server_weights",
    "dry_run",
    "exit_stopped",
    "speed_up_cpu",
]
__version__ = "0.1.0"

_HOMES = {
    "BAPOConfig": "bapo_config",
    "BAPOTrainer": "bapo_trainer",
    "ReportCallback": "report.callback",
    "StaleServerError": "vllm_server.weight_check",
    "StopSignals": "checkpoints.stop_signals",
    "check_server_weights": "vllm_server.check_server_weights",
    "dry_run": "script.plan",
    "exit_stopped": "checkpoints.stop_signals",
    "speed_up_cpu": "upstream.cpu_speed",
}
_SUBPACKAGES = (
    "clip_bounds",
    "evaluation",
    "experimental",
    "report",
    "tasks",
)  # public: `import bapo_trl` is enough for them


def __getattr__(name: str):
    # Imported at first use: most commands do not need TRL.
    if name in _SUBPACKAGES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__():
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
