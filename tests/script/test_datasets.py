"""Datasets by name."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from trl import DatasetMixtureConfig

from bapo_trl.errors import InputError
from bapo_trl.script.data.columns import format_prompts
from bapo_trl.script.data.load import hold_out, load_mixture, load_splits
from bapo_trl.script.settings.arguments import BAPOScriptArguments
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


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.CSV", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")])
def test_values_of_csv_files_are_as_written(tmp_path, name, separator):
    cells = [["prompt", "n", "day"], ["1", "0.10", "2024-05-01"], ['"a,""b"', "42", ""], ["3", "007", "nan"]]
    write(tmp_path / name, "".join(f"{separator.join(row)}\n" for row in cells))
    rows = list(load_splits(str(tmp_path / name))["train"])
    values = {"prompt": ["1", 'a,"b', "3"], "n": ["0.10", "42", "007"], "day": ["2024-05-01", "None", "nan"]}
    assert texts(rows) == values
    assert [type(row["n"]) for row in rows[1:]] == [int, str]
    assert rows[0]["n"] == 0.1


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


def test_parts_of_a_mixture_keep_their_values_and_need_the_same_types(tmp_path):
    write(tmp_path / "a.jsonl", WRITTEN)
    write(tmp_path / "b.jsonl", '{"prompt": "5", "n": "forty"}')
    parts = [{"path": "json", "data_files": str(tmp_path / name)} for name in ("a.jsonl", "b.jsonl")]
    assert texts(load_mixture(DatasetMixtureConfig(datasets=parts[:1]))["train"]) == AS_WRITTEN
    with pytest.raises(InputError, match="can't be aligned because the key n"):
        load_mixture(DatasetMixtureConfig(datasets=parts))


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
