"""Datasets by name."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, enable_caching
from trl import DatasetMixtureConfig

from bapo_trl.errors import InputError
from bapo_trl.script.arguments import BAPOScriptArguments
from bapo_trl.script.command_line import parse_arguments
from bapo_trl.script.datasets import format_prompts, hold_out, load_data, load_mixture, load_splits
from tests.helpers.script_runs import run


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


# Values that `datasets` changes where a column has one type
ODD = {
    "prompt": ["1", "2", "3", "4"],
    "n": [42, 3.5, 1e-07, 7],
    "day": ["2024-05-01", None, "1999-12-31 10:00", None],
    "o": [{"a": [1, "x"]}, {"b": 0.1}, {}, [[2.5], {}]],
    "t": ["7", "null", "\N{GRINNING FACE}", None],
    "mixed": ["x", 7, None, 7.5],
    "whole": [1, None, 3, 4],
}
ODD_ROWS = [dict(zip(ODD, values, strict=True)) for values in zip(*ODD.values(), strict=True)]


def write_odd(path: Path) -> None:
    text = json.dumps(ODD_ROWS) if path.suffix == ".json" else "\n".join(map(json.dumps, ODD_ROWS))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.ndjson", "a.jsonl.gz", "a.json"])
def test_values_of_json_files_keep_their_types(tmp_path, name, streaming):
    write_odd(tmp_path / name)
    rows = load_splits(str(tmp_path / name), streaming=streaming and name != "a.json")["train"]
    assert [repr(row) for row in rows] == [repr(row) for row in ODD_ROWS]
    flags = BAPOScriptArguments(prompt_template="{n}, {prompt}", answer_column=["n"])
    made = [{"prompt": f"{row['n']}, {row['prompt']}"} for row in ODD_ROWS]
    solutions = ["42", "3.5", "0.0000001", "7"]
    formatted = list(format_prompts(rows, flags))
    assert [{**row, **new, "solution": s} for row, new, s in zip(ODD_ROWS, made, solutions, strict=True)] == formatted
    assert repr(formatted[0]["n"]) == "42"


def test_values_of_a_folder_keep_their_types(tmp_path):
    for name in ("train", "test-1", "test-2"):
        write_odd(tmp_path / f"{name}.jsonl")
    splits = load_splits(str(tmp_path))
    assert {split: list(rows) for split, rows in splits.items()} == {"train": ODD_ROWS, "test": ODD_ROWS * 2}


def test_cells_of_csv_files_have_the_types_of_datasets(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,n,day\n1,0.10,2024-05-01\n"a,b",42,\n')
    rows = load_splits(str(tmp_path / "a.csv"))["train"]
    assert list(rows) == [{"prompt": "1", "n": 0.1, "day": "2024-05-01"}, {"prompt": "a,b", "n": 42.0, "day": None}]
    assert format_prompts(rows, BAPOScriptArguments(answer_column=["n"]))["solution"][:] == ["0.1", "42"]


def test_a_mixture_whose_types_cannot_be_joined_names_the_column(tmp_path):
    for name, row in {"a": {"n": 42}, "b": {"n": "one"}}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    parts = [{"path": "json", "data_files": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    with pytest.raises(InputError, match=r"b\.jsonl'\) could not be loaded: .*key n .*unexpected type"):
        load_mixture(DatasetMixtureConfig(datasets=parts))


@pytest.mark.trainings
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_rewards_get_the_values_of_a_file_in_training_evaluation_and_the_dry_run(folder, streaming):
    (folder / "seen.py").write_text(
        "seen = []\ndef reward(completions, n, day, o, **kwargs):\n"
        "    seen.append({tuple(map(str, row)) for row in zip(n, day, o)})\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    write_odd(folder / "odd.jsonl")
    values = {tuple(str(row[name]) for name in ("n", "day", "o")) for row in ODD_ROWS}
    data = {"dataset_name": "odd.jsonl", "eval_dataset": "odd.jsonl", "reward_funcs": "seen.reward"}
    run(**data, dataset_streaming=streaming, max_steps=1, do_eval="true")
    import seen

    assert set.union(*seen.seen) == values
    assert all(given <= values for given in seen.seen)
    seen.seen.clear()
    run(**data, dataset_streaming=streaming, dry_run="true", output_dir="other")
    (given,) = seen.seen
    assert given < values


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
