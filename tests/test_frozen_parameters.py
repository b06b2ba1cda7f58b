"""Runs in which nothing would be trained end with an error; frozen parameters stay frozen."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.optim import SGD
from transformers import AutoModelForCausalLM

from tests.helpers.alike import assert_same_logs, assert_same_tensors, assert_same_weights, weights_of
from tests.helpers.toy import toy_model, toy_trainer, training_logs


LORA = LoraConfig(target_modules="all-linear", init_lora_weights=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model, and a folder with an adapter of it."""
    folder = tmp_path_factory.mktemp("saved")
    toy_model().save_pretrained(folder / "model")
    torch.manual_seed(0)
    get_peft_model(load(folder), LORA).save_pretrained(folder / "adapter")
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model")


def saved_adapter(folder, is_trainable=True):
    return PeftModel.from_pretrained(load(folder), folder / "adapter", is_trainable=is_trainable)


def frozen_model(folder):
    return load(folder).requires_grad_(False)


def frozen_adapter(folder):
    return saved_adapter(folder, is_trainable=False)


def is_rejected(trainer, message: str) -> None:
    """See that the run ends before its first generation, with the weights as they were."""
    weights = weights_of(trainer.model)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert_same_tensors(weights, trainer.model.state_dict())


def test_a_merged_adapter_raises_an_error(saved, tmp_path):
    model = saved_adapter(saved)
    model.merge_adapter()
    is_rejected(toy_trainer(tmp_path, model=model), "all 14 parameters .* `PeftModel.unmerge_adapter`")
    model.unmerge_adapter()
    toy_trainer(tmp_path, model=model, reward_funcs=[lambda completions, **_: [1.0] * len(completions)]).train()


def no_reward(completions, **kwargs):
    raise AssertionError("completions were sampled")


@pytest.mark.parametrize(
    ("make", "beta", "checkpointing", "num_parameters", "fix"),
    [
        # Embeddings, norm and head; in the layer 7 matrices, 3 of them with a bias, and 2 norms: 3 + 7 + 3 + 2
        (frozen_model, 0.0, True, 15, "`peft_config`"),
        (frozen_model, 0.1, False, 15, "`peft_config`"),
        (frozen_adapter, 0.0, True, 15 + 2 * 7, "is_trainable=True"),
        (frozen_adapter, 0.1, True, 15 + 2 * 2 * 7, "is_trainable=True"),  # with TRL's copy of it, the reference
        (frozen_adapter, 0.1, False, 15 + 2 * 2 * 7, "is_trainable=True"),
    ],
)
def test_a_run_that_trains_nothing_raises_an_error(saved, tmp_path, make, beta, checkpointing, num_parameters, fix):
    settings = {"beta": beta, "gradient_checkpointing": checkpointing, "reward_funcs": no_reward}
    trainer = toy_trainer(tmp_path, make(saved), **settings)
    is_rejected(trainer, rf"none of the model's {num_parameters} parameters .*{fix}")


@pytest.mark.parametrize(
    ("others", "peft_config"),
    [
        (lambda model, folder: load(folder).parameters(), None),  # of another copy
        (lambda model, folder: list(model.parameters()), LORA),  # the adapter comes later, and freezes them
        (lambda model, folder: [model.lm_head.weight.requires_grad_(False)], None),
    ],
    ids=["other model", "before the adapter", "frozen part"],
)
def test_an_optimizer_without_a_trained_parameter_raises_an_error(saved, tmp_path, others, peft_config):
    model = load(saved)
    parts = {"optimizers": (SGD(others(model, saved), lr=0.1), None), "peft_config": peft_config}
    num_trained = 14 if peft_config or not model.lm_head.weight.requires_grad else 15
    trainer = toy_trainer(tmp_path, model, reward_funcs=no_reward, trainer_args=parts)
    is_rejected(trainer, f"the optimizer has none of the model's {num_trained} parameters .*`optimizers`")


# A part of an adapter: the first matrices are frozen, the second ones trained ("LoRA-FA")


def half_frozen(folder, output_dir, is_saved, **settings):
    parts = {} if is_saved else {"peft_config": LORA}
    model = saved_adapter(folder) if is_saved else load(folder)
    trainer = toy_trainer(output_dir, model, trainer_args=parts, **settings)
    for name, weight in trainer.model.named_parameters():
        weight.requires_grad_("lora_B.default" in name)
    return trainer


@pytest.mark.parametrize("is_saved", [True, False], ids=["reference a copy", "reference the base"])
def test_scoring_the_reference_lets_the_frozen_half_of_an_adapter_be(saved, tmp_path, is_saved):
    trainer = half_frozen(saved, tmp_path, is_saved, beta=0.1, max_grad_norm=0.0, max_steps=2)
    norms, of_trainer = [], trainer._get_grad_norm

    def noting(model, grad_norm=None):
        assert all("lora_B.default" in name for name, weight in model.named_parameters() if weight.grad is not None)
        norms.append(torch.cat([w.grad.flatten() for w in model.parameters() if w.requires_grad]).norm().item())
        return of_trainer(model, grad_norm=grad_norm)

    trainer._get_grad_norm = noting
    trainer.train()
    assert [log["grad_norm"] for log in training_logs(trainer)] == pytest.approx(norms)
    assert len(norms) == 2


@pytest.mark.trainings
@pytest.mark.parametrize("is_saved", [True, False], ids=["reference a copy", "reference the base"])
def test_a_resumed_run_trains_the_same_half_of_an_adapter(saved, tmp_path, is_saved):
    settings = {"beta": 0.1, "save_strategy": "steps", "save_steps": 4, "max_steps": 6}
    straight = half_frozen(saved, tmp_path, is_saved, **settings)
    straight.train()
    resumed = half_frozen(saved, tmp_path, is_saved, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same_weights(straight, resumed)
    assert_same_logs(straight, resumed, last=2)
