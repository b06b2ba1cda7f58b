"""Evaluation as users ask for it: before and after, by source, killed and run again."""

import json
import math
import re
import signal
import sys

import pytest
from datasets import Dataset, DatasetDict

from bapo_trl.tasks import character_tokenizer
from tests.helpers.commands import ROOT, run_command
from tests.helpers.toy import toy_model


sys.path.insert(0, str(ROOT))
import train_bapo


CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}{% endfor %}<a>"
SHORT = {
    "model_name_or_path": "model", "output_dir": "out", "use_cpu": "true", "bf16": "false",
    "dataloader_pin_memory": "false", "gradient_checkpointing": "false", "report_to": "none", "save_strategy": "no",
    "disable_tqdm": "true", "per_device_train_batch_size": "6", "gradient_accumulation_steps": "1",
    "steps_per_generation": "2", "num_generations": "3", "num_generations_eval": "4",
    "per_device_eval_batch_size": "5", "max_completion_length": "6", "max_steps": "2", "learning_rate": "2e-2",
    "reward_funcs": "my_rewards.has_digit",
}  # fmt: skip
REWARD = """
import os, signal
calls = 0
def has_digit(completions, prompts, **kwargs):
    global calls
    calls += 1
    if os.environ.get("KILLED_AT") == str(calls):
        os.kill(os.getpid(), signal.SIGKILL)
    found = [float(any(map(str.isdigit, text))) for text in completions]
    return [None if prompt == "skip" else reward for prompt, reward in zip(prompts, found)]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a model, a reward and problems to train and evaluate on."""
    monkeypatch.chdir(tmp_path)
    toy_model().save_pretrained("model")
    character_tokenizer().save_pretrained("model")
    (tmp_path / "my_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    sums = [{"prompt": f"{a}+{a + 1}=", "data_source": f"tens {a // 10}"} for a in range(23)]
    Dataset.from_list(sums[:16]).to_json("train.jsonl")
    Dataset.from_list(sums[17:]).to_json("test.jsonl")
    return tmp_path


def flags(**settings):
    return [part for name, value in {**SHORT, **settings}.items() for part in (f"--{name}", *str(value).split("|"))]


def results(folder):
    return json.loads((folder / "out" / "eval_results.json").read_text())


def completions(folder, name="eval_completions"):
    return [json.loads(line) for line in (folder / "out" / f"{name}.jsonl").read_text().splitlines()]


def test_before_and_after_on_data_of_ones_own(folder, capsys):
    train_bapo.main(flags(dataset_name="train.jsonl", eval_dataset="test.jsonl", extract_answer="last_number"))
    out = capsys.readouterr().out
    found = results(folder)
    for prefix, name in (("before", "eval_completions_before"), ("eval", "eval_completions")):
        lines = completions(folder, name)
        assert [(line["prompt_index"], line["number"]) for line in lines] == [
            (p, n) for p in range(6) for n in range(4)
        ]
        shares = [sum(line["correct"] for line in lines[start : start + 4]) / 4 for start in range(0, 24, 4)]
        assert found[f"{prefix}_avg@4"] == pytest.approx(sum(shares) / 6)
        assert found[f"{prefix}_avg@4"] == pytest.approx(found[f"{prefix}_reward"])
        variance = sum((share - sum(shares) / 6) ** 2 for share in shares) / 5
        assert found[f"{prefix}_avg@4_stderr"] == pytest.approx(math.sqrt(variance / 6))
        assert found[f"{prefix}_pass@4"] == pytest.approx(sum(map(bool, shares)) / 6)
        assert found[f"{prefix}_reward_best_of_4"] == pytest.approx(found[f"{prefix}_pass@4"])
        of_tens = [share for share, line in zip(shares, lines[::4], strict=True) if line["data_source"] == "tens 1"]
        assert found[f"{prefix}_avg@4/tens 1"] == pytest.approx(sum(of_tens) / 3)
        assert f"{prefix}_maj@4" in found
        assert found[f"{prefix}_completions/mean_length"] == sum(line["tokens"] for line in lines) / 24
        assert found[f"{prefix}_completions/clipped_ratio"] == sum(line["cut_off"] for line in lines) / 24
    assert completions(folder) != completions(folder, "eval_completions_before")
    assert re.search(r"\n +before +after\n  avg@4 +0\.\d{3} ± 0\.\d{3}  0\.\d{3} ± 0\.\d{3}\n", out)
    assert f"Evaluation of out on test.jsonl: update    2  eval reward {found['eval_reward']:.3f}" in out


def test_an_evaluation_before_changes_nothing_in_the_training(folder):
    histories = []
    for settings in ({}, {"eval_dataset": "test.jsonl"}):
        train_bapo.main(flags(dataset_name="train.jsonl", logging_steps=1, **settings))
        logs = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
        histories.append([(log["loss"], log["grad_norm"], log["entropy"]) for log in logs if "loss" in log])
    assert histories[0] == histories[1]


def test_a_fraction_is_held_out(folder):
    train_bapo.main(flags(dataset_name="train.jsonl", eval_fraction=0.25))
    held_out = {line["prompt"] for line in completions(folder)}
    assert len(held_out) == 4
    train_bapo.main(flags(dataset_name="train.jsonl", eval_fraction=0.25, seed=7))
    assert {line["prompt"] for line in completions(folder)} == held_out
    assert "eval_maj@4" not in results(folder)


def test_a_killed_evaluation_goes_on(folder):
    alone = {"do_train": "false", "eval_dataset": "test.jsonl"}
    command = [sys.executable, str(ROOT / "train_bapo.py"), *flags(**alone)]
    killed = run_command(command, cwd=folder, PYTHONPATH=str(ROOT), KILLED_AT="3")
    assert killed.returncode == -signal.SIGKILL
    kept = completions(folder)
    assert len(kept) == 10  # 2 batches of 5
    with (folder / "out" / "eval_completions.jsonl").open("a") as file:
        file.write('{"prompt_index": 2, "num')
    train_bapo.main(flags(**alone))
    assert sys.modules["my_rewards"].calls == 3  # 14 completions are left
    assert completions(folder)[:10] == kept
    assert len({(line["prompt_index"], line["number"]) for line in completions(folder)}) == 24
    before = results(folder)
    train_bapo.main(flags(**alone, extract_answer="text"))  # all is there
    assert sys.modules["my_rewards"].calls == 3
    assert "eval_maj@4" in results(folder)
    assert {**results(folder), **before} == results(folder)
    train_bapo.main(flags(**alone, temperature=0.5))  # another evaluation
    assert sys.modules["my_rewards"].calls == 3 + 5


def test_prompts_that_no_reward_can_judge_are_counted_apart(folder):
    Dataset.from_list([{"prompt": "1+1="}, {"prompt": "skip"}]).to_json("some.jsonl")
    train_bapo.main(flags(do_train="false", eval_dataset="some.jsonl", num_generations_eval=2))
    found = results(folder)
    assert found["eval_prompts_without_reward"] == 1
    assert found["eval_avg@2"] == found["eval_reward"]
    assert [line["rewards"] for line in completions(folder)[2:]] == [{"has_digit": None}] * 2


def test_chats_of_other_columns(folder):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained("model")
    rows = [{"question": f"{a}+1?", "answer": f"{a + 1:03}"} for a in range(6)]
    Dataset.from_list(rows).to_json("aime.jsonl")
    train_bapo.main(
        flags(
            dataset_name="aime.jsonl", eval_fraction=0.2, prompt_column="problem|question", answer_column="answer",
            prompt_template="{prompt} In \\boxed{}.", system_prompt="Add.", reward_funcs="accuracy_reward",
        )
    )  # fmt: skip
    (line, *_) = completions(folder)
    system, user = line["prompt"]
    assert system == {"role": "system", "content": "Add."}
    assert re.fullmatch(r"\d\+1\? In \\boxed\{\}\.", user["content"])
    assert line["rewards"] == {"accuracy_reward": 0.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval_dataset": "test.jsonl", "eval_fraction": 0.5}, "`eval_dataset` and `eval_fraction` are both set"),
        ({"eval_fraction": 1.5}, "`eval_fraction` is 1.5, which leaves 24 of 16 prompts"),
        ({"eval_fraction": 0.5, "dataset_streaming": "true"}, "`eval_fraction` cannot hold out a share of a stream"),
        ({"eval_dataset": "tset.jsonl"}, "`eval_dataset` is 'tset.jsonl', but there is no such file"),
        ({"eval_dataset": "two"}, "`dataset_test_split` is 'test', but the dataset has only the splits"),
        (
            {"extract_answer": "box"},
            "`extract_answer` has 'box', which is not known: choose one of boxed, last_number",
        ),
        (
            {"answer_column": "answer"},
            r"train dataset \(train.jsonl\) has no `answer` column, only .*`--answer_column`",
        ),
        ({"eval_dataset": "two", "dataset_test_split": "b"}, r"eval dataset \(two\) has no `prompt` column"),
        ({"system_prompt": "Add."}, "`system_prompt` is set, but the tokenizer .* has no chat template"),
        ({"dataset_name": "chats.jsonl"}, "prompts are chat messages, but the tokenizer .* has no chat template"),
    ],
)
def test_what_cannot_be_is_refused_with_the_flag_to_change(folder, settings, message):
    part = Dataset.from_list([{"text": "1+1="}])
    DatasetDict(a=part, b=part).save_to_disk("two")
    Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1="}]}] * 4).to_json("chats.jsonl")
    with pytest.raises(ValueError, match=message):
        train_bapo.main(flags(**{"dataset_name": "train.jsonl", **settings}))
