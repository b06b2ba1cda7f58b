"""Datasets by name."""

import json

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, enable_caching
from trl import DatasetMixtureConfig

from bapo_trl.script.arguments import BAPOScriptArguments
from bapo_trl.script.command_line import parse_arguments
from bapo_trl.script.datasets import format_prompts, hold_out, load_data, load_mixture, load_splits


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


@pytest.mark.parametrize("streaming", [False, True])
def test_a_name_with_brackets_is_that_file_and_no_other(tmp_path, streaming):
    (tmp_path / "data[1].jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "data1.jsonl").write_text('{"prompt": "another"}\n')
    assert list(load_splits(str(tmp_path / "data[1].jsonl"), streaming=streaming)["train"]) == ROWS


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
    flags = BAPOScriptArguments(prompt_column=["question"])
    try:
        parts = [format_prompts(part, flags) for part in hold_out(load_splits(str(saved))["train"], 0.25)]
    finally:
        enable_caching()
    assert [len(part) for part in parts] == [15, 5]
    assert sorted(prompt for part in parts for prompt in part["prompt"]) == sorted(f"{i}+1=" for i in range(20))
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before


def test_held_out_prompts_are_always_the_same(tmp_path):
    rows = Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(20)]})
    rows.to_json(tmp_path / "data.jsonl")
    parts = [{"path": "json", "data_files": str(tmp_path / "data.jsonl")}]
    found = []
    for seed in (1, 2):  # as in processes that begin with random states of their own
        np.random.seed(seed)
        mixture = load_mixture(DatasetMixtureConfig(datasets=parts, test_split_size=0.25))
        found.append([part["prompt"][:] for part in (mixture["train"], mixture["test"], *hold_out(rows, 0.25))])
    assert found[0] == found[1]
    assert [len(part) for part in found[0]] == [15, 5, 15, 5]


def test_data_that_cannot_be_loaded_raises_an_error_with_the_reason(monkeypatch):
    nowhere = "which is no file or folder here, and cannot be loaded from the Hub: "

    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach it,\nnot at all")

    monkeypatch.setattr("bapo_trl.script.datasets.load_dataset", unreachable)
    with pytest.raises(ValueError, match=rf"'data/promts', {nowhere}Couldn't reach it, not at all$"):
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
    assert load_data(parse_arguments(flags)).test.to_list() == ROWS
    assert asked == [("org/data", config)]
