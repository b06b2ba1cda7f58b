"""A run whose reference model is not the model that it starts from has a warning."""

import warnings

import pytest
from peft import LoraConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM

from tests.helpers.toy import toy_model, toy_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    toy_model().save_pretrained(folder)
    return str(folder)


def warned(output_dir, model, resume=None, **settings) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toy_run(output_dir, model, beta=0.1, resume=resume, **{"max_steps": 2, **settings})
    return [str(each.message) for each in caught if "reference model" in str(each.message)]


def changed_in_memory(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data *= 1.5
    return model


@pytest.mark.parametrize("settings", [{}, {"replay_fraction": 0.5}, {"partial_rollout_oversampling": 1.5}], ids=str)
def test_a_model_that_was_changed_in_memory_is_not_the_reference(tmp_path, folder, settings):
    (message,) = warned(tmp_path, changed_in_memory(folder), **settings)
    assert folder in message
    assert "at the first update" in message


@pytest.mark.trainings
def test_the_folder_and_new_adapters_are_the_reference(tmp_path, folder):
    adapters = [
        None,
        LoraConfig(target_modules=["q_proj"], lora_dropout=0.05),
        PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
    ]
    for number, adapter in enumerate(adapters):
        assert warned(tmp_path / str(number), folder, trainer_args={"peft_config": adapter}) == []
