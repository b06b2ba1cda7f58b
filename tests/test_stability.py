"""The stability study of `benchmarks/`: its arms, how its figures are computed, and one run of each trainer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def stability():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import stability

        yield stability
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def full(stability):
    return stability.PRESETS["full"]


def arm_rates(stability):
    return {(arm, staleness): 1e-3 for arm in stability.ARMS for staleness in (16, 64)}


# --- plan ------------------------------------------------------------------------------------------------------------


def test_all_arms_of_a_cell_share_seeds_updates_and_generated_answers(stability, full):
    for task in full.updates:
        sizes: dict[str, set] = {}
        for run in stability.reported(full, task, arm_rates(stability)):
            args = (spec := full.spec(run, measurements=8))["args"]
            rows = args.get("per_device_train_batch_size", stability.ROWS[task])
            updates = spec["generations"] * args["steps_per_generation"] * args["num_iterations"]
            answers = spec["generations"] * args["steps_per_generation"] * rows
            micro_batches = args.get("gradient_accumulation_steps", 1)
            sizes.setdefault(run.cell.name, set()).add((updates / micro_batches, answers, rows * micro_batches))
        assert {len(values) for values in sizes.values()} == {1}
        assert len(sizes) == 8


def test_the_main_arms_run_everywhere_and_the_others_where_samples_are_stale(stability, full):
    runs = list(stability.reported(full, "running_totals", arm_rates(stability)))
    assert len(set(runs)) == len(runs)
    seeds: dict[tuple, int] = {}
    for run in runs:
        seeds[run.arm, run.cell.name] = seeds.get((run.arm, run.cell.name), 0) + 1
    for arm in ("GRPO", "clip-higher", "BAPO"):
        cells = {cell for (name, cell) in seeds if name == arm}
        assert cells == {"1", "4", "16", "64", "4, 4 passes", "16, 4 passes", "64, 4 passes", "4, queue"}
        assert {seeds[arm, cell] for cell in cells} == {5}
    for arm in ("GSPO", "CISPO", "SAPO", "VESPO", "released recipe", "BAPO, surrogate", "BAPO, target 0.4"):
        assert {cell: count for (name, cell), count in seeds.items() if name == arm} == {"16": 3, "64": 3}
    assert not set(full.pilot_seeds) & set(full.seeds)


def test_learning_rates_are_the_best_of_the_pilots(stability):
    cell = stability.Cell(16)
    runs = [stability.Run("sums", "BAPO", cell, rate, seed) for rate in (0.1, 0.2, 0.3) for seed in (0, 1)]
    ends = [(0.1, 0.2), (0.1, 0.2), (0.9, 0.1), (0.3, 0.5), (0.2, 0.3), (0.4, 0.4)]  # means 0.15, 0.45, 0.325
    results = [{"held_out": [{"sampled": 1.0}, {"sampled": a}, {"sampled": b}]} for a, b in ends]
    assert stability.choose_learning_rates(runs, results) == {("BAPO", 16): 0.2}


# --- figures ---------------------------------------------------------------------------------------------------------


def finished_run(accuracies, norms, entropies=(2.0, 1.0, 0.5)):
    points = zip((0, 10, 20), accuracies, entropies, strict=True)
    return {
        "updates": 20,
        "seconds": 40.0,
        "generated_tokens": [500, 1000],
        "held_out": [{"update": u, "sampled": a, "greedy": a, "entropy": e} for u, a, e in points],
        "series": {"grad_norm": norms},
        "means": {"bapo/positive_share": 0.4},
    }


def test_figures_of_a_run(stability):
    run = stability.Run("sums", "BAPO", stability.Cell(4), 1e-3, seed=0)
    row = stability.condense(run, finished_run([0.2, 0.8, 0.3], [1.0] * 18 + [None, 5.0]))
    assert row["final"] == 0.3
    assert row["area"] == pytest.approx((0.5 * 10 + 0.55 * 10) / 20)
    assert row["entropy_ratio"] == 0.25
    assert row["gradient_peak"] == 5.0
    assert row["is_collapsed"]
    assert not stability.condense(run, finished_run([0.2, 0.5, 0.3], [1.0] * 20))["is_collapsed"]


def test_stretches_are_means_of_what_is_defined(stability):
    assert stability.stretches([1.0, 3.0, None, 5.0, None, None], count=3) == [2.0, 5.0, None]
    assert stability.stretches([1.0, 2.0], count=16) == [1.0, 2.0]


def test_intervals_are_those_of_student_s_t(stability):
    # 5 values, standard deviation 1: 2.776 / sqrt(5)
    values = [0.0, 0.0, 0.0, 0.0, 5.0**0.5]
    assert stability.mean_and_interval(values) == {"mean": 0.4472, "half_width": pytest.approx(1.2415, abs=1e-4)}
    assert stability.mean_and_interval([1.0]) == {"mean": 1.0, "half_width": None}


def test_a_summary_row_covers_the_seeds_of_an_arm_in_a_cell(stability):
    rows = [
        stability.condense(stability.Run("sums", arm, stability.Cell(4), 1e-3, seed), finished_run(ends, [1.0] * 20))
        for arm, seed, ends in [("BAPO", 0, (0, 0.9, 0.4)), ("BAPO", 1, (0, 0.5, 0.5)), ("GRPO", 0, (0, 0.1, 0.1))]
    ]
    bapo, grpo = stability.summarize(rows)
    assert (bapo["arm"], bapo["cell"], bapo["seeds"], bapo["collapsed"]) == ("BAPO", "4", 2, 0.5)
    assert bapo["final"]["mean"] == pytest.approx(0.45)
    assert bapo["seconds_per_update"] == 2.0
    assert bapo["tokens_per_update"] == 1000 / 20
    assert (grpo["arm"], grpo["seeds"], grpo["final"]) == ("GRPO", 1, {"mean": 0.1, "half_width": None})


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["BAPO", "CISPO"])
def test_a_run_gives_what_the_study_reports(stability, arm):
    """A real run in a process of its own, with each of the two trainers."""
    preset = stability.Preset({"sums": 4}, {"sums": (1e-3,)}, (0,), (), (1000,))
    run = stability.Run("sums", arm, stability.Cell(2), 1e-3, seed=0)
    spec = preset.spec(run, measurements=2)
    assert spec["trainer"] == {"BAPO": "BAPO", "CISPO": "GRPO"}[arm]
    command = [sys.executable, str(BENCHMARKS / "training_run.py"), json.dumps(spec)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    row = stability.condense(run, json.loads(process.stdout.splitlines()[-1]))
    assert row["updates"] == 4
    assert [point[0] for point in row["held_out"]] == [0, 2, 4]
    assert 0.3 < row["held_out"][0][1] < 0.6  # what the warm start can do
    assert row["generated_tokens"] > 4 * 128 * 2
    assert ("bapo/clip_low" in row["stretches"]) == (arm == "BAPO")
    assert len(row["stretches"]["grad_norm"]) == 4
    assert stability.summarize([row])[0]["seeds"] == 1
