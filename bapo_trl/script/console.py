"""What a training run says on the terminal: the settings once, then a line for each log, with how fast it goes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from transformers import ProgressCallback, TrainerCallback

from ..bapo_config import BAPOConfig
from ..plan.dry_run import aligned_rows, count
from ..report.logs import is_of_updates
from ..staleness import oldest_age


def settings_table(args: BAPOConfig, method: str | None = None) -> str:
    """Return a table of what the settings mean, on as many processes as there are, with the name of `--method`."""
    counts = count(args, args.world_size, None)
    shape = f"{counts.processes} x {args.per_device_train_batch_size} x {args.gradient_accumulation_steps}"
    rows = [
        *([("method", method)] if method else []),
        ("samples per generation", f"{counts.samples} ({args.num_generations} per prompt)"),
        ("samples per update", f"{counts.samples_per_update} ({shape})"),
        ("updates per generation", f"{counts.updates_per_generation:g}"),
        ("oldest age of a sample", oldest_age(args)),
        *_balance_rows(args),
    ]
    if args.uses_replay:
        shares = [f"{args.replay_fraction:g} of each batch"] if args.replay_fraction else []
        shares += ["in place of samples without advantage"] if args.replay_zero_advantage else []
        rows.append(("replay queue", f"{' and '.join(shares)}, {args.replay_capacity} samples a rank at most"))
    if args.uses_partial_rollouts:
        held, chunk = args.groups_held, args.partial_rollout_chunk_length
        rows.append(("partial rollouts", f"{held} groups a rank held over, looked at every {chunk} tokens"))
    return aligned_rows(rows)


def _balance_rows(args: BAPOConfig) -> list[tuple[str, str]]:
    target = ("target share of positives", f"{args.positive_contribution_target:g} ({args.contribution_measure})")
    scope = {
        "batch": "over each batch",
        "micro_batch": "over each micro-batch",
        "carried_over": "carried over from the update before",
    }[args.search_scope]
    rows = [("clip bounds", f"none (loss_type {args.loss_type})")]
    if args.has_clip_bounds:
        low = _range(args.ratio_lower_start, args.ratio_lower_max)
        high = _range(args.ratio_upper_start, args.ratio_upper_max)
        rows = [("clip bounds", f"low {low}, high {high}")]
        if args.is_adaptive:
            rows += [target, ("bound search", f"{args.search_order}, {scope}")]
    elif args.is_adaptive:
        rows += [target, ("search of the weight", scope)]
    if args.negative_weight_min < 1:
        is_constant = args.has_constant_weight
        rows.append(("weight of negatives", f"{args.negative_weight_min:g}{'' if is_constant else ' .. 1'}"))
    return rows


def _range(start: float, maximum: float) -> str:
    return f"{start:g}" if start == maximum else f"{start:g} .. {maximum:g}"


@dataclass(frozen=True)
class Pace:
    """Speed of a run at one of its log lines."""

    seconds: float  # of an update since the last line, on average, with its share of the generation
    tokens_per_second: float | None  # of prompts and completions on all processes; `None` without a generation since
    seconds_left: float | None  # at the mean speed since the start; `None` if the number of updates is not known


class Stopwatch:
    """Measures the pace from line to line."""

    def __init__(self, step: int, tokens: float, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._first = self._last = (step, clock())
        self._last_tokens = (tokens, clock())

    def read(self, step: int, max_steps: int, tokens: float | None = None) -> Pace | None:
        """
        Return the pace, or `None` if there was no update since the last line.

        `max_steps` is 0 or less where it is not known; `tokens` is their number so far, if counted since that line.
        """
        now = self._clock()
        (first_step, start), (last_step, last) = self._first, self._last
        if step <= last_step:
            return None
        self._last = (step, now)
        speed = None
        if tokens is not None and now > self._last_tokens[1]:
            speed = (tokens - self._last_tokens[0]) / (now - self._last_tokens[1])
            self._last_tokens = (tokens, now)
        left = (max_steps - step) * (now - start) / (step - first_step) if max_steps > 0 else None
        return Pace((now - last) / (step - last_step), speed, left)


def log_line(step: int, logs: Mapping[str, float], pace: Pace | None = None) -> str | None:
    """
    Return one line on a training or evaluation log, or `None` if the log has nothing of either.

    Undefined values are missing, and so are those of a generation where there was none since the last log.
    """

    def show(label: str, name: str, digits: int = 2) -> list[str]:
        return [f"{label} {logs[name]:.{digits}f}"] if name in logs else []

    if any(name.startswith("eval_") for name in logs):
        parts = show("eval reward", "eval_reward", 3) or ["eval: no reward"]
        for name in logs:
            if "reward_best_of" in name:
                parts += show(name[5:].replace("_", " "), name, 3)
        return f"update {step:>4}  " + "  ".join(parts)
    if not is_of_updates(logs):
        return None

    parts = [
        *show("reward", "reward", 3),
        *show("length", "completions/mean_length", 1),
        *show("cut off", "completions/clipped_ratio"),
        *show("no signal", "frac_reward_zero_std"),
    ]
    if logs.get("bapo/masked_share", 0) > 0:
        parts.append(f"rows masked {logs['bapo/masked_share']:.0%}")
    if "bapo/clip_low" in logs:
        parts.append(f"clip [{logs['bapo/clip_low']:.2f}, {logs['bapo/clip_high']:.2f}]")
    parts += show("positive share", "bapo/positive_share")
    if "bapo/clip_low" in logs and "bapo/positive_share_initial" in logs:
        parts.append(f"(start bounds: {logs['bapo/positive_share_initial']:.2f})")
    if logs.get("bapo/negative_weight", 1) < 1:
        parts += show("weight of negatives", "bapo/negative_weight")
    parts += [*show("entropy", "entropy"), *show("age", "staleness/mean", 1)]
    if pace is not None:
        parts.append(f"{pace.seconds:.3g} s")
        parts += [] if pace.tokens_per_second is None else [f"{pace.tokens_per_second:.0f} tokens/s"]
        parts += [] if pace.seconds_left is None else [f"left {timedelta(seconds=round(pace.seconds_left))}"]
    return f"update {step:>4}  " + "  ".join(parts)


class UpdateLines(TrainerCallback):
    """Lines on the terminal that show what matters instead of every metric; the trackers get them all."""

    stopwatch: Stopwatch | None = None  # from the begin of the training
    _covered = 0  # update up to which the lines have told of all

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self.stopwatch = Stopwatch(state.global_step, state.num_input_tokens_seen)
        # A checkpoint within a line holds what was measured for it
        self._covered = max((log["step"] for log in state.log_history if is_of_updates(log)), default=0)

    def on_train_end(self, args, state, control, **kwargs):
        super().on_train_end(args, state, control, **kwargs)
        self.stopwatch = None

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.stopwatch is None:
            return
        tokens = logs.get("num_tokens")
        pace = self.stopwatch.read(state.global_step, state.max_steps, tokens) if is_of_updates(logs) else None
        line = log_line(state.global_step, logs, pace)
        if line is not None and is_of_updates(logs):
            line += self._coverage(state)
        if line is not None and state.is_world_process_zero:
            self.write(line)

    def _coverage(self, state) -> str:
        """Return how many updates a line is the mean of, if not `logging_steps`: after a resume, or at the first."""
        count, self._covered = state.global_step - self._covered, state.global_step
        return "" if count in (0, state.logging_steps) else f"  (over {count} update{'s' * (count != 1)})"

    def write(self, line: str) -> None:
        """Show a line at once."""
        print(line, flush=True)


class UpdateLinesAboveBar(UpdateLines, ProgressCallback):
    """The same above a progress bar: for a terminal. In a file, it would leave a piece of the bar at each line."""

    def write(self, line: str) -> None:
        """Show a line without a piece of the bar."""
        bar: Any = self.training_bar  # from the begin of the training
        bar.write(line)
