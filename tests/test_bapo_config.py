"""Every knob's range and the combinations that are rejected."""

import math
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
from trl import GRPOConfig

from bapo_trl import BAPOConfig
from bapo_trl.bapo_config import own_fields
from bapo_trl.errors import InputError
from bapo_trl.inputs.reward_checks import distinct_names
from tests.helpers.toy import CPU


def config(**args) -> BAPOConfig:
    return BAPOConfig("unused", **{**CPU, "per_device_train_batch_size": 8, **args})


def test_every_field_of_ours_has_its_choices_or_its_range_and_takes_no_other():
    for f in own_fields():
        choices, interval = f.metadata.get("choices"), f.metadata.get("range")
        assert (choices is None) != (interval is None) or f.type is bool, f.name
        if interval is None:
            outside = ["other"]
        else:
            low, high = map(float, interval[1:-1].split(","))
            outside = [*([low] if interval[0] == "(" else []), low - 1, *([high + 1] if high < math.inf else [])]
        is_whole = interval is not None and "int" in str(f.type)
        for value in outside:
            with pytest.raises(InputError, match=f"`{f.name}` is"):
                config(**{f.name: int(value) if is_whole else value})


def test_cispo_without_a_cap_of_its_own_has_trls():
    cispo = config(loss_type="cispo")
    assert cispo.epsilon == GRPOConfig.epsilon


def test_settings_at_the_edges_are_accepted():
    config(
        positive_contribution_target=1.0, delta=3.0, ratio_lower_start=1.0, ratio_lower_max=1.0, ratio_upper_start=1
    )
    config(gradient_accumulation_steps=4, steps_per_generation=2, num_iterations=2)
    config(gradient_accumulation_steps=2, steps_per_generation=3, num_iterations=2)
    config(gradient_accumulation_steps=4, steps_per_generation=2)
    for corrected in ({"mode": "token_truncate"}, {"mode": "token_mask"}, {"correction": False}):
        named = {f"vllm_importance_sampling_{name}": value for name, value in corrected.items()}
        config(loss_type="vespo", use_vllm=True, **named)


@pytest.mark.parametrize(
    ("args", "always_on_policy"),
    [
        ({}, True),
        ({"gradient_accumulation_steps": 4}, True),
        ({"gradient_accumulation_steps": 4, "num_iterations": 2}, False),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, False),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 2}, True),
    ],
)
def test_knows_when_every_sample_is_on_policy(args, always_on_policy):
    assert config(**args).is_always_on_policy == always_on_policy


@pytest.mark.parametrize("args", [{"logging_steps": 0}, {"hub_strategy": "never"}, {"fp16": True, "bf16": True}])
def test_what_transformers_refuses_keeps_its_own_words(args):
    errors = []
    for config_class in (GRPOConfig, BAPOConfig):
        with pytest.raises((TypeError, ValueError)) as caught:
            config_class("unused", **{**CPU, **args})
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_a_grpo_config_is_taken_over():
    grpo = GRPOConfig("somewhere", **CPU, per_device_train_batch_size=8, generation_batch_size=32, learning_rate=3e-4)
    args = BAPOConfig.from_grpo_config(grpo)
    assert isinstance(args, BAPOConfig)
    assert (args.output_dir, args.learning_rate, args.steps_per_generation) == ("somewhere", 3e-4, 4)
    assert args.positive_contribution_target == 0.5
    assert args.epsilon is None
    with pytest.raises(ValueError, match=r"`epsilon` is 0.3, .* of 0.7 and 1.3, set"):
        BAPOConfig.from_grpo_config(GRPOConfig("unused", **CPU, epsilon=0.3))
    cispo = BAPOConfig.from_grpo_config(GRPOConfig("unused", **CPU, loss_type="cispo", epsilon_high=5.0))
    assert (cispo.epsilon, cispo.epsilon_high) == (0.2, 5.0)  # its cap


@pytest.mark.parametrize("settings", [{"partial_rollout_oversampling": 1.5}, {"replay_fraction": 0.5}], ids=str)
def test_batches_that_are_split_over_ranks_are_rejected_where_each_rank_needs_whole_ones(monkeypatch, settings):
    split = {"accelerator_config": {"split_batches": True}, "steps_per_generation": 2, "num_generations": 4}
    config(**split, **settings)
    monkeypatch.setattr(BAPOConfig, "world_size", 2)
    config(**split)
    with pytest.raises(ValueError, match="`split_batches` is True"):
        config(**split, **settings)


def numbered_fields(kind: type) -> list:
    return [f for f in own_fields() if kind in (get_args(f.type) or (f.type,)) and f.default is not None]


@pytest.mark.parametrize("number", [np.float64, np.float32, np.longdouble, Fraction])
def test_every_real_number_is_one(number):
    for f in numbered_fields(float):
        value = getattr(config(**{f.name: number(f.default)}), f.name)
        assert type(value) is float
        assert value == float(number(f.default))


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8])
def test_every_whole_number_is_one(number):
    for f in numbered_fields(int):
        value = getattr(config(**{f.name: number(min(f.default, 200))}), f.name)
        assert type(value) is int
    assert type(config(replay_fraction=number(1)).replay_fraction) is float


def test_a_buffer_needs_room_for_what_is_drawn_only():
    settings = {
        "per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 1,
        "steps_per_generation": 4, "replay_fraction": 0.25, "replay_min_staleness": 8,
    }  # fmt: skip
    config(**settings, replay_capacity=20)  # a generation step of 16, and the 4 that are drawn
    with pytest.raises(ValueError, match="Set it to at least 20"):
        config(**settings, replay_capacity=19)


def test_numbered_names_of_rewards_avoid_names_that_are_taken():
    assert distinct_names(["a", "a", "a_1", "b"]) == ["a_2", "a_3", "a_1", "b"]
