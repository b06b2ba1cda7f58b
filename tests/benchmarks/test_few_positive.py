"""The rules of the study of few positive tokens, on synthetic rows."""

import json

import pytest

from bapo_trl.compare.results import Row
from benchmarks import few_positive as rules
from benchmarks.common import best_rate
from benchmarks.rambling_totals import LIMITS


NOISE = (-0.02, 0.02, -0.01, 0.01, -0.015, 0.015)
ROBUST = {"VESPO": 0.4, "GRPO": 0.4, "BAPO": 0.4}


def rows(updates: int, contribution: float, **above: float) -> list[Row]:
    over = {"steps_per_generation": updates, "max_completion_length": LIMITS[contribution]}
    return [
        Row(arm, over, seed, final=0.5 + mean + bool(mean) * noise)
        for arm, mean in {"VESPO": 0.0, **above}.items()
        for seed, noise in enumerate(NOISE)
    ]


@pytest.mark.parametrize(
    ("finals", "best", "robust"),
    [
        ({2e-4: 0.3, 4e-4: 0.6, 8e-4: 0.5}, 4e-4, 0.3),
        ({2e-4: 0.3, 4e-4: 0.6, 8e-4: 0.6}, 4e-4, 0.3),  # the lower one of equals
        ({1.6e-3: 0.2, 3.2e-3: 0.4}, 3.2e-3, 0.2),  # the last one
    ],
)
def test_robustness_is_the_lower_accuracy_beside_the_best_rate(finals, best, robust):
    assert (best_rate(finals), rules.robustness(finals)) == (best, robust)


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


def test_the_contribution_is_averaged_over_each_part_of_the_training(tmp_path):
    logs = [{"step": step, "bapo/positive_share_initial": step / 256} for step in range(1, 257) if step != 3]
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [*logs, {"step": 3}, {"step": 256, "eval_reward": 0.5}]}))
    assert rules.contributions(state) == {
        "1 to 10": round((55 - 3) / 9 / 256, 4), "11 to 64": round(37.5 / 256, 4), "65 to 128": round(96.5 / 256, 4),
        "129 to 256": round(192.5 / 256, 4),
    }  # fmt: skip
