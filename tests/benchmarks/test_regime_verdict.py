"""The rules of the study of few positive tokens, on synthetic rows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from PIL import Image

from bapo_trl.compare.results import Row
from benchmarks import regime_verdict as rules
from benchmarks import study_figures
from benchmarks.common import best_rate
from benchmarks.rambling_totals import LIMITS
from benchmarks.regime_contributions import contributions
from benchmarks.regime_studies import studies


NOISE = (-0.02, 0.02, -0.01, 0.01, -0.015, 0.015)
ROBUST = {"VESPO": 0.4, "GRPO": 0.4, "BAPO": 0.4}


def rows(updates: int, contribution: float, **above: float) -> list[Row]:
    over = {"steps_per_generation": updates, "max_completion_length": LIMITS[contribution]}
    return [
        Row(arm, over, seed, final=0.5 + mean + bool(mean) * noise)
        for arm, mean in {"VESPO": 0.0, **above}.items()
        for seed, noise in enumerate(NOISE)
    ]


def pilot(updates: int, contribution: float, **finals: dict[float, float]) -> list[Row]:
    over = {"steps_per_generation": updates, "max_completion_length": LIMITS[contribution]}
    return [
        Row(arm, over | {"learning_rate": rate}, 1000, final=final)
        for arm, by_rate in finals.items()
        for rate, final in by_rate.items()
    ]


@pytest.mark.parametrize(
    ("finals", "best", "beside", "robust"),
    [
        ({2e-4: 0.3, 4e-4: 0.6, 8e-4: 0.5}, 4e-4, None, 0.3),
        ({2e-4: 0.3, 4e-4: 0.6, 8e-4: 0.6}, 4e-4, None, 0.3),  # the lower one of equals
        ({2e-4: 0.3, 4e-4: 0.6, 8e-4: 0.7}, 8e-4, 1.6e-3, 0.6),
        ({2e-4: 0.8, 4e-4: 0.6, 8e-4: 0.5}, 2e-4, 1e-4, 0.6),
        ({1.6e-3: 0.2, 3.2e-3: 0.4}, 3.2e-3, None, 0.2),  # the last one
    ],
)
def test_the_best_rate_has_a_rate_on_both_sides(finals, best, beside, robust):
    assert (best_rate(finals), rules.next_rate(finals), rules.robustness(finals)) == (best, beside, robust)


def test_the_figure_has_a_panel_for_each_staleness(tmp_path):
    one, two = rows(16, 0.1, GRPO=0.1), rows(64, 0.1, GRPO=0.1)
    study_figures.draw_contributions(one, tmp_path / "one.png")
    study_figures.draw_contributions(one + two, tmp_path / "two.png")
    with Image.open(tmp_path / "one.png") as one_panel, Image.open(tmp_path / "two.png") as two_panels:
        assert two_panels.width == 2 * one_panel.width


def test_more_spread_takes_more_seeds():
    few = rows(16, 0.1, GRPO=0.1)
    wide = [replace(row, final=0.5 + 10 * (row.final - 0.5)) for row in rows(64, 0.1, BAPO=0.1)]
    assert rules.number_of_seeds(few) < 12 < rules.number_of_seeds(few + wide)


@pytest.mark.parametrize(
    ("above", "robust", "arm"),
    [
        ({"GRPO": 0.1, "BAPO": 0.05}, ROBUST, "GRPO"),
        ({"GRPO": 0.1, "BAPO": 0.05}, ROBUST | {"BAPO": 0.49}, "BAPO"),  # of the better ones, the highest sum
        ({"GRPO": 0.002, "BAPO": -0.1}, ROBUST, "VESPO"),
        ({"GRPO": 0.002, "BAPO": -0.1}, ROBUST | {"GRPO": 0.51, "BAPO": 0.9}, "GRPO"),  # more robust, and not worse
        ({"GSPO": 0.4}, ROBUST, "VESPO"),  # reported apart
    ],
)
def test_a_setting_names_the_method_that_is_better_or_more_robust(above, robust, arm):
    (finals,) = rules.by_setting(rows(16, 0.1, **above)).values()
    assert rules.named(finals, robust) == arm


def test_a_missing_seed_is_an_error():
    (finals,) = rules.by_setting(rows(16, 0.1, GRPO=0.1)[:-1]).values()
    with pytest.raises(ValueError, match="GRPO has seeds"):
        rules.compared(finals)


def test_only_seeds_of_all_methods_and_settings_are_compared():
    made = [*rows(16, 0.1, GSPO=0.1)[:-1], *rows(64, 0.1, GSPO=0.1)]  # the last seed of GSPO is missing in a setting
    assert sorted({row.seed for row in rules.complete(made)}) == [0, 1, 2, 3, 4]
    assert len(rules.complete(made)) == 4 * 5


def test_the_advice_changes_up_to_the_contribution_where_one_method_is_named_throughout():
    made = [
        *rows(16, 0.1, BAPO=0.1), *rows(16, 0.2, BAPO=0.1), *rows(16, 0.35, GRPO=0.1, BAPO=0.001),
        *rows(64, 0.1, BAPO=-0.1), *rows(64, 0.35, BAPO=0.1),
    ]  # fmt: skip
    same = {1e-4: 0.4, 2e-4: 0.5, 4e-4: 0.4}
    settings = [(16, 0.1), (16, 0.2), (16, 0.35), (64, 0.1), (64, 0.35)]
    tried = [row for setting in settings for row in pilot(*setting, VESPO=same, BAPO=same, GRPO=same)]
    best = rules.best_methods(made, tried)
    assert best == {16: {0.1: "BAPO", 0.2: "BAPO", 0.35: "GRPO"}, 64: {0.1: "VESPO", 0.35: "BAPO"}}
    assert rules.advice(best[16]) == "BAPO up to a contribution of 0.2"
    assert rules.advice(best[64]) == "nothing changes, VESPO"


def test_the_studies_that_follow_have_the_rates_of_the_pilot():
    design = yaml.safe_load(Path("benchmarks/studies/regime_pilot.yaml").read_text())
    inner, outer = {1e-4: 0.4, 2e-4: 0.5, 4e-4: 0.4}, {2e-4: 0.3, 4e-4: 0.4, 8e-4: 0.5}
    finals = rules.finals_by_rate(pilot(16, 0.1, VESPO=inner, GRPO=outer) + pilot(64, 0.2, BAPO=inner))
    (more,) = studies("rates", design, finals)
    assert list(more["arms"]) == ["GRPO"]
    assert more["over"] == {"steps_per_generation": [16], "max_completion_length": [117], "learning_rate": [1.6e-3]}
    assert [list(study["arms"]) for study in studies("spread", design, finals)] == [["VESPO", "GRPO"]]
    first, second = studies("main", design, finals, 3)
    assert {arm: flags["learning_rate"] for arm, flags in first["arms"].items()} == {"VESPO": 2e-4, "GRPO": 8e-4}
    assert (second["over"]["max_completion_length"], second["seeds"]) == ([52], [0, 1, 2])
    assert list(second["arms"]) == ["BAPO"]
    kept = [*rows(16, 0.1, GRPO=0.1), *rows(64, 0.2, BAPO=0.1)]
    kept = [row for row in kept if (row.arm, row.seed) != ("GRPO", 1)]
    (rest,) = studies("main", design, finals, 3, kept)
    assert (rest["over"], rest["seeds"]) == (first["over"], [1])


def test_the_contribution_is_averaged_over_each_part_of_the_training(tmp_path):
    logs = [{"step": step, "bapo/positive_share_initial": step / 256} for step in range(1, 257) if step != 3]
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [*logs, {"step": 3}, {"step": 256, "eval_reward": 0.5}]}))
    assert contributions(state) == {
        "1 to 10": round((55 - 3) / 9 / 256, 4), "11 to 64": round(37.5 / 256, 4), "65 to 128": round(96.5 / 256, 4),
        "129 to 256": round(192.5 / 256, 4),
    }  # fmt: skip
