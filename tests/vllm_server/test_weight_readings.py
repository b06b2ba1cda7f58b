"""A server that does not take the weights is noticed by how little it moves, in float32 and in bfloat16."""

import math

import pytest
import torch

from bapo_trl.vllm_server.weight_readings import Reading, share_followed, stands_still
from tests.helpers.alike import assert_same_weights
from tests.helpers.fake_vllm import FakeVLLM, round_otherwise, vllm_trainer
from tests.helpers.toy import toy_model, training_logs


EVERY_UPDATE = {  # a generation and a transfer before each
    "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1, "steps_per_generation": 1,
    "num_iterations": 1, "lr_scheduler_type": "constant", "vllm_logp_tolerance": 0.5,
}  # fmt: skip


class Hearing(FakeVLLM):
    """Takes the weights of some transfers, and none after them."""

    hears_until = math.inf

    def sync_weights(self):
        if self.num_syncs < self.hears_until:
            super().sync_weights()
        else:
            self.num_syncs += 1


class InFloat32(Hearing):
    """Rounds otherwise than the trainer, as another implementation does."""

    def _post(self, url, json):
        return round_otherwise(super()._post(url, json))


class InBFloat16(Hearing):
    def sync_weights(self):
        self.served.bfloat16()
        super().sync_weights()


def deaf(server, after=1):
    return type(f"Deaf{server.__name__}", (server,), {"hears_until": after})


def train(monkeypatch, tmp_path, server, **settings):
    trainer = vllm_trainer(monkeypatch, tmp_path, server, **{**EVERY_UPDATE, **settings})
    trainer.train()
    return trainer


# Through the front door


@pytest.mark.trainings
@pytest.mark.parametrize(
    ("server", "heard", "rate", "transfers", "settings"),
    [
        (InFloat32, 1, 1e-6, 3, {}),
        (InFloat32, 3, 5e-5, 3, {}),
        (InFloat32, 1, 1e-6, 3, {"top_p": 0.8, "temperature": 0.7}),  # which explain a difference of the samples
        (InBFloat16, 1, 5e-5, 3, {}),
        (InBFloat16, 3, 1e-5, 12, {}),
    ],
)
def test_a_server_that_no_longer_takes_weights_is_noticed(
    monkeypatch, tmp_path, server, heard, rate, transfers, settings
):
    settings = {"learning_rate": rate, "max_steps": heard + transfers, **settings}
    with pytest.raises(RuntimeError, match=r"does not load the trainer's weights: .* made only -?0\.0\d of"):
        train(monkeypatch, tmp_path, deaf(server, heard), **settings)


@pytest.mark.trainings
def test_steps_too_small_to_tell_add_up(monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="does not load the trainer's weights"):
        train(monkeypatch, tmp_path, deaf(InFloat32), learning_rate=1e-7, max_steps=30)
    trainer = train(monkeypatch, tmp_path, InFloat32, learning_rate=1e-7, max_steps=30)
    shares = [log["sampling/server_followed"] for log in training_logs(trainer) if "sampling/server_followed" in log]
    assert 1 < len(shares) < 29
    assert all(0.75 <= share <= 1.25 for share in shares)


@pytest.mark.trainings
@pytest.mark.parametrize("learning_rate", [1e-6, 2e-2])
def test_a_server_that_takes_them_follows(monkeypatch, tmp_path, learning_rate):
    trainer = train(monkeypatch, tmp_path, InFloat32, learning_rate=learning_rate, max_steps=8)
    first, *others = training_logs(trainer)
    assert "sampling/server_followed" not in first
    assert [log["sampling/server_followed"] for log in others] == pytest.approx([1] * 7, abs=0.1)


@pytest.mark.trainings
@pytest.mark.parametrize("learning_rate", [0.0, 1e-8, 1e-6])
def test_a_server_in_bfloat16_is_not_taken_for_a_stale_one(monkeypatch, tmp_path, learning_rate):
    train(monkeypatch, tmp_path, InBFloat16, learning_rate=learning_rate, max_steps=30)


@pytest.mark.trainings
def test_the_check_changes_nothing_that_is_trained(monkeypatch, tmp_path):
    def run(tolerance):
        settings = {"gradient_checkpointing": True, "vllm_logp_tolerance": tolerance}
        model = toy_model(attention_dropout=0.2)
        trainer = train(monkeypatch, tmp_path, FakeVLLM, max_steps=4, model=model, **settings)
        modes = [module.training for module in trainer.model.modules()]
        return trainer, modes, torch.random.get_rng_state()

    checked, modes, random_state = run(0.5)
    unchecked, modes_without, random_state_without = run(None)
    assert len(checked.vllm_generation.requests) == 6 * 4
    assert unchecked.vllm_generation.requests == []
    assert modes == modes_without
    assert torch.equal(random_state, random_state_without)
    assert_same_weights(checked, unchecked)


# By hand


def reading(trainer, server):
    return Reading(torch.tensor(trainer, dtype=torch.float64), torch.tensor(server, dtype=torch.float64))


def test_share_by_hand():
    before = reading([-1.0, -1.0, -1.0], [-1.001, -1.0, -0.998])  # mean rounding 1e-3
    # d = 0.1, -0.2, 0.3 and e = 0.1, -0.1, 0.1: (0.1 + 0.1 + 0.1) / 0.6
    assert share_followed(before, reading([-0.9, -1.2, -0.7], [-0.901, -1.1, -0.898])) == pytest.approx(0.5)
    before = reading([-1.0, -1.0], [-1.01, -0.99])  # mean rounding 0.01: a change below 0.08 tells nothing
    assert math.isnan(share_followed(before, reading([-1.079, -1.079], [-1.01, -0.99])))
    assert share_followed(before, reading([-1.081, -1.081], [-1.01, -0.99])) == 0
    # Probabilities of 0.8 and 0.2: (0.8 * 0.1 + 0.2 * 0) / (0.8 * 0.1 + 0.2 * 0.3)
    before = reading([math.log(0.8), math.log(0.2)], [math.log(0.8), math.log(0.2)])
    now = reading([math.log(0.8) + 0.1, math.log(0.2) + 0.3], [math.log(0.8) + 0.1, math.log(0.2)])
    assert share_followed(before, now) == pytest.approx(0.08 / 0.14)


@pytest.mark.parametrize("seed", range(5))
def test_rounding_of_any_kind_moves_the_share_by_a_quarter_at_most(seed):
    """Also rounding of a few tokens only, always against the trainer's change."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(40, generator=random, dtype=torch.float64) ** 5
    change = torch.randn(40, generator=random, dtype=torch.float64)
    change *= 8 * noise.abs().mean() / change.abs().mean() * 1.01
    trainer = torch.full((40,), -50.0, dtype=torch.float64)
    against = -change.sign() * noise.abs()
    before = Reading(trainer, trainer - against)
    assert share_followed(before, Reading(trainer + change, trainer + change + against)) >= 0.75
    assert share_followed(before, Reading(trainer + change, trainer - against)) == 0


def test_a_server_that_repeats_itself_stands_still():
    before = reading([-1.0, -2.0, -3.0], [-1.1, -2.1, -3.1])
    moved = [-1.002, -2.002, -9.0]
    assert stands_still(before, reading(moved, [-1.1, -2.1, -3.1]))
    assert not stands_still(before, reading(moved, [-1.1, -2.1, -3.1001]))
    assert not stands_still(before, reading([-1.0005, -2.0005, -9.0], [-1.1, -2.1, -3.1]))  # the median has not moved
    assert not stands_still(before, before)
