"""The study of partial rollouts in `benchmarks/`: its plan, its arithmetic, and a real run of each arm."""

import itertools
import json
from dataclasses import replace

import pytest

from benchmarks import partial_study, training_run
from benchmarks.common import describe_run
from benchmarks.long_tailed_sums import load_long_tailed_sums
from benchmarks.measured_trainer import MeasuredBAPOTrainer
from benchmarks.partial_study import ARMS, BOUNDS, LINES, WITHOUT, judge, render, result_to_row, spec, summarize


# --- plan ------------------------------------------------------------------------------------------------------------


def test_arms_with_partial_rollouts_differ_from_those_without_in_nothing_else():
    assert [arm for arm in ARMS if "partial_rollout_oversampling" in ARMS[arm]] == list(WITHOUT)
    for arm, without in WITHOUT.items():
        for bounds in BOUNDS:
            one, other = (spec(bounds, name, 1e-3, seed=2, generations=16) for name in (arm, without))
            added = set(one["args"]) - set(other["args"])
            assert added == {"partial_rollout_oversampling", "partial_rollout_chunk_length"}
            assert {key: one["args"].pop(key) for key in added}["partial_rollout_oversampling"] in (1.5, 1.9)
            assert one == other
    both = ARMS["partial, 1.5, queue, 2 passes"]
    assert (both["replay_fraction"], both["num_iterations"]) == (0.5, 2)


def test_all_arms_generate_as_much_and_are_measured_at_the_end():
    for arm, bounds in itertools.product(ARMS, BOUNDS):
        run = spec(bounds, arm, 1e-3, 0, partial_study.GENERATIONS)
        updates = run["generations"] * partial_study.UPDATES_PER_PASS * run["args"].get("num_iterations", 1)
        assert (run["task"], run["generations"]) == ("long_tailed_sums", partial_study.GENERATIONS)
        assert updates % run["held_out_every"] == 0
        fixed = {run["args"].get(key) for key in ("ratio_lower_start", "ratio_lower_max")}
        assert fixed == ({0.8} if bounds == "GRPO" else {None})


def test_the_learning_rate_is_the_best_of_the_synchronous_arm(monkeypatch, tmp_path):
    accuracies = {(5e-4, "BAPO"): 0.6, (5e-4, "GRPO"): 0.6, (1e-3, "BAPO"): 0.7, (1e-3, "GRPO"): 0.64}

    def run_all(specs, finished, jobs):
        assert not any("partial_rollout_oversampling" in run["args"] for run in specs)
        assert {run["seed"] for run in specs}.isdisjoint(partial_study.SEEDS)
        named = [
            (run["args"]["learning_rate"], "GRPO" if "ratio_lower_max" in run["args"] else "BAPO") for run in specs
        ]
        return [{"held_out": [{"sampled": 0.9}, {"sampled": accuracies.get(name, 0.3)}]} for name in named]

    monkeypatch.setattr(partial_study, "run_all", run_all)
    assert partial_study.choose_learning_rate(tmp_path, 1) == (1e-3, {5e-4: 0.6, 1e-3: 0.67, 2e-3: 0.3})


# --- arithmetic ------------------------------------------------------------------------------------------------------


def a_result(rewards, held_out=0.6, decode_steps=(50, 10, 20, 40), completions=240):
    return {
        "reward": rewards,
        "held_out": [{"sampled": 0.4}, {"sampled": held_out}],
        "means": {"staleness/mean": 2.5, "completions/clipped_ratio": 0.01},
        "decode_steps": list(decode_steps),
        "seconds_so_far": [1.0, 2.0, 3.0, 4.0],
        "completions": completions,
        "lengths": {"first": {"median": 12, "95th": 60}, "last": {"median": 10, "95th": 55}},
        "share_of_several_versions": 0.25,
        "trained_length_ratio": 0.98,
        "updates": 12,
        "seconds": 3.0,
    }


def test_a_row_holds_the_last_quarter_and_the_decode_steps_so_far():
    row = result_to_row("BAPO", "synchronous", 3, a_result([0.1] * 6 + [0.5, 0.7]))
    assert (row["bounds"], row["arm"], row["seed"], row["final_reward"]) == ("BAPO", "synchronous", 3, 0.6)
    assert (row["held_out_start"], row["held_out"]) == (0.4, 0.6)
    assert (row["decode_steps"], row["decode_steps_so_far"]) == (120, [50, 60, 80, 120])
    assert (row["staleness"], row["cut_off"], row["share_of_several_versions"]) == (2.5, 0.01, 0.25)


def rows_of(finals):
    """Rows of runs with these final rewards, by bounds, arm and seed."""
    return [
        result_to_row(*key, a_result([0.4, 0.4, 0.4, final], held_out=final + 0.1)) for key, final in finals.items()
    ]


def test_differences_are_those_to_the_same_bounds_and_seed():
    finals = {
        ("BAPO", "synchronous", 0): 0.60,
        ("BAPO", "synchronous", 1): 0.70,
        ("GRPO", "synchronous", 0): 0.10,
        ("BAPO", "queue, 2 passes", 0): 0.20,
        ("BAPO", "partial, 1.5", 0): 0.61,
        ("BAPO", "partial, 1.5", 1): 0.67,
        ("BAPO", "partial, 1.5", 2): 0.99,  # without a partner
        ("GRPO", "partial, 1.9", 0): 0.15,
        ("BAPO", "partial, 1.5, queue, 2 passes", 0): 0.25,
    }
    summary = {(row["bounds"], row["arm"]): row for row in summarize(rows_of(finals))}
    assert summary["BAPO", "partial, 1.5"]["reward_gains"] == [0.01, -0.03]
    assert summary["BAPO", "partial, 1.5"]["held_out_gains"] == [0.01, -0.03]
    assert summary["GRPO", "partial, 1.9"]["reward_gains"] == [0.05]
    assert summary["BAPO", "partial, 1.5, queue, 2 passes"]["reward_gains"] == [0.05]
    assert summary["BAPO", "synchronous"]["reward_gains"] == []
    # 0.65 ± 12.71 x 0.0707 / sqrt(2)
    assert summary["BAPO", "synchronous"]["final_reward"] == {"mean": 0.65, "half_width": pytest.approx(0.6355)}
    assert summary["BAPO", "synchronous"]["steps_per_sample"] == 120 / 240


def test_the_verdict_follows_the_interval():
    # Three pairs: half the interval is 4.303 x deviation / sqrt(3). Deviation 0.01: 0.0248
    assert "as without (+0.010 ± 0.025 over 3 pairs; a loss of more than 0.015" in judge("a", [0.0, 0.01, 0.02])
    assert judge("a", [-0.02, -0.03, -0.04]) == "a: **not as without, lower** (-0.030 ± 0.025 over 3 pairs)."
    assert judge("a", [-0.02, -0.01, 0.0]).startswith("a: as without (-0.010 ± 0.025 over 3 pairs")
    assert judge("a", [0.02, 0.03, 0.04]) == "a: not as without, but higher (+0.030 ± 0.025 over 3 pairs)."


def test_the_section_judges_by_the_rows():
    finals = {
        (bounds, arm, seed): 0.6 + 0.01 * seed + (-0.1 if arm == "partial, 1.9" else 0.002 * (seed - 1))
        for bounds in BOUNDS
        for arm in ARMS
        for seed in range(3)
    }
    settings = {
        "generations": 16,
        "learning_rate": 1e-3,
        "pilot_accuracies": [[1e-3, 0.7]],
        "pilot_seed": 1000,
        "pilot_generations": 10,
        "chunk_tokens": 12,
        "queue": {"replay_fraction": 0.5},
        "threads": 1,
    }
    section = render({**describe_run("partial_study", "cpu"), "settings": settings, "results": rows_of(finals)})
    assert "- partial, 1.5, final reward: as without (+0.000 ± 0.000 over 6 pairs" in section.text
    assert "- partial, 1.9, held-out accuracy: **not as without, lower** (-0.100 ± 0.002 over 6 pairs)" in section.text
    assert (
        "12 tokens and the 95th percentile 60 (5.0 times as many), in the last quarter 10 and 55 (5.5" in section.text
    )
    assert "| GRPO | partial, 1.9 | 0.510 ± 0.025 | -0.100 ± 0.005 |" in section.text
    assert "| BAPO | synchronous | 0.500 | 2.5 | 25% |" in section.text
    assert "0.98" in section.tables
    (figure,) = section.figures.values()
    assert [len(panel.lines) for panel in figure.axes] == [len(LINES)] * 6


# --- runs ------------------------------------------------------------------------------------------------------------


class Watched(MeasuredBAPOTrainer):
    """Keeps what the sampler gave at each call, and the versions of every trained row, in plain lists."""

    latest = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Watched.latest = self
        self.longest_of_calls, self.version_sets = [[]], []

    def _generate_single_turn(self, *args, **kwargs):
        output = super()._generate_single_turn(*args, **kwargs)
        if self._handed_over is None:
            self.longest_of_calls[-1].append(max(len(ids) for ids in output[0]))
        return output

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.longest_of_calls.append([])
        return output

    def _compute_loss(self, model, inputs):
        versions = inputs.get("token_versions")
        for row, mask in enumerate(inputs["completion_mask"].tolist()):
            if any(mask):
                here = [0] if versions is None else versions[row].tolist()
                self.version_sets.append({version for version, is_token in zip(here, mask, strict=False) if is_token})
        return super()._compute_loss(model, inputs)


@pytest.mark.trainings
@pytest.mark.parametrize("arm", ARMS)
def test_a_run_of_each_arm_counts_what_its_columns_say(arm, tmp_path, monkeypatch):
    """A model after a few updates of its warm start: completions of all lengths up to the cap."""
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path))
    task = load_long_tailed_sums()
    few = {"num_steps": 8, "batch_size": 4}
    lesson = replace(task.warm_start.first_lesson, **few)
    task = replace(
        task,
        test_dataset=task.test_dataset.select(range(8)),
        warm_start=replace(task.warm_start, **few, first_lesson=lesson),
    )
    sizes = {"per_device_train_batch_size": 8, "steps_per_generation": 4, "num_generations": 2}
    monkeypatch.setitem(training_run.TASKS, "long_tailed_sums", lambda: task)
    monkeypatch.setitem(training_run.TASK_SETTINGS, "long_tailed_sums", sizes)
    monkeypatch.setitem(training_run.TRAINERS, "BAPO", (Watched, training_run.TRAINERS["BAPO"][1]))
    monkeypatch.setattr(training_run, "keep_freed_memory", lambda: None)  # of this process

    result = training_run.run(spec("BAPO", arm, 1e-3, seed=0, generations=4))
    row = json.loads(json.dumps(result_to_row("BAPO", arm, 0, result)))
    trainer = Watched.latest
    assert result["decode_steps"] == [sum(calls) for calls in trainer.longest_of_calls[:-1]]
    assert row["decode_steps"] == row["decode_steps_so_far"][-1] == sum(result["decode_steps"])
    several = [len(versions) > 1 for versions in trainer.version_sets]
    assert row["share_of_several_versions"] == round(sum(several) / len(several), 4)
    held = {"partial, 1.5": 8, "partial, 1.9": 14}.get(arm.partition(", queue")[0], 0)
    assert row["completions"] == 4 * 32 - 2 * held  # groups of 2
    assert row["updates"] == (32 if "2 passes" in arm else 16)
    assert [point["generations"] for point in result["held_out"]] == [0, 2, 4]
    if arm in WITHOUT:
        assert any(several)
        assert max(map(len, trainer.longest_of_calls[:-1])) > 1
        assert 0.5 < row["trained_length_ratio"] < 1.5
    else:
        assert row["trained_length_ratio"] is None
        assert (any(several), set(map(len, trainer.longest_of_calls[:-1]))) == (False, {1})
        assert all(60 < steps <= 120 for steps in result["decode_steps"])
