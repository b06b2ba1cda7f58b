"""What a run writes of its method."""

import json

import pytest

from bapo_trl import BAPOConfig
from bapo_trl.report.facts import facts_of


FIXED = {"ratio_lower_max": 0.6, "ratio_upper_max": 1.2}
GRPO = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2}
WEIGHT = {"negative_weight_min": 0.5}
CONSTANT = {**WEIGHT, "positive_contribution_target": 1.0}
SEQUENCES = {"importance_sampling_level": "sequence"}
STALE = {"steps_per_generation": 4, "gradient_accumulation_steps": 1}

METHODS = [
    ({}, "BAPO"),
    ({"ratio_upper_max": 1.2}, "BAPO"),
    (FIXED, "Fixed bounds 0.6 to 1.2"),
    (GRPO, "GRPO bounds"),
    ({**FIXED, **SEQUENCES}, "GSPO, bounds 0.6 to 1.2"),
    ({"loss_type": "vespo"}, "VESPO"),
]  # fmt: skip


def facts(folder, settings) -> dict:
    """Return the facts of a run as they are read from its file."""
    args = BAPOConfig(
        output_dir=str(folder), per_device_train_batch_size=2, num_generations=2, use_cpu=True, bf16=False,
        **{**STALE, **settings},
    )  # fmt: skip
    return json.loads(json.dumps(facts_of(args)))


@pytest.mark.parametrize(("settings", "name"), METHODS)
def test_a_run_is_titled_by_its_method(tmp_path, settings, name):
    assert facts(tmp_path, settings)["method"] == name
