"""The first run on a GPU, tried on the CPU at tiny sizes; what only a GPU has is stood in for."""

import importlib.metadata
import json
import subprocess
import warnings
from collections import Counter

import pytest
import torch

from bapo_trl.tasks import character_tokenizer
from benchmarks.gpu_first_run import parts, shapes
from benchmarks.gpu_first_run.results_file import run_part
from benchmarks.gpu_first_run.table import render
from benchmarks.lognormal_model import lognormal_hazards
from tests.helpers.forked import run_python


pytestmark = pytest.mark.trainings


TINY = parts.Setup("cpu", "tiny", 0)


def call(*arguments: object) -> subprocess.CompletedProcess:
    return run_python(["-m", "benchmarks.gpu_first_run", *arguments])


def test_the_command_writes_all_that_a_cpu_can_tell_and_goes_on_where_it_was_cut(tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    tiny = ("--device", "cpu", "--sizes", "tiny")
    made = call(*tiny, "--output", first)
    assert made.returncode == 0, made.stderr
    content = json.loads(first.read_text())
    status = {name: part["status"] for name, part in content["parts"].items()}
    assert status == {
        "runs": "done", "cost": "done", "search": "done", "rollouts": "done",
        "memory": "null: needs a GPU, not cpu", "reads": "null: needs a GPU, not cpu",
    }  # fmt: skip
    assert not [row for part in content["parts"].values() for row in part["cases"].values() if "error" in row]
    assert content["parts"]["runs"]["cases"]["fixed bounds against GRPOTrainer"]["largest_difference"] == 0
    assert {len(values) for values in content["parts"]["cost"]["cases"]["tiny, LoRA"]["seconds"].values()} == {2}
    assert content["machine"]["torch"] == importlib.metadata.version("torch")
    assert content["asked"]["seed"] == 0
    assert str(tmp_path) not in first.read_text()  # no path of one machine
    assert render(content).strip() in made.stdout

    # As a call leaves it that is cut in its second part
    del content["parts"]["cost"]["cases"]["tiny, LoRA"]
    kept = content["parts"]["runs"]["cases"]
    first.write_text(json.dumps(content))
    went_on = call(*tiny, "--parts", "runs", "cost", "--output", second, "--continue", first)
    assert went_on.returncode == 0, went_on.stderr
    content = json.loads(second.read_text())
    assert content["parts"]["runs"]["cases"] == kept  # not made again
    assert "seconds" in content["parts"]["cost"]["cases"]["tiny, LoRA"]

    other = call("--device", "cpu", "--sizes", "full", "--output", second, "--continue", first)
    assert other.returncode == 2
    assert "was made with" in other.stderr


def test_a_case_that_raises_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("out of memory")

    monkeypatch.setitem(parts.PARTS, "search", parts.Part(lambda setup: {"one": broken, "two": dict}, 1))
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"parts": {"search": {"cases": {}}}}))
    run_part("search", TINY, file)
    cases = json.loads(file.read_text())["parts"]["search"]["cases"]
    assert cases["one"]["error"] == "RuntimeError: out of memory"
    assert "error" not in cases["two"]


def test_memory_is_that_of_the_last_update_at_each_micro_batch(monkeypatch):
    """A clock stands in for the device's memory: it grows with each look, and its peak starts anew with an update."""
    looks = Counter()

    def allocated() -> int:
        looks["now"] += 1
        return looks["now"]

    monkeypatch.setattr(torch.cuda, "memory_allocated", allocated)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: looks.update(["resets"]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: looks["resets"])
    (measure,) = parts.memory(TINY).values()
    row = measure()
    updates = parts.WARMUP_ROUNDS + 2
    assert [row[kind]["peak_bytes"] for kind in ("grpo", *parts.SCOPES)] == [updates * n for n in (1, 2, 3, 4)]
    assert row["grpo"]["bytes_between_micro_batches"] == [4 * (updates - 1) + n for n in (1, 2, 3, 4)]
    assert row["completion_tokens"] == 2 * 16 * 4
    assert "Bytes held a completion token" in render(
        {"machine": {"device": "none", "driver": None}, "date": "-", "asked": {"seed": 0},
         "parts": {"memory": {"status": "done", "cases": {"tiny": row}}}}
    )  # fmt: skip


def test_calls_that_wait_are_counted_in_the_last_update_with_the_line_of_ours_or_trls(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    item = torch.Tensor.item

    def watched(tensor):
        if modes and modes[-1] == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", watched)
    row = parts.reads(TINY)["grpo"]()
    assert modes.count("warn") == 1
    assert row["synchronizing_calls"] == sum(row["lines"].values()) > 0
    assert all(line.startswith("trl/trainer/grpo_trainer.py:") for line in row["lines"])


def test_completions_of_a_qwen2_are_as_long_as_the_hazards_say():
    median, cap = 6, 40
    model = shapes.make_model(
        shapes.Shape(64, 64, 1, 2, 1, 320, False), device="cpu", dtype=torch.float32, seed=0
    ).eval()
    first = len(character_tokenizer())
    shapes.end_by_hazards(model, median, 5, cap, first_token=first)
    ids = torch.tensor([[5, 7, *range(first, first + cap - 1)]])
    with torch.no_grad():
        probabilities = model(ids).logits[0, 1:].softmax(-1).double()
    ends = probabilities[:, model.config.eos_token_id]
    torch.testing.assert_close(ends, lognormal_hazards(median, 5, cap), rtol=1e-3, atol=1e-6)
    goes_on = probabilities[torch.arange(cap), first + torch.arange(cap)]
    torch.testing.assert_close(ends + goes_on, torch.ones(cap, dtype=torch.float64))


def test_a_model_with_a_tied_head_is_refused():
    model = shapes.make_model(shapes.TINY, device="cpu", dtype=torch.float32, seed=0)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        shapes.end_by_hazards(model, 4, 5, 40, first_token=100)
