"""Where the time of a training goes: phases that add up to its wall time, and tokens per second."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Trainer, TrainerCallback, TrainerState
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.evaluation.sampling import EvaluatedGRPOTrainer
from bapo_trl.parts import Part
from bapo_trl.phase_clock import PHASES, PhaseClock
from bapo_trl.report.callback import ReportCallback
from tests.helpers.fake_vllm import FakeVLLM, vllm_trainer
from tests.helpers.passing_time import Time
from tests.helpers.script_runs import fill_folder, run
from tests.helpers.toy import digits_reward, toy_dataset, toy_run, toy_trainer, training_logs


@pytest.fixture
def time(monkeypatch):
    return Time(monkeypatch)


def test_a_phase_pauses_the_one_around_it(time):
    logs = defaultdict(list)
    clock = PhaseClock()
    clock.put_last(SimpleNamespace(_metrics={"train": logs}, pop_callback=id, add_callback=id))
    with clock.phase("rewards"):  # before the training
        time.now += 100
    clock.on_train_begin(None, TrainerState(), None)
    time.now += 1
    clock.on_step_begin(None, None, None)
    time.now += 2
    with clock.phase("generation"):
        time.now += 4
        with clock.phase("weights"):
            time.now += 8
        time.now += 16
    with clock.pause(), clock.phase("scoring"):  # of an evaluation
        time.now += 32
        clock.count(generated=1000)
    clock.count(generated=33, trained=66)
    clock.on_step_end(None, None, None)
    expected = {**dict.fromkeys(PHASES, 0), "other": 1, "training": 2, "generation": 20, "weights": 8}
    assert logs == {f"time/{name}": [seconds] for name, seconds in expected.items()}
    time.now += 2
    clock.on_step_end(None, None, None)
    assert clock.rates() == {"tokens/generated_per_s": 1, "tokens/trained_per_s": 2}
    assert clock.rates() == {}
    clock.logs_totals = True
    state = TrainerState(log_history=[{"loss": 0.1}])
    clock.on_log(None, state, None)
    assert state.log_history[0]["clock/wall_s"] == 31 + 2
    assert state.log_history[0]["clock/cpu_s"] >= 0
    clock.on_train_begin(None, state, None)  # of a resumed run
    clock.on_step_begin(None, None, None)
    time.now += 5
    clock.on_step_end(None, None, None)
    state.log_history.append({"loss": 0.1})
    clock.on_log(None, state, None)
    assert state.log_history[1]["clock/wall_s"] == 31 + 2 + 5


class Wall(TrainerCallback):
    """The time in the updates at the start of a training and at the end of each update."""

    def __init__(self, time):
        self.time, self.ends = time, []

    def on_train_begin(self, *args, **kwargs):
        self.ends.append(self.time.now - self.time.outside)

    on_step_end = on_train_begin


TAKEN = {
    (GRPOTrainer, "_generate_single_turn"): 3, (GRPOTrainer, "_get_per_token_logps_and_entropies"): 5,
    (Trainer, "get_batch_samples"): 7, (Trainer, "_get_grad_norm"): 11,
}  # fmt: skip


class Waiting(Part):
    """Part that waits before an evaluation, as overlapped generation does for its request."""

    def __init__(self, time):
        self.before_evaluation = time.passing_outside(lambda dataloader: None)


@pytest.mark.parametrize(
    ("classes", "settings"),
    [
        ((BAPOTrainer, BAPOConfig), {}),
        ((BAPOTrainer, BAPOConfig), {"replay_fraction": 0.5}),
        ((BAPOTrainer, BAPOConfig), {"partial_rollout_oversampling": 1.5}),
        ((EvaluatedGRPOTrainer, GRPOConfig), {}),  # of `method: trl`
    ],
    ids=["plain", "replay", "partial rollouts", "trl"],
)
def test_the_phases_of_a_run_add_up_to_its_wall_time(tmp_path, monkeypatch, time, classes, settings):
    for (owner, name), seconds in TAKEN.items():
        monkeypatch.setattr(owner, name, time.passing(getattr(owner, name), seconds))
    for name in ("evaluation_loop", "_save_checkpoint"):
        monkeypatch.setattr(Trainer, name, time.passing_outside(getattr(Trainer, name)))
    wall = Wall(time)
    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "max_steps": 8}
    trainer = toy_trainer(
        tmp_path, None, *classes, reward_funcs=time.passing(digits_reward, 13), per_device_eval_batch_size=3,
        **often, **settings, trainer_args={"callbacks": [wall], "eval_dataset": toy_dataset(2)},
    )  # fmt: skip
    if classes[0] is BAPOTrainer:
        trainer.parts.append(Waiting(time))
    trainer.train()
    assert time.outside > 5000
    logs = training_logs(trainer)
    phases = {name: [log[f"time/{name}"] for log in logs] for name in PHASES}
    assert [sum(each) for each in zip(*phases.values(), strict=True)] == [b - a for a, b in pairwise(wall.ends)]
    # Four updates, of two micro-batches each, per generation
    assert phases["training"] == [11 + 2 * 5] * 8
    assert phases["other"] == [7] * 8
    assert phases["rewards"] == [13, 0, 0, 0] * 2
    assert [seconds > 0 for seconds in phases["generation"]] == [True, False, False, False] * 2
    assert phases["scoring"][0] > 0
    assert phases["weights"] == phases["waiting"] == [0] * 8


@pytest.mark.trainings
def test_over_a_server_the_weights_count_apart_from_the_generation(tmp_path, monkeypatch, time):
    class Server(FakeVLLM):
        sync_weights = time.passing(FakeVLLM.sync_weights, 2)
        generate = time.passing(FakeVLLM.generate, 3)
        _post = time.passing(FakeVLLM._post, 5)  # the check of the weights

    trainer = vllm_trainer(monkeypatch, tmp_path, Server, max_steps=8)
    trainer.train()
    logs = training_logs(trainer)
    assert [log["time/generation"] for log in logs] == [3, 0, 0, 0] * 2
    assert logs[4]["time/weights"] > 2


@pytest.mark.trainings
@pytest.mark.parametrize("method", ["grpo", "trl"])
def test_a_report_that_is_drawn_at_a_save_counts_in_no_clock(tmp_path, monkeypatch, time, method):
    fill_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(ReportCallback, "on_save", time.passing(ReportCallback.on_save, 1000))
    settings = {"dataset_name": "train.jsonl", "steps_per_generation": None, "logging_steps": 1}
    run(method=method, max_steps=3, save_strategy="steps", save_steps=1, **settings)
    logs = [log for log in json.loads(Path("out/trainer_state.json").read_text())["log_history"] if "loss" in log]
    assert time.now == 3000
    assert [log[f"time/{name}"] for log in logs for name in PHASES] == [0] * 3 * len(PHASES)
    assert [log["clock/wall_s"] for log in logs] == [0] * 3


def test_tokens_per_second_are_those_of_all_updates_of_a_log_line(tmp_path, time, monkeypatch):
    monkeypatch.setattr(Trainer, "_get_grad_norm", time.passing(Trainer._get_grad_norm, 2))
    generated = []

    def reward(completion_ids, **kwargs):
        generated.append(sum(map(len, completion_ids)))
        return [float(ids[0] % 7) for ids in completion_ids]

    logs = training_logs(toy_run(tmp_path, reward_funcs=reward, max_steps=8, logging_steps=8))
    assert logs[0]["tokens/generated_per_s"] == pytest.approx(sum(generated) / 16)
    assert logs[0]["tokens/trained_per_s"] == pytest.approx(2 * sum(generated) / 16)  # in two passes
