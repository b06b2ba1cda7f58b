"""What a RUN may be, which runs are seeds of one setting, and what is rejected."""

import os

import pytest

from bapo_trl.errors import InputError
from bapo_trl.report.runs import Logs, group_runs, read_runs
from tests.report.made_logs import made_logs, save_run


def test_a_run_is_a_folder_a_checkpoint_or_a_state(tmp_path):
    save_run(tmp_path / "out" / "checkpoint-3", made_logs(3), summary=False)
    save_run(tmp_path / "out" / "checkpoint-15", made_logs(5), summary=False)
    os.utime(tmp_path / "out" / "checkpoint-15" / "trainer_state.json", (1, 1))  # a copy has its files in any order
    (tmp_path / "out" / "run_settings.json").write_text('{"seed": 7}')

    def read(*parts):
        (run,) = read_runs([tmp_path.joinpath("out", *parts)])
        return run.label, run.logs.steps, run.settings

    assert read() == ("out", [1, 2, 3, 4, 5], {"seed": 7})  # still training: the last checkpoint
    assert read("checkpoint-3") == ("checkpoint-3", [1, 2, 3], {"seed": 7})
    save_run(tmp_path / "out", made_logs(16))
    assert read() == read("trainer_state.json") == ("out", list(range(1, 17)), {"seed": 7})
    save_run(tmp_path / "out" / "checkpoint-17", made_logs(17), summary=False)  # resumed from there
    assert read() == ("out", list(range(1, 18)), {"seed": 7})


def test_a_resumed_run_counts_each_update_once():
    again = made_logs(3, first=4, reward=0.9)
    logs = Logs([*made_logs(6), {"step": 6, "eval_reward": 0.5}, *again])  # killed at 6, resumed from 3
    assert logs.steps == [1, 2, 3, 4, 5, 6]
    assert logs.points("reward").values.tolist() == [0.5] * 3 + [0.9] * 3
    coarser = Logs([*made_logs(6), *made_logs(2, first=4, every=4)])  # resumed from 3, logs each 4th
    assert coarser.steps == [1, 2, 3, 4, 8]


def test_runs_whose_settings_differ_in_the_seed_alone_are_one_band(tmp_path):
    def titles():
        return [(group.title, len(group.runs)) for group in group_runs(read_runs(paths))]

    common = {"fingerprint": "a", "facts": {"method": "BAPO"}}
    changes = [
        ("bapo-1", {"seed": 1}), ("bapo-2", {"seed": 2}), ("other", {"seed": 3, "fingerprint": "b"}),
        ("bapo-3", {"seed": 3}),
    ]  # fmt: skip
    paths = [save_run(tmp_path / name, made_logs(2), {**common, **own}) for name, own in changes]
    paths.append(save_run(tmp_path / "plain", made_logs(2)))  # as TRL leaves it
    assert titles() == [("BAPO: bapo (3 seeds)", 3), ("BAPO: other", 1), ("plain", 1)]
    # two of the same seed are not seeds of one setting: something else differs, such as the code
    save_run(tmp_path / "bapo-2", made_logs(2), {**common, "seed": 1})
    assert [title for title, _ in titles()] == ["BAPO: bapo-1", "BAPO: bapo-2", "BAPO: bapo-3", "BAPO: other", "plain"]
    # settings whose runs are named alike
    for name, fingerprint, seed in (("bapo-1", "a", 1), ("bapo-2", "a", 2), ("bapo-3", "b", 3), ("other", "b", 4)):
        save_run(tmp_path / name, made_logs(2), {"fingerprint": fingerprint, "seed": seed})
    (tmp_path / "other").rename(tmp_path / "bapo-4")
    paths = [tmp_path / f"bapo-{number}" for number in (1, 2, 3, 4)]
    assert titles() == [("bapo-1, bapo-2", 2), ("bapo-3, bapo-4", 2)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, r"RUN .*missing: no such file or folder. Give the `output_dir`"),
        ("empty", {}, r"RUN .*empty has no trainer_state.json, nor has a checkpoint .*`save_strategy`"),
        ("eval", {"trainer_state.json": '{"log_history": [{"step": 1, "eval_reward": 1}]}'}, "no log of an update"),
        ("damaged", {"trainer_state.json": '{"log_history": [{"step": 1,'}, r"state.json cannot be read \(Exp"),
    ],
)  # fmt: skip
def test_what_holds_no_run_is_rejected_with_the_path_and_the_fix(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).mkdir()
        for file, text in content.items():
            (tmp_path / name / file).write_text(text)
    with pytest.raises(InputError, match=message):
        read_runs([tmp_path / name])
