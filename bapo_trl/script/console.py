"""What a training run prints: a table of its settings, then a table with a row for each log."""

import math
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from shutil import get_terminal_size
from time import monotonic

import datasets
import huggingface_hub
import transformers
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import ProgressCallback, TrainerCallback

from ..bapo_config import BAPOConfig
from ..phase_clock import PHASES
from ..report.runs import is_of_updates


HEADER_EVERY = 20  # rows

_COLUMNS = (  # two lines of a header, metrics, format, least width
    ("mean", "reward", "reward", ".3f", 6),
    ("zero", "advantage", "frac_reward_zero_std", ".0%", 0),
    ("entropy", "(nats)", "entropy", ".2f", 0),
    ("clip", "bounds", "bapo/clip_low bapo/clip_high", ".2f", 9),
    ("positive", "contrib.", "bapo/positive_share", ".2f", 0),
    ("", "ESS", "ratio/ess", ".2f", 4),
    ("grad", "norm", "grad_norm", ".3g", 5),
)


def aligned_rows(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values as lines, the values one below the other."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def settings_table(args: BAPOConfig, method: str | None = None) -> str:
    """Return a table of what the settings mean, on as many processes as there are, with the name of `--method`."""
    micro_batch, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    samples = args.world_size * micro_batch * accumulated
    shape = f"{args.world_size} process{'es' * (args.world_size > 1)} x {micro_batch} x {accumulated} micro-batches"
    rows = {"method": method} if method else {}
    rows["samples per generation"] = f"{args.generation_batch_size} ({args.num_generations} per prompt)"
    rows["samples per update"] = f"{samples} ({shape})"
    rows["clip bounds"] = f"none (loss_type {args.loss_type})"
    if args.has_clip_bounds:
        grid = args.bound_grid
        low, high = _range(grid.lower_start, grid.lower_max), _range(grid.upper_start, grid.upper_max)
        rows["clip bounds"] = f"lower {low}, upper {high}"
    if args.negative_weight_min < 1:
        largest = args.negative_weight_min if args.has_constant_weight else 1
        rows["weight of negative tokens"] = _range(args.negative_weight_min, largest)
    if args.is_adaptive:
        order = f"search_order {args.search_order}, " if args.has_clip_bounds else ""
        target = f"{args.positive_contribution_target:g} (contribution_measure {args.contribution_measure})"
        rows["positive contribution target"] = target
        rows["search"] = f"{order}search_scope {args.search_scope}"
    return aligned_rows(rows.items())


def _range(start: float, maximum: float) -> str:
    return f"{start:g}" if start == maximum else f"{start:g} to {maximum:g}"


def rewards_in_words(logs: Mapping[str, float]) -> str:
    """Return the rewards of the log of an evaluation."""
    shown = {name: value for name, value in sorted(logs.items()) if name == "eval_reward" or "reward_best_of" in name}
    names = [name.replace("eval_reward_best", "best").replace("eval_", "mean ").replace("_", " ") for name in shown]
    pairs = [(name, value) for name, value in zip(names, shown.values(), strict=True) if value == value]
    return ", ".join(f"{name} {value:.3f}" for name, value in pairs) or "no reward"


def without_bars_in_files() -> None:
    """Turn off the progress bars of libraries where stderr is no terminal: a file would be full of their pieces."""
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


class UpdateLines(TrainerCallback):
    """Prints a table with the most important metrics, and the saves and evaluations. Trackers get all metrics."""

    _is_training = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._is_training = True
        self._num_rows, self._widths = 0, [0] * (len(_COLUMNS) + 3)
        self._first = self._last = (state.global_step, monotonic())
        self._of_updates = self._of_generations = 0.0  # seconds

    def on_train_end(self, args, state, control, **kwargs):
        self._is_training = False

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_evaluate and not control.should_log:  # else after the row of the update
            self._print(state, f"Evaluating after update {state.global_step} ...")

    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        self._print(state, f"Saved {args.output_dir}/checkpoint-{state.global_step}")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if any(name.startswith("eval_") for name in logs):
            self._print(state, f"Evaluation after update {state.global_step}: {rewards_in_words(logs)}")
        elif self._is_training and is_of_updates(logs):
            before = self._widths
            header, row = self._header_and_row(args, state, logs)
            is_due = self._num_rows % HEADER_EVERY == 0 or self._widths != before
            self._num_rows += 1
            self._print(state, f"{header}\n{row}" if is_due else row)
            self.on_step_end(args, state, control)

    def _print(self, state, text: str) -> None:
        if self._is_training and state.is_world_process_zero:
            with tqdm.external_write_mode():  # no piece of a bar is left before the line
                print(text, flush=True)

    def _header_and_row(self, args, state, logs: Mapping[str, float]) -> tuple[str, str]:
        """Return the header and a row. An undefined value is a "-", and so is one of a generation where none was."""
        step, total = state.global_step, state.max_steps
        is_narrow = get_terminal_size(fallback=(100, 24)).columns < 100
        done = f"{step:>{len(str(total))}}/{total}" + ("" if is_narrow else f" {step / max(total, 1):4.0%}")
        pace, left = self._pace(args, state, logs)
        cells = [("", "update", done)]
        for above, name, metrics, form, width in _COLUMNS:
            fits = name != "ESS" or not is_narrow or state.max_steps < 10_000
            if fits and (args.has_clip_bounds or name != "bounds"):
                values = [logs.get(metric) for metric in metrics.split()]
                is_defined = all(value is not None and value == value for value in values)
                cell = "-".join(f"{value:{form}}" for value in values) if is_defined else "-"
                cells.append((above, name, cell.rjust(width)))
        cells += [("s per", "update", pace), ("time", "left", left.rjust(7))]
        self._widths = [max(width, *map(len, cell)) for width, cell in zip(self._widths, cells, strict=False)]
        padded = [[text.rjust(width) for text in cell] for cell, width in zip(cells, self._widths, strict=True)]
        above, names, row = ((" " if is_narrow else "  ").join(line) for line in zip(*padded, strict=True))
        return f"{above}\n{names}", row

    def _pace(self, args, state, logs: Mapping[str, float]) -> tuple[str, str]:
        """
        Return the seconds an update, with its part of the generation, and what is left at the mean speed so far.

        The time of the generations so far counts once per generation that is left, so the first row's holds.
        """
        (first, start), (last, then) = self._first, self._last
        step, now = self._last = (state.global_step, monotonic())
        if step == last:
            return "-", "-"
        updates, left = step - first, state.max_steps - step
        if "time/generation" in logs:
            seconds = {name: (step - last) * logs[f"time/{name}"] for name in PHASES}
            self._of_updates += seconds["training"] + seconds["other"]
            self._of_generations += sum(seconds.values()) - seconds["training"] - seconds["other"]
            begun, total = (math.ceil(end / args.updates_per_generation) for end in (step, state.max_steps))
            of_this_run = begun - first // args.updates_per_generation  # resumed within one, it begins it again
            left_s = self._of_updates / updates * left + self._of_generations / of_this_run * (total - begun)
        else:
            left_s = (now - start) / updates * left
        return f"{(now - then) / (step - last):.2f}", str(timedelta(seconds=round(left_s)))


class ProgressBar(ProgressCallback):
    """The bar without the metrics. For a terminal: in a file, it would leave a piece of itself at each line."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass
