"""`--method`: the settings that a name stands for, next to recipes and flags."""

import pytest
import yaml

from bapo_trl.script.settings.methods import METHOD_SETTINGS, METHODS
from bapo_trl.script.settings.parser import parse_arguments
from tests.helpers.commands import ROOT


def settings(*flags, **wanted):
    _, args, *_ = parse_arguments([*flags, "--output_dir", "out", "--use_cpu", "true", "--bf16", "false"])
    return {name: getattr(args, name) for name in wanted}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_its_settings(name):
    of_method = {field: value for field, value in METHODS[name].items() if value is not None}
    assert settings("--method", name, **of_method) == of_method


def test_the_released_method_is_that_of_its_recipe():
    recipe = yaml.safe_load((ROOT / "recipes" / "released_recipe.yaml").read_text())
    wanted = {name: value for name, value in recipe.items() if name in (*METHOD_SETTINGS, "search_scope", "loss_type")}
    assert METHODS["bapo_released"].keys() <= wanted.keys()
    assert settings("--method", "bapo_released", **wanted) == wanted


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        # A recipe's settings of another method do not stay
        (["--config", "stale_samples", "--method", "bapo"], {"loss_type": "dapo"}),
        (["--config", "released_recipe", "--method", "grpo"], {"delta": None, "ratio_upper_max": 1.2}),
        # Flags that the method leaves open do
        (
            ["--method", "vespo", "--negative_weight_min", "0.5", "--positive_contribution_target", "1.0"],
            {"loss_type": "vespo", "negative_weight_min": 0.5, "positive_contribution_target": 1.0},
        ),
        (["--method", "bapo", "--search_scope", "batch"], {"search_scope": "batch"}),
        # What BAPO itself would reject
        (["--method=grpo", "--delta", "2.0"], {"delta": 2.0, "ratio_upper_max": 1.2}),
        (["--method", "cispo", "--epsilon_high=5.0"], {"epsilon_high": 5.0, "loss_type": "cispo"}),
    ],
)
def test_a_method_goes_before_a_recipe_and_beside_flags(flags, wanted):
    assert settings(*flags, **wanted) == wanted


def test_a_recipe_may_name_a_method_with_more(tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text("method: vespo\nnegative_weight: 0.5\n")
    wanted = {"loss_type": "vespo", "negative_weight_min": 0.5, "positive_contribution_target": 1.0}
    assert settings("--config", str(recipe), **wanted) == wanted
    reset = {"loss_type": "dapo", "negative_weight_min": 1.0, "positive_contribution_target": 0.5}
    assert settings("--config", str(recipe), "--method", "bapo", **reset) == reset


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("learning_rate: 1e-6", 1e-6),  # text to YAML 1.1
        ("max_grad_norm:", None), ("seed: '7'", 7), ("save_steps: 0.1", 0.1),
        ("use_peft: 'yes'", True), ("report_to: none", []), ("scale_rewards: false", "none"),
        ("resume_from_checkpoint: true", True), ("reward_funcs: my.reward", ["my.reward"]),
        ("reward_weights: [1, 5e-1]", [1, 0.5]), ("lora_target_modules: all-linear", "all-linear"),
        ("lr_scheduler_kwargs: {min_lr: 1.0e-7}", {"min_lr": 1e-7}),
    ],
)  # fmt: skip
def test_values_that_trl_and_transformers_accept_are_accepted_in_a_recipe(tmp_path, line, value):
    name = line.partition(":")[0]
    (tmp_path / "own.yaml").write_text(f"use_cpu: true\nbf16: false\n{line}\n")
    parsed = parse_arguments(["--config", str(tmp_path / "own.yaml")])
    assert [getattr(each, name) for each in parsed if hasattr(each, name)] == [value]
