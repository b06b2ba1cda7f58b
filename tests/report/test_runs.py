"""What a RUN may be, which runs are seeds of one setting, and what is refused."""

import json
import os

import pytest

from bapo_trl.report.logs import Logs
from bapo_trl.report.runs import group_runs, read_runs
from tests.report.made_logs import HEALTHY, made_logs, save_run


def steps(run) -> list[int]:
    return run.logs.steps.tolist()


def test_a_run_is_a_folder_a_checkpoint_or_a_state(tmp_path):
    save_run(tmp_path / "out" / "checkpoint-3", made_logs(3), summary=False)
    save_run(tmp_path / "out" / "checkpoint-5", made_logs(5), settings=None, summary=False)
    os.utime(tmp_path / "out" / "checkpoint-5" / "trainer_state.json", (1, 1))  # a copy has its files in any order
    (tmp_path / "out" / "run_settings.json").write_text('{"seed": 7}')
    (run,) = read_runs([tmp_path / "out"])  # still training: the last checkpoint
    assert (run.label, steps(run), run.settings) == ("out", [1, 2, 3, 4, 5], {"seed": 7})
    (checkpoint,) = read_runs([tmp_path / "out" / "checkpoint-3"])
    assert (checkpoint.label, steps(checkpoint), checkpoint.settings) == ("checkpoint-3", [1, 2, 3], {"seed": 7})
    save_run(tmp_path / "out", made_logs(6))
    for path in (tmp_path / "out", tmp_path / "out" / "trainer_state.json"):
        (whole,) = read_runs([path])
        assert (whole.label, steps(whole)) == ("out", [1, 2, 3, 4, 5, 6])


def test_evaluations_and_the_summary_are_no_updates():
    history = [*made_logs(2), {"step": 2, "eval_reward": 0.5}, {**made_logs(1)[0], "step": 2, "train_runtime": 1.0}]
    logs = Logs(history)
    assert logs.steps.tolist() == [1, 2]
    assert [logs.logged(name).values.tolist() for name in HEALTHY] == [[value] * 2 for value in HEALTHY.values()]


def test_the_summary_of_a_run_shorter_than_its_logging_is_its_only_log():
    """TRL merges into the summary what it has not logged yet."""
    summary = {**made_logs(1)[0], "step": 8, "train_runtime": 1.0}
    assert Logs([summary]).steps.tolist() == [8]
    assert Logs([{"step": 8, "train_runtime": 1.0}]).steps.tolist() == []


def test_a_resumed_run_counts_each_update_once():
    again = made_logs(3, first=4, reward=0.9)
    logs = Logs([*made_logs(6), {"step": 6, "eval_reward": 0.5}, *again])  # killed at 6, resumed from 3
    assert logs.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert logs.logged("reward").values.tolist() == [0.5] * 3 + [0.9] * 3
    coarser = Logs([*made_logs(6), *made_logs(2, first=4, every=4)])  # resumed from 3, logs each 4th
    assert coarser.steps.tolist() == [1, 2, 3, 4, 8]


def test_labels_are_the_shortest_that_tell_runs_apart(tmp_path):
    for name in ("a/out", "b/out", "b/other"):
        save_run(tmp_path / name, made_logs(2))
    paths = [tmp_path / "a" / "out", tmp_path / "b" / "out"]
    assert [run.label for run in read_runs(paths)] == ["a/out", "b/out"]
    assert [run.label for run in read_runs([*paths[:1], tmp_path / "b" / "other", paths[0]])] == ["out", "other"]
    states = [path.with_suffix(".trainer_state.json") for path in paths]  # as `compare` keeps them
    for path, state in zip(paths, states, strict=True):
        (path / "trainer_state.json").rename(state)
    assert [run.label for run in read_runs(states)] == ["a/out.trainer_state.json", "b/out.trainer_state.json"]


def groups(runs) -> list[tuple[str, int]]:
    return [(group.label, len(group.runs)) for group in group_runs(runs)]


def test_runs_whose_settings_differ_in_the_seed_alone_are_one_band(tmp_path):
    common = {"fingerprint": "a", "loss_type": "dapo"}
    paths = [
        save_run(tmp_path / name, made_logs(2), {**common, "seed": seed, "output_dir": name, **changes})
        for name, seed, changes in (
            ("bapo-a", 1, {}), ("bapo-b", 2, {}), ("other", 3, {"fingerprint": "b"}), ("bapo-c", 3, {})
        )
    ]  # fmt: skip
    assert groups(read_runs(paths)) == [("bapo (3 seeds)", 3), ("other", 1)]
    # two of the same seed are not seeds of one setting: something else differs, such as the code
    save_run(tmp_path / "bapo-b", made_logs(2), {**common, "seed": 1})
    assert groups(read_runs(paths)) == [("bapo-a", 1), ("bapo-b", 1), ("bapo-c", 1), ("other", 1)]


def test_without_settings_the_seeds_are_in_the_paths(tmp_path):
    names = ("low/seed1", "low/seed2", "high/seed_1", "high/seed_12", "alone")
    paths = [save_run(tmp_path / name, made_logs(2)) for name in names]
    assert groups(read_runs(paths)) == [("low (2 seeds)", 2), ("high (2 seeds)", 2), ("alone", 1)]
    assert groups(read_runs(paths[:2])) == [("low (2 seeds)", 2)]
    assert groups(read_runs([*paths[:1], paths[4]])) == [("seed1", 1), ("alone", 1)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, r"RUN .*missing: no such file or folder. Give the `output_dir`"),
        ("empty", {}, r"RUN .*empty has no trainer_state.json, nor has a checkpoint .*`save_strategy`"),
        ("other", {"trainer_state.json": '{"a": 1}'}, r"other.trainer_state.json has no log of an update"),
        ("eval", {"trainer_state.json": '{"log_history": [{"step": 1, "eval_reward": 1}]}'}, "no log of an update"),
        (
            "damaged",
            {"trainer_state.json": '{"log_history": [{"step": 1,'},
            r"trainer_state.json cannot be read \(Exp",
        ),
        ("list", {"trainer_state.json": "[1]"}, "trainer_state.json is damaged: it holds no values by name"),
        (
            "settings",
            {"trainer_state.json": json.dumps({"log_history": made_logs(1)}), "run_settings.json": "[]"},
            "run_settings.json is damaged: it holds no values by name",
        ),
    ],
)
def test_what_holds_no_run_is_refused_with_the_path_and_the_fix(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).mkdir()
        for file, text in content.items():
            (tmp_path / name / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_runs([tmp_path / name])
