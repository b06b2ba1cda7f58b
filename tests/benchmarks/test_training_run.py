"""The training runs of the studies in `benchmarks/`: one run of each trainer, and the pool that makes many."""

import json
from dataclasses import replace

import pytest

from benchmarks import run_pool, training_run
from benchmarks.stability.figures import HARD_TASK, draw_arms, draw_bounds, draw_staleness
from benchmarks.stability.plan import FULL, Run, StalenessSetting
from benchmarks.stability.rows import run_to_row
from benchmarks.stability.summary import summarize
from tests.helpers.forked import run_python


pytestmark = pytest.mark.trainings


def run_for_real(spec):
    process = run_python(["-m", "benchmarks.training_run", json.dumps(spec)])
    return json.loads(process.stdout.splitlines()[-1])


def short_run(arm, updates_per_generation, learning_rate=1e-3):
    run = Run("reported", "sums", arm, StalenessSetting(updates_per_generation), learning_rate, seed=0)
    spec = {**replace(FULL, updates={"sums": 4}).spec(run), "held_out_every": 2}
    return run, spec, run_for_real(spec)


@pytest.mark.parametrize("arm", ["CISPO", "4 micro-batches, micro-batch scope"])
def test_a_run_gives_what_the_study_reports(arm):
    """A real run in a process of its own, with each of the two trainers, and with updates of several micro-batches."""
    run, spec, result = short_run(arm, 2)
    assert spec["trainer"] == ("GRPO" if arm == "CISPO" else "BAPO")
    row = run_to_row(run, result, spec["args"])
    assert (row["updates"], len(result["reward"])) == (4, 2)
    assert [point[0] for point in row["held_out"]] == [0, 2, 4]
    assert 0.3 < row["held_out"][0][1] < 0.6  # what the warm start can do
    assert 4 * 128 * 2 < row["generated_tokens"] < 4 * 128 * 4
    assert "bins" not in row  # of an arm that no figure draws
    assert summarize([row])[0]["seeds"] == [0]


def test_metrics_without_a_value_are_left_out(monkeypatch):
    """TRL logs `None` where all values of a metric are NaN, such as the share of an update that clips every token."""

    def train(trainer):
        shares = [None, 0.25, float("nan"), 0.75]
        trainer.state.log_history = [{"loss": 0.0, "entropy": 1.0, "bapo/positive_share": share} for share in shares]
        trainer.state.log_history[0] |= {"reward": 0.5, "completions/mean_length": 2.0}

    monkeypatch.setattr(training_run.MeasuredBAPOTrainer, "train", train)
    monkeypatch.setattr(training_run, "keep_freed_memory", lambda: None)  # of this process
    result = training_run.run({"seed": 0, "generations": 1, "args": {"steps_per_generation": 4}})
    assert result["series"]["bapo/positive_share"] == [None, 0.25, None, 0.75]
    assert result["means"]["bapo/positive_share"] == 0.5


def test_measuring_in_between_changes_nothing_of_a_run():
    spec = {"seed": 0, "generations": 2, "args": {"steps_per_generation": 1, "learning_rate": 1e-3}}
    often, seldom = (run_for_real({**spec, "held_out_every": every}) for every in (1, 2))
    assert len(often["held_out"]) > len(seldom["held_out"])
    for key in ("reward", "generated_tokens", "series"):
        assert often[key] == seldom[key]


def test_a_run_whose_policy_breaks_is_a_result(tmp_path):
    """It has collapsed, with an accuracy of 0 from there on, and its lines in the figures stay as long as others'."""
    rows, results = [], []
    for learning_rate in (1e30, 1e-3):
        run, spec, result = short_run("BAPO", 1, learning_rate)
        results.append(result)
        rows.append(run_to_row(replace(run, task=HARD_TASK), result, spec["args"]))
    assert "nan" in results[0]["failure"].lower()
    assert results[0]["updates"] < 4
    row = rows[0]
    assert (row["final"], row["is_collapsed"], row["entropy_ratio"]) == (0.0, True, None)
    assert [point[0] for point in row["held_out"]] == [0, 2, 4]
    assert [point[1] for point in row["held_out"]][1:] == [0.0, 0.0]
    assert row["area"] == pytest.approx(row["held_out"][0][1] / 4, abs=1e-4)
    (summary,) = summarize(rows)
    assert (summary["collapsed"], len(summary["seeds"])) == (0.5, 2)
    for draw in (draw_staleness, draw_arms, draw_bounds):
        draw([{**row, "staleness_setting": "16"} for row in rows]).savefig(tmp_path / "figure.png")


def test_a_run_has_a_process_of_its_own_whose_failure_stops_the_study(tmp_path, capfd):
    spec = {
        "seed": 0,
        "generations": 1,
        "held_out_every": 9,
        "args": {"steps_per_generation": 1, "num_generations": 7},
    }
    with pytest.raises(RuntimeError, match=r"'num_generations': 7.* exit status 1"):
        run_pool.run_all([spec], tmp_path / "runs.jsonl", jobs=1)
    assert "num_generations" in capfd.readouterr().err
    assert (tmp_path / "runs.jsonl").read_text() == ""

    spec["args"] |= {"num_generations": 8, "learning_rate": 1e-3}
    (result,) = run_pool.run_all([spec], tmp_path / "runs.jsonl", jobs=1)
    clocks = {"seconds": None, "seconds_so_far": None}
    assert {**result, **clocks} == {**run_for_real(spec), **clocks}


def test_finished_runs_are_not_made_again_and_a_cut_off_line_is(tmp_path, monkeypatch):
    made = []

    def run_in_process(run, spec):
        made.append(spec["seed"])
        return {"held_out": [spec["seed"]], "seconds": 0.0}

    monkeypatch.setattr(run_pool, "_run_in_process", run_in_process)
    monkeypatch.setattr(run_pool, "warm_start_path", lambda task: None)
    finished, specs = tmp_path / "runs.jsonl", [{"seed": seed} for seed in range(4)]
    run_pool.run_all(specs[:3], finished, jobs=2)
    finished.write_text(finished.read_text()[:-5])  # interrupted while it wrote the last of them
    assert len([result for result in run_pool.run_all(specs, finished, jobs=0) if result is None]) == 2
    results = run_pool.run_all(specs, finished, jobs=2)
    assert [result["held_out"] for result in results] == [[0], [1], [2], [3]]
    assert sorted(made[:3]) == [0, 1, 2]
    assert len(made) == 3 + 2
