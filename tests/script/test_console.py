"""What the terminal shows."""

import contextlib
import io

import pytest
import yaml
from transformers import TrainerState

from bapo_trl import BAPOConfig
from bapo_trl.advice import ADVICE, advice_line
from bapo_trl.batch.staleness import staleness_line
from bapo_trl.script.command_line import parse_arguments
from bapo_trl.script.console import Pace, Stopwatch, UpdateLines, UpdateLinesAboveBar, log_line, settings_table
from tests.helpers.commands import ROOT
from tests.helpers.script_runs import train_bapo
from tests.helpers.toy import CPU, OFF_POLICY, toy_trainer


def table(**args):
    return settings_table(BAPOConfig("unused", **{**CPU, **OFF_POLICY, **args}))


def test_settings_table_says_what_the_settings_mean():
    # 6 rows x 4 steps = 24 rows a generation; 2 micro-batches an update: 4 x 2 / 2 = 4 updates, the last on
    # samples of 3 versions ago
    lines = dict(line.strip().split("  ", 1) for line in table().splitlines())
    assert {name: value.strip() for name, value in lines.items()} == {
        "samples per generation": "24 (3 per prompt)",
        "samples per update": "12 (1 x 6 x 2)",
        "updates per generation": "4",
        "oldest age of a sample": "3 policy versions",
        "clip bounds": "low 0.6 .. 0.9, high 1.2 .. 3",
        "target share of positives": "0.5 (gradient)",
        "bound search": "upper_first, carried over from the update before",
    }


def test_settings_table_of_on_policy_and_fixed_settings():
    text = table(steps_per_generation=2, num_iterations=1, ratio_lower_start=0.9, search_scope="micro_batch")
    assert "updates per generation     1\n" in text
    assert "oldest age of a sample     0 policy versions" in text
    assert "low 0.9, high 1.2 .. 3" in text
    assert "over each micro-batch" in text
    fixed = table(ratio_lower_start=0.8, ratio_lower_max=0.8, ratio_upper_start=1.2, ratio_upper_max=1.2)
    assert fixed.endswith("clip bounds             low 0.8, high 1.2")  # nothing is searched


def test_settings_table_of_a_constant_weight():
    text = table(loss_type="vespo", positive_contribution_target=1.0, negative_weight_min=0.5)
    assert text.endswith("weight of negatives     0.5")  # not a range
    assert "target share" not in text  # it is never met
    assert "search" not in text
    fixed = {"ratio_lower_max": 0.6, "ratio_upper_start": 3.0}
    text = table(positive_contribution_target=1.0, negative_weight_min=0.5, **fixed)
    assert "low 0.6, high 3\n" in text
    assert "search" not in text


def test_settings_table_with_a_replay_queue():
    text = table(replay_fraction=0.25)
    assert "oldest age of a sample     no limit (replay queue)" in text
    assert "replay queue               0.25 of each batch, 4096 samples a rank at most\n" in f"{text}\n"
    text = table(replay_zero_advantage=True)
    assert "replay queue               in place of samples without advantage, 4096 samples" in text
    both = table(replay_fraction=0.25, replay_zero_advantage=True)
    assert "0.25 of each batch and in place of samples without advantage, 4096 samples" in both
    assert "6 policy versions (replay queue)" in table(replay_fraction=0.25, replay_max_staleness=6)


ADVISED = "Advice: loss_type vespo (docs/stability.md)."


def test_a_run_says_at_its_start_how_stale_it_is(tmp_path, capsys):
    def line(**args):
        return staleness_line(BAPOConfig("unused", **{**CPU, **OFF_POLICY, **args}))

    stale = {"steps_per_generation": 8, "num_iterations": 1}  # 4 updates
    assert line(**stale) == ("4 updates a generation, of 2 micro-batches each; samples at most 3 policy versions old.")
    stale["steps_per_generation"] = 10
    assert "at most 4 policy versions old." in line(**stale)
    # As old as the queue has them
    assert "samples of any age (replay queue)." in line(replay_fraction=0.25)
    aged = {"num_iterations": 1, "replay_fraction": 0.25, "replay_max_staleness": 3}
    assert "samples at most 3 policy versions old (replay queue)." in line(**aged)
    alone = {"steps_per_generation": 1, "gradient_accumulation_steps": 1, "num_iterations": 1}
    assert line(**alone).startswith("1 update a generation, of 1 micro-batch each; samples at most 0")

    for steps, advice in ((4, ""), (10, f" {ADVISED}")):
        trainer = toy_trainer(tmp_path, max_steps=1, steps_per_generation=steps, num_iterations=1)
        capsys.readouterr()
        trainer.train()
        assert capsys.readouterr().out.splitlines()[0] == f"{staleness_line(trainer.args)}{advice}"


@pytest.mark.parametrize(
    ("settings", "is_advised"),
    [
        # Of 2 micro-batches an update: 4, 4.5, 2 x 2, 3 x 2, 1 and less than 1 updates per generation
        ({"steps_per_generation": 8}, False),
        ({"steps_per_generation": 9}, True),
        ({"steps_per_generation": 4, "num_iterations": 2}, False),
        ({"steps_per_generation": 4, "num_iterations": 3}, True),
        ({"steps_per_generation": 2}, False),
        ({"steps_per_generation": 1}, False),
        *(({"steps_per_generation": 32, "loss_type": loss}, False) for loss in ("vespo", "sapo", "grpo", "dr_grpo")),
        ({"steps_per_generation": 32, "loss_type": "dapo"}, True),  # the default
    ],
)
def test_the_advice_is_for_many_updates_with_the_default_loss(settings, is_advised):
    args = BAPOConfig(
        "unused", **{**CPU, **OFF_POLICY, "num_iterations": 1, "search_scope": "micro_batch", **settings}
    )
    assert advice_line(args) == (ADVISED if is_advised else "")


def test_who_names_a_loss_or_a_method_gets_no_advice(tmp_path, capsys):
    (tmp_path / "own.yaml").write_text(
        "dataset_name: embedded\nsteps_per_generation: 64\nuse_cpu: true\nbf16: false\n"
    )
    (tmp_path / "chosen.yaml").write_text(f"{(tmp_path / 'own.yaml').read_text()}loss_type: dapo\n")
    for flags, is_advised in {
        ("quickstart",): True,
        ("quickstart", "--method", "bapo"): False,
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
    assert f"`{settings}`" in (ROOT / "docs" / "stability.md").read_text()
    recipe = yaml.safe_load((ROOT / "recipes" / "stale_samples.yaml").read_text())
    assert {name: recipe[name] for name in ADVICE} == ADVICE


def test_settings_table_of_a_weight_that_is_searched():
    weight = {"negative_weight_min": 0.05, "positive_contribution_target": 0.7}
    text = table(**weight, search_scope="batch")
    assert "bound search               upper_first, over each batch" in text
    assert "weight of negatives        0.05 .. 1" in text
    plain = table(loss_type="vespo")
    assert "clip bounds             none (loss_type vespo)" in plain
    assert "target share" not in plain
    weighed = table(loss_type="vespo", **weight)
    assert "target share of positives  0.7 (gradient)" in weighed
    assert "search of the weight       carried over from the update before" in weighed


def test_log_lines_of_the_weight_and_of_a_loss_without_bounds():
    log = {"bapo/positive_share": 0.7, "bapo/positive_share_initial": 0.3, "bapo/negative_weight": 0.25}
    assert log_line(1, log) == "update    1  positive share 0.70  weight of negatives 0.25"
    log |= {"bapo/clip_low": 0.6, "bapo/clip_high": 1.2, "bapo/negative_weight": 1.0}
    assert log_line(1, log) == "update    1  clip [0.60, 1.20]  positive share 0.70  (start bounds: 0.30)"


def test_log_lines():
    train = {
        "reward": 0.25, "bapo/clip_low": 0.6, "bapo/clip_high": 1.85, "bapo/positive_share": 0.5034,
        "bapo/positive_share_initial": 0.41, "entropy": 0.777, "staleness/mean": 2.5,
    }  # fmt: skip
    assert log_line(12, train) == (
        "update   12  reward 0.250  clip [0.60, 1.85]  positive share 0.50  (start bounds: 0.41)  entropy 0.78"
        "  age 2.5"
    )
    undefined = {"bapo/clip_low": 0.6, "bapo/clip_high": 1.2, "entropy": 0.5}  # without any advantage
    assert log_line(3, undefined) == "update    3  clip [0.60, 1.20]  entropy 0.50"
    assert log_line(4, {"eval_reward": 0.5, "eval_reward_best_of_4": 0.75}) == (
        "update    4  eval reward 0.500  reward best of 4 0.750"
    )
    assert log_line(4, {"eval_loss": 0.1, "eval_runtime": 3.0}) == "update    4  eval: no reward"
    assert log_line(4, {"train_runtime": 3.0}) is None


def test_log_lines_say_how_many_rows_were_masked():
    log = {"loss": 0.0, "reward": 0.25, "completions/clipped_ratio": 1.0, "bapo/masked_share": 1.0}
    assert log_line(7, log) == "update    7  reward 0.250  cut off 1.00  rows masked 100%"
    log |= {"bapo/masked_share": 0.25, "entropy": 0.5}
    assert log_line(8, log) == "update    8  reward 0.250  cut off 1.00  rows masked 25%  entropy 0.50"
    log |= {"bapo/masked_share": 0.0}
    assert "masked" not in log_line(9, log)


def test_log_lines_say_what_a_generation_brought_and_how_fast_it_went():
    log = {
        "reward": 0.25, "completions/mean_length": 123.44, "completions/clipped_ratio": 0.125,
        "frac_reward_zero_std": 0.5, "bapo/clip_low": 0.6, "bapo/clip_high": 1.2,
    }  # fmt: skip
    assert log_line(5, log, Pace(seconds=12.345, tokens_per_second=678.9, seconds_left=3661.4)) == (
        "update    5  reward 0.250  length 123.4  cut off 0.12  no signal 0.50  clip [0.60, 1.20]  12.3 s"
        "  679 tokens/s  left 1:01:01"
    )
    bounds = {"bapo/clip_low": 0.6, "bapo/clip_high": 1.2}
    rest = log_line(5, bounds, Pace(0.0521, None, None))
    assert rest == "update    5  clip [0.60, 1.20]  0.0521 s"


def test_the_stopwatch_of_a_resumed_run():
    times = iter([100.0, 100.0, 104.0, 106.0, 114.0, 114.0])
    stopwatch = Stopwatch(step=10, tokens=1000, clock=lambda: next(times))
    # 4 s for 2 updates; 400 tokens in 4 s; 8 updates left at 2 s each
    assert stopwatch.read(12, 20, tokens=1400) == Pace(2.0, 100.0, 16.0)
    # 2 s for 1 update; no generation; 6 s for 3 updates so far, 7 left
    assert stopwatch.read(13, 20) == Pace(2.0, None, 14.0)
    # 8 s for 1 update; 500 tokens in the 10 s since they were counted last; the end of the run is not known
    assert stopwatch.read(14, -1, tokens=1900) == Pace(8.0, 50.0, None)
    assert stopwatch.read(14, -1) is None


@pytest.mark.parametrize("terminal", [False, True], ids=["file", "terminal"])
def test_the_bar_and_the_lines_of_updates_stand_apart(terminal):
    """In a terminal the bar is cleared before each line; in a file there is none, and each line comes at once."""
    output = Terminal() if terminal else io.StringIO()
    callback = UpdateLinesAboveBar() if terminal else UpdateLines()
    state = TrainerState(max_steps=3, is_world_process_zero=True)
    events = [({"bapo/positive_share": 0.5, "entropy": float(step)}, step) for step in (1, 2, 3)]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        callback.on_log(None, state, None, {"eval_reward": 1.0})  # before the training
        callback.on_train_begin(None, state, None)
        for logs, step in events:
            state.global_step = step
            callback.on_step_end(None, state, None)
            callback.on_log(None, state, None, logs)
        callback.on_train_end(None, state, None)
    text = output.getvalue()
    written = [line.rpartition("\r")[2] for line in text.splitlines() if "update " in line]
    starts = [f"update    {step}  positive share 0.50  entropy {step}.00" for step in (1, 2, 3)]
    assert [line[: len(start)] for line, start in zip(written, starts, strict=True)] == starts
    assert ("it/s" in text) == ("\r" in text) == terminal


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("resumed_at", "last_line", "logged_at", "said"),
    [
        (0, None, (16, 32), ("", "")),
        (10, None, (16, 32), ("", "")),  # the checkpoint holds what was measured in updates 1 to 10
        (26, 16, (32, 48), ("", "")),
        (20, 4, (16, 32), ("  (over 12 updates)", "")),  # saved by a run with other lines
        (0, None, (1, 16), ("  (over 1 update)", "  (over 15 updates)")),  # `logging_first_step`
    ],
)
def test_a_line_says_how_many_updates_it_covers(resumed_at, last_line, logged_at, said, capsys):
    state = TrainerState(global_step=resumed_at, max_steps=64, logging_steps=16)
    state.log_history = [] if last_line is None else [{"step": last_line, "loss": 0.1}]
    lines = UpdateLines()
    lines.on_train_begin(None, state, None)
    for step in logged_at:
        state.global_step = step
        lines.on_log(None, state, None, logs={"loss": 0.1, "bapo/positive_share": 0.5, "reward": 0.25})
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition("  (")[1:] for line in printed] == [each.partition("  (")[1:] for each in said]
