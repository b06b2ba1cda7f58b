"""Real tasks of the package reasoning-gym. tests/tasks has tests with a fake package."""

import json
from types import SimpleNamespace

import pytest

from bapo_trl.compare import execution
from bapo_trl.script.data.load import make_task
from bapo_trl.tasks import gym_reward
from benchmarks import chat_task
from benchmarks.common import ROOT
from benchmarks.gpu_first_run import to_accuracy
from benchmarks.gpu_first_run.trainers import Setup
from tests.helpers.forked import ForkedRun
from tests.helpers.script_runs import chat_tokenizer
from tests.helpers.toy import toy_model


pytest.importorskip("reasoning_gym")
TWO_TERMS = '{"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3, "size": 50}'


def test_a_task_is_made_from_its_name_and_scored_by_its_own_rule():
    task = make_task("reasoning_gym:chain_sum", TWO_TERMS)
    assert task.name == "reasoning_gym:chain_sum"
    assert (len(task.train_dataset), len(task.test_dataset)) == (50, 256)
    row = task.train_dataset[0]
    question = json.loads(row["entry"])["entry"]["question"]
    assert row["prompt"] == [{"role": "user", "content": question}]
    right = row["answer"]
    completions = [f"That is {right}.", f"<answer>{right}</answer>, not 1000", f"{right} or 1000", ""]
    assert task.reward_func(completions, entry=[row["entry"]] * 4) == [1.0, 1.0, 0.0, 0.0]
    again = make_task("reasoning_gym:chain_sum", json.loads(TWO_TERMS))
    assert again.train_dataset["entry"][:] == task.train_dataset["entry"][:]


@pytest.mark.parametrize("name", ["gcd", "letter_counting", "spell_backward", "countdown", "leg_counting"])
def test_right_answers_get_the_full_score(name):
    rows = make_task(f"reasoning_gym:{name}", {"size": 10}).train_dataset
    answers = [f"<answer>{json.loads(entry)['entry']['answer']}</answer>" for entry in rows["entry"]]
    assert make_task(f"reasoning_gym:{name}", {"size": 10}).reward_func(answers, entry=rows["entry"]) == [1.0] * 10


@pytest.mark.parametrize("name", chat_task.TASKS)
def test_the_worked_answers_of_the_study_end_in_the_right_one(name):
    train, held_out = chat_task.problems(name)
    asked = {row["prompt"][-1]["content"] for row in held_out}
    assert len(held_out) == len(asked) == chat_task.HELD_OUT
    assert not asked & {row["prompt"][-1]["content"] for row in train}
    texts = [chat_task.TASKS[name].work_out(json.loads(entry)["entry"]) for entry in train["entry"]]
    assert set(gym_reward(texts, train["entry"])) == {1.0}


def test_time_trains_both_methods_and_tells_what_each_phase_took(tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "subprocess", SimpleNamespace(Popen=ForkedRun, DEVNULL=None))
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    toy_model(max_position_embeddings=512).save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
    setup = Setup("cpu", "tiny", 0, chat_model=tmp_path / "model")
    cases = to_accuracy.time_to_accuracy(setup)
    assert set(cases) == {f"{method}, seed {seed}" for method in to_accuracy.METHODS for seed in range(3)}
    rows = {case: cases[case].measure() for case in ("TRL, seed 0", "recommendation, seed 0")}
    assert [len(row["rewards"]) for row in rows.values()] == [4, 1]  # generations of the four updates
    for row in rows.values():
        assert [step for step, _ in row["curve"]] == [0, 2, 4]
        assert all(row["seconds_of_phases"][name] > 0 for name in to_accuracy.PHASES)
        total = sum(row["seconds_of_phases"].values())
        assert row["to_target"]["seconds"] == pytest.approx(total, rel=0.05)  # not reached: those of the whole run
        assert not row["to_target"]["reached"]
        assert not to_accuracy.learned_in_time(row)  # a toy solves nothing
