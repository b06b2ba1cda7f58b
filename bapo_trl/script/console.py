"""What a training run says on the terminal: the settings once, then a line for each log, with how fast it goes."""

from collections.abc import Mapping
from datetime import timedelta
from time import monotonic

from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import ProgressCallback, TrainerCallback

from ..bapo_config import BAPOConfig
from ..plan.dry_run import aligned_rows
from ..report.runs import is_of_updates


def settings_table(args: BAPOConfig, method: str | None = None) -> str:
    """Return a table of what the settings mean, on as many processes as there are, with the name of `--method`."""
    micro_batch, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    samples = args.world_size * micro_batch * accumulated
    rows = {"method": method} if method else {}
    rows["samples per generation"] = f"{args.generation_batch_size} ({args.num_generations} per prompt)"
    rows["samples per update"] = f"{samples} ({args.world_size} x {micro_batch} x {accumulated})"
    rows["clip bounds"] = f"none (loss_type {args.loss_type})"
    if args.has_clip_bounds:
        low = _range(args.ratio_lower_start, args.ratio_lower_max)
        rows["clip bounds"] = f"low {low}, high {_range(args.ratio_upper_start, args.ratio_upper_max)}"
    if args.negative_weight_min < 1:
        largest = args.negative_weight_min if args.has_constant_weight else 1
        rows["weight of negatives"] = _range(args.negative_weight_min, largest)
    if args.is_adaptive:
        order = f"{args.search_order}, " if args.has_clip_bounds else ""
        rows["target share of positives"] = f"{args.positive_contribution_target:g} ({args.contribution_measure})"
        rows["search"] = f"{order}{args.search_scope}"
    return aligned_rows(rows.items())


def _range(start: float, maximum: float) -> str:
    return f"{start:g}" if start == maximum else f"{start:g} .. {maximum:g}"


def log_line(step: int, logs: Mapping[str, float]) -> str | None:
    """
    Return a line on a training or evaluation log, or `None` if the log has nothing of either.

    Undefined values are missing, and so are those of a generation where there was none since the last log.
    """

    def show(label: str, name: str, form: str = ".2f", is_told: bool = True) -> list[str]:
        return [f"{label} {logs[name]:{form}}"] if name in logs and is_told else []

    if any(name.startswith("eval_") for name in logs):
        shown = [name for name in logs if name == "eval_reward" or "reward_best_of" in name]
        names = [name.replace("eval_reward_best", "best").replace("_", " ") for name in shown]
        parts = [f"{name} {logs[key]:.3f}" for name, key in zip(names, shown, strict=True)] or ["eval: no reward"]
        return f"update {step:>4}  " + "  ".join(parts)
    if not is_of_updates(logs):
        return None
    has_bounds = "bapo/clip_low" in logs
    parts = [
        *show("reward", "reward", ".3f"),
        *show("length", "completions/mean_length", ".1f"),
        *show("cut off", "completions/clipped_ratio"),
        *show("no signal", "frac_reward_zero_std"),
        *show("rows masked", "bapo/masked_share", ".0%", logs.get("bapo/masked_share", 0) > 0),
        *([f"clip [{logs['bapo/clip_low']:.2f}, {logs['bapo/clip_high']:.2f}]"] if has_bounds else []),
        *show("positive share", "bapo/positive_share"),
        *show("at start bounds", "bapo/positive_share_initial", is_told=has_bounds),
        *show("weight of negatives", "bapo/negative_weight", is_told=logs.get("bapo/negative_weight", 1) < 1),
        *show("entropy", "entropy"),
        *show("age", "staleness/mean", ".1f"),
    ]
    return f"update {step:>4}  " + "  ".join(parts)


class UpdateLines(TrainerCallback):
    """Lines on the terminal that show what matters instead of every metric; the trackers get them all."""

    _is_training = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._is_training = True
        self._first = self._last = (state.global_step, monotonic())
        # Update up to which the lines have told of all; a checkpoint within a line holds what was measured for it
        self._covered = max((log["step"] for log in state.log_history if is_of_updates(log)), default=0)

    def on_train_end(self, args, state, control, **kwargs):
        self._is_training = False

    def on_log(self, args, state, control, logs=None, **kwargs):
        line = log_line(state.global_step, logs) if self._is_training else None
        if line is not None and is_of_updates(logs):
            line += self._pace(state) + self._coverage(state)
        if line is not None and state.is_world_process_zero:
            with tqdm.external_write_mode():  # no piece of a bar is left before the line
                print(line, flush=True)

    def _pace(self, state) -> str:
        """Return seconds an update, its share of the generation too, and what is left at the mean speed so far."""
        (first, start), (last, then) = self._first, self._last
        step, now = self._last = (state.global_step, monotonic())
        if step == last:
            return ""
        left = timedelta(seconds=round((now - start) / (step - first) * (state.max_steps - step)))
        return f"  {(now - then) / (step - last):.3g} s  left {left}"

    def _coverage(self, state) -> str:
        """Return how many updates a line is the mean of, if not `logging_steps`: after a resume, or at the first."""
        count, self._covered = state.global_step - self._covered, state.global_step
        return "" if count in (0, state.logging_steps) else f"  (over {count} update{'s' * (count != 1)})"


class ProgressBar(ProgressCallback):
    """The bar without the metrics. For a terminal: in a file, it would leave a piece of itself at each line."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass
