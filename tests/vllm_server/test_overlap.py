"""Overlapped generation over a server that samples by prompt and weights alone: runs are equal to the bit."""

import copy
import math
import warnings
from pathlib import Path

import pytest
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerCallback

from bapo_trl import BAPOTrainer
from bapo_trl.batch.injected import InjectedRollouts
from bapo_trl.batch.scoring import score
from bapo_trl.batch.staleness import mean_staleness
from bapo_trl.checkpoints.stop_signals import StopSignals
from bapo_trl.parts import Part
from bapo_trl.upstream.fixes import end_training
from bapo_trl.vllm_server.comparison import SamplerComparison
from tests.helpers.alike import TIMES, assert_same_weights
from tests.helpers.commands import succeeded
from tests.helpers.fake_vllm import RUN, ModelServer, client_of
from tests.helpers.forked import run_function
from tests.helpers.toy import InUpdate, digits_reward, ending_model, terminate, toy_dataset, toy_trainer, training_logs


pytestmark = pytest.mark.trainings

OVERLAP = {**RUN, "overlap_generation": True, "vllm_logp_tolerance": None, "vllm_request_timeout": 60}


class Late(Part):
    def reset(self, run):
        self._run = run

    def sample(self, rows, clock):
        return self._run.late(rows)


class OneGenerationLate(BAPOTrainer):
    """The slow, obvious oracle: it waits for each rollout batch, sampled by the weights of the generation before."""

    served = None

    def _make_parts(self):
        return [Late(), *(part for part in super()._make_parts() if not isinstance(part, SamplerComparison))]

    def late(self, inputs):
        model = self.accelerator.unwrap_model(self.model)
        now = (copy.deepcopy(self.server.first), self.state.global_step)
        now[0].load_state_dict(model.state_dict())
        (served, version), self.served = self.served or now, now
        self.server.served = copy.deepcopy(served)  # in which an evaluation puts the current weights
        prompts = self._tokenize_prompts([row["prompt"] for row in inputs])[0]
        groups = gather_object(prompts)[:: self.num_generations]  # a completion depends on its place in the request
        body = {"prompt": groups, "n": self.num_generations, "max_tokens": self.max_completion_length}
        first = self.accelerator.process_index * len(prompts)
        choices = self.server.complete(body)["choices"][first : first + len(prompts)]
        tokens = [choice["token_ids"] for choice in choices]
        logps = [choice["logprobs"]["token_logprobs"] for choice in choices]
        return InjectedRollouts(
            copy.deepcopy(inputs), prompts, tokens,
            behavior_logps=logps, versions=[[version] * len(row) for row in tokens], sampler_logps=logps,
        )  # fmt: skip


def run(
    output_dir,
    trainer_class=BAPOTrainer,
    server=None,
    resume=None,
    model=None,
    dataset=None,
    eval_dataset=None,
    **settings,
):
    server = server or ModelServer()
    with client_of(server):
        data = {"train_dataset": toy_dataset() if dataset is None else dataset, "eval_dataset": eval_dataset}
        trainer = toy_trainer(
            output_dir, model, trainer_class, vllm_server_base_url=server.url, trainer_args=data,
            **{**OVERLAP, **settings},
        )  # fmt: skip
        trainer.server = server
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            server.stop()
    return trainer


def log_of(trainer):
    return [
        {name: value for name, value in log.items() if name not in TIMES and not name.startswith("sampling/")}
        for log in training_logs(trainer)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_iterations": 2},
        {"replay_fraction": 0.5},
        {"search_scope": "batch"},
        {"max_steps": 14},  # three epochs
        {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "search_scope": "micro_batch"},
        {"dataset": toy_dataset(40).to_iterable_dataset()},
    ],
    ids=str,
)
def test_a_run_is_that_of_completions_that_come_one_generation_late(tmp_path, settings):
    trainer = run(tmp_path / "overlap", **settings)
    oracle = run(tmp_path / "oracle", OneGenerationLate, overlap_generation=False, **settings)
    assert_same_weights(trainer, oracle)
    assert log_of(trainer) == log_of(oracle)
    if "replay_fraction" not in settings:
        assert max(log["staleness/max"] for log in log_of(trainer)) == trainer.args.largest_staleness
        cycle = log_of(trainer)[trainer.args.updates_per_generation :]  # from the first step that was requested ahead
        ages = [log["staleness/mean"] for log in cycle[: len(cycle) // 2 * 2]]
        assert sum(ages) / len(ages) == mean_staleness(trainer.args)


class TakesCurrent(BAPOTrainer):
    """The oracle: before each update, some tokens of its samples get the current policy's log-probabilities."""

    def _compute_loss(self, model, inputs):
        if not self.is_within_update:
            for batch in self._buffered_inputs:
                batch["reported"] = reported = batch.get("reported", batch["old_per_token_logps"])
                logps, _ = score(self, batch)
                is_odd = batch["completion_ids"] % 2 == 1
                batch["old_per_token_logps"] = torch.where(is_odd, logps, reported)
        return super()._compute_loss(model, inputs)


class ServerWithGaps(ModelServer):
    """Reports no log-probability of tokens with an odd id."""

    def sample(self, *args):
        choices = super().sample(*args)
        for choice in choices:
            logps = choice["logprobs"]["token_logprobs"]
            pairs = zip(choice["token_ids"], logps, strict=True)
            choice["logprobs"]["token_logprobs"] = [math.nan if token % 2 else logp for token, logp in pairs]
        return choices


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"replay_fraction": 0.5, "num_iterations": 2},
        {"search_scope": "batch", "contribution_weighting": "behavior_prob"},
        {"loss_type": "vespo", "negative_weight_min": 0.5},
        {"importance_sampling_level": "sequence", "contribution_measure": "surrogate"},
    ],
    ids=str,
)
def test_a_token_whose_log_probability_the_server_lacks_takes_the_current_one(tmp_path, settings):
    trainer = run(tmp_path / "gaps", server=ServerWithGaps(), **settings)
    oracle = run(tmp_path / "oracle", TakesCurrent, **settings)
    assert_same_weights(trainer, oracle)
    assert log_of(trainer) == log_of(oracle)
    assert max(log["ratio/max"] for log in log_of(trainer)) > 1.01


@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2, "replay_fraction": 0.5}, {"max_steps": 14}], ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, settings):
    """From the checkpoint before each generation step, over a restarted server."""
    size = {"save_strategy": "steps", "save_steps": 2 * settings.get("num_iterations", 1), **settings}
    whole = run(tmp_path / "whole", **size)
    folders = sorted(tmp_path.glob("whole/checkpoint-*"))
    assert len(folders) >= 2
    for folder in folders[:-1]:
        resumed = run(tmp_path / f"resumed-{folder.name}", resume=str(folder), **size)
        assert_same_weights(resumed, whole)
        assert log_of(resumed)[-1] == log_of(whole)[-1]


def test_a_resume_within_a_generation_step_keeps_what_was_requested_for_the_next(tmp_path):
    size = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}
    run(tmp_path / "whole", **size)
    resumed = run(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-3"), **size)
    at_5 = next(log for log in resumed.state.log_history if log.get("step") == 5)
    assert at_5["staleness/max"] == 2 + 0  # requested at update 2, with the weights of that update


@pytest.mark.parametrize("settings", [{}, {"replay_fraction": 0.5}], ids=str)
def test_a_request_that_fails_is_repeated_by_the_weights_of_then(tmp_path, settings):
    """The second request dies: its samples come from the weights at the next boundary, with no staleness at first."""
    server = ModelServer({("/v1/completions", 3): "die"})

    def on_wait(look):
        if look == 2:
            server.stop()
            server.start()

    with client_of(server, on_wait), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = toy_trainer(
            tmp_path, vllm_server_base_url=server.url, **{**OVERLAP, "vllm_server_timeout": 30, **settings}
        )
        trainer.train()
    server.stop()
    assert any("failed during generation" in str(each.message) for each in caught)
    if not settings:
        assert [log["staleness/max"] for log in training_logs(trainer)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert trainer.state.global_step == 8


def test_after_a_signal_a_save_waits_a_while_and_the_resumed_run_generates_again(tmp_path, monkeypatch):
    monkeypatch.setattr("bapo_trl.rollouts.overlap.SIGNAL_WAIT_S", 0.05)
    server = ModelServer({("/v1/completions", 3): "hang"})  # the request for generation step 2
    size = {"save_strategy": "steps", "save_steps": 8, "vllm_request_timeout": 60}
    data = {"train_dataset": toy_dataset(), "callbacks": [StopSignals(), InUpdate(4, terminate)]}
    with client_of(server):
        trainer = toy_trainer(
            tmp_path / "run", vllm_server_base_url=server.url, trainer_args=data, **{**OVERLAP, **size}
        )
        with pytest.warns(UserWarning, match="has not answered within 0.05 seconds"):
            trainer.train()
    server.stop()
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert trainer.state.global_step == 4
    assert list(checkpoint.glob("optimizer*"))
    assert not list(checkpoint.glob("requested_completions*"))
    resumed = run(tmp_path / "resumed", resume=str(checkpoint), **size)
    assert [log["staleness/max"] for log in training_logs(resumed)][-4:] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "event", "update"),
    [
        (
            {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 3, "num_generations_eval": 3},
            "on_evaluate", 4,
        ),
        (
            {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "search_scope": "micro_batch"},
            "on_substep_end", 3,
        ),
    ],
    ids=["after an evaluation", "within an update"],
)  # fmt: skip
def test_what_a_restarted_server_answers_is_not_trained_on(tmp_path, settings, event, update):
    """It has its first weights, while the trainer has sent its own at this very update."""
    server, asked = ModelServer(), []

    def restart(self, args, state, control, **kwargs):
        if state.global_step == update:
            server.stop()
            server.start()

    complete = server.complete

    def noted(body):
        if "prompt_logprobs" not in body:
            first, served = (next(iter(model.parameters())) for model in (server.first, server.served))
            asked.append((body["prompt"], server.num_starts > 1 and torch.equal(first, served)))
        return complete(body)

    server.complete = noted
    callback = type("Restart", (TrainerCallback,), {event: restart})()
    data = {"train_dataset": toy_dataset(), "eval_dataset": toy_dataset(1), "callbacks": [callback]}
    with client_of(server):
        trainer = toy_trainer(
            tmp_path, vllm_server_base_url=server.url, trainer_args=data,
            **{**OVERLAP, "vllm_server_timeout": 30, **settings},
        )  # fmt: skip
        with pytest.warns(UserWarning, match="vLLM server"):
            trainer.train()
    server.stop()
    by_first_weights = [number for number, (_, is_first) in enumerate(asked) if is_first]
    assert by_first_weights
    for number in by_first_weights:
        assert (asked[number][0], False) in asked[number:]


def test_an_epoch_that_is_ended_early_keeps_completions_with_their_rows(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 4

    rewarded = []

    def reward(prompts, completions, number, **kwargs):
        rewarded.append(list(zip(prompts, number, strict=True)))
        return digits_reward(completions)

    data = Dataset.from_dict({"prompt": [f"{i}+{i + 1}=" for i in range(40)], "number": list(range(40))})
    asked = []
    for overlaps in (True, False):
        server = ModelServer()
        complete = server.complete

        def noted(body, complete=complete):
            if "prompt_logprobs" not in body:
                asked.append(body["prompt"])
            return complete(body)

        server.complete = noted
        with client_of(server):
            trainer = toy_trainer(
                tmp_path, vllm_server_base_url=server.url, reward_funcs=reward,
                trainer_args={"train_dataset": data, "callbacks": [Stop()]},
                **{**OVERLAP, "overlap_generation": overlaps, "max_steps": 10},
            )  # fmt: skip
            trainer.train()
        server.stop()
    overlapped, plain = rewarded[: len(rewarded) // 2], rewarded[len(rewarded) // 2 :]
    assert overlapped == plain
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt, _ in overlapped[-1]]
    assert ids[:: trainer.num_generations] in asked[: len(asked) // 2 + 1]


def train_on_a_rank(out: str) -> None:
    folder = Path(out)
    size = {"save_strategy": "steps", "save_steps": 2, "max_completion_length": 30}
    trainer = run(folder / "overlap", model=ending_model(), **size)
    assert trainer.accelerator.num_processes == 2
    oracle = run(folder / "oracle", OneGenerationLate, model=ending_model(), overlap_generation=False, **size)
    assert_same_weights(trainer, oracle)
    assert log_of(trainer) == log_of(oracle)
    assert log_of(trainer)[0]["completions/min_length"] < 10 < log_of(trainer)[0]["completions/max_length"]
    checkpoint = str(folder / "overlap" / "checkpoint-4")
    resumed = run(folder / "resumed", model=ending_model(), resume=checkpoint, **size)
    assert_same_weights(resumed, trainer)
    end_training(trainer)


@pytest.mark.processes
def test_two_ranks_with_completions_of_unequal_lengths(tmp_path):
    succeeded(run_function(train_on_a_rank, tmp_path, ranks=2))


def test_twenty_deaths_of_the_server_lose_no_sample(tmp_path):
    """Each request dies from the second on. Every prompt is trained on once, in the order of the data."""
    server, trained = ModelServer(), []

    def on_wait(look):
        if look == 2:
            server.stop()
            server.start()
            server.faults = {("/v1/completions", server.counts["/v1/completions"] + 2): "die"}

    def reward(prompts, completions, **kwargs):
        trained.extend(prompts[::3])
        return digits_reward(completions)

    server.faults = {("/v1/completions", 2): "die"}
    with client_of(server, on_wait):
        trainer = toy_trainer(
            tmp_path, vllm_server_base_url=server.url, reward_funcs=reward,
            **{**OVERLAP, "vllm_server_timeout": 30, "max_steps": 42, "shuffle_dataset": False},
        )  # fmt: skip
        trainer.train()
    server.stop()
    assert server.num_starts == 21
    assert trained == (list(toy_dataset()["prompt"]) * 5)[: len(trained)]
    assert len(trained) == 21 * 8


def test_an_evaluation_waits_for_the_request(tmp_path):
    """It sends weights: the request under way keeps those that it was made with."""
    evaluating = {
        "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "num_generations_eval": 3
    }  # fmt: skip
    trainer = run(tmp_path / "overlap", eval_dataset=toy_dataset(1), **evaluating)
    oracle = run(
        tmp_path / "oracle", OneGenerationLate, eval_dataset=toy_dataset(1), overlap_generation=False, **evaluating
    )
    assert_same_weights(trainer, oracle)
    assert [log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log] == [
        log["eval_reward"] for log in oracle.state.log_history if "eval_reward" in log
    ]
