"""What the terminal shows."""

import contextlib
import io
import math

import pytest
from datasets import Dataset
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from bapo_trl import BAPOConfig
from bapo_trl.batch.staleness import staleness_line
from bapo_trl.phase_clock import PHASES
from bapo_trl.script.console import ProgressBar, UpdateLines, settings_table
from tests.helpers.toy import CPU, OFF_POLICY, toy_trainer


def off_policy(**args):
    """Return settings of 6 rows x 4 steps = 24 rows a generation; an update has 2 micro-batches of 6."""
    return BAPOConfig("unused", **{**CPU, **OFF_POLICY, **args})


FIXED = {"ratio_lower_max": 0.6, "ratio_upper_start": 3.0}
SEARCH = {
    "positive contribution target": "0.5 (contribution_measure gradient)",
    "search": "search_order upper_first, search_scope carried_over",
}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, {"clip bounds": "lower 0.6 to 0.9, upper 1.2 to 3", **SEARCH}),
        (
            {"ratio_lower_start": 0.9, "search_scope": "micro_batch"},
            {
                "clip bounds": "lower 0.9, upper 1.2 to 3", **SEARCH,
                "search": "search_order upper_first, search_scope micro_batch",
            },
        ),
        (FIXED, {"clip bounds": "lower 0.6, upper 3"}),  # nothing is searched
        ({"loss_type": "vespo"}, {"clip bounds": "none (loss_type vespo)"}),
        (
            {"loss_type": "vespo", "negative_weight_min": 0.05},
            {
                "clip bounds": "none (loss_type vespo)", "weight of negative tokens": "0.05 to 1", **SEARCH,
                "search": "search_scope carried_over",
            },
        ),
        (  # a share that is never met is not searched
            {**FIXED, "negative_weight_min": 0.5, "positive_contribution_target": 1.0},
            {"clip bounds": "lower 0.6, upper 3", "weight of negative tokens": "0.5"},
        ),
    ],
)  # fmt: skip
def test_the_table_of_settings_says_what_they_mean(args, expected):
    lines = dict(line.strip().split("  ", 1) for line in settings_table(off_policy(**args)).splitlines())
    shape = {
        "samples per generation": "24 (3 per prompt)",
        "samples per update": "12 (1 process x 6 x 2 micro-batches)",
    }
    assert {name: value.strip() for name, value in lines.items()} == {**shape, **expected}


REPLAYS = {"replay_fraction": 0.25}


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"steps_per_generation": 8}, "Off-policy: 4 updates per generation (max staleness 3)."),
        ({"steps_per_generation": 10}, "Off-policy: 5 updates per generation (max staleness 4)."),
        (
            {"steps_per_generation": 1, "gradient_accumulation_steps": 1},
            "On-policy: 1 update per generation (max staleness 0), so clip bounds have no effect.",
        ),
        (
            {"steps_per_generation": 2, "loss_type": "vespo"},
            "On-policy: 1 update per generation (max staleness 0).",
        ),
        (REPLAYS, "Off-policy: 2 updates per generation (no staleness limit, with replay buffer)."),
        ({**REPLAYS, "replay_max_staleness": 3}, "Off-policy: 2 updates per generation (max staleness 3, with "
         "replay buffer)."),
    ],
)  # fmt: skip
def test_how_stale_a_run_is(args, line):
    assert staleness_line(off_policy(num_iterations=1, **args)) == line


def test_a_run_says_at_its_start_how_stale_it_is(tmp_path, capsys):
    trainer = toy_trainer(tmp_path, max_steps=1, steps_per_generation=10, num_iterations=1)
    capsys.readouterr()
    trainer.train()
    assert capsys.readouterr().out.splitlines()[0] == staleness_line(trainer.args)


LOG = {
    "reward": 0.25, "frac_reward_zero_std": 0.5, "entropy": 0.777, "bapo/clip_low": 0.6, "bapo/clip_high": 1.849,
    "bapo/positive_share": 0.7, "ratio/ess": 0.9, "grad_norm": 12.34,
}  # fmt: skip


def printed(args, logs, capsys, state=None, **steps) -> list[str]:
    """Return the lines that a training prints for logs, one update for each."""
    callback, control = UpdateLines(), TrainerControl(**steps)
    state = state or TrainerState(max_steps=20000, is_world_process_zero=True)
    callback.on_log(args, state, control, {"eval_reward": 1.0})  # before the training
    callback.on_train_begin(args, state, control)
    for log in logs:
        state.global_step += 1
        callback.on_log(args, state, control, logs=log)
    return capsys.readouterr().out.splitlines()


def test_a_row_has_the_columns_that_apply_and_fits_into_100_characters(capsys, monkeypatch):
    monkeypatch.setattr("bapo_trl.script.console.monotonic", iter([0.0, 0.5, 0.5, 0.5, 0.5]).__next__)
    above, names, row, undefined = printed(off_policy(), [LOG, {"loss": 0.1, "entropy": None}], capsys)
    for line, words in (
        (above, "mean zero entropy clip positive grad s per time"),
        (names, "update reward advantage (nats) bounds contrib. ESS norm update left"),
        (row, "1/20000 0% 0.250 50% 0.78 0.60-1.85 0.70 0.90 12.3 0.50 2:46:40"),
    ):
        assert " ".join(line.split()) == words
    assert undefined.split()[2:9] == ["-"] * 7
    assert len({len(line) for line in (above, names, row, undefined)}) == 1
    assert len(row) <= 100
    assert "bounds" not in "".join(printed(off_policy(loss_type="vespo"), [LOG], capsys))


def test_rows_fit_a_terminal_of_80_characters(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    state = TrainerState(max_steps=2000, is_world_process_zero=True)
    assert max(map(len, printed(off_policy(), [LOG], capsys, state))) <= 80


def test_rows_keep_their_columns_where_a_number_is_longer_or_not_a_number(capsys):
    logs = [LOG, {**LOG, "grad_norm": 1.23e6}, {**LOG, "grad_norm": math.nan}, LOG]
    lines = printed(off_policy(), logs, capsys)
    assert [index for index, line in enumerate(lines) if "advantage" in line] == [1, 4]  # again where it widens
    assert len({len(line) for line in lines[3:]}) == 1
    assert "nan" not in "".join(lines)


def test_the_header_comes_again_every_20_rows(capsys):
    lines = printed(off_policy(), [LOG] * 45, capsys)
    assert [index for index, line in enumerate(lines) if "advantage" in line] == [1, 23, 45]


def test_saves_and_evaluations_are_announced(capsys):
    lines = printed(
        off_policy(), [LOG, {"eval_reward_best_of_4": 0.75, "eval_reward": 0.5}], capsys, should_evaluate=True
    )
    assert lines[3:] == [
        "Evaluating after update 1 ...",
        "Evaluation after update 2: mean reward 0.500, best of 4 0.750",
    ]
    assert printed(off_policy(), [{"eval_loss": 0.1}], capsys) == ["Evaluation after update 1: no reward"]
    assert printed(off_policy(), [{"train_runtime": 3.0}], capsys) == []
    callback, state = UpdateLines(), TrainerState(global_step=3, is_world_process_zero=True)
    callback.on_train_begin(None, state, None)
    callback.on_save(off_policy(), state, None)
    assert capsys.readouterr().out == "Saved unused/checkpoint-3\n"


@pytest.mark.parametrize("terminal", [False, True], ids=["file", "terminal"])
def test_the_bar_and_the_rows_stand_apart(terminal):
    """In a terminal the bar is cleared before each row; in a file there is none, and each row comes at once."""
    output = io.StringIO()
    callback = CallbackHandler([ProgressBar(), UpdateLines()] if terminal else [UpdateLines()], *[None] * 4)
    state, control, args = TrainerState(max_steps=3, is_world_process_zero=True), TrainerControl(), off_policy()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        callback.on_train_begin(args, state, control)
        for step in (1, 2, 3):
            state.global_step = step
            callback.on_step_end(args, state, control)
            callback.on_log(args, state, control, {"bapo/positive_share": 0.5, "entropy": float(step)})
        callback.on_train_end(args, state, control)
    text = output.getvalue()
    written = [line.rpartition("\r")[2].split() for line in text.splitlines() if "0.50" in line]
    assert [(row[0], row[4]) for row in written] == [(f"{step}/3", f"{step}.00") for step in (1, 2, 3)]
    assert ("it/s" in text) == ("\r" in text) == terminal


def test_a_row_of_a_resumed_run_says_how_fast_it_is(monkeypatch, capsys):
    times = iter([100.0, 104.0, 106.0, 3706.0])
    monkeypatch.setattr("bapo_trl.script.console.monotonic", lambda: next(times))
    state = TrainerState(global_step=10, max_steps=20, is_world_process_zero=True)
    callback = UpdateLines()
    callback.on_train_begin(None, state, None)
    for state.global_step in (12, 13, 20):
        callback.on_log(off_policy(), state, TrainerControl(), logs={"loss": 0.1})
    # 4 s for 2 updates, 8 left at 2 s each; 2 s for 1, 6 s for 3 so far, 7 left; 3600 s for 7, none left
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[-2:] for row in rows] == [["2.00", "0:00:16"], ["2.00", "0:00:14"], ["514.29", "0:00:00"]]


def test_the_first_row_counts_a_generation_once_per_generation(monkeypatch, capsys):
    monkeypatch.setattr("bapo_trl.script.console.monotonic", lambda: 0.0)
    args = off_policy(num_iterations=1, steps_per_generation=8)  # 4 updates per generation
    state = TrainerState(max_steps=12, is_world_process_zero=True)
    callback = UpdateLines()
    callback.on_train_begin(None, state, None)
    times = dict.fromkeys((f"time/{name}" for name in PHASES), 0.0)
    with_generation = {**times, "time/generation": 95.0, "time/scoring": 5.0, "time/training": 1.5, "time/other": 0.5}
    without = {**times, "time/training": 2.0}
    for state.global_step, log in (
        (1, with_generation),
        (2, without),
        (5, with_generation | {"time/generation": 28.0}),
    ):
        callback.on_log(args, state, TrainerControl(), logs={"loss": 0.1, **log})
    rows = [line for line in capsys.readouterr().out.splitlines() if "/12" in line]
    # 11 updates of 2 s and 2 generations of 100 s; the last line: 3 updates of 2 s, and 99.5 s for one generation
    assert [row.split()[-1] for row in rows] == ["0:03:42", "0:03:40", "0:01:54"]


def test_a_run_that_resumes_within_a_generation_step_counts_the_next_ones_too(monkeypatch, capsys):
    monkeypatch.setattr("bapo_trl.script.console.monotonic", lambda: 0.0)
    args = off_policy(num_iterations=1, steps_per_generation=8)  # 4 updates per generation
    state = TrainerState(global_step=3, max_steps=9, is_world_process_zero=True)
    callback = UpdateLines()
    callback.on_train_begin(None, state, None)
    times = dict.fromkeys((f"time/{name}" for name in PHASES), 0.0)
    log = {"loss": 0.1, **times, "time/generation": 100.0, "time/training": 2.0}
    state.global_step = 4
    callback.on_log(args, state, TrainerControl(), logs=log)
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "/9" in line)
    assert row.split()[-1] == "0:03:30"  # 5 updates of 2 s, and generations before the updates 5 and 9


def test_completions_that_the_terminal_cannot_encode_end_no_training(tmp_path, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    dataset = Dataset.from_dict({"prompt": ["1+\u00e9="] * 24})
    trainer = toy_trainer(tmp_path, max_steps=1, log_completions=True, trainer_args={"train_dataset": dataset})
    trainer.train()
    terminal.flush()
    assert b" 1+?= " in terminal.buffer.getvalue()
