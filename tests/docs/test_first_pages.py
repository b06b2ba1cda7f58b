"""What README and the page for GRPO users say: results, settings that raise an error, bounds that equal GRPO."""

import re
import runpy

import pytest
import yaml
from trl import GRPOConfig

from bapo_trl import BAPOConfig
from bapo_trl.errors import InputError
from tests.docs.blocks import all_blocks
from tests.helpers.commands import ROOT


README = (ROOT / "README.md").read_text()
CPU = {"output_dir": "unused", "use_cpu": True, "bf16": False}
VLLM = {"use_vllm": True, "loss_type": "vespo"}


def test_the_readme_is_short_and_its_first_example_trains_with_bapo():
    assert len(README.split()) <= 700
    example = next(block for block in all_blocks() if block.page == "README.md" and block.language == "python")
    assert "BAPOTrainer(" in example.text
    assert "loss_type" not in example.text


def test_the_accuracies_in_the_readme_are_those_of_the_results():
    section = README.partition("## Which loss")[2].partition("\n## ")[0]
    told = [float(number) for number in re.findall(r"0\.\d\d\b", section)]
    accuracies = runpy.run_path(str(ROOT / "docs" / "tools" / "draw_losses.py"))["accuracies"]
    after = {updates: accuracies(updates) for updates in (64, 128)}
    arms = ("BAPO", "GRPO", "VESPO")
    places = [(64, 16, arms), (64, 64, arms[:2]), (128, 64, arms)]
    measured = [round(after[each][arm][stale].value, 2) for each, stale, named in places for arm in named]
    assert told == measured


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("epsilon", {"epsilon": 0.2}),
        ("epsilon_high", {"epsilon_high": 0.28}),
        ("epsilon_high", {"epsilon_high": 5.0, "loss_type": "sapo"}),
        ("delta", {"delta": 0.5}),
        ("ratio_upper_max", {"ratio_upper_max": 2.0, "loss_type": "vespo"}),
        ("vllm_importance_sampling_mode", {**VLLM, "vllm_importance_sampling_mode": "sequence_mask"}),
    ],
)
def test_settings_that_the_page_for_grpo_users_lists_raise_an_error(name, settings):
    assert f"`{name}`" in (ROOT / "docs" / "from_grpo.md").read_text()
    with pytest.raises(InputError, match=f"`{name}"):
        BAPOConfig(**CPU, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon_high": 5.0, "loss_type": "cispo"},
        {"delta": 2.0},
        {"gradient_accumulation_steps": 3, "steps_per_generation": 8},
        {**VLLM, "vllm_importance_sampling_mode": "token_mask"},
    ],
)
def test_the_exceptions_that_it_names_are_accepted(settings):
    BAPOConfig(**CPU, **settings)


def test_a_grpo_config_is_taken_unless_it_sets_its_clip_bounds():
    assert BAPOConfig.from_grpo_config(GRPOConfig(**CPU)).is_adaptive
    with pytest.raises(InputError, match=r"`epsilon_high` is 0\.28"):
        BAPOConfig.from_grpo_config(GRPOConfig(**CPU, epsilon_high=0.28))


def test_the_fixed_bounds_on_the_page_are_those_of_trl():
    (block,) = (block for block in all_blocks() if block.page == "docs/from_grpo.md" and block.language == "yaml")
    bounds = BAPOConfig(**CPU, **yaml.safe_load(block.text))
    epsilon = GRPOConfig(**CPU).epsilon
    assert (bounds.ratio_lower_start, bounds.ratio_lower_max) == (1 - epsilon, 1 - epsilon)
    assert (bounds.ratio_upper_start, bounds.ratio_upper_max) == (1 + epsilon, 1 + epsilon)
    assert not bounds.is_adaptive
