"""The look-ahead leaves the model as it found it, and finds what the loss will find, whatever is random in both."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoKrConfig, LoraConfig

from bapo_trl.batch.updates import PolicyLoss
from bapo_trl.upstream.forward_passes import forked_random_state
from tests.helpers.model_state import model_state, random_state
from tests.helpers.toy import opt_model, toy_model, toy_trainer, training_logs
from tests.test_bapo_trainer import assert_logged_shares_are_those_of_the_loss, trained


def lora(**settings) -> dict:
    return {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings)}


LOKR = LoKrConfig(r=4, target_modules="all-linear", init_weights=False, module_dropout=0.5)


# The model afterwards


@pytest.mark.trainings
@pytest.mark.parametrize(
    "args",
    [
        {"gradient_checkpointing": False},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"trainer_args": lora(lora_dropout=0.5)},
        {"neftune_noise_alpha": 5.0, "top_entropy_quantile": 0.5},
    ],
    ids=lambda args: "-".join(args),
)
def test_the_look_ahead_leaves_everything_as_it_found_it(tmp_path, monkeypatch, recwarn, args):
    def compare(policy_loss, *args):
        before = {**model_state(trainer.model), **random_state()}
        before["weights"] = [weight.detach().clone() for weight in trainer.model.parameters()]
        tokens = read_ahead(policy_loss, *args)
        after = {**model_state(trainer.model), **random_state()}
        weights = zip(before.pop("weights"), trainer.model.parameters(), strict=True)
        assert all(torch.equal(left, right) for left, right in weights)
        assert after == before
        compared.append(trainer.state.global_step)
        return tokens

    read_ahead, compared = PolicyLoss.tokens_ahead, []
    monkeypatch.setattr(PolicyLoss, "tokens_ahead", compare)
    trainer = toy_trainer(
        tmp_path, model=toy_model(attention_dropout=0.1, num_hidden_layers=2), search_scope="batch", **args
    )  # fmt: skip
    trainer.train()
    assert compared == [0, 1, 2, 3]
    assert trainer.model.is_gradient_checkpointing == args.get("gradient_checkpointing", True)
    assert not any("requires_grad" in str(warning.message) for warning in recwarn)


def test_the_random_states_of_all_devices_of_the_model_are_given_back(monkeypatch):
    """Stands in for the devices: their module, which `torch` asks for the state, is there without one."""
    module, states = torch.get_device_module("cuda"), {torch.device("cuda", 0): 1, torch.device("cuda", 1): 2}
    monkeypatch.setattr(module, "get_rng_state", states.get)
    monkeypatch.setattr(module, "set_rng_state", lambda new, device: states.update({device: new}))
    model = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=device) for device in states])
    before, of_devices = torch.get_rng_state(), dict(states)
    with forked_random_state(torch.device("cuda", 0), model):
        states.update(dict.fromkeys(states, 3))
        torch.rand(3)
    assert states == of_devices
    assert torch.equal(torch.get_rng_state(), before)


# What is random in a forward pass


@pytest.mark.trainings
@pytest.mark.parametrize(
    ("model", "args"),
    [
        (lambda: opt_model(dropout=0.3), {"gradient_checkpointing": False}),
        (lambda: opt_model(dropout=0.3), {"disable_dropout": True}),  # which TRL does for dropout modules only
        (lambda: toy_model(attention_dropout=0.3), {"disable_dropout": True}),
        (toy_model, {"trainer_args": lora(lora_dropout=0.5)}),  # without effect until the first update
        (toy_model, {"trainer_args": lora(lora_dropout=0.5), "gradient_checkpointing": False}),
        (toy_model, {"trainer_args": {"peft_config": LOKR}}),
    ],
    ids=["opt-plain", "opt-disabled", "attention-disabled", "lora", "lora-plain", "lokr"],
)
def test_the_logged_share_is_that_of_the_loss_whatever_is_random(tmp_path, model, args):
    """Also where the samples are those of the current policy: the ratios are not 1 even there. More in test_sweep."""
    trainer = trained(tmp_path, search_scope="batch", model=model(), steps_per_generation=2, **args)
    assert_logged_shares_are_those_of_the_loss(trainer)
    assert trainer.look_ahead_calls == 4 * 2
    ages = [log["staleness/max"] for log in training_logs(trainer)]
    assert ages == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (opt_model, {}),
        (toy_model, {"neftune_noise_alpha": None}),
        (toy_model, {"trainer_args": lora(lora_dropout=0.5), "disable_dropout": True}),
    ],
    ids=["opt", "qwen", "lora-disable_dropout"],
)
def test_without_anything_random_fresh_samples_need_no_forward_pass(tmp_path, model, args):
    trainer = trained(tmp_path, model=model(), steps_per_generation=2, search_scope="batch", **args)
    assert trainer.look_ahead_calls == 2 * 2


@pytest.mark.parametrize("scope", ["batch", "carried_over"])
@pytest.mark.parametrize(
    "args",
    [
        {"trainer_args": lora(lora_dropout=0.5)},
        {"neftune_noise_alpha": 5.0, "loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"model": opt_model(dropout=0.3), "loss_type": "vespo"},
    ],
    ids=["lora", "noise", "opt"],
)
def test_an_on_policy_run_needs_no_forward_pass_whatever_is_random(tmp_path, scope, args):
    """TRL divides by the log-probabilities of the same forward pass: each ratio is 1."""
    trainer = trained(
        tmp_path, search_scope=scope, steps_per_generation=2, num_iterations=1, negative_weight_min=0.05,
        positive_contribution_target=0.7, **args,
    )  # fmt: skip
    assert trainer.look_ahead_calls == 0
    assert_logged_shares_are_those_of_the_loss(trainer)
    assert {log["ratio/max"] for log in training_logs(trainer)} == {1}
    assert min(log["bapo/negative_weight"] for log in training_logs(trainer)) < 1
