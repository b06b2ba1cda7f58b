"""What a run writes of its method, and that it is advised nothing else."""

import json

import pytest

from bapo_trl import BAPOConfig
from bapo_trl.report.facts import facts_of
from bapo_trl.report.health import examine
from bapo_trl.report.runs import Logs
from tests.helpers.toy import toy_trainer
from tests.report.made_logs import made_logs


FIXED = {"ratio_lower_max": 0.6, "ratio_upper_max": 1.2}
GRPO = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2}
WEIGHT = {"negative_weight_min": 0.5}
CONSTANT = {**WEIGHT, "positive_contribution_target": 1.0}
SEQUENCES = {"importance_sampling_level": "sequence"}
STALE = {"steps_per_generation": 4, "gradient_accumulation_steps": 1}

METHODS = [
    # settings, name, whether bounds that never have an effect are told
    ({}, "BAPO", True),
    ({"ratio_upper_max": 1.2}, "BAPO", True),
    (FIXED, "Fixed bounds 0.6 to 1.2", False),
    (GRPO, "GRPO bounds", False),
    ({**FIXED, **SEQUENCES}, "GSPO, bounds 0.6 to 1.2", False),
    ({"loss_type": "vespo"}, "VESPO", False),
    ({"gradient_accumulation_steps": 4}, "BAPO", False),  # ratios are always 1, as the run says at its start
]  # fmt: skip


def facts(folder, settings) -> dict:
    """Return the facts of a run as they are read from its file."""
    args = BAPOConfig(
        output_dir=str(folder), per_device_train_batch_size=2, num_generations=2, use_cpu=True, bf16=False,
        **{**STALE, **settings},
    )  # fmt: skip
    return json.loads(json.dumps(facts_of(args)))


@pytest.mark.parametrize(("settings", "name", "is_adaptive"), METHODS)
def test_a_run_is_titled_by_its_method_and_told_that_its_adaptive_bounds_have_no_effect(
    tmp_path, settings, name, is_adaptive
):
    of_run = facts(tmp_path, settings)
    assert of_run["method"] == name
    in_vain = {"ratio/min": 1.0, "ratio/max": 1.0, "bapo/positive_share": 0.5, "bapo/positive_share_initial": 0.5}
    names = [finding.name for finding in examine(Logs(made_logs(**in_vain)), of_run)[1:]]
    assert names == ["Effect of the clip bounds"] * is_adaptive


@pytest.mark.parametrize(("rate", "names"), [(1e-7, ["Effect of the clip bounds"]), (0.05, [])])
def test_a_training_that_hardly_moves_the_policy_is_told_that_its_bounds_have_no_effect(tmp_path, rate, names):
    trainer = toy_trainer(tmp_path, **STALE, learning_rate=rate, max_steps=8, logging_steps=2)
    trainer.train()
    findings = examine(Logs(trainer.state.log_history), facts_of(trainer.args))
    assert [finding.name for finding in findings if finding.name == "Effect of the clip bounds"] == names
