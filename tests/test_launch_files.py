"""Every YAML file in the repository parses with the parser that reads it."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from trl import DatasetMixtureConfig, ModelConfig, TrlParser

from bapo_trl import BAPOConfig
from tests.commands import ROOT


sys.path.insert(0, str(ROOT))
import train_bapo


RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def parse(recipe: Path):
    # Without a GPU, bf16 is refused: that is for the machine to say, not for the recipe.
    flags = [] if torch.cuda.is_available() else ["--use_cpu", "true", "--bf16", "false"]
    return train_bapo.parse_arguments(["--config", str(recipe), *flags])


def test_the_recipes_of_the_readme_are_there():
    assert {recipe.name for recipe in RECIPES} == {
        "quickstart.yaml", "math_7b.yaml", "released_recipe.yaml", "lora_small.yaml",
    }  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_and_trains_off_policy(recipe):
    script_args, training_args, model_args, _ = parse(recipe)
    assert script_args.dataset_name
    assert script_args.reward_funcs or script_args.dataset_name == train_bapo.EMBEDDED
    assert model_args.model_name_or_path
    assert not training_args.is_always_on_policy


def test_every_other_yaml_is_a_mapping():
    others = [path for path in ROOT.rglob("*.y*ml") if not {".venv", ".git"} & {part[:5] for part in path.parts}]
    assert len(others) > len(RECIPES)
    for path in others:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


def test_paper_numbers():
    _, args, _, _ = parse(ROOT / "recipes" / "math_7b.yaml")
    assert args.positive_contribution_target == 0.4
    assert (args.ratio_lower_start, args.ratio_lower_max, args.ratio_lower_step) == (0.6, 0.9, 0.02)
    assert (args.ratio_upper_start, args.ratio_upper_max, args.ratio_upper_step) == (1.2, 3.0, 0.05)
    assert (args.learning_rate, args.temperature, args.max_completion_length) == (2e-6, 0.6, 8192)


def test_released_recipe_settings():
    _, args, _, _ = parse(ROOT / "recipes" / "released_recipe.yaml")
    assert (args.search_order, args.search_scope, args.contribution_measure) == (
        "lower_first", "micro_batch", "surrogate",
    )  # fmt: skip


def test_lora_recipe_asks_for_an_adapter():
    _, _, model_args, _ = parse(ROOT / "recipes" / "lora_small.yaml")
    assert model_args.use_peft
    assert model_args.lora_r > 0


def test_help_of_every_argument_renders():
    parser = TrlParser((train_bapo.BAPOScriptArguments, BAPOConfig, ModelConfig, DatasetMixtureConfig))
    assert "--positive_contribution_target" in parser.format_help()
