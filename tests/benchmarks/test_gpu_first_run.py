"""The first run on a GPU, tried on the CPU at tiny sizes; what only a GPU has is stood in for."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter

import pytest
import torch

from bapo_trl.tasks import character_tokenizer
from benchmarks.gpu_first_run import __main__, parts, results_file, shapes
from benchmarks.gpu_first_run.results_file import run_part
from benchmarks.gpu_first_run.table import render
from benchmarks.lognormal_model import lognormal_hazards
from tests.helpers.commands import run_command
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
    runs = content["parts"]["runs"]["cases"]
    assert runs["replay"]["replay/fraction"][2] > 0  # of the second generation
    assert all(norm > 0 for norm in runs["partial rollouts"]["gradient_norms"])
    assert runs["partial rollouts"]["partial/segments_max"][2] > 1  # of a completion that was carried over
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


def test_it_needs_none_of_the_packages_that_it_does_not_name():
    hidden = ["hypothesis", "math_verify", "matplotlib", "pytest", "requests", "scipy", "tensorboard"]
    imports = "from benchmarks.gpu_first_run import __main__"
    result = run_command([sys.executable, "-c", f"import sys; sys.modules |= dict.fromkeys({hidden}); {imports}"])
    assert result.returncode == 0, result.stderr


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


def test_a_part_beyond_its_limit_goes_on_case_by_case(tmp_path, monkeypatch):
    monkeypatch.setitem(parts.PARTS, "search", parts.Part(lambda setup: {"one": dict, "two": dict}, -1))
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"parts": {"search": {"cases": {}}}}))
    with pytest.raises(SystemExit, match=str(results_file.PASSED_LIMIT)):
        run_part("search", TINY, file)
    assert list(json.loads(file.read_text())["parts"]["search"]["cases"]) == ["one"]
    run_part("search", TINY, file)
    assert list(json.loads(file.read_text())["parts"]["search"]["cases"]) == ["one", "two"]


def test_a_part_that_is_cut_and_one_that_never_began_say_so(tmp_path, monkeypatch, capsys):
    def slow():
        threading.Event().wait(600)

    def cases(setup):
        return {"one": lambda: {"found": 1}, "two": slow}

    def interrupted(setup):
        threading.Event().wait(0.5)  # the parent has left the fork, in whose hooks Python drops what a signal raises
        os.kill(os.getppid(), signal.SIGINT)
        threading.Event().wait(5)  # so that it is not over before it is interrupted
        return {}

    monkeypatch.setattr(__main__, "PARTS", {name: parts.PARTS[name] for name in ("runs", "cost", "search")})
    monkeypatch.setitem(__main__.PARTS, "runs", parts.Part(cases, 5))
    monkeypatch.setitem(__main__.PARTS, "cost", parts.Part(interrupted, 60))
    monkeypatch.setattr(results_file, "PARTS", __main__.PARTS)
    file = tmp_path / "run.json"
    asked = ["gpu_first_run", "--device", "cpu", "--sizes", "tiny", "--output", str(file)]
    monkeypatch.setattr(sys, "argv", asked)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            __main__.main()
    finally:
        signal.signal(signal.SIGINT, handler)
    status = {name: part["status"] for name, part in json.loads(file.read_text())["parts"].items()}
    assert status == {"runs": "cut at its time limit", "cost": "begun", "search": "not begun"}
    assert json.loads(file.read_text())["parts"]["runs"]["cases"]["one"]["found"] == 1


def test_the_tables_are_printed_from_a_file(tmp_path, monkeypatch, capsys):
    row = {"tokens": 8, "seconds": {"search": [1.0], "recomputed": [3.0], "hoisted": [2.0]},
           "same_bounds_as_on_the_cpu": True}  # fmt: skip
    content = {
        "machine": {"device": "none", "driver": None}, "date": "-", "asked": {"seed": 0},
        "parts": {"search": {"status": "done", "cases": {"gradient": row}},
                  "rollouts": {"status": "not begun", "cases": {}}},
    }  # fmt: skip
    file = tmp_path / "run.json"
    file.write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["gpu_first_run", "--table", str(file)])
    __main__.main()
    assert capsys.readouterr().out == render(content) + "\n"
    assert "3.000 (3.000 to 3.000)" in render(content)
    assert "Part `rollouts`: not begun." in render(content)
    monkeypatch.setattr(sys, "argv", ["gpu_first_run"])
    with pytest.raises(SystemExit):
        __main__.main()
    assert "give --output, or --table" in capsys.readouterr().err


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

    def set_mode(mode):
        modes.append(mode)
        warnings.warn("a prototype feature, which does not yet detect all synchronizing operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    item = torch.Tensor.item

    def watched(tensor):
        if modes and modes[-1] == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", watched)
    row = parts.reads(TINY)["grpo"]()
    assert modes.count("warn") == 1
    assert row["synchronizing_calls"] == sum(row["lines"].values()) > 0  # not what torch says of the mode
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
