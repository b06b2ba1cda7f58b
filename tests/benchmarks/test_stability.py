"""The stability study of `benchmarks/`: its plan, what it keeps of its runs, and its statistics."""

import json
import re
from dataclasses import fields

import pytest
import yaml
from trl import GRPOConfig

from bapo_trl import BAPOConfig
from benchmarks.common import RESULTS, ROOT, describe_run
from benchmarks.stability import __main__ as study
from benchmarks.stability.arms import ABLATION, ARMS, CANDIDATES, MAIN, TRAINERS
from benchmarks.stability.plan import FULL, PRESETS, ROWS, Plan, Run, StalenessSetting, choose_learning_rates
from benchmarks.stability.rows import NAMES, bin_means, describe_search, run_to_row
from benchmarks.stability.section import render
from benchmarks.stability.summary import mean_and_interval, summarize
from benchmarks.stability.tables import readme_table, undefined_gradients


RATES = {(arm, staleness): 1e-3 for arm in ARMS for staleness in ("16", "64")}


def a_run(arm="BAPO", staleness=16, seed=0, learning_rate=1e-3, task="sums"):
    return Run("reported", task, arm, StalenessSetting(staleness), learning_rate, seed)


# --- plan ------------------------------------------------------------------------------------------------------------


def test_all_arms_of_a_setting_share_updates_and_generated_completions():
    for task in FULL.updates:
        sizes: dict[str, set] = {}
        for run in Plan(FULL, task, RATES).reported():
            args = (spec := FULL.spec(run))["args"]
            rows = args.get("per_device_train_batch_size", ROWS[task])
            micro_batches = args.get("gradient_accumulation_steps", 1)
            completions = spec["generations"] * args["steps_per_generation"] * rows
            sizes.setdefault(run.staleness.name, set()).add(
                (completions, spec["held_out_every"], rows * micro_batches)
            )
        assert {len(values) for values in sizes.values()} == {1}
        assert len(sizes) == 8


def test_the_main_arms_run_everywhere_and_the_others_where_samples_are_stale():
    runs = list(Plan(FULL, "running_totals", RATES).reported())
    assert len(set(runs)) == len(runs)
    seeds: dict[tuple, list[int]] = {}
    for run in runs:
        seeds.setdefault((run.arm, run.staleness.name), []).append(run.seed)
    for arm in MAIN:
        settings = {setting for (name, setting) in seeds if name == arm} - {"1"}
        assert settings == {"4", "16", "64", "4, 4 passes", "16, 4 passes", "64, 4 passes", "4, queue from 16"}
        assert {tuple(seeds[arm, setting]) for setting in settings} == {(0, 1, 2, 3, 4)}
    assert [(arm, len(values)) for (arm, setting), values in seeds.items() if setting == "1"] == [("GRPO", 5)]
    for arm in {*ARMS, *ABLATION} - set(MAIN):
        assert {setting: tuple(values) for (name, setting), values in seeds.items() if name == arm} == {
            "16": (0, 1, 2),
            "64": (0, 1, 2),
        }


def test_candidates_and_learning_rates_are_compared_on_seeds_of_their_own():
    runs = list(Plan(FULL, "sums", {**RATES, ("BAPO", "64"): 2e-3}).candidates())
    assert {run.arm for run in runs} == {"BAPO", *CANDIDATES}
    assert {(run.staleness.name, run.learning_rate) for run in runs} == {("16", 1e-3), ("64", 2e-3)}  # BAPO's
    assert len(runs) == len(set(runs)) == 2 * 5 * (1 + len(CANDIDATES))
    assert not set(FULL.pilot_seeds) & set(FULL.seeds)
    assert not {run.seed for run in runs} & {*FULL.pilot_seeds, *FULL.seeds}


def test_the_arm_of_the_released_recipe_has_the_search_of_its_file():
    recipe = yaml.safe_load((ROOT / "recipes" / "released_recipe.yaml").read_text())
    names = {f.name for f in fields(BAPOConfig)} - {f.name for f in fields(GRPOConfig)} | {"delta"}
    assert ARMS["released recipe's bounds"] == {name: recipe[name] for name in names & set(recipe)}


def test_arms_run_in_the_trainer_that_they_name():
    trainers = {arm: FULL.spec(a_run(arm))["trainer"] for arm in {**ARMS, **ABLATION}}
    assert {arm for arm, trainer in trainers.items() if trainer == "GRPO"} == {"CISPO", "SAPO", "VESPO"}
    assert set(TRAINERS) <= set(trainers)


def pilots_with(accuracy):
    """Stand in for runs: measured at three quarters and at the end, `accuracy` of their learning rate is the mean."""
    made = []

    def make(runs):
        made.extend(runs)
        return [
            {
                "arm": run.arm,
                "staleness_setting": run.staleness.name,
                "learning_rate": run.learning_rate,
                "held_out": [[0, 1.0], [1, 0.0], [2, 2 * accuracy(run.learning_rate)]],
            }
            for run in runs
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
def test_learning_rates_are_the_best_of_the_pilots(peak, chosen, tried):
    made, make = pilots_with(lambda rate: -1000 * abs(rate - peak))
    rates = choose_learning_rates("sums", ["BAPO"], FULL, make)
    assert rates == {("BAPO", "16"): chosen, ("BAPO", "64"): chosen}
    assert {run.learning_rate for run in made} == tried
    assert {(run.purpose, run.seed) for run in made} == {("pilot", seed) for seed in FULL.pilot_seeds}


def test_no_pilots_where_there_is_one_learning_rate():
    made, make = pilots_with(lambda rate: 1.0)
    rates = choose_learning_rates("sums", ["BAPO"], PRESETS["quick"], make)
    assert rates == {("BAPO", "16"): 5e-4, ("BAPO", "64"): 5e-4}
    assert made == []


def test_arms_within_reach_of_the_best_get_all_seeds():
    def made(arm, final, count, setting="16"):
        return [{"arm": arm, "staleness_setting": setting, "final": final} for _ in range(count)]

    in_reach = [*made("CISPO", 0.79, 3), *made("VESPO", 0.80, 3)]
    others = [*made("BAPO", 0.81, 5), *made("SAPO", 0.78, 3), *made("delta 3", 0.9, 3), *made("SAPO", 0.9, 3, "4")]
    more = list(Plan(FULL, "sums", RATES).more_seeds(in_reach + others))
    assert {(run.arm, run.seed) for run in more} == {(arm, seed) for arm in ("CISPO", "VESPO") for seed in (3, 4)}
    assert {(run.purpose, run.task, run.staleness.name, run.learning_rate) for run in more} == {
        ("reported", "sums", "16", 1e-3)
    }


# --- rows that are kept ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept():
    return json.loads((RESULTS / "stability.json").read_text())["results"]


@pytest.fixture
def made(monkeypatch):
    """Have each run end alike, and list what is run."""
    specs = []

    def run_all(missing, finished, jobs):
        specs.extend(missing)
        return [finished_run([0.1, 0.1, 0.1], [1.0] * 20) if jobs else None for _ in missing]

    monkeypatch.setattr(study, "run_all", run_all)
    return specs


def test_no_run_of_the_committed_results_is_made_again(kept, made, tmp_path):
    rows, runs_left = study.make_study(FULL, kept, tmp_path / "none.jsonl", jobs=1)
    assert made == []
    assert rows == kept
    assert runs_left == 0
    assert len({tuple(row[name] for name in NAMES) for row in kept}) == len(kept)
    assert {row["arm"] for row in kept} > {*ARMS, *ABLATION}  # one whose code has gone is still there


def test_an_arm_that_is_added_makes_its_own_runs_only(kept, made, tmp_path, monkeypatch):
    monkeypatch.setitem(ARMS, "new arm", {"positive_contribution_target": 0.7})
    rows, runs_left = study.make_study(FULL, kept, tmp_path / "none.jsonl", jobs=1)
    assert rows[: len(kept)] == kept
    new = rows[len(kept) :]
    assert {row["arm"] for row in new} == {"new arm"}
    assert {spec["args"]["positive_contribution_target"] for spec in made} == {0.7}
    assert {(row["task"], row["staleness_setting"], row["seed"]) for row in new if row["purpose"] == "reported"} == {
        (task, setting, seed) for task in FULL.updates for setting in ("16", "64") for seed in FULL.few_seeds
    }
    assert runs_left == 0
    assert len(made) == len(new) == len({row["key"] for row in new})


def test_runs_that_are_not_made_now_are_told(kept, made, tmp_path, monkeypatch):
    without = [row for row in kept if (row["arm"], row["purpose"]) != ("delta 3", "candidate")]
    rows, runs_left = study.make_study(FULL, without, tmp_path / "none.jsonl", jobs=0)
    assert rows == without
    assert runs_left == len(kept) - len(without) == 20


def test_rows_of_other_settings_are_not_mixed_in(kept, made, tmp_path, monkeypatch):
    monkeypatch.setitem(ARMS, "SAPO", {"loss_type": "sapo", "epsilon_high": 9.0})
    with pytest.raises(ValueError, match=r"row of Run\(.*'SAPO'.* another name"):
        study.make_study(FULL, kept, tmp_path / "none.jsonl", jobs=1)
    assert made == []


def test_a_result_says_which_rows_were_made_when(kept, made, tmp_path, monkeypatch):
    path = tmp_path / "stability.json"
    content = json.loads((RESULTS / "stability.json").read_text())
    path.write_text(json.dumps(content))
    monkeypatch.setattr(study, "result_path", lambda name, device: path)
    monkeypatch.setattr("benchmarks.common.result_path", lambda name, device: path)
    arguments = ["--finished", str(tmp_path / "none.jsonl")]
    study.main(arguments)
    assert json.loads(path.read_text())["date"] == content["date"]  # nothing new
    for arm in ("new arm", "newer arm"):
        monkeypatch.setitem(ARMS, arm, {"positive_contribution_target": len(arm) / 100})
        study.main(arguments)
    new = json.loads(path.read_text())
    assert [made["date"] for made in new["earlier"]][1:] == [content["date"]]
    assert len(new["earlier"]) == 2
    assert "Earlier rows: measured on " + content["date"] in render(new).text


def test_the_quick_preset_leaves_the_reported_results_alone(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "save_result", lambda *args: pytest.fail("would overwrite the reported results"))
    study.main(["--preset", "quick", "--finished", str(tmp_path / "q.jsonl")])
    rows = json.loads((tmp_path / "q.json").read_text())["results"]
    assert len(rows) == len(made) == 22
    assert {row["arm"] for row in rows} == set(MAIN)
    assert "q.json" in capsys.readouterr().out


def test_no_result_without_finished_runs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        study.main(["--preset", "quick", "--jobs", "0", "--finished", str(tmp_path / "none.jsonl")])
    assert "none.jsonl" in capsys.readouterr().err


# --- statistics ------------------------------------------------------------------------------------------------------


def finished_run(accuracies, norms, entropies=(2.0, 1.0, 0.5)):
    points = zip((0, 10, 20), accuracies, entropies, strict=True)
    series = {"grad_norm": norms} | {
        f"bapo/{name}": [0.5] * len(norms)
        for name in ("positive_share_initial", "positive_share", "clip_low", "clip_high")
    }
    return {
        "updates": 20,
        "seconds": 40.0,
        "generated_tokens": [500, 1000],
        "held_out": [{"update": u, "sampled": a, "greedy": a, "entropy": e} for u, a, e in points],
        "series": {**series, "ratio/max": [1.0] * len(norms)},
        "means": {"bapo/positive_share": 0.4},
    }


def test_figures_of_a_run():
    def row_of(accuracies, norms):
        return run_to_row(a_run(), finished_run(accuracies, norms), {})

    row = row_of([0.2, 0.8, 0.3], [1.0] * 18 + [None, 5.0])
    assert [row[name] for name in NAMES] == ["reported", "sums", "BAPO", "16", 1e-3, 0]
    assert row["final"] == 0.3
    assert row["area"] == pytest.approx((0.5 * 10 + 0.55 * 10) / 20)
    assert row["largest_fall"] == 0.5
    assert row["entropy_ratio"] == 0.25
    assert row["gradient_peak"] == 5.0
    assert row["is_collapsed"]
    assert not row_of([0.2, 0.5, 0.3], [1.0] * 20)["is_collapsed"]
    recovered = row_of([0.6, 0.1, 0.5], [1.0] * 20)
    assert (recovered["is_collapsed"], recovered["largest_fall"]) == (False, 0.5)
    without_gradient = row_of([0.2, 0.5, 0.0], [0.0] * 20)
    assert (without_gradient["is_collapsed"], without_gradient["gradient_peak"]) == (True, None)
    assert summarize([without_gradient])[0]["gradient_peak"] == {"mean": None, "half_width": None}


def test_what_the_search_did():
    series = {
        "bapo/clip_low": [0.6, 0.9, 0.9, 0.9],
        "bapo/clip_high": [1.2, 3.0, 3.0, 2.0],
        "bapo/positive_share_initial": [0.6, 0.4, None, 0.5],
        "bapo/positive_share": [0.6, 0.45, None, 0.52],
        "grad_norm": [0.1, None, 0.3, 0.2],
        "ratio/max": [1.0, 2.0, 3.0, 4.0],
    }
    assert describe_search({}, series) == {
        "at_start": 0.25,
        "at_end": 0.5,
        "initial_share_deviation": 0.0816,
        "initial_share_range": [0.4, 0.6],
        "largest_share_gain": 0.05,
        "mean_share_gain": 0.035,
        "ratio_at_gradient_peak": 3.0,
    }
    released = describe_search(ARMS["released recipe's bounds"], series)
    assert (released["at_start"], released["at_end"]) == (0.0, 0.0)
    assert describe_search(ARMS["GRPO"], series) == describe_search(ARMS["CISPO"], {}) == {}


def test_bins_are_means_of_what_is_defined():
    assert bin_means([1.0, 3.0, None, 5.0, None, None], count=3) == [2.0, 5.0, None]
    assert bin_means([1.0, 2.0], count=16) == [1.0, 2.0]
    assert bin_means([1.0, 2.0, 3.0, 4.0, 5.0], count=2) == [1.5, 4.0]


def test_intervals_are_those_of_student_s_t():
    # 5 values, standard deviation 1: 2.776 / sqrt(5)
    values = [0.0, 0.0, 0.0, 0.0, 5.0**0.5]
    assert mean_and_interval(values) == {"mean": 0.4472, "half_width": pytest.approx(1.2415, abs=1e-4)}
    assert mean_and_interval([1.0]) == {"mean": 1.0, "half_width": None}


def rows_with(ends, task="sums"):
    """Return the rows of arms that end with these accuracies, by seed."""
    return [
        run_to_row(a_run(arm, seed=seed, task=task), finished_run(accuracies, [1.0] * 20), ARMS.get(arm, {}))
        for arm, by_seed in ends.items()
        for seed, accuracies in by_seed.items()
    ]


def test_a_summary_row_covers_the_seeds_of_an_arm_at_a_setting():
    rows = rows_with({"BAPO": {0: (0, 0.9, 0.4), 1: (0, 0.5, 0.5)}, "GRPO": {0: (0, 0.1, 0.1)}})
    bapo, grpo = summarize(rows)
    assert (bapo["arm"], bapo["staleness_setting"], bapo["seeds"], bapo["collapsed"]) == ("BAPO", "16", [0, 1], 0.5)
    assert bapo["final"]["mean"] == pytest.approx(0.45)
    assert bapo["seconds_per_update"] == 2.0
    assert bapo["tokens_per_update"] == 1000 / 20
    assert (grpo["arm"], grpo["seeds"], grpo["final"]) == ("GRPO", [0], {"mean": 0.1, "half_width": None})


def test_metrics_that_some_runs_lack_are_left_out_of_a_summary():
    rows = rows_with({"GRPO": {0: [0.1] * 3, 1: [0.1] * 3}})
    rows[1]["means"] = {}
    assert summarize(rows)[0]["means"] == {}


def test_arms_are_compared_with_bapo_on_the_same_seeds():
    ends = {"BAPO": {5: 0.5, 6: 0.7, 7: 0.1}, "delta 3": {9: 0.9, 5: 0.6, 6: 0.6}}
    rows = rows_with({arm: {seed: [0, 0, end] for seed, end in finals.items()} for arm, finals in ends.items()})
    bapo, delta = summarize(rows)
    assert delta["gains"] == [0.1, -0.1]
    assert delta["gain"] == {"mean": 0.0, "half_width": pytest.approx(12.71 * 0.1, abs=1e-3)}
    assert delta["final"]["mean"] == pytest.approx(0.7)  # of all its seeds
    assert bapo["gains"] == [0.0] * 3


# --- section ---------------------------------------------------------------------------------------------------------


def test_the_table_of_the_readme_shows_the_published_methods_and_wide_intervals():
    ends = {"0.8": [0.80, 0.80, 0.80], "0.7": [0.695, 0.70, 0.705], "0.6": [0.59, 0.60, 0.61]}  # ± 0, 0.012, 0.025
    rows = [
        {**rows_with({arm: {seed: [0, 0, end]}})[0], "task": "running_totals", "staleness_setting": staleness}
        for arm, staleness, name in (("GRPO", "4", "0.8"), ("GRPO", "64", "0.7"), ("VESPO", "16", "0.6"))
        for seed, end in enumerate(ends[name])
    ]
    header, _, *lines = readme_table(summarize(rows)).splitlines()
    assert header == "| updates per generation | 4 | 16 | 64 |"
    assert lines[0] == "| GRPO | 0.80 | - | 0.70 |"
    assert lines[1:6] == [f"| {arm} | - | - | - |" for arm in ("clip-higher", "CISPO", "BAPO", "SAPO", "GSPO")]
    assert lines[6:] == ["| VESPO | - | 0.60 ± 0.02 | - |"]


def test_undefined_gradients_are_told():
    row = run_to_row(a_run("CISPO"), finished_run([0.2, 0.5, 0.6], [1.0] * 10 + [None] * 2 + [1.5] * 8), {})
    assert undefined_gradients(summarize([row]))[0].endswith("CISPO at 16: 2.")


def test_the_section_judges_the_aims_by_the_rows():
    ends = {"BAPO": (0.8, 0.9), "GRPO": (0.3, 0.4), "clip-higher": (0.7, 0.9)}  # intervals at 0.85, 0.35 and 0.8
    finals = {arm: [pair[0], *[sum(pair) / 2] * 3, pair[1]] for arm, pair in ends.items()}
    rows = rows_with(
        {arm: {seed: [0.1, 0.2, end] for seed, end in enumerate(by_seed)} for arm, by_seed in finals.items()},
        task="running_totals",
    )
    pilots = {("BAPO", 1e-4): 0.7, ("BAPO", 2e-4): 0.9, ("GRPO", 5e-5): 0.6, ("GRPO", 1e-4): 0.3}
    rows += [{**row, "purpose": "candidate"} for row in rows]
    rows += [
        {
            **rows[0],
            **{"purpose": "pilot", "arm": arm, "learning_rate": rate},
            "held_out": [[0, 0.0], [1, accuracy], [2, accuracy]],
        }
        for (arm, rate), accuracy in pilots.items()
    ]
    settings = {
        "updates": {"running_totals": 20, "sums": 20},
        "learning_rates": {"running_totals": [1e-3], "sums": [1e-3]},
        "pilot_seeds": [1000],
        "runs_left": 7,
        "threads": 1,
    }
    section = render({**describe_run("stability", "cpu"), "settings": settings, "results": rows})
    assert "Unfinished: at least 7 runs" in section.text
    assert "BAPO ends at 0.850 ± 0.044, GRPO at 0.350" in section.text
    assert "above both, with intervals apart: **no**" in section.text
    assert "Of the 2 arms without a search, clip-higher ends highest (-0.050 ± 0.044 against BAPO" in section.text
    assert "BAPO above all of them: yes" in section.text
    assert "Entropy at least 1.5 times GRPO's: **no** (1.00)" in section.text
    assert "| GRPO | 0.350 ± 0.044 | -0.500 ± 0.000 | - | - |" in section.text
    assert "| 16 | GRPO | 0.350 ± 0.044 | -0.500 ± 0.000 | -0.500, " in section.text
    assert "| 16 | BAPO | 0.0001: 0.700, **0.0002: 0.900** |" in section.tables
    assert "| 16 | GRPO | **5e-05: 0.600**, 0.0001: 0.300 |" in section.tables
    assert not re.search("### Sums", section.text + section.tables)
    assert "| GRPO | - | 0.35 ± 0.04 | - |" in section.readme_table
    assert len(section.figures) == 3
