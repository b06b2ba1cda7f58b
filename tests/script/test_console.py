"""What the terminal and the report show."""

import pytest

from bapo_trl import BAPOConfig
from bapo_trl.script.console import log_line, settings_table
from bapo_trl.script.report import save_report
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
        "bound search": "upper_first, over each batch",
    }


def test_oldest_age_where_an_update_spans_two_generations():
    # 5 micro-batches a generation, 3 an update: a generation can begin with the last micro-batch of an update, and its
    # other four are in the next two. Version 0 samples are trained on at version 2.
    text = table(search_scope="micro_batch", gradient_accumulation_steps=3, steps_per_generation=5, num_iterations=1)
    assert "oldest age of a sample     2 policy versions" in text


def test_settings_table_of_on_policy_and_fixed_settings():
    text = table(steps_per_generation=2, num_iterations=1, ratio_lower_start=0.9, search_scope="micro_batch")
    assert "updates per generation     1\n" in text
    assert "oldest age of a sample     0 policy versions" in text
    assert "low 0.9, high 1.2 .. 3" in text
    assert "over each micro-batch" in text


def test_settings_table_with_a_replay_queue():
    text = table(replay_fraction=0.25)
    assert "oldest age of a sample     no limit (replay queue)" in text
    assert "replay queue               0.25 of each batch, 4096 samples a rank at most, fifo" in text
    text = table(replay_zero_advantage=True)
    assert "replay queue               in place of samples without advantage, 4096 samples" in text
    both = table(replay_fraction=0.25, replay_zero_advantage=True)
    assert "0.25 of each batch and in place of samples without advantage, 4096 samples" in both
    assert "6 policy versions (replay queue)" in table(replay_fraction=0.25, replay_max_staleness=6)


def test_log_lines():
    train = {
        "reward": 0.25, "bapo/clip_low": 0.6, "bapo/clip_high": 1.85, "bapo/positive_share": 0.5034,
        "bapo/positive_share_initial": 0.41, "entropy": 0.777, "staleness/mean": 2.5,
    }  # fmt: skip
    assert log_line(12, train) == (
        "update   12  reward 0.250  clip [0.60, 1.85]  positive share 0.50  (start bounds: 0.41)  entropy 0.78"
        "  age 2.5"
    )
    undefined = {"bapo/clip_low": 0.6, "bapo/clip_high": 1.2, "bapo/positive_share": None, "entropy": 0.5}
    assert log_line(3, undefined) == "update    3  clip [0.60, 1.20]  entropy 0.50"
    assert log_line(4, {"eval_reward": 0.5, "eval_reward_best_of_4": 0.75}) == (
        "update    4  eval reward 0.500  reward best of 4 0.750"
    )
    assert log_line(4, {"train_runtime": 3.0}) is None


def test_report_of_a_real_run(tmp_path):
    trainer = toy_trainer(tmp_path)
    trainer.train()
    path = save_report(trainer.state.log_history, tmp_path / "new" / "report.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert path.stat().st_size > 10_000


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to draw"):
        save_report([{"train_runtime": 1.0}], tmp_path / "report.png")
