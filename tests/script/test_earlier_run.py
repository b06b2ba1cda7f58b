"""A second training into an output folder: what an earlier one left there stays, unless the flags let it go."""

import json
import shutil
from pathlib import Path

import pytest

from bapo_trl.errors import InputError
from tests.helpers.script_runs import run


SAVING = {"dataset_name": "train.jsonl", "save_strategy": "steps", "save_steps": "2"}


def contents(folder="out") -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def run_dir(**files: bytes) -> None:
    for name, content in files.items():
        Path("out", name).parent.mkdir(parents=True, exist_ok=True)
        Path("out", name).write_bytes(content)


@pytest.mark.parametrize("kept", ["model.safetensors", "adapter_model.safetensors", "checkpoint-2/optimizer.pt"])
def test_a_training_does_not_replace_an_earlier_run(folder, monkeypatch, kept):
    run_dir(**{kept: b"of days"})
    monkeypatch.setattr("bapo_trl.script.run.train.gather_inputs", lambda *args: pytest.fail("the model is loaded"))
    elsewhere = shutil.copytree("out", "other") if "checkpoint" in kept else None
    resume = {"resume_from_checkpoint": f"{elsewhere}/checkpoint-2"} if elsewhere else {}
    name = kept.split("/")[0]
    for settings in ({}, {"save_strategy": "no"}, {"resume_from_checkpoint": "false"}, resume):
        message = (
            rf"which holds {name} of an earlier run: .* --resume_from_checkpoint true, .*--overwrite_output_dir true"
        )
        with pytest.raises(InputError, match=message):
            run(**{**SAVING, **settings})
    assert contents() == {f"out/{kept}": b"of days"}


@pytest.mark.parametrize("start", ["out", "out/checkpoint-2"])
def test_a_training_does_not_delete_the_model_it_starts_from(folder, start):
    shutil.copytree("model", start)
    before = contents()
    with pytest.raises(
        InputError, match=rf"holds the model that the run starts from \({start}\).*another --output_dir"
    ):
        run(**SAVING, model_name_or_path=start, overwrite_output_dir="true")
    assert contents() == before


@pytest.mark.trainings
def test_only_files_of_the_earlier_run_are_overwritten(folder):
    run(**SAVING, max_steps=6, eval_dataset="test.jsonl", logging_steps=1, log_completions="true")
    files = ("adapter_model.safetensors", "chat_template.jinja", "novel.txt", "checkpoint-mine/novel.txt")
    run_dir(**dict.fromkeys(files, b"of somebody"))
    run(**SAVING, overwrite_output_dir="true", max_steps=4, seed=7)
    left = {path.name for path in Path("out").iterdir()}
    assert {"checkpoint-4", "checkpoint-2", "checkpoint-mine", "novel.txt", "model.safetensors"} <= left
    assert not left & {"checkpoint-6", *files[:2], "eval_results.json", "eval_completions.jsonl"}
    assert not list(Path("out").glob("completions/*.parquet"))
    assert json.loads(Path("out/trainer_state.json").read_text())["global_step"] == 4
    run(**SAVING, max_steps=6, resume_from_checkpoint="true", overwrite_output_dir="true")  # nothing is deleted
    assert Path("out/checkpoint-2").is_dir()
