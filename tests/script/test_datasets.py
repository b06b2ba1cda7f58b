"""Datasets and rewards by name."""

import json

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, enable_caching
from trl import DatasetMixtureConfig

from bapo_trl.errors import InputError
from bapo_trl.script.command_line import parse_arguments
from bapo_trl.script.datasets import hold_out, load_data, load_mixture, load_splits
from bapo_trl.script.prompts import PromptFormat, format_prompts
from bapo_trl.script.rewards import REWARDS, resolve_reward_funcs


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_files_are_the_train_split(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        Dataset.from_list(ROWS).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, ROWS)))
    splits = load_splits(str(path))
    assert list(splits) == ["train"]
    assert splits["train"].to_list() == ROWS


def test_a_name_with_brackets_is_that_file_and_no_other(tmp_path, monkeypatch):
    folder = tmp_path / "[v2] math?"
    folder.mkdir()
    (folder / "data[1].jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "data1.jsonl").write_text('{"prompt": "another"}\n')
    monkeypatch.chdir(folder)
    for name in ("data[1].jsonl", str(folder / "data[1].jsonl")):
        for streaming in (False, True):
            assert list(load_splits(name, streaming=streaming)["train"]) == ROWS


def test_saved_datasets_and_folders_of_files(tmp_path):
    data = Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "two")
    (tmp_path / "files").mkdir()
    data.to_json(tmp_path / "files" / "train.jsonl")
    data.select([1]).to_json(tmp_path / "files" / "test.jsonl")
    assert load_splits(str(tmp_path / "one"))["train"].to_list() == ROWS
    assert load_splits(str(tmp_path / "two"))["test"].to_list() == ROWS[:1]
    assert load_splits(str(tmp_path / "files"))["test"].to_list() == ROWS[1:]


def test_nothing_is_written_beside_data_of_save_to_disk(tmp_path):
    saved = tmp_path / "saved"
    Dataset.from_dict({"question": [f"{i}+1=" for i in range(20)]}).save_to_disk(saved)
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    try:
        held_out = hold_out(load_splits(str(saved))["train"], 0.25)
        parts = [format_prompts(part, PromptFormat(["question"])) for part in held_out]
    finally:
        enable_caching()
    assert [len(part) for part in parts] == [15, 5]
    assert sorted(prompt for part in parts for prompt in part["prompt"]) == sorted(f"{i}+1=" for i in range(20))
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before


def test_the_test_split_of_a_mixture_is_always_the_same(tmp_path):
    Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(20)]}).to_json(tmp_path / "data.jsonl")
    found = []
    for seed in (1, 2):  # as in processes that begin with random states of their own
        np.random.seed(seed)
        parts = [{"path": "json", "data_files": str(tmp_path / "data.jsonl")}]
        found.append(load_mixture(DatasetMixtureConfig(datasets=parts, test_split_size=0.25)))
    assert found[0]["test"].to_list() == found[1]["test"].to_list()
    assert (len(found[0]["train"]), len(found[0]["test"])) == (15, 5)


def test_missing_and_foreign_files_are_refused(tmp_path):
    (tmp_path / "data.csv").write_text("prompt\n")
    with pytest.raises(ValueError, match=r"data\.csv.*\.jsonl"):
        load_splits(str(tmp_path / "data.csv"))
    with pytest.raises(ValueError, match="no such file or folder"):  # as a path that is not relative
        load_splits(str(tmp_path / "missing"))


def test_what_the_hub_does_not_give_is_told_with_its_answer(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr("bapo_trl.script.datasets.load_dataset", unreachable)
    with pytest.raises(
        ValueError, match=r"'data/promts', which is neither a file nor a folder here.*Couldn't reach it"
    ):
        load_splits("data/promts")


@pytest.mark.parametrize(("dataset_name", "config"), [(None, "main"), ("org/data", "main"), ("org/other", None)])
def test_a_configuration_is_that_of_the_only_data(monkeypatch, dataset_name, config):
    asked = []

    def load(path, name, **kwargs):
        asked.append((path, name))
        return DatasetDict(test=Dataset.from_list(ROWS))

    monkeypatch.setattr("bapo_trl.script.datasets.load_dataset", load)
    flags = ["--eval_dataset=org/data", "--dataset_config=main", "--do_train=false", "--output_dir=out"]
    flags += ["--use_cpu=true", "--bf16=false", *([] if dataset_name is None else [f"--dataset_name={dataset_name}"])]
    script_args, training_args, _, dataset_args = parse_arguments(flags)
    data = load_data(script_args, training_args, dataset_args)
    assert data.test.to_list() == ROWS
    assert asked == [("org/data", config)]


@pytest.mark.parametrize(
    ("parameter", "fix"),
    [
        ("dataset_name", "name one with --dataset_config"),
        ("eval_dataset", "evaluate on it alone, with --dataset_name org/data --dataset_config NAME"),
    ],
)
def test_a_configuration_that_is_missing_is_asked_for_in_the_spelling_that_works(monkeypatch, parameter, fix):
    def load(*args, **kwargs):
        raise ValueError(
            "Config name is missing.\nPlease pick one among the available configs: ['main', 'socratic']\nExample of "
            "usage:\n\t`load_dataset('org/data', 'main')`"
        )

    monkeypatch.setattr("bapo_trl.script.datasets.load_dataset", load)
    with pytest.raises(InputError) as refusal:
        load_splits("org/data", parameter=parameter)
    known = "which has the configurations ['main', 'socratic']"
    assert str(refusal.value) == f"`{parameter}` is 'org/data', {known}: {fix}."


def test_a_revision_in_the_name_is_refused_as_an_id(monkeypatch):
    """The Hub's client checks ids before it asks the Hub for anything."""
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    message = r"`dataset_name` is 'hf://datasets/org/data@main', which is neither a file.*Repo id must use"
    with pytest.raises(ValueError, match=message):
        load_splits("hf://datasets/org/data@main")


def test_rewards_by_name_and_import_path(tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text("def one(completions, **kwargs):\n    return [1.0]\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    think, own = resolve_reward_funcs(["think_format_reward", "own_rewards.one"])
    assert think is REWARDS["think_format_reward"]
    assert own(["text"]) == [1.0]
    for name, message in (
        ("no_such_module.reward", "'no_such_module.reward', which cannot be imported"),
        ("own_rewards.two", "'own_rewards.two', which cannot be imported"),
        ("own_rewards.number", "'own_rewards.number', which is not a function"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_reward_funcs([name])
