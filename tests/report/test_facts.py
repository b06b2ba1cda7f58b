"""What a run writes of its method, and that it is advised nothing else."""

import json
import re

import pytest
from trl import GRPOConfig

from bapo_trl import BAPOConfig
from bapo_trl.report.facts import facts_of
from bapo_trl.report.health import examine
from bapo_trl.report.runs import Logs
from tests.report.made_logs import made_logs


FIXED = {"ratio_lower_max": 0.6, "ratio_upper_max": 1.2}
GRPO = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2}
WEIGHT = {"negative_weight_min": 0.5}
CONSTANT = {**WEIGHT, "positive_contribution_target": 1.0}
SEQUENCES = {"importance_sampling_level": "sequence"}
STALE = {"steps_per_generation": 4, "gradient_accumulation_steps": 1}

METHODS = [
    # settings, name, names of what the advice on a missed target holds (none: no such check)
    ({}, "BAPO", {"ratio_upper_max", "negative_weight_min"}),
    ({**WEIGHT}, "BAPO, weight from 0.5", {"ratio_upper_max", "negative_weight_min"}),
    ({"ratio_upper_max": 1.2}, "BAPO", {"ratio_lower_max", "negative_weight_min"}),
    ({"ratio_upper_max": 1.22, "ratio_lower_max": 0.6}, "Fixed bounds 0.6 to 1.2", None),  # less than a step apart
    ({**SEQUENCES}, "BAPO, ratios of sequences", {"ratio_upper_max", "negative_weight_min"}),
    (FIXED, "Fixed bounds 0.6 to 1.2", None),
    (GRPO, "GRPO bounds", None),
    ({**GRPO, **WEIGHT}, "GRPO bounds, weight from 0.5", {"negative_weight_min"}),
    ({**GRPO, **CONSTANT}, "GRPO bounds, constant weight 0.5", None),
    ({**FIXED, **SEQUENCES}, "GSPO, bounds 0.6 to 1.2", None),
    ({"loss_type": "vespo"}, "VESPO", None),
    ({"loss_type": "vespo", **WEIGHT}, "VESPO, weight from 0.5", {"negative_weight_min"}),
    ({"loss_type": "vespo", **CONSTANT}, "VESPO, constant weight 0.5", None),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "CISPO", None),
    ({"gradient_accumulation_steps": 4}, "BAPO", None),  # ratios are always 1: no bound has an effect
    ({"gradient_accumulation_steps": 4, "replay_fraction": 0.5}, "BAPO", {"ratio_upper_max", "negative_weight_min"}),
]  # fmt: skip


def facts(folder, settings) -> dict:
    """Return the facts of a run as they are read from its file."""
    args = BAPOConfig(
        output_dir=str(folder), per_device_train_batch_size=2, num_generations=2, use_cpu=True, bf16=False,
        **{**STALE, **settings},
    )  # fmt: skip
    return json.loads(json.dumps(facts_of(args)))


def named(remedy: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", remedy))


@pytest.mark.parametrize(("settings", "name", "advised"), METHODS)
def test_a_run_is_titled_by_its_method_and_advised_what_it_leaves_open(tmp_path, settings, name, advised):
    of_run = facts(tmp_path, settings)
    assert of_run["method"] == name
    findings = examine(Logs(made_logs(entropy=[1.0, 0.1], **{"bapo/target_met": 0.0})), of_run)
    of_target = [finding for finding in findings if finding.name == "Target missed"]
    expected = [] if advised is None else [{"positive_contribution_target", *advised}]
    assert [named(finding.remedy) for finding in of_target] == expected
    (of_entropy,) = (finding for finding in findings if finding.name == "Entropy halved")
    assert ("ratio_upper_max" in of_entropy.remedy) == ("ratio_upper_max" in (advised or ()))


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        ({}, 0.9, 3.0),
        ({"ratio_upper_max": 2.98}, 0.9, 2.95),  # the last candidate
        ({"ratio_upper_max": 1.2}, 0.9, None),
        ({"ratio_lower_max": 0.6}, None, 3.0),
        (FIXED, None, None),
        ({"loss_type": "vespo"}, None, None),
        ({"gradient_accumulation_steps": 4}, None, None),  # no bound has an effect
    ],
)
def test_bounds_at_their_limits_are_found_where_they_are_searched(tmp_path, settings, low, high):
    logs = Logs(made_logs(**{"bapo/clip_low": low or 0.6, "bapo/clip_high": high or 1.2}))
    findings = examine(logs, facts(tmp_path, settings))
    found = [named(finding.remedy) for finding in findings if finding.name == "Clip bounds at their maximum"]
    assert found == ([{"positive_contribution_target"}] if low or high else [])


ALL_BAD = {
    "ratio/mean": 5.0, "ratio/ess": 0.1, "bapo/target_met": 0.0, "frac_reward_zero_std": 1.0,
    "completions/clipped_ratio": 1.0, "entropy": [1.0, 0.1],
}  # fmt: skip
FOLLOWED = {
    **CONSTANT, "negative_weight_min": 0.5, "temperature": 1.0, "mask_truncated_completions": True,
    "replay_zero_advantage": True, "gradient_accumulation_steps": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ({"temperature": 0.7}, "`temperature` 1"),
        ({"mask_truncated_completions": False}, "`mask_truncated_completions`"),
        ({"use_vllm": True}, "`sampling/` metrics"),
        ({"gradient_accumulation_steps": 1}, "A smaller `steps_per_generation`"),
        ({"positive_contribution_target": 0.5}, "A higher `positive_contribution_target`"),
        ({"replay_zero_advantage": False}, "`replay_zero_advantage`"),
        ({"negative_weight_min": 1.0}, "`negative_weight_min` below 1"),
    ],
)
def test_what_a_run_does_already_is_not_advised(tmp_path, settings, advised):
    def remedies(some):
        return " ".join(finding.remedy for finding in examine(Logs(made_logs(**ALL_BAD)), facts(tmp_path, some)))

    assert advised not in remedies(FOLLOWED)
    assert advised in remedies({**FOLLOWED, **settings})


def test_on_policy_samples_cannot_be_fresher(tmp_path):
    logs = Logs(made_logs(**{"ratio/ess": 0.1}))
    for passes, remedy in (
        (1, "A lower `learning_rate`."),
        (2, "Fewer updates per generation. A lower `learning_rate`."),
    ):
        settings = {"gradient_accumulation_steps": 4, "num_iterations": passes}
        assert [finding.remedy for finding in examine(logs, facts(tmp_path, settings))[1:]] == [remedy]


def test_a_run_without_facts_is_advised_nothing_that_needs_one():
    words = " ".join(finding.remedy for finding in examine(Logs(made_logs(**ALL_BAD)), {}))
    ours = {word for word in named(words) if not hasattr(GRPOConfig, word)}
    assert ours == set()
