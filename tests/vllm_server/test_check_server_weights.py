"""`check_server_weights` finds wrong weights for the trainers of TRL, and leaves healthy runs alone."""

import copy
import math
import os
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.trainer import grpo_trainer, rloo_trainer

from bapo_trl import BAPOConfig, BAPOTrainer, StaleServerError, check_server_weights
from bapo_trl.experimental import AsyncBAPOConfig, AsyncBAPOTrainer
from bapo_trl.vllm_server import mismatch
from tests.helpers.asynchronous import NoTransfer, async_trainer, on_cpu, scripted_samples
from tests.helpers.commands import succeeded
from tests.helpers.fake_vllm import FakeVLLM, ModelServer, ScriptedLLM, StaleLLM, colocate_trainer, round_otherwise
from tests.helpers.forked import run_function
from tests.helpers.toy import toy_model, toy_trainer, training_logs


pytestmark = pytest.mark.trainings

TRAINERS = {
    "GRPO": (GRPOTrainer, GRPOConfig),
    "RLOO": (RLOOTrainer, RLOOConfig),
    "GMPO": (GMPOTrainer, GMPOConfig),
    "BAPO": (BAPOTrainer, BAPOConfig),
}
EVERY_UPDATE = {  # a generation and a transfer before each
    "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1, "steps_per_generation": 1,
    "num_iterations": 1, "learning_rate": 1e-2, "max_steps": 6, "beta": 0.0, "vllm_max_model_length": 64,
}  # fmt: skip


class Server(FakeVLLM):
    """A server with a prefix cache, which rounds otherwise than the trainer."""

    def sync_weights(self):
        super().sync_weights()
        self.cached = {}  # by salt

    def _post(self, url, json):
        answer = round_otherwise(super()._post(url, json))
        (choice,) = answer["choices"]
        choice["logprobs"] = self.cached.setdefault(json["cache_salt"], choice["logprobs"])
        return answer


class Deaf(Server):
    """Takes the weights of two transfers."""

    hears_until = 2

    def sync_weights(self):
        if self.num_syncs < self.hears_until:
            super().sync_weights()
        else:
            self.num_syncs += 1


class OtherModel(Server):
    """Never takes weights, and had others from the start."""

    def sync_weights(self):
        super().sync_weights()
        self.served.load_state_dict(toy_model(seed=1).state_dict())


class WithoutOneLayer(Server):
    def sync_weights(self):
        super().sync_weights()
        kept = {name: value for name, value in self.first_weights.items() if "mlp.down_proj" in name}
        self.served.load_state_dict({**self.trained.state_dict(), **kept})


class Late(Server):
    """Has the weights of the transfer before."""

    def sync_weights(self):
        sent = copy.deepcopy(self.trained.state_dict())
        super().sync_weights()
        self.served.load_state_dict(getattr(self, "latest", sent))
        self.latest = sent


class MergedTwice(Server):
    """Has twice the change of the weights."""

    def sync_weights(self):
        super().sync_weights()
        trained = self.trained.state_dict()
        self.served.load_state_dict({name: 2 * trained[name] - self.first_weights[name] for name in trained})


class KeepsPrefixCache(Server):
    def sync_weights(self):
        cached = getattr(self, "cached", {})
        super().sync_weights()
        self.cached = cached


class Restarted(Server):
    """Has its first weights again from the fourth transfer."""

    def sync_weights(self):
        super().sync_weights()
        if self.num_syncs > 3:
            self.served.load_state_dict(self.first_weights)


FAULTS = [Deaf, OtherModel, WithoutOneLayer, Late, MergedTwice, KeepsPrefixCache, Restarted]


def server_trainer(monkeypatch, output_dir, server=Server, kind="GRPO", trainer_args=None, **settings):
    """Return a trainer over a stand-in for a server."""
    for module in (grpo_trainer, rloo_trainer):
        monkeypatch.setattr(module, "VLLMGeneration", server)
    monkeypatch.setattr(mismatch, "client_for", lambda *args: nullcontext())
    trainer_class, config_class = TRAINERS[kind]
    settings = {**EVERY_UPDATE, "use_vllm": True, "vllm_mode": "server", **settings}
    return toy_trainer(
        output_dir, trainer_class=trainer_class, config_class=config_class, trainer_args=trainer_args, **settings
    )


def shares(trainer) -> list[float]:
    return [log["sampling/server_followed"] for log in training_logs(trainer) if "sampling/server_followed" in log]


# Found and not found


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("server", FAULTS)
def test_wrong_weights_end_the_run(monkeypatch, tmp_path, server, kind):
    trainer = server_trainer(monkeypatch, tmp_path, server, kind, max_steps=20)
    check_server_weights(trainer, vllm_logp_tolerance=0.1)
    with pytest.raises(StaleServerError):
        trainer.train()


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_server_that_takes_the_weights_follows(monkeypatch, tmp_path, kind):
    trainer = server_trainer(monkeypatch, tmp_path, kind=kind)
    check_server_weights(trainer)
    trainer.train()
    assert shares(trainer) == pytest.approx([1] * 5, abs=0.05)


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleep"])
@pytest.mark.parametrize("kind", ["GRPO", "BAPO"])
def test_an_engine_in_the_process_follows(monkeypatch, tmp_path, kind, sleeps):
    trainer_class, config_class = TRAINERS[kind]
    settings = {**EVERY_UPDATE, "vllm_enable_sleep_mode": sleeps, "max_completion_length": 7}
    trainer, llm = colocate_trainer(
        monkeypatch, tmp_path / "run", trainer_class=trainer_class, config_class=config_class, **settings
    )
    check_server_weights(trainer)
    trainer.train()
    assert shares(trainer) == pytest.approx([1] * 5, abs=0.05)
    assert llm.asleep == ({"weights", "kv_cache"} if sleeps else set())


def test_an_engine_in_the_process_that_takes_no_weights_ends_the_run(monkeypatch, tmp_path):
    settings = {**EVERY_UPDATE, "trainer_class": GRPOTrainer, "config_class": GRPOConfig}
    trainer, _ = colocate_trainer(monkeypatch, tmp_path / "run", llm=StaleLLM, **settings)
    check_server_weights(trainer)
    with pytest.raises(StaleServerError):
        trainer.train()


# When it asks


def test_the_server_is_asked_once_a_transfer_and_every_tenth_time_after_ten_checks_that_passed(monkeypatch, tmp_path):
    settings = {"steps_per_generation": 2, "max_steps": 80, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"per_device_eval_batch_size": 3, "num_generations": 3}
    held_out = toy_trainer(tmp_path / "other").train_dataset.select(range(1))
    trainer = server_trainer(monkeypatch, tmp_path, trainer_args={"eval_dataset": held_out}, **settings)
    check_server_weights(trainer)
    trainer.train()
    # 40 generations: ten checks, the first of which has nothing to compare with, then each tenth
    assert len(trainer.vllm_generation.requests) == 6 * 10 + 4 * 3
    assert len(shares(trainer)) == 12


def test_a_repeated_answer_is_followed_up_at_the_next_transfer(monkeypatch, tmp_path):
    class DeafLater(Deaf):
        hears_until = 13

    trainer = server_trainer(monkeypatch, tmp_path, DeafLater, max_steps=60, learning_rate=1e-6)
    check_server_weights(trainer)
    with pytest.raises(StaleServerError):
        trainer.train()
    assert trainer.state.global_step < 13 + 2 * 10


def test_completions_that_are_all_masked_put_the_check_off(monkeypatch, tmp_path):
    trainer = server_trainer(monkeypatch, tmp_path, mask_truncated_completions=True, max_completion_length=1)
    check_server_weights(trainer)
    trainer.train()
    assert trainer.vllm_generation.requests == []


def test_warnings_come_once_for_each_fault(monkeypatch, tmp_path):
    class Now_and_then(Server):
        """Takes no weights at the transfers 2 to 5 and 7 to 9."""

        def sync_weights(self):
            if self.num_syncs + 1 in (2, 3, 4, 5, 7, 8, 9):
                self.num_syncs += 1
            else:
                super().sync_weights()

    trainer = server_trainer(monkeypatch, tmp_path, Now_and_then, max_steps=9)
    check_server_weights(trainer, on_failure="warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert sum("trainer's weights" in str(each.message) for each in caught) == 2
    assert trainer.state.global_step == 9


def test_a_second_call_replaces_the_first(monkeypatch, tmp_path):
    trainer = server_trainer(monkeypatch, tmp_path)
    check_server_weights(trainer)
    check_server_weights(trainer, min_followed=1.5)
    with pytest.raises(StaleServerError):
        trainer.train()
    assert len(trainer.vllm_generation.requests) == 6 * 4


def test_a_call_for_a_bapo_trainer_counts_beside_its_setting(monkeypatch, tmp_path):
    trainer = server_trainer(monkeypatch, tmp_path, Deaf, "BAPO", vllm_logp_tolerance=None)
    trainer.train()
    trainer = server_trainer(monkeypatch, tmp_path, Deaf, "BAPO", vllm_logp_tolerance=None)
    check_server_weights(trainer)
    with pytest.raises(StaleServerError):
        trainer.train()


# The asynchronous trainers


class ToServer(NoTransfer):
    def __init__(self, server, last=math.inf):
        super().__init__()
        self.server, self.last = server, last

    def send_weights(self, iterator):
        super().send_weights(iterator)
        if len(self.sent) <= self.last:
            self.server.served.load_state_dict(self.sent[-1], strict=False)


@pytest.mark.parametrize("last", [math.inf, 1], ids=["healthy", "stale"])
@pytest.mark.parametrize("kind", ["TRL", "BAPO"])
def test_asynchronous_trainers_are_checked_after_each_transfer(tmp_path, kind, last):
    classes = {"TRL": (AsyncGRPOTrainer, AsyncGRPOConfig), "BAPO": (AsyncBAPOTrainer, AsyncBAPOConfig)}
    server = ModelServer()
    try:
        with on_cpu():
            samples = scripted_samples(toy_model(), 40)
            trainer = async_trainer(tmp_path, samples, *classes[kind], vllm_server_base_url=server.url)
            trainer.weight_transfer = ToServer(server, last)
            check_server_weights(trainer)
            with nullcontext() if last == math.inf else pytest.raises(StaleServerError):
                trainer.train()
            if last == math.inf:
                assert shares(trainer) == pytest.approx([1] * 4, abs=0.05)
    finally:
        server.stop()


# Several ranks


class StaleOnOneRank(ScriptedLLM):
    def _load_weights(self, weights):
        if self.seed == 0:
            super()._load_weights(weights)


def train_on_two_ranks(out: str) -> None:
    """Train with an engine on each rank, one of which takes no weights."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        rank = os.environ["RANK"]
        settings = {**EVERY_UPDATE, "trainer_class": GRPOTrainer, "config_class": GRPOConfig}
        trainer, _ = colocate_trainer(monkeypatch, Path(out) / f"run-{rank}", llm=StaleOnOneRank, **settings)
        check_server_weights(trainer)
        with pytest.raises(StaleServerError):
            trainer.train()
        (Path(out) / f"{rank}.found").touch()


def test_an_engine_of_one_rank_ends_the_run_on_all(tmp_path):
    succeeded(run_function(train_on_two_ranks, tmp_path, ranks=2))
    assert all((tmp_path / f"{rank}.found").exists() for rank in range(2))


# Bad input


def test_a_trainer_without_vllm_is_rejected(tmp_path):
    trainer = toy_trainer(tmp_path, trainer_class=GRPOTrainer, config_class=GRPOConfig)
    with pytest.raises(ValueError, match="use_vllm"):
        check_server_weights(trainer)


def test_a_trainer_without_vllm_generation_is_rejected(monkeypatch, tmp_path):
    trainer = server_trainer(monkeypatch, tmp_path)
    del trainer.vllm_generation
    with pytest.raises(ValueError, match="vllm_generation"):
        check_server_weights(trainer)


def test_images_and_other_failures_are_rejected(monkeypatch, tmp_path):
    trainer = server_trainer(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="on_failure"):
        check_server_weights(trainer, on_failure="ignore")
    trainer._is_vlm = True
    with pytest.raises(ValueError, match="images"):
        check_server_weights(trainer)
