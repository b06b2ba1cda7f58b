"""Partial rollouts through `train()`."""

import json
import math
from itertools import chain, count

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.replay.mixer import ReplayMixer
from bapo_trl.rollouts.partial import PartialRollouts
from bapo_trl.rollouts.pool import FILES
from bapo_trl.tasks import character_tokenizer
from tests.helpers.alike import assert_same_states, assert_same_weights
from tests.helpers.commands import succeeded
from tests.helpers.fake_vllm import FakeVLLM, vllm_trainer
from tests.helpers.forked import run_function
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.scores import assert_scored_by_its_policy, score
from tests.helpers.toy import (
    CPU,
    OFF_POLICY,
    ending_model,
    part_of,
    toy_model,
    toy_run,
    toy_trainer,
    training_logs,
)


# 24 rows a generation in 12 groups of 2, of which 11 are held over; 3 updates of 2 micro-batches of 4 rows.
PARTIAL = {
    "partial_rollout_oversampling": 1.9,
    "partial_rollout_chunk_length": 2,
    "max_completion_length": 40,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 6,
    "num_iterations": 1,
    "max_steps": 15,
    "gradient_checkpointing": True,
}


def countdown_model(**overrides):
    """A model that follows each token with the one before it in the vocabulary; EOS is number 1."""
    size = len(character_tokenizer())
    model = toy_model(**{"hidden_size": size + -size % 4, **overrides})
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, model.config.hidden_size))
        model.lm_head.weight.copy_(torch.eye(size, model.config.hidden_size).roll(1, dims=1))
    return model


def prompts_of_many_lengths(size: int = 40) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{i}+{i * 37 % 11}" + "=" * (1 + i % 5) for i in range(size)]})


def share_of_digits(completions, **kwargs) -> list[float]:
    """Reward digits whatever the length, so that the lengths stay as they are."""
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]


class Recording(BAPOTrainer):
    """Keeps what each generation hands to training, and the weights of every policy version."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.prompts, self.weights = [], [], {}

    def _generate_and_score_completions(self, inputs):
        if self.model.training:
            self.weights[self.state.global_step] = {k: v.clone() for k, v in self.model.state_dict().items()}
            self.prompts += [row["prompt"] for row in inputs[:: self.num_generations]]
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.batches.append({k: v.clone() for k, v in output.items()})
        return output


def with_rollouts(kind: type[PartialRollouts], trainer_class=Recording) -> type[BAPOTrainer]:
    """A trainer class whose partial rollouts are of a class."""

    class WithRollouts(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            part_of(self, PartialRollouts).__class__ = kind

    return WithRollouts


def trainer_of(tmp_path, trainer_class=Recording, model=None, trainer_args=None, **args):
    return toy_trainer(
        tmp_path,
        model=model if model is not None else ending_model(),
        trainer_class=trainer_class,
        reward_funcs=share_of_digits,
        trainer_args={"train_dataset": prompts_of_many_lengths(), **(trainer_args or {})},
        **{**PARTIAL, **args},
    )


def train(tmp_path, *args, **kwargs):
    trainer = trainer_of(tmp_path, *args, **kwargs)
    trainer.train()
    return trainer


def trained_rows(trainer, *kinds):
    """Prompt ids, token ids, version of each token, and log-probs of these kinds, of all rows that train something."""
    for recorded in trainer.batches:  # on the trainer's device
        batch = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in recorded.items()}
        of_rows = batch["policy_version"].unsqueeze(1).expand(batch["completion_mask"].shape)
        versions = batch.get("token_versions", of_rows)
        for row in range(len(batch["completion_ids"])):
            mask = batch["completion_mask"][row].bool()
            if mask.any():
                yield (
                    batch["prompt_ids"][row][batch["prompt_mask"][row].bool()],
                    batch["completion_ids"][row][mask],
                    versions[row][mask],
                    *(batch[kind][row][mask] for kind in kinds or ("old_per_token_logps",)),
                )


def pool_of(trainer):
    return part_of(trainer, PartialRollouts).pool


def parked_prompts(trainer) -> list[str]:
    return [group.inputs["prompt"] for group in pool_of(trainer)]


def full_rows(trainer) -> list[int]:
    """Number of rows that train something, of each batch."""
    return [int(batch["completion_mask"].any(dim=1).sum()) for batch in trainer.batches]


def test_every_prompt_is_trained_once_and_each_token_scored_by_the_policy_that_sampled_it(tmp_path):
    trainer = train(tmp_path, learning_rate=1e-2)
    model, logs = ending_model().eval(), training_logs(trainer)
    assert_scored_by_its_policy(
        trained_rows(trainer), lambda version, *ids: score(model, *ids, trainer.weights[version])
    )
    assert max(log.get("ratio/max", 0) for log in logs) > 1.1  # the weights did change
    assert full_rows(trainer) == [2, 24, 24, 24, 24]
    assert all(len(batch["completion_ids"]) == 24 for batch in trainer.batches)
    assert [log["partial/masked"] for log in logs if "partial/masked" in log] == [22, 0, 0, 0, 0]
    trained = [character_tokenizer().decode(prompt_ids) for prompt_ids, *_ in trained_rows(trainer)]
    assert len(pool_of(trainer)) == 11
    assert sorted([*trained[::2], *parked_prompts(trainer)]) == sorted(trainer.prompts)


@pytest.mark.trainings
def test_a_prompt_is_that_after_which_its_completions_were_sampled(tmp_path):
    """A chat template may show the date: here it shows how often it was rendered, modulo 10."""
    tokenizer, renderings = character_tokenizer(), count()

    class Dated(type(tokenizer)):
        def apply_chat_template(self, *args, **kwargs):
            return super().apply_chat_template(*args, **kwargs, now=str(next(renderings) % 10))

    tokenizer.__class__ = Dated
    tokenizer.chat_template = "{{ now }}{% for message in messages %}{{ message['content'] }}{% endfor %}="
    prompts = [[{"role": "user", "content": f"{i}+{i * 37 % 11}"}] for i in range(40)]
    trainer = toy_run(
        tmp_path,
        model=ending_model(),
        trainer_class=Recording,
        reward_funcs=lambda completions, **kwargs: share_of_digits([each[0]["content"] for each in completions]),
        trainer_args={"train_dataset": Dataset.from_dict({"prompt": prompts}), "processing_class": tokenizer},
        **{**PARTIAL, "learning_rate": 0.0},
    )
    assert max(log.get("staleness/max", 0) for log in training_logs(trainer)) > 3
    assert max(log.get("ratio/max", 1) for log in training_logs(trainer)) == pytest.approx(1, abs=1e-5)
    model = ending_model().eval()
    for prompt_ids, token_ids, _, logps in trained_rows(trainer):
        expected = score(model, prompt_ids, token_ids)
        torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)


# Limits


@pytest.mark.trainings
def test_no_token_is_older_at_its_last_update_than_the_limit(tmp_path):
    """3 updates a generation: 2 * 3 - 1 = 5 is the least limit. A completion is parked for one generation at most."""
    ages = {}
    for limit in (5, None):
        trainer = train(tmp_path, partial_rollout_max_staleness=limit, model=ending_model(eos_logit=1.2))
        ages[limit] = max(log.get("staleness/max", 0) for log in training_logs(trainer))
        waited = sum(log.get("partial/waited") or 0 for log in training_logs(trainer))
        assert (waited > 0) == (limit == 5)
        assert full_rows(trainer) == [2, 24, 24, 24, 24]
    assert ages[5] <= 5 < ages[None]


class Windowed(FakeVLLM):
    """Refuses what vLLM's server rejects: requests for more tokens than the window has room for."""

    window = 40  # as `get_server_info` says

    def generate(self, prompts, *args, **kwargs):
        for prompt in prompts:
            assert len(prompt) + self.max_completion_length <= self.window
        return super().generate(prompts, *args, **kwargs)


@pytest.mark.trainings
def test_a_completion_ends_at_the_window_of_the_sampler(monkeypatch, tmp_path):
    trainer = vllm_trainer(
        monkeypatch,
        tmp_path,
        server=Windowed,
        model=ending_model(eos_logit=1.0),
        trainer_class=Recording,
        reward_funcs=share_of_digits,
        trainer_args={"train_dataset": prompts_of_many_lengths()},
        **{**PARTIAL, "max_completion_length": 60, "partial_rollout_chunk_length": 7},
    )
    trainer.train()
    lengths = [(len(prompt_ids), len(token_ids)) for prompt_ids, token_ids, *_ in trained_rows(trainer)]
    assert max(prompt + completion for prompt, completion in lengths) == 40
    at_window = {prompt for prompt, completion in lengths if prompt + completion == 40}
    assert len(at_window) > 3


@pytest.mark.trainings
def test_evaluation_in_between_samples_beyond_the_chunk_and_touches_neither_pool_nor_queue(tmp_path):
    class Untouched(Recording):
        def evaluation_loop(self, *args, **kwargs):
            parts = (pool_of(self), part_of(self, ReplayMixer).buffer)
            before = [part.state_dict() for part in parts]
            with torch.random.fork_rng():
                output = super().evaluation_loop(*args, **kwargs)
            for part, state in zip(parts, before, strict=True):
                assert_same_states(part.state_dict(), state)
            return output

    def run(**evaluation):
        data, sizes = {"eval_dataset": prompts_of_many_lengths(4)}, {"max_steps": 6, "per_device_eval_batch_size": 4}
        sizes |= {"replay_fraction": 0.25}
        return train(tmp_path, Untouched, ending_model(eos_logit=1.2), data, **sizes, **evaluation)

    evaluating = run(eval_strategy="steps", eval_steps=3)
    longest = [log["eval_completions/max_length"] for log in evaluating.state.log_history if "eval_reward" in log]
    assert len(longest) == 2
    assert min(longest) > 20  # the chunk is 2
    assert_same_weights(run(), evaluating)


# Together with TRL's settings and the other sources of stale samples


@pytest.mark.trainings
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "bnpo", "beta": 0.1, "replay_zero_advantage": True, "scale_rewards": "batch"},
        {"gradient_accumulation_steps": 6},  # TRL alone would see an on-policy run
        {"beta": 0.1, "uses_lora": True, "gradient_accumulation_steps": 6},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_goes_with_other_settings(tmp_path, settings):
    settings = dict(settings)
    lora = LoraConfig(r=2, target_modules=["v_proj", "down_proj"], lora_dropout=0.0)
    trainer_args = {"peft_config": lora} if settings.pop("uses_lora", False) else {}
    if "gradient_accumulation_steps" in settings:
        settings.setdefault("max_steps", 18 // settings["gradient_accumulation_steps"])
    ending_model().save_pretrained(tmp_path / "start")  # TRL loads its reference from there
    trainer = train(tmp_path, model=str(tmp_path / "start"), trainer_args=trainer_args, **settings)
    logs = training_logs(trainer)
    assert all(math.isfinite(log["loss"]) for log in logs)
    assert max(log.get("partial/segments_max", 0) for log in logs if "partial/segments_max" in log) > 1
    assert max(log.get("ratio/max", 0) for log in logs) > 1.01
    if "beta" in settings:  # the reference is the first policy, and scored by itself
        model = ending_model().eval()
        for prompt_ids, token_ids, _, logps in list(trained_rows(trainer, "ref_per_token_logps"))[::5]:
            torch.testing.assert_close(logps, score(model, prompt_ids, token_ids), rtol=0, atol=1e-5)


def test_a_group_lives_on_one_rank(tmp_path, monkeypatch):
    """2 ranks of 12 rows are 3 groups of 8, of which the second would lie on both."""
    args = {**CPU, **OFF_POLICY, **PARTIAL, "num_generations": 8, "steps_per_generation": 3, "num_iterations": 2}
    monkeypatch.setattr(BAPOConfig, "world_size", property(lambda self: 2))
    with pytest.raises(ValueError, match=r"`num_generations` is 8, but each rank has 12 .*multiple of `num_gen"):
        BAPOConfig(str(tmp_path), **args)


# Checkpoints


SAVES = {"save_strategy": "steps", "save_steps": 3}


@pytest.mark.trainings
@pytest.mark.parametrize("replay", [{}, {"replay_fraction": 0.5, "num_iterations": 2}], ids=["fresh", "replay"])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, replay):
    settings = {**SAVES, **replay, "max_steps": 18, "save_steps": 6}
    straight = train(tmp_path, **settings)
    resumed = trainer_of(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert_same_weights(straight, resumed)
    assert_same_states(pool_of(resumed).state_dict(), pool_of(straight).state_dict())
    for batch, expected in zip(resumed.batches, straight.batches[-len(resumed.batches) :], strict=True):
        assert all(torch.equal(batch[key], expected[key]) for key in expected)


def emitting_into(emitted: list[list[str]]) -> type[Recording]:
    """A trainer that keeps there, by generation, the prompts of the groups that it hands to training."""

    class Emitting(PartialRollouts):
        def sample(self, rows, clock):
            rollouts = super().sample(rows, clock)
            emitted.append([row["prompt"] for row in rollouts.inputs[::2]])
            return rollouts

    return with_rollouts(Emitting)


@pytest.mark.trainings
@pytest.mark.parametrize(
    "replay",
    [{}, pytest.param({"replay_fraction": 0.25, "num_iterations": 2}, marks=pytest.mark.trainings)],
    ids=["fresh", "replay"],
)
def test_a_second_resume_from_inside_a_generation_loses_no_prompt(tmp_path, replay):
    """The blocks in which the sampler repeats the prompts go on where they were, and the generations with them."""
    emitted = []
    prompts = [f"{i}+" for i in range(60)]
    settings = {"trainer_args": {"train_dataset": Dataset.from_dict({"prompt": prompts})}, "shuffle_dataset": False}
    updates = 3 * replay.get("num_iterations", 1)  # of a generation
    served = []
    # Saved one update into the second generation, then at the end of the third
    for stop in (updates + 1, 3 * updates, 4 * updates):
        trainer = trainer_of(tmp_path, emitting_into(emitted), **SAVES, **settings, **replay, max_steps=stop)
        trainer.train(resume_from_checkpoint=bool(emitted) or None)
        served.append(trainer.prompts)
    assert served == [prompts[:24], prompts[12:36], prompts[36:48]]
    del emitted[1]  # of the generation that was made again
    assert sorted([*chain(*emitted), *parked_prompts(trainer)]) == sorted(prompts[:48])


@pytest.mark.trainings
@pytest.mark.parametrize(
    ("steps_per_generation", "micro_batches", "stop", "again"),
    [(6, 2, 4, 1), (6, 2, 6, 1), (2, 4, 2, 2)],
)
def test_a_checkpoint_before_an_optimizer_step_loses_no_prompt_and_trains_none_twice(
    tmp_path, steps_per_generation, micro_batches, stop, again
):
    """That of transformers' `enable_jit_checkpoint`, whose step is in no checkpoint; nor is what it was made with."""

    class Terminated(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == stop - 1:
                (jit,) = (each for each in first.callback_handler.callbacks if isinstance(each, JITCheckpointCallback))
                jit.jit_manager.is_checkpoint_requested = True  # as some seconds after SIGTERM

    emitted = []
    data = {"train_dataset": Dataset.from_dict({"prompt": [f"{i}+" for i in range(60)]})}
    settings = {
        "shuffle_dataset": False, "steps_per_generation": steps_per_generation, "enable_jit_checkpoint": True,
        "gradient_accumulation_steps": micro_batches, "search_scope": "micro_batch",
    }  # fmt: skip
    first = trainer_of(
        tmp_path, emitting_into(emitted), trainer_args={**data, "callbacks": [Terminated()]}, **settings
    )
    first.train()
    kept = len(emitted) - again
    assert kept == (1 if again == 1 else 2)
    del emitted[kept:]
    updates = max(3, 3 * steps_per_generation // micro_batches)
    second = trainer_of(tmp_path, emitting_into(emitted), trainer_args=data, **settings, max_steps=updates)
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop - 1}"))
    admitted = 2 * updates * micro_batches
    assert sorted([*chain(*emitted), *parked_prompts(second)]) == sorted(data["train_dataset"]["prompt"][:admitted])


@pytest.mark.trainings
@pytest.mark.parametrize(("before", "held"), [(1.0, 0), (1.1, 1), (1.9, 11)])
def test_a_first_batch_after_a_resume_is_short_by_what_is_missing_in_flight(tmp_path, before, held):
    """12 groups of 2 a generation, of which 1.5 holds 6 over."""
    first = train(tmp_path, **SAVES, max_steps=3, partial_rollout_oversampling=before)
    assert held == 0 or len(pool_of(first)) == held
    resumed = trainer_of(tmp_path, **SAVES, max_steps=9, partial_rollout_oversampling=1.5)
    resumed.train(resume_from_checkpoint=True)
    assert full_rows(resumed) == [2 * min(12, 12 + held - 6), 24]
    assert len(pool_of(resumed)) == max(held, 6)


# Several ranks


def train_on_a_rank(folder: str, settings: str) -> None:
    """Give rank 0 prompts with short completions, rank 1 those with long ones: 12 prompts each in turn."""
    settings = {**PARTIAL, "shuffle_dataset": False, "generation_kwargs": {"do_sample": False}, **json.loads(settings)}
    tokenizer = character_tokenizer()
    of_ranks = [[tokenizer.decode([start + i % width]) for i in range(12)] for start, width in ((2, 4), (20, 18))]
    data = Dataset.from_dict({"prompt": ["1+" + last for last in [*chain(*of_ranks)] * 5]})
    trainer = toy_run(f"{folder}/run", countdown_model(), Recording, trainer_args={"train_dataset": data}, **settings)
    finish(
        trainer, folder, prompts=trainer.prompts,
        rows=[[ids.tolist() for ids in row] for *row, _ in trained_rows(trainer)],
        rows_per_batch=full_rows(trainer), parked=parked_prompts(trainer),
    )  # fmt: skip


def launch(folder, num_processes=2, **settings):
    return run_function(train_on_a_rank, folder, json.dumps({"learning_rate": 0.0, **settings}), ranks=num_processes)


@pytest.mark.processes
def test_two_ranks_of_unequal_lengths_stay_in_step(tmp_path):
    """Rank 0 has completions of 1 to 4 tokens, rank 1 of 19 to 36, which cross several policy versions."""
    succeeded(launch(tmp_path))
    ranks = read_ranks(tmp_path)
    for rank in ranks:
        assert rank["rows_per_batch"] == [2, 24, 24, 24, 24]
        for prompt_ids, token_ids, *_ in rank["rows"]:
            assert token_ids == list(range(prompt_ids[-1] - 1, 0, -1))
        trained = [character_tokenizer().decode(prompt_ids) for prompt_ids, *_ in rank["rows"][::2]]
        assert sorted([*trained, *rank["parked"]]) == sorted(rank["prompts"])
    means = [sum(len(row[1]) for row in rank["rows"]) / len(rank["rows"]) for rank in ranks]
    assert means[1] > 6 * means[0]
    assert any(len(set(versions)) > 1 for _, _, versions in ranks[1]["rows"])


@pytest.mark.processes
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    settings = {**SAVES, "partial_rollout_max_staleness": 5}  # one rank has 22 groups, of which 12 can go at once
    succeeded(launch(tmp_path, **settings, max_steps=6))
    before = read_ranks(tmp_path)
    succeeded(launch(tmp_path, 1, **settings, max_steps=12, resume=True))
    (after,) = read_ranks(tmp_path, 1)
    assert after["rows_per_batch"] == [24, 24]
    admitted = [prompt for rank in before for prompt in rank["parked"]] + after["prompts"]
    trained = [character_tokenizer().decode(prompt_ids) for prompt_ids, *_ in after["rows"][::2]]
    assert sorted([*trained, *after["parked"]]) == sorted(admitted)
    for prompt_ids, token_ids, *_ in after["rows"]:
        assert token_ids == list(range(prompt_ids[-1] - 1, 0, -1))


@pytest.mark.trainings
def test_a_save_in_the_middle_of_a_generation_is_of_the_pool_before_it(tmp_path):
    """As where a server is gone: the resumed run generates it again, whatever was trained before."""
    saved = []

    class SavesWithin(Recording):
        def _generate_and_score_completions(self, inputs):
            before = pool_of(self).state_dict()
            output = super()._generate_and_score_completions(inputs)
            saved[-1:] = [(before, FILES.read(FILES.path(tmp_path / "within", 0, 1)), pool_of(self).state_dict())]
            return output

    class SavesInRounds(PartialRollouts):
        def _continue(self, prompts, cap):
            self.save(tmp_path / "within", self._run.now())
            return super()._continue(prompts, cap)

    (tmp_path / "within").mkdir()
    train(tmp_path / "run", with_rollouts(SavesInRounds, SavesWithin), max_steps=6)
    before, within, after = saved[-1]
    assert before["groups"]  # of the generation before
    assert_same_states(within, before)
    assert within["groups"] != after["groups"]
