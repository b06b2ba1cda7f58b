"""The replay queue through `train()`: what is trained was generated, stays within the limits, survives a resume."""

from collections import Counter

import pytest
import torch
from accelerate import PartialState
from transformers import TrainerCallback

from bapo_trl import BAPOTrainer
from bapo_trl.replay.mixer import REPLAY_METRICS, ReplayMixer
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_function
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.scores import assert_scored_by_its_policy, score
from tests.helpers.toy import (
    digits_reward,
    part_of,
    toy_model,
    toy_run,
    toy_trainer,
    training_logs,
)
from tests.rollouts.test_rollout_rounds import Recording, trained_rows
from tests.test_bapo_trainer import saved_model


# 2 updates a pass; 24 rows a generation
REPLAY = {"replay_fraction": 0.5, "num_iterations": 1, "max_steps": 12, "replay_capacity": 200}


def fingerprint(batch, index) -> tuple:
    """All that a row carries, as bytes; the padding left out."""
    mask = batch["completion_mask"][index].bool()
    parts = [batch["prompt_ids"][index][batch["prompt_mask"][index].bool()], batch["completion_ids"][index][mask]]
    parts += [
        batch[key][index][mask]
        for key in ("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps")
        if key in batch
    ]
    parts += [batch["advantages"][index], batch["policy_version"][index]]
    return tuple(part.cpu().numpy().tobytes() for part in parts)


class SpyReplay(ReplayMixer):
    """Keeps what was generated and, by draw, the masks of it and of what is in the queue."""

    def mix(self, batch, clock):
        if batch is not None:
            names = [fingerprint(batch, i) for i in range(len(batch["advantages"]))]
            self.spy.generated.append((names, batch["advantages"]))
        mixed = super().mix(batch, clock)
        self.spy.queued.append([flag for rows in self.buffer.rows for flag in rows.has_trained_token()])
        self.spy.fresh.append(self.latest.has_trained_token().tolist())
        return mixed


class Spy(BAPOTrainer):
    """Keeps fingerprints of what was generated and of what each update trained on."""

    def __init__(self, *args, **kwargs):
        self.generated, self.trained, self.items, self.fresh, self.queued = [], [], [], [], []
        super().__init__(*args, **kwargs)

        for part in self.parts:
            if isinstance(part, ReplayMixer):
                part.__class__, part.spy = SpyReplay, self

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if not self.model.training:
            return loss
        for index in range(len(inputs["advantages"])):
            if inputs["completion_mask"][index].any():
                age = self.state.global_step - int(inputs["policy_version"][index])
                self.trained.append((fingerprint(inputs, index), age, float(inputs["advantages"][index])))
        self.items.append((int(inputs["num_items_in_batch"]), int(inputs["completion_mask"].sum())))
        return loss


def queue_of(trainer):
    return part_of(trainer, ReplayMixer).buffer


def spied(tmp_path, **args) -> Spy:
    """Train; see that every trained row was generated, and is within the limits of age and use."""
    trainer = toy_run(tmp_path, trainer_class=Spy, **{**REPLAY, **args})
    generated = Counter(name for names, _ in trainer.generated for name in names)
    uses = Counter(name for name, *_ in trainer.trained)
    # A fingerprint can be generated twice: the same prompt may get the same answer.
    limit = trainer.args.replay_max_reuse or trainer.args.max_steps
    assert all(count <= limit * generated[name] for name, count in uses.items())
    oldest = max(age for _, age, _ in trainer.trained)
    assert trainer.args.replay_max_staleness is None or oldest <= trainer.args.replay_max_staleness
    logs = training_logs(trainer)
    assert len(logs) == trainer.args.max_steps
    assert max(log["staleness/max"] for log in logs) == oldest
    assert any(log.get("replay/fraction", 0) > 0 for log in logs)
    return trainer


@pytest.mark.trainings
@pytest.mark.parametrize(
    "args",
    [
        {"replay_max_staleness": 5, "num_iterations": 2, "replay_fraction": 0.75, "search_scope": "batch"},
        {"replay_min_staleness": 4, "num_iterations": 2, "replay_fraction": 1.0},
        {"replay_zero_advantage": True, "replay_fraction": 0.0, "num_iterations": 2},
        {"loss_type": "grpo", "search_scope": "micro_batch", "num_iterations": 2, "replay_max_reuse": 3},
    ],
    ids=lambda args: "-".join(args),
)
def test_trained_rows_were_generated_and_stay_within_the_limits_and_no_update_is_left_without(tmp_path, args):
    logs = training_logs(spied(tmp_path, **args))
    assert all(log["grad_norm"] > 0 for log in logs)
    # Rows without advantage may be kept out, and a later pass find too few others
    assert "replay_zero_advantage" in args or all(log.get("replay/masked", 0) == 0 for log in logs)


@pytest.mark.trainings
def test_controlled_staleness(tmp_path):
    trainer = spied(tmp_path, replay_fraction=1.0, replay_min_staleness=4, max_steps=20)
    ages = [age for _, age, _ in trainer.trained]
    assert min(ages[-24:]) >= 4
    assert ages[0] == 0  # until the queue is filled, fresh rows train


# About a third of the answers end before
TRUNCATED = {"mask_truncated_completions": True, "max_completion_length": 60}


@pytest.mark.trainings
def test_rows_that_keep_the_shape_of_a_batch_are_not_counted_as_untrained(tmp_path):
    args = {"partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 2, "replay_max_reuse": 4}
    trainer = toy_run(tmp_path, trainer_class=Spy, **{**REPLAY, **args})
    logs = [log for log in training_logs(trainer) if "replay/size" in log]
    assert logs[0]["partial/masked"] > 0  # in the first generations, while the pool fills
    assert [log["replay/untrained"] for log in logs] == [0] * len(logs)


@pytest.mark.trainings
@pytest.mark.parametrize("passes", [1, 2])
def test_a_generation_that_a_resume_makes_again_leaves_the_queue_as_it_was_saved(tmp_path, passes):
    args = {**REPLAY, "num_iterations": passes, "replay_max_reuse": 9, "steps_per_generation": 8, "max_steps": 8}
    toy_trainer(tmp_path, **{**args, "max_steps": 2}, save_strategy="steps", save_steps=2).train()
    resumed = toy_trainer(tmp_path, trainer_class=Spy, **args)
    ledgers = []
    load = resumed._load_optimizer_and_scheduler

    def noting(checkpoint):
        load(checkpoint)
        ledgers.append(queue_of(resumed).state_dict()["ledger"])

    resumed._load_optimizer_and_scheduler = noting

    class AfterTheStep(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ledgers.append(queue_of(resumed).state_dict()["ledger"])

    resumed.add_callback(AfterTheStep())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    loaded, *after = ledgers
    assert loaded["uses"]
    assert after[0] == after[1] == loaded  # updates 3 and 4: the rest of a pass over the generation
    assert after[-1] != loaded


@pytest.mark.trainings
def test_rows_without_a_trained_token_give_their_place_and_stay_out_of_the_queue(tmp_path):
    args = {**REPLAY, **TRUNCATED, "replay_fraction": 0.0, "replay_zero_advantage": True}
    trainer = toy_run(tmp_path, trainer_class=Spy, **args)
    assert all(all(queued) for queued in trainer.queued)
    drawn = [log for log in training_logs(trainer) if "replay/size" in log]
    assert [log["replay/untrained"] for log in drawn] == [fresh.count(False) for fresh in trainer.fresh]
    assert sum(log["replay/untrained"] for log in drawn) > 20
    assert sum(log["replay/size"] for log in drawn) > 20
    assert all(log["replay/masked"] == 0 for log in drawn)
    useful = [sum(mask) for mask in trainer.fresh]  # all have an advantage
    assert useful[0] < 24
    assert drawn[0]["replay/fraction"] == 0
    assert (
        drawn[1]["replay/fraction"] * 24 == drawn[1]["replay/zero_advantage_filled"] == min(useful[0], 24 - useful[1])
    )
    trained = [sum(tokens for _, tokens in trainer.items[i : i + 4]) for i in range(0, 24, 4)]
    assert [items for items, _ in trainer.items[::4]] == trained


@pytest.mark.trainings
def test_metrics_of_the_queue_and_the_number_of_items_are_those_of_the_batch_that_is_trained(tmp_path):
    trainer = spied(tmp_path, num_iterations=2, replay_capacity=60, micro_batch_layout="padded")
    drawn = [log for log in training_logs(trainer) if "replay/size" in log]
    assert len(drawn) == 6  # one at each pass of two updates
    assert all(set(REPLAY_METRICS) <= set(log) for log in drawn)
    assert [log["replay/fraction"] for log in drawn] == [0, 1, 0.5, 1, 0.5, 1]
    assert max(log["replay/size"] for log in drawn) == 60
    assert sum(log["replay/overflowed"] for log in drawn) == 3 * 24 - 60
    assert drawn[-1]["replay/bytes"] == queue_of(trainer).num_bytes > 0
    assert drawn[0]["replay/reuse_mean"] == 1
    for start in range(0, len(trainer.items), 4):  # 4 micro-batches a pass
        of_pass = trainer.items[start : start + 4]
        assert {items for items, _ in of_pass} == {sum(tokens for _, tokens in of_pass)}


@pytest.mark.trainings
def test_a_replayed_row_keeps_the_log_probabilities_of_its_policy_and_of_the_reference(tmp_path):
    trainer = toy_run(tmp_path, saved_model(tmp_path), Recording, beta=0.1, **REPLAY)
    model, weights = toy_model().eval(), trainer.weights

    def check(kind, weights_of):
        rows = trained_rows(trainer, kind)
        assert_scored_by_its_policy(rows, lambda v, *ids: score(model, *ids, weights_of(v)), least_share=None)

    check("old_per_token_logps", lambda version: weights[version])
    check("ref_per_token_logps", lambda version: weights[0])
    ages = [2 * generation - batch["policy_version"] for generation, batch in enumerate(trainer.batches)]
    assert (torch.cat(ages) > 0).sum() == 5 * 12  # half of all generations but the first


@pytest.mark.trainings
def test_resume_without_a_saved_queue_warns_and_with_the_flag_starts_empty(tmp_path):
    saving = {**REPLAY, "save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    checkpoint = tmp_path / "checkpoint-4"

    def resumed(**args):
        trainer = toy_run(tmp_path, **{**saving, "max_steps": 6, **args}, resume=str(checkpoint))
        return next(log for log in training_logs(trainer) if log["step"] == 5)["replay/fraction"]

    toy_run(tmp_path, **{**saving, "replay_fraction": 0})
    with pytest.warns(UserWarning, match="has no replay buffer: starting with an empty one"):
        assert resumed() == 0

    toy_run(tmp_path, **saving)
    (queue_file,) = checkpoint.glob("replay_queue_*")
    assert resumed() == 0.5
    content = queue_file.read_bytes()
    queue_file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"{queue_file.name} is damaged"):
        resumed()
    assert resumed(replay_discard_saved=True) == 0


def only_rank_0(completions, **kwargs):
    """Give all completions of rank 1 the same reward, whose mean over 6 of them is another number in float32."""
    return [0.911] * len(completions) if PartialState().process_index else digits_reward(completions)


class Unequal(BAPOTrainer):
    """Rank 1 finds no advantage in its rows; both keep the bounds and the sizes of their queues."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bounds, self.sizes = [], []

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.accelerator.sync_gradients:
            self.bounds.append([self.clip_bounds.low.item(), self.clip_bounds.high.item()])
            self.sizes.append(len(queue_of(self)))
        return loss


def train_on_a_rank(folder: str) -> None:
    args = {**REPLAY, "replay_zero_advantage": True, "num_iterations": 2, "num_generations": 6}
    trainer = toy_run(f"{folder}/run", trainer_class=Unequal, reward_funcs=only_rank_0, **args)
    finish(
        trainer, folder, bounds=trainer.bounds, sizes=trainer.sizes,
        ties=[log["frac_reward_zero_std"] for log in trainer.state.log_history if "frac_reward_zero_std" in log],
        weights=sum(weight.double().sum().item() for weight in trainer.model.parameters()),
    )  # fmt: skip


@pytest.mark.processes
def test_two_ranks_with_unequal_queues_stay_in_step(tmp_path):
    succeeded(run_function(train_on_a_rank, tmp_path, ranks=2))
    ranks = read_ranks(tmp_path)
    assert 0 < ranks[0]["sizes"][0] <= 24
    assert set(ranks[1]["sizes"]) == {0}  # all its rows are tied
    assert min(ranks[0]["ties"]) >= 0.5
    assert ranks[0]["bounds"] == ranks[1]["bounds"]
    assert len(ranks[0]["bounds"]) == 12
    assert ranks[0]["weights"] == ranks[1]["weights"]
