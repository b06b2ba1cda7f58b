"""Datasets by name."""

import gzip
import json
import pickle
from datetime import date
from decimal import Decimal
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
WRITTEN = r"""
{"prompt": "1", "n": 42, "day": "2024-05-01", "id": 12345678901234567890123, "o": {"a": [1, "x"]}, "t": "7"}

{"prompt": "2", "n": 3.5, "day": null, "id": 7, "o": {"b": 0.10}, "t": "null"}
{"prompt": "3", "n": -1E+400, "day": "1999-12-31 10:00", "id": -0, "o": {}, "t": "\ud83d\ude00"}
{"prompt": "4", "n": true, "o": [[2.50], {}], "only": 1e-7}
""".lstrip()
AS_WRITTEN = {
    "prompt": ["1", "2", "3", "4"],
    "n": ["42", "3.5", "-1E+400", "True"],
    "day": ["2024-05-01", "None", "1999-12-31 10:00", "None"],
    "id": ["12345678901234567890123", "7", "-0", "None"],
    "o": ["{'a': [1, 'x']}", "{'b': 0.10}", "{}", "[[2.50], {}]"],
    "t": ["7", "null", "\N{GRINNING FACE}", "None"],
    "only": ["None", "None", "None", "1e-7"],
}


def texts(rows) -> dict[str, list[str]]:
    rows = list(rows)
    return {name: [str(row[name]) for row in rows] for name in rows[0]}


def write(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.ndjson", "a.jsonl.gz", "a.json", "lines.json"])
def test_values_of_json_files_are_as_written(tmp_path, name, streaming):
    lines = [line for line in WRITTEN.splitlines() if line]
    text = {"a.json": f"[{', '.join(lines)}]", "lines.json": WRITTEN.replace(", ", ",\n")}.get(name, WRITTEN)
    write(tmp_path / name, text)
    rows = load_splits(str(tmp_path / name), streaming=streaming)["train"]
    assert texts(rows) == AS_WRITTEN
    flags = BAPOScriptArguments(prompt_template="{n}, {prompt}", answer_column=["id"])
    formatted = texts(format_prompts(rows, flags))
    prompts = [f"{n}, {prompt}" for n, prompt in zip(AS_WRITTEN["n"], AS_WRITTEN["prompt"], strict=True)]
    assert formatted == {**AS_WRITTEN, "prompt": prompts, "solution": AS_WRITTEN["id"]}
    write(tmp_path / name, text.replace("42", "43"))  # a file that changed is read again
    assert next(iter(load_splits(str(tmp_path / name), streaming=streaming)["train"]))["n"] == 43


def test_numbers_of_files_are_numbers(tmp_path):
    write(tmp_path / "a.jsonl", WRITTEN)
    rows = format_prompts(load_splits(str(tmp_path / "a.jsonl"))["train"], BAPOScriptArguments(prompt_template="{n}"))
    assert rows["n"][:] == [42, 3.5, float("-inf"), True]
    assert [type(value) for value in rows["n"][:2]] == [int, float]
    ten_cents = pickle.loads(pickle.dumps(rows[1]["o"]["b"]))  # as between processes
    assert (ten_cents * 2, str(ten_cents), f"{ten_cents}") == (0.2, "0.10", "0.10")
    assert sorted(n for part in hold_out(rows, 0.5) for n in texts(part)["n"]) == sorted(AS_WRITTEN["n"])


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.CSV", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")])
def test_values_of_csv_files_are_as_written(tmp_path, name, separator):
    cells = [["prompt", "n", "day"], ["1", "0.10", "2024-05-01"], ['"a,""b"', "42", ""], ["3", "007", "nan"]]
    write(tmp_path / name, "".join(f"{separator.join(row)}\n" for row in cells))
    rows = list(load_splits(str(tmp_path / name))["train"])
    values = {"prompt": ["1", 'a,"b', "3"], "n": ["0.10", "42", "007"], "day": ["2024-05-01", "None", "nan"]}
    assert texts(rows) == values
    assert [type(row["n"]) for row in rows[1:]] == [int, str]
    assert rows[0]["n"] == 0.1


def test_values_in_folders_and_mixtures_are_as_written(tmp_path):
    write(tmp_path / "train.jsonl", WRITTEN)
    write(tmp_path / "test-1.jsonl", WRITTEN)
    write(tmp_path / "test-2.jsonl", WRITTEN)
    splits = load_splits(str(tmp_path))
    assert texts(splits["train"]) == AS_WRITTEN
    assert texts(splits["test"]) == {name: values * 2 for name, values in AS_WRITTEN.items()}
    file = {"path": "json", "data_files": str(tmp_path / "train.jsonl")}
    parts = [{"path": str(tmp_path), "split": "test[:4]"}, file]
    mixture = load_mixture(DatasetMixtureConfig(datasets=parts))["train"]
    assert texts(mixture) == {name: values * 2 for name, values in AS_WRITTEN.items()}


# Of Parquet, beside files whose column `n` has other types
OTHERS = {"prompt": ["5", "6"], "n": [7, 8], "day": ["x", "y"], "id": [0.5, 1e22], "o": [{"a": [1.5]}, None]}


def test_a_mixture_joins_values_as_written_with_values_of_other_types(tmp_path):
    write(tmp_path / "a.jsonl", WRITTEN)
    write(tmp_path / "b.csv", 'prompt,n,day\n7,"one, two",\n')
    Dataset.from_dict(OTHERS).to_parquet(tmp_path / "c.parquet")
    kinds = {"a.jsonl": "json", "b.csv": "csv", "c.parquet": "parquet"}
    parts = [
        {"path": kind, "data_files": str(tmp_path / name), "split": "train[:1]", "fraction": 0.5, "columns": ["n"]}
        for name, kind in kinds.items()
    ]
    mixture = load_mixture(DatasetMixtureConfig(datasets=parts))["train"]
    assert mixture["n"][:] == [42, "one, two", 7]


@pytest.mark.parametrize("value", [date(2024, 5, 1), b"42", Decimal("0.10")])
def test_a_mixture_whose_types_cannot_be_joined_names_both_sources(tmp_path, value):
    write(tmp_path / "a.jsonl", WRITTEN)
    Dataset.from_dict({"day": ["x"], "n": [value]}).to_parquet(tmp_path / "c.parquet")
    parts = [{"path": kind, "data_files": str(next(tmp_path.glob(f"*.{kind}*")))} for kind in ("parquet", "json")]
    with pytest.raises(InputError, match=r"`n` .*c\.parquet.*a\.jsonl.* as text in '.*c\.parquet', .*`columns`"):
        load_mixture(DatasetMixtureConfig(datasets=parts))


def test_a_stream_of_a_mixture_with_several_types_is_rejected_with_the_fix(tmp_path):
    write(tmp_path / "a.jsonl", WRITTEN)
    write(tmp_path / "b.jsonl", '{"n": "text"}')
    parts = [{"path": "json", "data_files": str(tmp_path / name)} for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(InputError, match=r"`n` .*b\.jsonl.*a\.jsonl.*set `streaming` to false"):
        load_mixture(DatasetMixtureConfig(datasets=parts, streaming=True))


@pytest.mark.trainings
def test_rewards_get_the_values_of_a_mixture_in_training_evaluation_and_the_dry_run(folder):
    (folder / "mixed.py").write_text(
        "seen = []\ndef reward(completions, n, id, o, **kwargs):\n"
        "    seen.append({tuple(map(str, row)) for row in zip(n, id, o)})\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    write(folder / "odd.jsonl", WRITTEN)
    Dataset.from_dict(OTHERS).to_parquet(folder / "other.parquet")
    parts = [{"path": "json", "data_files": "odd.jsonl"}, {"path": "parquet", "data_files": "other.parquet"}]
    (folder / "recipe.yaml").write_text(json.dumps({"datasets": parts, "test_split_size": 0.3}))
    columns = [AS_WRITTEN[name] + [str(value) for value in OTHERS[name]] for name in ("n", "id", "o")]
    values = set(zip(*columns, strict=True))
    run(config="recipe.yaml", reward_funcs="mixed.reward", max_steps=2, do_eval="true", gradient_checkpointing="true")
    import mixed

    assert set.union(*mixed.seen) == values
    mixed.seen.clear()
    run(config="recipe.yaml", reward_funcs="mixed.reward", dry_run="true", output_dir="other")
    (given,) = mixed.seen
    assert given < values


@pytest.mark.trainings
@pytest.mark.parametrize("streaming", ["false", "true"])
def test_rewards_get_values_as_written_in_training_evaluation_and_the_dry_run(folder, streaming):
    (folder / "seen.py").write_text(
        "seen = []\ndef reward(completions, n, day, id, o, **kwargs):\n"
        "    seen.append({tuple(map(str, row)) for row in zip(n, day, id, o)})\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    write(folder / "odd.jsonl", WRITTEN)
    written = set(zip(*(AS_WRITTEN[name] for name in ("n", "day", "id", "o")), strict=True))
    data = {"dataset_name": "odd.jsonl", "eval_dataset": "odd.jsonl", "reward_funcs": "seen.reward"}
    run(**data, dataset_streaming=streaming, max_steps=1, do_eval="true")
    import seen

    assert set.union(*seen.seen) == written
    assert all(given <= written for given in seen.seen)
    seen.seen.clear()
    run(**data, dataset_streaming=streaming, dry_run="true", output_dir="other")
    (given,) = seen.seen
    assert given < written


@pytest.mark.trainings
def test_rewards_of_paused_completions_get_values_as_written_after_a_resume(folder):
    (folder / "resumed.py").write_text(
        "seen = []\ndef reward(completions, n, o, **kwargs):\n"
        "    seen.append(list(map(str, zip(n, o))))\n    return [float(len(text)) for text in completions]\n"
    )
    write(folder / "odd.jsonl", WRITTEN.replace("42", "0.10").replace("true", "1.0e0"))
    settings = {
        "dataset_name": "odd.jsonl", "reward_funcs": "resumed.reward", "steps_per_generation": 1, "max_steps": 4,
        "partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 2, "gradient_checkpointing": "true",
        "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    run(**settings)
    import resumed

    straight = resumed.seen[:]
    for step in (1, 2, 3):
        resumed.seen.clear()
        run(**settings, resume_from_checkpoint=f"out/checkpoint-{step}", output_dir=f"from_{step}")
        assert resumed.seen == straight[step:]


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
