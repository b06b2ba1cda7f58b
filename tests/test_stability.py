"""The stability study of `benchmarks/`: its arms, how its figures are computed, and one run of each trainer."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml
from trl import GRPOConfig

from bapo_trl import BAPOConfig
from bapo_trl.bound_search import BoundSearch
from tests.toy import toy_trainer


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


def test_all_arms_of_a_cell_share_updates_and_generated_answers(stability, full):
    for task in full.updates:
        sizes: dict[str, set] = {}
        for run in stability.Plan(full, task, arm_rates(stability)).reported():
            args = (spec := full.spec(run, measurements=8))["args"]
            rows = args.get("per_device_train_batch_size", stability.ROWS[task])
            micro_batches = args.get("gradient_accumulation_steps", 1)
            answers = spec["generations"] * args["steps_per_generation"] * rows
            sizes.setdefault(run.cell.name, set()).add((answers, spec["held_out_every"], rows * micro_batches))
        assert {len(values) for values in sizes.values()} == {1}
        assert len(sizes) == 8


def test_the_main_arms_run_everywhere_and_the_others_where_samples_are_stale(stability, full):
    runs = list(stability.Plan(full, "running_totals", arm_rates(stability)).reported())
    assert len(set(runs)) == len(runs)
    seeds: dict[tuple, list[int]] = {}
    for run in runs:
        seeds.setdefault((run.arm, run.cell.name), []).append(run.seed)
    for arm in ("GRPO", "clip-higher", "BAPO"):
        cells = {cell for (name, cell) in seeds if name == arm} - {"1"}
        assert cells == {"4", "16", "64", "4, 4 passes", "16, 4 passes", "64, 4 passes", "4, queue"}
        assert {tuple(seeds[arm, cell]) for cell in cells} == {(0, 1, 2, 3, 4)}
    assert [(arm, len(values)) for (arm, cell), values in seeds.items() if cell == "1"] == [("GRPO", 5)]
    for arm in {*stability.ARMS, *stability.ABLATION} - {"GRPO", "clip-higher", "BAPO"}:
        assert {cell: tuple(values) for (name, cell), values in seeds.items() if name == arm} == {
            "16": (0, 1, 2),
            "64": (0, 1, 2),
        }


def test_candidates_and_learning_rates_are_compared_on_seeds_of_their_own(stability, full):
    runs = list(stability.Plan(full, "sums", arm_rates(stability)).candidates())
    assert {run.arm for run in runs} == {"BAPO", *stability.CANDIDATES}
    assert {run.learning_rate for run in runs} == {1e-3}  # BAPO's
    assert len(runs) == len(set(runs)) == 2 * 5 * (1 + len(stability.CANDIDATES))
    assert not set(full.pilot_seeds) & set(full.seeds)
    assert not {run.seed for run in runs} & {*full.pilot_seeds, *full.seeds}


def test_the_arm_of_the_released_recipe_has_the_search_of_its_file(stability):
    recipe = yaml.safe_load((BENCHMARKS.parent / "recipes" / "released_recipe.yaml").read_text())
    names = {f.name for f in fields(BAPOConfig)} - {f.name for f in fields(GRPOConfig)} | {"delta"}
    assert stability.ARMS["released recipe's bounds"] == {name: recipe[name] for name in names & set(recipe)}


def test_arms_run_in_the_trainer_that_they_name(stability, full):
    trainers = {
        arm: full.spec(stability.Run("sums", arm, stability.Cell(16), 1e-3, 0), 8)["trainer"]
        for arm in {**stability.ARMS, **stability.ABLATION}
    }
    assert {arm for arm, trainer in trainers.items() if trainer == "GRPO"} == {"CISPO", "SAPO", "VESPO"}
    assert {arm for arm, trainer in trainers.items() if trainer == "smoothed BAPO"} == {"smoothed bounds"}


def pilots_with(accuracy):
    """Stand in for runs: measured at three quarters and at the end, `accuracy` of their learning rate is the mean."""
    made = []

    def make(runs, measurements):
        made.extend(runs)
        ends = [accuracy(run.learning_rate) for run in runs]
        return [
            (run, {"held_out": [{"sampled": 1.0}, {"sampled": 0.0}, {"sampled": 2 * e}]})
            for run, e in zip(runs, ends, strict=True)
        ]

    return made, make


@pytest.mark.parametrize(
    ("peak", "chosen", "tried"),
    [
        (5e-4, 5e-4, {2.5e-4, 5e-4, 1e-3}),
        (1e-3, 1e-3, {2.5e-4, 5e-4, 1e-3, 2e-3}),  # at the end of the grid: one step beyond it
        (0, 6.25e-5, {6.25e-5, 1.25e-4, 2.5e-4, 5e-4, 1e-3}),  # no more than two
    ],
)
def test_learning_rates_are_the_best_of_the_pilots(stability, full, peak, chosen, tried):
    made, make = pilots_with(lambda rate: -abs(rate - peak))
    pilots = stability.try_learning_rates("sums", ["BAPO"], full, make)
    for staleness in (16, 64):
        assert pilots["BAPO", staleness] == {rate: -abs(rate - peak) for rate in tried}
        assert stability.best_rate(pilots["BAPO", staleness]) == chosen
    assert {run.learning_rate for run in made} == tried
    assert {run.seed for run in made} == set(full.pilot_seeds)


def test_no_pilots_where_there_is_one_learning_rate(stability):
    made, make = pilots_with(lambda rate: 1.0)
    pilots = stability.try_learning_rates("sums", ["BAPO"], stability.PRESETS["quick"], make)
    assert [stability.best_rate(pilots["BAPO", staleness]) for staleness in (16, 64)] == [5e-4, 5e-4]
    assert made == []


def test_arms_within_reach_of_the_best_get_all_seeds(stability, full):
    def made(arm, final, seeds, cell=16):
        runs = [stability.Run("sums", arm, stability.Cell(cell), 1e-3, seed) for seed in range(seeds)]
        return [(run, {"held_out": [{"sampled": final}]}) for run in runs]

    in_reach = [*made("CISPO", 0.79, 3), *made("VESPO", 0.80, 3)]
    others = [
        *made("BAPO", 0.81, 5),
        *made("SAPO", 0.78, 3),
        *made("upper bound alone", 0.9, 3),
        *made("SAPO", 0.5, 3, 4),
    ]
    more = list(stability.more_seeds(full, in_reach + others))
    assert [(run.arm, run.seed) for run in more] == [("CISPO", 3), ("CISPO", 4), ("VESPO", 3), ("VESPO", 4)]
    assert {(run.task, run.cell, run.learning_rate) for run in more} == {("sums", stability.Cell(16), 1e-3)}


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
    assert row["largest_fall"] == 0.5
    assert row["entropy_ratio"] == 0.25
    assert row["gradient_peak"] == 5.0
    assert row["is_collapsed"]
    assert not stability.condense(run, finished_run([0.2, 0.5, 0.3], [1.0] * 20))["is_collapsed"]
    recovered = stability.condense(run, finished_run([0.6, 0.1, 0.5], [1.0] * 20))
    assert (recovered["is_collapsed"], recovered["largest_fall"]) == (False, 0.5)
    without_gradient = stability.condense(run, finished_run([0.2, 0.5, 0.0], [0.0] * 20))
    assert (without_gradient["is_collapsed"], without_gradient["gradient_peak"]) == (True, None)
    assert stability.summarize([without_gradient])[0]["gradient_peak"] == {"mean": None, "half_width": None}


def test_what_the_search_did(stability):
    series = {
        "bapo/clip_low": [0.6, 0.9, 0.9, 0.9],
        "bapo/clip_high": [1.2, 3.0, 3.0, 2.0],
        "bapo/positive_share_initial": [0.6, 0.4, None, 0.5],
        "bapo/positive_share": [0.6, 0.45, None, 0.52],
        "grad_norm": [0.1, None, 0.3, 0.2],
        "ratio/max": [1.0, 2.0, 3.0, 4.0],
    }
    assert stability.describe_search("BAPO", series) == {
        "at_start": 0.25,
        "at_end": 0.5,
        "initial_share_deviation": 0.0816,
        "initial_share_range": [0.4, 0.6],
        "largest_share_gain": 0.05,
        "mean_share_gain": 0.035,
        "ratio_at_gradient_peak": 3.0,
    }
    released = stability.describe_search("released recipe's bounds", series)
    assert (released["at_start"], released["at_end"]) == (0.0, 0.0)
    assert stability.describe_search("GRPO", series) == stability.describe_search("CISPO", {}) == {}


def test_stretches_are_means_of_what_is_defined(stability):
    assert stability.stretches([1.0, 3.0, None, 5.0, None, None], count=3) == [2.0, 5.0, None]
    assert stability.stretches([1.0, 2.0], count=16) == [1.0, 2.0]
    assert stability.stretches([1.0, 2.0, 3.0, 4.0, 5.0], count=2) == [1.5, 4.0]


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
    assert (bapo["arm"], bapo["cell"], bapo["seeds"], bapo["collapsed"]) == ("BAPO", "4", [0, 1], 0.5)
    assert bapo["final"]["mean"] == pytest.approx(0.45)
    assert bapo["seconds_per_update"] == 2.0
    assert bapo["tokens_per_update"] == 1000 / 20
    assert (grpo["arm"], grpo["seeds"], grpo["final"]) == ("GRPO", [0], {"mean": 0.1, "half_width": None})


def test_arms_are_compared_with_bapo_on_the_same_seeds(stability):
    ends = {"BAPO": {5: 0.5, 6: 0.7, 7: 0.1}, "delta 3": {9: 0.9, 5: 0.6, 6: 0.6}}
    rows = [
        stability.condense(
            stability.Run("sums", arm, stability.Cell(16), 1e-3, seed), finished_run([0, 0, end], [1.0])
        )
        for arm, finals in ends.items()
        for seed, end in finals.items()
    ]
    bapo, delta = stability.summarize(rows)
    assert delta["gains"] == [0.1, -0.1]
    assert delta["gain"] == {"mean": 0.0, "half_width": pytest.approx(12.71 * 0.1, abs=1e-3)}
    assert delta["final"]["mean"] == pytest.approx(0.7)  # of all its seeds
    assert bapo["gains"] == [0.0] * 3


# --- runs ------------------------------------------------------------------------------------------------------------


def run_for_real(spec):
    command = [sys.executable, str(BENCHMARKS / "training_run.py"), json.dumps(spec)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("arm", ["BAPO", "CISPO", "4 micro-batches, micro-batch scope"])
def test_a_run_gives_what_the_study_reports(stability, arm):
    """A real run in a process of its own, with each of the two trainers, and with updates of several micro-batches."""
    preset = replace(stability.FULL, updates={"sums": 4})
    run = stability.Run("sums", arm, stability.Cell(2), 1e-3, seed=0)
    spec = preset.spec(run, measurements=2)
    assert spec["trainer"] == ("GRPO" if arm == "CISPO" else "BAPO")
    row = stability.condense(run, result := run_for_real(spec))
    assert (row["updates"], len(result["reward"])) == (4, 2)
    assert [point[0] for point in row["held_out"]] == [0, 2, 4]
    assert 0.3 < row["held_out"][0][1] < 0.6  # what the warm start can do
    assert 4 * 128 * 2 < row["generated_tokens"] < 4 * 128 * 4
    assert ("bapo/clip_low" in row["stretches"]) == (arm != "CISPO")
    assert len(row["stretches"]["grad_norm"]) == 4
    assert stability.summarize([row])[0]["seeds"] == [0]


def test_metrics_without_a_value_are_left_out(stability, monkeypatch):
    """TRL logs `None` where all values of a metric are NaN, such as the share of an update that clips every token."""
    import training_run

    def train(trainer):
        shares = [None, 0.25, float("nan"), 0.75]
        trainer.state.log_history = [{"loss": 0.0, "entropy": 1.0, "bapo/positive_share": share} for share in shares]
        trainer.state.log_history[0] |= {"reward": 0.5, "completions/mean_length": 2.0}

    monkeypatch.setattr(training_run.BAPOTrainer, "train", train)
    monkeypatch.setattr(training_run, "keep_freed_memory", lambda: None)  # of this process
    result = training_run.run({"seed": 0, "generations": 1, "args": {"steps_per_generation": 4}})
    assert result["series"]["bapo/positive_share"] == [None, 0.25, None, 0.75]
    assert result["means"]["bapo/positive_share"] == 0.5
    rows = [
        stability.condense(
            stability.Run("sums", "GRPO", stability.Cell(4), 1e-3, seed), finished_run([0.1] * 3, [1.0])
        )
        for seed in (0, 1)
    ]
    rows[1]["means"] = {}
    assert stability.summarize(rows)[0]["means"] == {}


def test_measuring_in_between_changes_nothing_of_a_run(stability):
    spec = {"seed": 0, "generations": 2, "args": {"steps_per_generation": 1, "learning_rate": 1e-3}}
    often, seldom = (run_for_real({**spec, "held_out_every": every}) for every in (1, 2))
    assert len(often["held_out"]) > len(seldom["held_out"])
    for key in ("reward", "generated_tokens", "series"):
        assert often[key] == seldom[key]


def test_a_run_whose_policy_breaks_is_a_result(stability, tmp_path):
    """It has collapsed, with an accuracy of 0 from there on, and its lines in the figures stay as long as others'."""
    import render_stability

    preset = replace(stability.FULL, updates={"sums": 4})
    broken, whole = (stability.Run("sums", "BAPO", stability.Cell(1), rate, seed=0) for rate in (1e30, 1e-3))
    rows, results = [], []
    for run in (broken, whole):
        results.append(run_for_real(preset.spec(run, measurements=2)))
        rows.append(stability.condense(run, results[-1]))
    assert "nan" in results[0]["failure"].lower()
    assert results[0]["updates"] < 4
    row = rows[0]
    assert (row["final"], row["is_collapsed"], row["entropy_ratio"]) == (0.0, True, None)
    assert [point[0] for point in row["held_out"]] == [0, 2, 4]
    assert [point[1] for point in row["held_out"]][1:] == [0.0, 0.0]
    assert row["area"] == pytest.approx(row["held_out"][0][1] / 4, abs=1e-4)
    (summary,) = stability.summarize(rows)
    assert (summary["collapsed"], len(summary["seeds"])) == (0.5, 2)
    for draw in (render_stability.draw_staleness, render_stability.draw_arms, render_stability.draw_bounds):
        draw([{**row, "cell": "16"} for row in rows], tmp_path / "figure.png")


def test_undefined_gradients_are_told(stability):
    import render_stability

    run = stability.Run("sums", "CISPO", stability.Cell(16), 1e-3, seed=0)
    row = stability.condense(run, finished_run([0.2, 0.5, 0.6], [1.0] * 10 + [None] * 2 + [1.5] * 8))
    (summary,) = stability.summarize([row])
    assert render_stability.undefined_part([summary])[0].endswith("CISPO at 16: 2.")


def test_a_run_has_a_process_of_its_own_whose_failure_stops_the_study(stability, tmp_path, capfd):
    import training_run

    spec = {
        "seed": 0,
        "generations": 1,
        "held_out_every": 9,
        "args": {"steps_per_generation": 1, "num_generations": 7},
    }
    with pytest.raises(RuntimeError, match=r"'num_generations': 7.* exit status 1"):
        training_run.run_all([spec], tmp_path / "runs.jsonl", jobs=1)
    assert "num_generations" in capfd.readouterr().err
    assert (tmp_path / "runs.jsonl").read_text() == ""

    spec["args"] |= {"num_generations": 8, "learning_rate": 1e-3}
    (made,) = training_run.run_all([spec], tmp_path / "runs.jsonl", jobs=1)
    here = run_for_real(spec)
    assert {**made["result"], "seconds": None} == {**here, "seconds": None}


def test_smoothed_bounds_follow_the_search_slowly(stability, monkeypatch, tmp_path):
    from training_run import TRAINERS

    found = iter([(0.9, 3.0), (0.9, 3.0), (0.6, 1.2)])
    trainer_class, config_class = TRAINERS["smoothed BAPO"]
    search = toy_trainer(tmp_path, trainer_class=trainer_class, config_class=config_class)._search

    def found_bounds(search):
        low, high = next(found)
        low, high = (torch.tensor(bound, dtype=torch.float64) for bound in (low, high))
        return replace(search.start_bounds(), low=low, high=high)

    monkeypatch.setattr(BoundSearch, "choose", found_bounds)
    followed = [(bounds.low.item(), bounds.high.item()) for bounds in (search.choose() for _ in range(3))]
    assert followed == [pytest.approx(pair) for pair in [(0.63, 1.38), (0.657, 1.542), (0.6513, 1.5078)]]


def test_finished_runs_are_not_made_again_and_a_cut_off_line_is(stability, tmp_path, monkeypatch):
    import training_run

    made = []

    def run_in_process(spec):
        made.append(spec["seed"])
        return {"held_out": [spec["seed"]], "seconds": 0.0}

    monkeypatch.setattr(training_run, "_run_in_process", run_in_process)
    monkeypatch.setattr(training_run, "warm_start_path", lambda task: None)
    finished, specs = tmp_path / "runs.jsonl", [{"seed": seed} for seed in range(4)]
    training_run.run_all(specs[:3], finished, jobs=2)
    finished.write_text(finished.read_text()[:-5])  # interrupted while it wrote the last of them
    assert len([run for run in training_run.run_all(specs, finished, jobs=0) if run["result"] is None]) == 2
    results = training_run.run_all(specs, finished, jobs=2)
    assert [run["result"]["held_out"] for run in results] == [[0], [1], [2], [3]]
    assert sorted(made[:3]) == [0, 1, 2]
    assert len(made) == 3 + 2


def test_the_quick_preset_leaves_the_reported_results_alone(stability, tmp_path, monkeypatch, capsys):
    seen = []

    def run_all(specs, finished, jobs):
        seen.extend(specs)
        return [{**spec, "result": finished_run([0.4, 0.5, 0.6], [1.0] * 20)} for spec in specs]

    monkeypatch.setattr(stability, "run_all", run_all)
    monkeypatch.setattr(stability, "save_result", lambda *args: pytest.fail("would overwrite the reported results"))
    monkeypatch.setattr(sys, "argv", ["stability.py", "--preset", "quick", "--finished", str(tmp_path / "q.jsonl")])
    stability.main()
    content = json.loads((tmp_path / "q.json").read_text())
    assert len(content["results"]) == len(seen) == 22
    assert {row["arm"] for row in content["settings"]["summary"]} == {"GRPO", "clip-higher", "BAPO"}
    assert content["settings"]["pilots"]["sums"][0] == {"arm": "GRPO", "cell": "16", "accuracies": [[5e-4, 1.0]]}
    assert "q.json" in capsys.readouterr().out


def test_no_report_without_finished_runs(stability, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stability, "save_result", lambda *args: pytest.fail("would overwrite the reported results"))
    monkeypatch.setattr(sys, "argv", ["stability.py", "--jobs", "0", "--finished", str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit):
        stability.main()
    assert "none.jsonl" in capsys.readouterr().err


def test_the_section_judges_the_aims_by_the_rows(stability, tmp_path):
    import render_stability

    import measuring

    series = {"grad_norm": [1.0] * 20} | {
        f"bapo/{name}": [0.5] * 20 for name in ("positive_share_initial", "positive_share", "clip_low", "clip_high")
    }
    series["ratio/max"] = [1.0] * 20
    ends = {"BAPO": (0.8, 0.9), "GRPO": (0.3, 0.4), "clip-higher": (0.7, 0.9)}  # intervals at 0.85, 0.35 and 0.8
    rows = [
        stability.condense(
            stability.Run("running_totals", arm, stability.Cell(16), 1e-3, seed),
            {**finished_run([0.1, 0.2, end], []), "series": series},
        )
        for arm, pair in ends.items()
        for seed, end in enumerate([pair[0], *[sum(pair) / 2] * 3, pair[1]])
    ]
    settings = {
        "updates": {"running_totals": 20, "sums": 20},
        "learning_rates": {"running_totals": [1e-3], "sums": [1e-3]},
        "pilot_seeds": [1000],
        "pilots": {
            "running_totals": [
                {"arm": "BAPO", "cell": "16", "accuracies": [[1e-4, 0.7], [2e-4, 0.9]]},
                {"arm": "GRPO", "cell": "16", "accuracies": [[5e-5, 0.6], [1e-4, 0.3]]},
            ],
            "sums": [],
        },
        "candidates": stability.summarize(rows),
        "runs_left": 7,
        "threads": 1,
        "summary": stability.summarize(rows),
    }
    content = {
        "command": "python benchmarks/stability.py",
        "date": "2026-01-01",
        "machine": measuring.describe_machine("cpu"),
        "settings": settings,
        "results": rows,
    }
    page = render_stability.render_stability(content, tmp_path)
    assert "Unfinished: at least 7 runs" in page
    assert "BAPO ends at 0.850 ± 0.044, GRPO at 0.350" in page
    assert "Of the 2 arms without a search, clip-higher ends highest (-0.050 ± 0.044 against BAPO" in page
    assert "BAPO above all of them: yes" in page
    assert "Intervals apart from GRPO and clip-higher, and above: **no**" in page
    assert "Entropy at least 1.5 times GRPO's: **no** (1.00)" in page
    assert "| 16 | BAPO | - | 0.700 | **0.900** |" in page
    assert "| 16 | GRPO | **0.600** | 0.300 | - |" in page
    assert "| 16 | GRPO | 0.350 ± 0.044 | -0.500 ± 0.000 | -0.500, " in page
    assert "sums" not in page.split("### Running totals")[1]
    assert len(list(tmp_path.glob("stability_*.png"))) == 3
