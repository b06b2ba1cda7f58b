"""What the terminal shows."""

import contextlib
import io

import pytest
import yaml
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from bapo_trl import BAPOConfig
from bapo_trl.batch.staleness import staleness_line
from bapo_trl.inputs.advice import ADVICE, advice_line
from bapo_trl.script.command_line import parse_arguments
from bapo_trl.script.console import ProgressBar, UpdateLines, log_line, settings_table
from tests.helpers.commands import ROOT
from tests.helpers.script_runs import train_bapo
from tests.helpers.toy import CPU, OFF_POLICY, toy_trainer


def off_policy(**args):
    """Return settings of 6 rows x 4 steps = 24 rows a generation; an update has 2 micro-batches of 6."""
    return BAPOConfig("unused", **{**CPU, **OFF_POLICY, **args})


FIXED = {"ratio_lower_max": 0.6, "ratio_upper_start": 3.0}
SEARCH = {"target share of positives": "0.5 (gradient)", "search": "upper_first, carried_over"}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, {"clip bounds": "low 0.6 .. 0.9, high 1.2 .. 3", **SEARCH}),
        (
            {"ratio_lower_start": 0.9, "search_scope": "micro_batch"},
            {"clip bounds": "low 0.9, high 1.2 .. 3", **SEARCH, "search": "upper_first, micro_batch"},
        ),
        (FIXED, {"clip bounds": "low 0.6, high 3"}),  # nothing is searched
        ({"loss_type": "vespo"}, {"clip bounds": "none (loss_type vespo)"}),
        (
            {"loss_type": "vespo", "negative_weight_min": 0.05},
            {
                "clip bounds": "none (loss_type vespo)", "weight of negatives": "0.05 .. 1", **SEARCH,
                "search": "carried_over",
            },
        ),
        (  # a share that is never met is not searched
            {**FIXED, "negative_weight_min": 0.5, "positive_contribution_target": 1.0},
            {"clip bounds": "low 0.6, high 3", "weight of negatives": "0.5"},
        ),
    ],
)  # fmt: skip
def test_the_table_of_settings_says_what_they_mean(args, expected):
    lines = dict(line.strip().split("  ", 1) for line in settings_table(off_policy(**args)).splitlines())
    shape = {"samples per generation": "24 (3 per prompt)", "samples per update": "12 (1 x 6 x 2)"}
    assert {name: value.strip() for name, value in lines.items()} == {**shape, **expected}


REPLAYS = {"replay_fraction": 0.25}
ADVISED = "Advice: loss_type vespo (docs/which_loss.md)."


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"steps_per_generation": 8}, "4 updates a generation, of 2 micro-batches each; samples at most 3 policy"),
        ({"steps_per_generation": 10}, "5 updates a generation, of 2 micro-batches each; samples at most 4 policy"),
        (
            {"steps_per_generation": 1, "gradient_accumulation_steps": 1},
            "1 update a generation, of 1 micro-batch each; samples at most 0 policy versions old.",
        ),
        (REPLAYS, "2 updates a generation, of 2 micro-batches each; samples of any age (replay queue)."),
        ({**REPLAYS, "replay_max_staleness": 3}, "2 updates a generation, of 2 micro-batches each; samples at most 3 "
         "policy versions old (replay queue)."),
    ],
)  # fmt: skip
def test_how_stale_a_run_is(args, line):
    assert staleness_line(off_policy(num_iterations=1, **args)).startswith(line)


def test_a_run_says_at_its_start_how_stale_it_is_and_the_advice(tmp_path, capsys):
    trainer = toy_trainer(tmp_path, max_steps=1, steps_per_generation=10, num_iterations=1)
    capsys.readouterr()
    trainer.train()
    assert capsys.readouterr().out.splitlines()[0] == f"{staleness_line(trainer.args)} {ADVISED}"


@pytest.mark.parametrize(
    ("settings", "is_advised"),
    [
        # Of 2 micro-batches an update: 4, 4.5, 2 x 2, 3 x 2 and less than 1 updates per generation
        ({"steps_per_generation": 8}, False),
        ({"steps_per_generation": 9}, True),
        ({"steps_per_generation": 4, "num_iterations": 2}, False),
        ({"steps_per_generation": 4, "num_iterations": 3}, True),
        ({"steps_per_generation": 1}, False),
        *(({"steps_per_generation": 32, "loss_type": loss}, False) for loss in ("vespo", "sapo", "grpo", "dr_grpo")),
        ({"steps_per_generation": 32, "loss_type": "dapo"}, True),  # the default
    ],
)
def test_the_advice_is_for_many_updates_with_the_default_loss(settings, is_advised):
    args = off_policy(**{"num_iterations": 1, "search_scope": "micro_batch", **settings})
    assert advice_line(args) == (ADVISED if is_advised else "")


def test_who_names_a_loss_or_a_method_gets_no_advice(tmp_path, capsys):
    own = "dataset_name: embedded\nsteps_per_generation: 64\nuse_cpu: true\nbf16: false\n"
    (tmp_path / "own.yaml").write_text(own)
    (tmp_path / "chosen.yaml").write_text(f"{own}loss_type: dapo\n")
    for flags, is_advised in {
        ("quickstart",): True,
        ("quickstart", "--method=grpo"): False,
        ("quickstart", "--loss-type", "dapo"): False,  # the default, named
        (str(tmp_path / "own.yaml"),): True,
        (str(tmp_path / "chosen.yaml"),): False,
    }.items():
        arguments = ["--config", *flags, "--output_dir", str(tmp_path / "out")]
        assert advice_line(parse_arguments(arguments)[1]) == (ADVISED if is_advised else ""), flags
    train_bapo.main(["--config", "quickstart", "--method", "bapo", "--dry_run", "true"])
    assert "Advice" not in capsys.readouterr().out
    train_bapo.main(["--config", "quickstart", "--dry_run", "true"])
    assert f"\n  {ADVISED}\n" in capsys.readouterr().out


def test_the_page_and_the_recipe_are_of_the_advice():
    settings = ", ".join(f'{name}="{value}"' for name, value in ADVICE.items())
    assert f"`{settings}`" in (ROOT / "docs" / "which_loss.md").read_text()
    recipe = yaml.safe_load((ROOT / "recipes" / "stale_samples.yaml").read_text())
    assert {name: recipe[name] for name in ADVICE} == ADVICE


BOUNDS = {"bapo/clip_low": 0.6, "bapo/clip_high": 1.849}
SHARES = {"bapo/positive_share": 0.7, "bapo/positive_share_initial": 0.3}


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            {
                "reward": 0.25, "completions/mean_length": 123.44, "completions/clipped_ratio": 0.125,
                "frac_reward_zero_std": 0.5, **BOUNDS, **SHARES, "bapo/negative_weight": 1.0, "entropy": 0.777,
                "staleness/mean": 2.5, "bapo/masked_share": 0.0,
            },
            "reward 0.250  length 123.4  cut off 0.12  no signal 0.50  clip [0.60, 1.85]  positive share 0.70"
            "  at start bounds 0.30  entropy 0.78  age 2.5",
        ),
        ({**BOUNDS, "entropy": 0.5}, "clip [0.60, 1.85]  entropy 0.50"),  # without any advantage
        # A loss without bounds
        ({**SHARES, "bapo/negative_weight": 0.25}, "positive share 0.70  weight of negatives 0.25"),
        ({"loss": 0.0, "reward": 0.25, "bapo/masked_share": 1.0}, "reward 0.250  rows masked 100%"),
        ({"eval_reward": 0.5, "eval_reward_best_of_4": 0.75}, "eval reward 0.500  best of 4 0.750"),
        ({"eval_loss": 0.1, "eval_runtime": 3.0}, "eval: no reward"),
        ({"train_runtime": 3.0}, None),
    ],
)  # fmt: skip
def test_log_lines(log, line):
    assert log_line(12, log) == (None if line is None else f"update   12  {line}")


@pytest.mark.parametrize("terminal", [False, True], ids=["file", "terminal"])
def test_the_bar_and_the_lines_of_updates_stand_apart(terminal):
    """In a terminal the bar is cleared before each line; in a file there is none, and each line comes at once."""
    output = io.StringIO()
    callback = CallbackHandler([ProgressBar(), UpdateLines()] if terminal else [UpdateLines()], *[None] * 4)
    state, control = TrainerState(max_steps=3, is_world_process_zero=True), TrainerControl()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        callback.on_log(None, state, control, {"eval_reward": 1.0})  # before the training
        callback.on_train_begin(None, state, control)
        for step in (1, 2, 3):
            state.global_step = step
            callback.on_step_end(None, state, control)
            callback.on_log(None, state, control, {"bapo/positive_share": 0.5, "entropy": float(step)})
        callback.on_train_end(None, state, control)
    text = output.getvalue()
    written = [line.rpartition("\r")[2] for line in text.splitlines() if "update " in line]
    starts = [f"update    {step}  positive share 0.50  entropy {step}.00" for step in (1, 2, 3)]
    assert [line[: len(start)] for line, start in zip(written, starts, strict=True)] == starts
    assert ("it/s" in text) == ("\r" in text) == terminal


def lines_of(state, logged_at, capsys) -> list[str]:
    """Return what is told behind the values at these updates, beginning from a state."""
    lines = UpdateLines()
    lines.on_train_begin(None, state, None)
    for step in logged_at:
        state.global_step = step
        lines.on_log(None, state, None, logs={"loss": 0.1, "reward": 0.25})
    return [line.partition("reward 0.250")[2] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("resumed_at", "last_line", "logged_at", "said"),
    [
        (0, None, (16, 32), ("", "")),
        (10, None, (16, 32), ("", "")),  # the checkpoint holds what was measured in updates 1 to 10
        (26, 16, (32, 48), ("", "")),
        (20, 4, (16, 32), ("over 12 updates)", "")),  # saved by a run with other lines
        (0, None, (1, 16), ("over 1 update)", "over 15 updates)")),  # `logging_first_step`
    ],
)
def test_a_line_says_how_many_updates_it_covers(resumed_at, last_line, logged_at, said, capsys):
    state = TrainerState(global_step=resumed_at, max_steps=64, logging_steps=16)
    state.log_history = [] if last_line is None else [{"step": last_line, "loss": 0.1}]
    assert [line.partition("  (")[2] for line in lines_of(state, logged_at, capsys)] == [*said]


def test_a_line_of_a_resumed_run_says_how_fast_it_goes(monkeypatch, capsys):
    times = iter([100.0, 104.0, 106.0, 3706.0])
    monkeypatch.setattr("bapo_trl.script.console.monotonic", lambda: next(times))
    # 4 s for 2 updates, 8 left at 2 s each; 2 s for 1, 6 s for 3 so far, 7 left; 3600 s for 7, none left
    told = lines_of(TrainerState(global_step=10, max_steps=20, logging_steps=1), (12, 13, 20), capsys)
    paces = ["  2 s  left 0:00:16", "  2 s  left 0:00:14", "  514 s  left 0:00:00"]
    assert [line.partition("  (")[0] for line in told] == paces
