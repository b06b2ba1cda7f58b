"""The model's own `generation_config`: what a generation takes from it, and whether it can be saved."""

import re
import warnings

import pytest
from peft import LoraConfig

from bapo_trl.errors import InputError
from tests.helpers.alike import assert_same_weights
from tests.helpers.toy import ending_model, toy_model, toy_run, toy_trainer


ONE_UPDATE = {"max_steps": 1, "gradient_checkpointing": True}
PARTIAL = {**ONE_UPDATE, "partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 3}
SAVES = {**ONE_UPDATE, "save_strategy": "steps", "save_steps": 1}
# As in many models on the Hub; TRL sets each of them itself
OF_MANY_MODELS = {
    "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1, "max_length": 999,
    "max_new_tokens": 2, "num_beams": 1, "num_return_sequences": 1, "typical_p": 1.0, "suppress_tokens": [],
}  # fmt: skip


def with_settings(make_model=toy_model, **settings):
    model = make_model()
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.trainings
def test_what_trl_sets_itself_is_not_taken_from_the_model(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Samples are drawn with")
        configured = toy_run(tmp_path, with_settings(**OF_MANY_MODELS), **ONE_UPDATE)
        toy_trainer(tmp_path, with_settings(ending_model, **OF_MANY_MODELS), **PARTIAL)
    assert_same_weights(configured, toy_run(tmp_path, toy_model(), **ONE_UPDATE))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", [5]), ("min_p", 0.05), ("num_beams", 2), ("guidance_scale", 1.5), ("min_new_tokens", 3),
    ],
)  # fmt: skip
def test_what_biases_the_samples_is_warned_of(tmp_path, name, value):
    drawn = f"Samples are drawn with `{name}` {value} from the model's `generation_config`"
    with pytest.warns(UserWarning, match=re.escape(drawn)):
        toy_trainer(tmp_path, with_settings(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_new_tokens", 5), ("forced_eos_token_id", 2), ("begin_suppress_tokens", [5]), ("stop_strings", ["."]),
    ],
)  # fmt: skip
def test_what_breaks_over_several_calls_is_rejected_with_partial_rollouts(tmp_path, name, value):
    model, args = with_settings(ending_model, **{name: value}), {}
    if name == "min_new_tokens":
        args["peft_config"] = LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(InputError, match=f"`{name}` .*generation_config"):
        toy_trainer(tmp_path, model, trainer_args=args, **PARTIAL)


def test_a_generation_config_that_cannot_be_saved_is_rejected_before_the_first_update(tmp_path):
    model = with_settings(do_sample=False, temperature=0.7)
    trainer = toy_trainer(tmp_path, model, **SAVES)
    with pytest.raises(InputError, match=r"(?s)generation_config.*`temperature`.*do_sample"):
        trainer.train()
    assert trainer.state.global_step == 0
    model.generation_config.do_sample = True
    trainer.train()
    assert (tmp_path / "checkpoint-1" / "generation_config.json").is_file()
