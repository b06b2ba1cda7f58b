"""What a study keeps of a run: one row, one JSON file, written when the run ends."""

import itertools
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..report.health import examine
from ..report.runs import Logs
from .study import Run


FOLDER = "runs"


@dataclass(frozen=True)
class Row:
    """A run that has ended."""

    arm: str  # this and the next three: as of `study.Run`
    sweep: dict[str, Any]
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    final: float | None = None  # accuracy at the end, avg@k in [0, 1]; `None` for a run that failed
    pass_at_k: float | None = None  # problems with a right completion among the k
    curve: list[tuple[int, float]] = field(default_factory=list)  # updates and accuracies, from the start on
    mean_accuracy: float | None = None  # mean over the updates; where it was measured in between
    max_drawdown: float | None = None  # how far the accuracy fell below the best so far, at most; likewise
    gradient_peak: float | None = None  # largest gradient norm over the median one
    entropy_ratio: float | None = None  # mean entropy of the last tenth of the updates over that of the first
    share: float | None = None  # mean share of positive tokens in the policy loss
    # Share of the updates in which the bounds that are searched ended at their limits; `None` where none is searched
    at_limits: float | None = None
    generated_tokens: int | None = None  # of all completions
    seconds: float = 0.0  # of the training, with its evaluations
    method: str | None = None  # what its settings make, as the report names it
    # Standard errors over the prompts of `start`, `final` and `pass_at_k`
    errors: dict[str, float] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)  # of the report's health check, by their names
    error: str | None = None  # why the run failed

    @property
    def start(self) -> float | None:
        """Accuracy before the first update; `None` where it was not measured."""
        return self.curve[0][1] if self.curve and self.curve[0][0] == 0 else None


def row_of(run: Run, folder: Path, seconds: float) -> Row:
    """Return the row of a run that has ended, from what `train` left in its folder; raises where that is not whole."""
    logs = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    results = json.loads((folder / "eval_results.json").read_text())
    facts = json.loads((folder / "run_settings.json").read_text()).get("facts", {})
    avg, best = (f"{kind}@{run.flags['num_generations_eval']}" for kind in ("avg", "pass"))
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
    return Row(
        run.arm,
        run.sweep,
        run.seed,
        run.settings,
        final=results[f"eval_{avg}"],
        pass_at_k=results.get(f"eval_{best}"),
        curve=[(step, round(accuracy, 4)) for step, accuracy in curve],
        mean_accuracy=_mean_accuracy(curve) if has_course else None,
        max_drawdown=_max_drawdown([accuracy for _, accuracy in curve]) if has_course else None,
        gradient_peak=round(max(norms) / statistics.median(norms), 2) if norms else None,
        entropy_ratio=round(statistics.fmean(entropies[-tenth:]) / first_entropy, 4) if first_entropy else None,
        share=_mean(_values(updates, "bapo/positive_share")),
        at_limits=_mean(at_limits),
        generated_tokens=round(sum(lengths) * rows) if lengths and rows else None,
        seconds=round(seconds, 1),
        method=facts.get("method"),
        errors={name: results[key] for name, key in errors.items() if key in results},
        warnings={found.name: found.sentence for found in examine(Logs(logs), facts) if found.severity == "warning"},
    )


def _values(updates: list[dict], name: str) -> list[float]:
    """Return the values of a metric where it is defined."""
    return [log[name] for log in updates if log.get(name) is not None and math.isfinite(log[name])]


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 4) if values else None


def _mean_accuracy(curve: list[tuple[int, float]]) -> float:
    width = curve[-1][0] - curve[0][0]
    return round(sum((b - a) * (f + g) / 2 for (a, f), (b, g) in itertools.pairwise(curve)) / width, 4)


def _max_drawdown(accuracies: list[float]) -> float:
    best = itertools.accumulate(accuracies, max)
    return round(max(high - now for high, now in zip(best, accuracies, strict=True)), 4)


def write_row(row: Row, path: Path) -> None:
    """Write a row, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(asdict(row), default=str) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def read_rows(source: Path) -> dict[str, Row]:
    """Read rows: those of a study's folder by the name of their file, or those of one file with `rows`, by number."""
    if source.is_file():
        kept = json.loads(source.read_text(encoding="utf-8"))["rows"]
        return {str(number): Row(**row) for number, row in enumerate(kept, start=1)}
    rows = {}
    for path in sorted((source / FOLDER).glob("*.json")):
        try:
            rows[path.stem] = Row(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            message = f"{path} is no result of a run ({error}): remove it, and its run is made again."
            raise InputError(message) from error
    return rows
