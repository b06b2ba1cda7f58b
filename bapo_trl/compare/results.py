"""Result rows of a study: one per run, saved as a JSON file when the run ends."""

import itertools
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..report.health import examine
from ..report.runs import Logs
from ..report.times import seconds_of
from .study import Run
from .target import to_target


FOLDER = "runs"


@dataclass(frozen=True)
class Row:
    """Result of a run that has ended."""

    arm: str  # this and the next three fields are those of `study.Run`
    sweep: dict[str, Any]
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    final: float | None = None  # final accuracy, avg@k in [0, 1]; `None` if the run failed
    pass_at_k: float | None = None  # fraction of problems with a right completion among the k
    curve: list[tuple[int, float]] = field(default_factory=list)  # (update, accuracy) from the start to the end
    # Up to each measurement of the curve: `wall` and `cpu` seconds of the training, and generated `tokens`
    costs: list[dict[str, float | None]] = field(default_factory=list)
    # Wall seconds of each phase of the training, `time/*` in the logs; without evaluations and saves
    phases: dict[str, float] = field(default_factory=dict)
    # `seconds`, `tokens`, `updates` until the study's target accuracy, and whether it was `reached`: see `to_target`
    to_target: dict[str, Any] | None = None
    mean_accuracy: float | None = None  # mean accuracy over training; `None` if not measured between start and end
    max_drawdown: float | None = None  # largest drop of the accuracy below its previous maximum; likewise
    gradient_peak: float | None = None  # largest gradient norm / median gradient norm
    entropy_ratio: float | None = None  # mean entropy in the last tenth of the updates / in the first tenth
    share: float | None = None  # mean positive contribution to the policy loss
    # Fraction of updates in which all searched bounds are at their limits; `None` if no bound is searched
    at_limits: float | None = None
    generated_tokens: int | None = None  # total over all completions
    seconds: float = 0.0  # training and evaluations
    method: str | None = None  # name of the method in the report
    # Standard errors of `start`, `final` and `pass_at_k` over the prompts
    errors: dict[str, float] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)  # warnings of the report's health checks, by name
    error: str | None = None  # reason why the run failed

    @property
    def start(self) -> float | None:
        """Accuracy before the first update; `None` if it was not measured."""
        return self.curve[0][1] if self.curve and self.curve[0][0] == 0 else None


def row_of(run: Run, folder: Path, seconds: float) -> Row:
    """Return the row of a finished run from the files in its folder; raise an error if a file or value is missing."""
    logs = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    results = json.loads((folder / "eval_results.json").read_text())
    facts = json.loads((folder / "run_settings.json").read_text()).get("facts", {})
    avg, best = (f"{kind}@{run.flags['num_generations_eval']}" for kind in ("avg", "pass"))
    of_updates = Logs(logs)
    updates = [log for log in logs if "bapo/positive_share_initial" in log or "grad_norm" in log]
    last = max(log["step"] for log in updates)
    curve = [(0, results[f"before_{avg}"])] if f"before_{avg}" in results else []
    measured = {log["step"]: log[f"eval_{avg}"] for log in logs if f"eval_{avg}" in log}
    curve += [(step, accuracy) for step, accuracy in sorted(measured.items()) if step < last]
    curve.append((last, results[f"eval_{avg}"]))
    has_course = any(0 < step < last for step, _ in curve)
    norms = [norm for norm in _values(updates, "grad_norm") if norm > 0]
    entropies = _values(updates, "entropy")
    tenth = max(1, len(entropies) // 10)
    first_entropy = statistics.fmean(entropies[:tenth]) if entropies else 0.0
    limits = facts.get("limits", {})
    searched = [log for log in updates if limits and all(log.get(name) is not None for name in limits)]
    at_limits = [all(abs(log[name] - end) < 1e-3 for name, end in limits.items()) for log in searched]
    lengths = _values(updates, "completions/mean_length")
    rows = facts.get("rows_per_generation")
    errors = {"start": f"before_{avg}_stderr", "final": f"eval_{avg}_stderr", "pass_at_k": f"eval_{best}_stderr"}
    row = Row(
        run.arm,
        run.sweep,
        run.seed,
        run.settings,
        costs=[_cost_at(step, logs, rows) for step, _ in curve],
        phases={name: round(value, 1) for name, value in seconds_of(of_updates).items()},
        final=results[f"eval_{avg}"],
        pass_at_k=results.get(f"eval_{best}"),
        curve=[(step, round(accuracy, 4)) for step, accuracy in curve],
        mean_accuracy=round(mean_accuracy(curve), 4) if has_course else None,
        max_drawdown=_max_drawdown([accuracy for _, accuracy in curve]) if has_course else None,
        gradient_peak=round(max(norms) / statistics.median(norms), 2) if norms else None,
        entropy_ratio=round(statistics.fmean(entropies[-tenth:]) / first_entropy, 4) if first_entropy else None,
        share=_mean(_values(updates, "bapo/positive_share")),
        at_limits=_mean(at_limits),
        generated_tokens=round(sum(lengths) * rows) if lengths and rows else None,
        seconds=round(seconds, 1),
        method=facts.get("method"),
        errors={name: results[key] for name, key in errors.items() if key in results},
        warnings={found.name: found.sentence for found in examine(of_updates, facts) if found.severity == "warning"},
    )
    return with_target(row, run)


def with_target(row: Row, run: Run) -> Row:
    """Return a row with what the run took to reach the target of its study, if the study has one."""
    found = None
    if run.target is not None and row.costs:
        found = to_target(row.curve, row.costs, run.target, run.clock)
    return replace(row, to_target=found)


def _cost_at(step: int, logs: Sequence[dict], rows: int | None) -> dict[str, float | None]:
    """Return what the training cost up to an update, `None` for what was not logged."""
    if step == 0:
        return {"wall": 0.0, "cpu": 0.0, "tokens": 0}
    before = [log for log in logs if log["step"] <= step]
    clocks: dict = next((log for log in reversed(before) if "clock/wall_s" in log), {})
    lengths = _values(before, "completions/mean_length")
    tokens = round(sum(lengths) * rows) if rows and lengths else None
    return {"wall": clocks.get("clock/wall_s"), "cpu": clocks.get("clock/cpu_s"), "tokens": tokens}


def _values(updates: list[dict], name: str) -> list[float]:
    """Return the finite values of a metric."""
    return [log[name] for log in updates if log.get(name) is not None and math.isfinite(log[name])]


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


def mean_accuracy(curve: Sequence[tuple[float, float]]) -> float:
    """Return the mean of the line through the points of a curve."""
    width = curve[-1][0] - curve[0][0]
    return sum((b - a) * (f + g) / 2 for (a, f), (b, g) in itertools.pairwise(curve)) / width


def _max_drawdown(accuracies: list[float]) -> float:
    best = itertools.accumulate(accuracies, max)
    return round(max(high - now for high, now in zip(best, accuracies, strict=True)), 4)


def write_row(row: Row, path: Path) -> None:
    """Write a row atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(asdict(row), default=str) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def read_rows(source: Path) -> dict[str, Row]:
    """Return the rows in a study's folder, by file name, or in the `rows` of a single file, by number."""
    if source.is_file():
        kept = json.loads(source.read_text(encoding="utf-8"))["rows"]
        return {str(number): Row(**row) for number, row in enumerate(kept, start=1)}
    rows = {}
    for path in sorted((source / FOLDER).glob("*.json")):
        try:
            rows[path.stem] = Row(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            message = f"{path} is not a valid result of a run ({error}): delete it to repeat the run."
            raise InputError(message) from error
    return rows
