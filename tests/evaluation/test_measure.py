"""Evaluation as users ask for it: before and after, by source, killed and run again."""

import json
import math
import re
import signal
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file, save_file
from trl.trainer import grpo_trainer

from bapo_trl import cli
from bapo_trl.errors import InputError
from bapo_trl.evaluation.measure import evaluate
from bapo_trl.evaluation.sampling import EvaluatedTrainer
from bapo_trl.script import preparation
from bapo_trl.vllm_server import mismatch
from tests.helpers.commands import ROOT, succeeded
from tests.helpers.fake_vllm import FakeVLLM
from tests.helpers.forked import run_python
from tests.helpers.script_runs import CHAT_TEMPLATE, CPU, completions, flags, results, run
from tests.helpers.toy import toy_trainer


pytestmark = pytest.mark.trainings


def test_before_and_after_on_data_of_ones_own(folder, capsys):
    run(dataset_name="train.jsonl", eval_dataset="test.jsonl", extract_answer="last_number")
    out = capsys.readouterr().out
    found = results()
    for prefix, name in (("before", "eval_completions_before"), ("eval", "eval_completions")):
        lines = completions(f"out/{name}.jsonl")
        assert [(line["prompt_index"], line["number"]) for line in lines] == [
            (p, n) for p in range(6) for n in range(4)
        ]
        shares = [sum(line["correct"] for line in lines[start : start + 4]) / 4 for start in range(0, 24, 4)]
        assert found[f"{prefix}_avg@4"] == pytest.approx(sum(shares) / 6)
        assert found[f"{prefix}_avg@4"] == pytest.approx(found[f"{prefix}_reward"])
        variance = sum((share - sum(shares) / 6) ** 2 for share in shares) / 6
        assert found[f"{prefix}_avg@4_stderr"] == pytest.approx(math.sqrt(variance / 6 + 1 / 144) / (7 / 6))
        assert found[f"{prefix}_pass@4"] == pytest.approx(sum(map(bool, shares)) / 6)
        assert found[f"{prefix}_reward_best_of_4"] == pytest.approx(found[f"{prefix}_pass@4"])
        of_tens = [share for share, line in zip(shares, lines[::4], strict=True) if line["data_source"] == "tens 1"]
        assert found[f"{prefix}_avg@4/tens 1"] == pytest.approx(sum(of_tens) / 3)
        assert f"{prefix}_maj@4" in found
        assert found[f"{prefix}_completions/mean_length"] == sum(line["tokens"] for line in lines) / 24
        assert found[f"{prefix}_completions/clipped_ratio"] == sum(line["cut_off"] for line in lines) / 24
    assert completions() != completions("out/eval_completions_before.jsonl")
    assert re.search(r"\n +before +after\n  avg@4 +0\.\d{3} ± 0\.\d{3}  0\.\d{3} ± 0\.\d{3}\n", out)
    assert "Evaluation of out on test.jsonl\n  number of prompts: 6; " in out
    assert f"\n  mean reward {found['eval_reward']:.3f}" in out


def test_an_evaluation_before_changes_nothing_in_the_training(folder):
    histories = []
    for settings in ({}, {"eval_dataset": "test.jsonl", "overwrite_output_dir": "true"}):
        run(dataset_name="train.jsonl", logging_steps=1, log_completions="true", **settings)
        logs = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
        tables = [pd.read_parquet(path).to_dict("list") for path in sorted(folder.glob("out/completions/*.parquet"))]
        values = [(log["loss"], log["grad_norm"], log.get("found_share")) for log in logs if "loss" in log]
        histories.append((values, tables))
    assert histories[0] == histories[1]
    values, tables = histories[0]
    assert values[0][2] is not None
    assert {"completion", "found"} < set(tables[0])


def test_a_fraction_is_held_out(folder):
    run(dataset_name="train.jsonl", eval_fraction=0.25)
    held_out = {line["prompt"] for line in completions()}
    assert len(held_out) == 4
    run(dataset_name="train.jsonl", eval_fraction=0.25, seed=7, overwrite_output_dir="true")
    assert {line["prompt"] for line in completions()} == held_out
    assert "eval_maj@4" not in results()


@pytest.mark.processes
def test_a_killed_evaluation_goes_on_where_it_ended(folder, monkeypatch):
    alone = {"do_train": "false", "eval_dataset": "test.jsonl"}
    run(**alone, output_dir="whole")
    killed = run_python([ROOT / "train_bapo.py", *flags(**alone)], cwd=folder, KILLED_AT="3")
    assert killed.returncode == -signal.SIGKILL
    kept = Path("out/eval_completions.jsonl")
    assert len(completions()) == 15  # of three batches, the last without its rewards
    with kept.open("a") as file:
        file.write('{"prompt_index": 4, "number"')  # as of a kill while a line is written
    sampled = counted_samples(monkeypatch)
    run(**alone)
    assert sampled == [5, 4]
    assert completions() == completions("whole/eval_completions.jsonl")
    assert results() == json.loads(Path("whole/eval_results.json").read_text())


def test_an_evaluation_replaces_no_completions_of_another(folder):
    alone = {"do_train": "false", "eval_dataset": "test.jsonl"}
    run(**alone)
    first = completions()
    for other in ({"temperature": 0.5}, {"eval_dataset": "train.jsonl"}):
        with pytest.raises(InputError, match=r"which holds eval_completions\.jsonl of another evaluation"):
            run(**{**alone, **other})
        assert completions() == first
    with pytest.raises(InputError, match=r"which holds eval_completions\.jsonl of an earlier run"):
        run(dataset_name="train.jsonl")
    run(**alone, temperature=0.5, overwrite_output_dir="true")
    assert completions() != first


def counted_samples(monkeypatch) -> list[int]:
    """Return a list that gets the number of prompts of each call of the model's sampler in an evaluation."""
    sampled, sample = [], EvaluatedTrainer._generate

    def counting(self, prompts):
        if self._row_of is not None:
            sampled.append(len(prompts))
        return sample(self, prompts)

    monkeypatch.setattr(EvaluatedTrainer, "_generate", counting)
    return sampled


def test_a_resumed_run_does_not_evaluate_its_initial_model_again(folder, monkeypatch):
    sampled = counted_samples(monkeypatch)
    settings = {"dataset_name": "train.jsonl", "eval_dataset": "test.jsonl", "save_strategy": "steps", "save_steps": 1}
    settings["lr_scheduler_type"] = "constant"  # else the last update of the first run leaves a learning rate of 0
    run(**settings, max_steps=1)
    assert sum(sampled) == 48
    before, found = completions("out/eval_completions_before.jsonl"), results()
    run(**settings, max_steps=2, resume_from_checkpoint="true")
    assert sum(sampled) == 72
    assert completions("out/eval_completions_before.jsonl") == before
    assert results()["before_avg@4"] == found["before_avg@4"]
    run(**settings, max_steps=2, resume_from_checkpoint="true")  # nothing to train: as after a killed evaluation
    assert sum(sampled) == 72
    weights = load_file("model/model.safetensors")
    save_file({name: weight * 1.1 for name, weight in weights.items()}, "model/model.safetensors", {"format": "pt"})
    run(**settings, max_steps=3, resume_from_checkpoint="true")
    assert sum(sampled) == 120


def test_completions_of_another_evaluation_are_not_counted(tmp_path, monkeypatch):
    sampled = counted_samples(monkeypatch)
    trainer = toy_trainer(tmp_path, trainer_class=EvaluatedTrainer, num_generations_eval=2)
    rows, path = [{"prompt": "1+1="}, {"prompt": "1+2="}], tmp_path / "completions.jsonl"

    def count(rows=rows, origin="model") -> int:
        sampled.clear()
        evaluate(trainer, rows, path, origin=origin)
        return sum(sampled)

    assert (count(), count(), count(rows[:1])) == (4, 0, 2)
    assert (count(origin="another"), count(origin=None), count(origin=None)) == (4, 4, 4)
    for name, value in {"seed": 1, "top_k": 5}.items():
        setattr(trainer.args, name, value)
        assert (count(), count()) == (4, 0)
    trainer.processing_class.chat_template = "another"
    assert (count(), count()) == (4, 0)


def test_completions_that_are_kept_are_scored_again(tmp_path, monkeypatch):
    seen = []

    class Score:  # whose behavior is in no source file of its own
        __name__, value = "score", 0.0

        def __call__(self, completions, completion_ids, answer, **kwargs):
            seen.append(list(zip(completions, map(tuple, completion_ids), answer, strict=True)))
            return [self.value] * len(completions)

    sampled, score = counted_samples(monkeypatch), Score()
    settings = {"num_generations_eval": 2, "per_device_eval_batch_size": 3}
    trainer = toy_trainer(tmp_path, trainer_class=EvaluatedTrainer, reward_funcs=score, **settings)
    chat, path = [{"role": "user", "content": "1+2="}], tmp_path / "completions.jsonl"
    trainer.processing_class.chat_template = CHAT_TEMPLATE
    found = []
    for score.value, answer, name in ((0.0, 1, "score"), (1.0, 2, "score"), (0.5, 2, "another")):
        trainer.reward_func_names = [name]
        rows = [{"prompt": chat, "answer": answer}]
        found.append(evaluate(trainer, rows, path, origin="model").accuracies["avg@2"].mean)
        assert [line["rewards"] for line in completions(path)] == [{name: score.value}] * 2
    assert (found, sum(sampled)) == ([0, 1, 0], 2)
    first, second, third = seen
    assert second == third == [(text, ids, 2) for text, ids, _ in first]


def test_prompts_that_no_reward_can_judge_are_counted_apart(folder, capsys):
    Dataset.from_list([{"prompt": "1+1="}, {"prompt": "skip"}]).to_json("some.jsonl")
    run(do_train="false", eval_dataset="some.jsonl", num_generations_eval=2)
    found = results()
    assert found["eval_prompts_without_reward"] == 1
    assert found["eval_avg@2"] == found["eval_reward"]
    assert [line["rewards"] for line in completions()[2:]] == [{"has_digit": None}] * 2
    assert "\nLeft out, without a reward: 1 of 2 prompts\n" in capsys.readouterr().out


@pytest.mark.parametrize(("streaming", "count", "expected"), [("true", 2, 2), ("false", 100, 6)])
def test_a_quick_look_is_at_the_first_prompts(folder, streaming, count, expected):
    run(
        do_train="false", dataset_name="test.jsonl", dataset_streaming=streaming, max_steps=-1,
        max_eval_samples=count, num_generations_eval=1,
    )  # fmt: skip
    assert [line["prompt"] for line in completions()] == [f"{a}+{a + 1}=" for a in range(17, 17 + expected)]


def test_settings_and_data_of_the_training_in_a_recipe_do_not_count_in_an_evaluation(folder):
    recipe = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_generations": 16,  # for 8 GPUs
        "learning_rate": -1.0, "replay_fraction": 0.5, "replay_capacity": 1, "partial_rollout_oversampling": 9.0,
        "method": "grpo", "ratio_upper_max": 3.0, "delta": 2.0, "loss_type": "cispo", "epsilon": 0.3,
        "resume_from_checkpoint": "true", "push_to_hub": True,
        "merge_adapter": True, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3,
        "dataset_name": "org/not-here", "eval_dataset": "test.jsonl", "reward_funcs": "my_rewards.has_digit",
        "save_strategy": "steps",
        **{name: yaml.safe_load(value) for name, value in CPU.items() if name != "save_strategy"},
    }  # fmt: skip
    Path("trained.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "out" / "merged").mkdir(parents=True)
    cli.evaluate(["--config", "trained.yaml"])
    assert len(completions()) == 6 * 16
    assert "eval_pass@16" in results()
    cli.evaluate(["--config", "trained.yaml", "--num_generations_eval", "2", "--overwrite_output_dir", "true"])
    assert "eval_pass@2" in results()
    assert not list((folder / "out" / "merged").iterdir())
    assert not {"model.safetensors", "eval_completions_before.jsonl"} & {path.name for path in Path("out").iterdir()}


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])  # batches of 2, 2 and 1 prompts; of 4, and of 1 that is filled up with 3
def test_an_evaluation_in_training_is_of_prompts_however_few_the_last_batch_has(folder, ranks):
    Path("my_rewards.py").write_text(
        "def has_digit(completions, prompts, **kwargs):\n    return [float(each == '18+19=') for each in prompts]\n"
    )
    of_five = {"eval_dataset": "test.jsonl", "max_eval_samples": 5, "per_device_eval_batch_size": 8}
    shown = {"eval_strategy": "steps", "eval_steps": 1, "disable_tqdm": "false", "report_to": "tensorboard"}
    settings = flags(dataset_name="train.jsonl", **shown, **of_five)
    printed = succeeded(run_python([ROOT / "train_bapo.py", *settings], ranks=ranks, cwd=folder))
    assert printed.count("mean reward 0") == 2  # one while training, one at the end
    assert list(Path("out").rglob("events.out.tfevents*"))
    logs = json.loads(Path("out/trainer_state.json").read_text())["log_history"]
    assert [log["step"] for log in logs if "eval_rewards/has_digit/mean" in log] == [1, 2]
    (found,) = [log for log in logs if "eval_avg@4" in log and log["step"] == 1]
    assert found["eval_avg@4"] == found["eval_pass@4"] == found["eval_reward_best_of_4"] == pytest.approx(1 / 5)


@pytest.mark.processes
def test_two_processes_share_an_evaluation(folder):
    settings = flags(dataset_name="train.jsonl", eval_dataset="test.jsonl", num_generations=4)
    printed = succeeded(run_python([ROOT / "train_bapo.py", *settings], ranks=2, cwd=folder))
    for prefix, name in (("before", "eval_completions_before"), ("eval", "eval_completions")):
        lines = completions(f"out/{name}.jsonl")
        assert sorted((line["prompt_index"], line["number"]) for line in lines) == [
            (prompt, number) for prompt in range(6) for number in range(4)
        ]
        assert len({line["completion"] for line in lines}) > 12  # the processes draw from different seeds
        assert results()[f"{prefix}_avg@4"] == pytest.approx(sum(line["correct"] for line in lines) / 24)
    assert printed.count("Evaluation of out on test.jsonl") == 1


def test_a_vllm_server_samples_if_it_samples_the_training(folder, monkeypatch):
    servers = []

    def serve(*args, **kwargs):
        servers.append(FakeVLLM(*args, **kwargs))
        return servers[-1]

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", serve)
    monkeypatch.setattr(mismatch, "client_for", lambda *args: nullcontext())
    monkeypatch.setattr(preparation, "check_packages", lambda *args: None)
    run(dataset_name="train.jsonl", eval_dataset="test.jsonl", use_vllm="true", vllm_mode="server")
    (server,) = servers
    # 24 completions before, 5 rows at a time; 12 of a generation; 24 after
    assert server.num_prompts == [5, 5, 5, 5, 4, 12, 5, 5, 5, 5, 4]
    for name, weight in server.trained.state_dict().items():
        torch.testing.assert_close(server.served.state_dict()[name], weight, rtol=0, atol=0)
    assert len(completions()) == len(completions("out/eval_completions_before.jsonl")) == 24


def test_a_later_evaluation_keeps_what_was_measured_before_training(folder):
    run(dataset_name="train.jsonl", eval_dataset="test.jsonl")
    found = results()
    run(do_train="false", eval_dataset="test.jsonl", model_name_or_path="out")
    kept = {name: value for name, value in found.items() if name.startswith("before_")}
    assert kept
    assert kept.items() <= results().items()


def test_a_reward_that_changes_its_arguments_sees_each_row_as_it_is(tmp_path):
    def takes(completions, answer, **kwargs):
        return [float(each.pop()) if each else 0.0 for each in answer]

    trainer = toy_trainer(tmp_path, trainer_class=EvaluatedTrainer, num_generations_eval=4, reward_funcs=takes)
    stream = Dataset.from_list([{"prompt": "1+1=", "answer": [3]}]).to_iterable_dataset()
    assert evaluate(trainer, stream, tmp_path / "completions.jsonl").metrics["reward"] == 3


def test_a_first_reward_that_is_never_1_is_reported(folder, capsys):
    names = ["get_soft_overlong_punishment", "my_rewards.has_digit"]
    for order, is_reported in ((names, True), (names[::-1], False)):
        settings = {"eval_dataset": "test.jsonl", "output_dir": order[0], "reward_funcs": "|".join(order)}
        run(do_train="false", **settings)
        assert ("Note: no completion has a first reward (`" in capsys.readouterr().out) == is_reported


def test_a_null_in_a_nested_answer_is_a_missing_answer(folder, capsys):
    rows = [{"prompt": f"{a}+1=", "meta": meta} for a, meta in enumerate(({"gold": "5"}, None, {"gold": None}))]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(do_train="false", eval_dataset="rows.jsonl", answer_column="meta.gold", reward_funcs="accuracy_reward")
    assert "\nLeft out, without a reward: 2 of 3 prompts\n" in capsys.readouterr().out
