"""The runs on a GPU, on the CPU at tiny sizes."""

import dataclasses
import importlib.metadata
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pytest
import torch

from bapo_trl.compare.study import as_arguments
from bapo_trl.script.commands import TRAIN
from bapo_trl.script.settings.parser import parse_arguments
from bapo_trl.tasks import character_tokenizer, load_task
from benchmarks.common import ROOT
from benchmarks.gpu_first_run import layouts, plan, qlora, sharded, to_accuracy, trainers
from benchmarks.gpu_first_run.table import render
from benchmarks.update_cost import make_for_layout
from tests.helpers.fake_vllm import take_scripted_llm
from tests.helpers.forked import run_python
from tests.helpers.toy import toy_model


pytestmark = pytest.mark.trainings


TINY = trainers.Setup("cpu", "tiny", 0)
ON_GPU = trainers.Setup("cuda", "full", 0)


def call(*arguments: object) -> subprocess.CompletedProcess:
    return run_python(["-m", "benchmarks.gpu_first_run", *arguments])


def test_the_command_writes_what_a_cpu_can_tell_and_continues_where_it_was_cut(tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    tiny = ("--device", "cpu", "--sizes", "tiny", "--parts")
    made = call(*tiny, "layout", "qlora", "--output", first)
    assert made.returncode == 0, made.stderr
    content = json.loads(first.read_text())
    assert {part["status"] for part in content["parts"].values()} == {"done"}
    skipped = {row.get("skipped") for row in content["parts"]["qlora"]["cases"].values()}
    assert skipped == {"needs a model: `--chat_model FOLDER`"}
    layout = content["parts"]["layout"]["cases"]
    assert [round(row["padding"]["skipped"], 2) for row in layout.values()] == [0, 0, 0.44]  # 7 of 16 groups
    assert [row["padding"]["computed"] < 1.5 for row in layout.values()] == [True] * 3
    for row in layout.values():
        assert {kind: [len(each) for each in own] for kind, own in row["seconds"].items()} == {
            "grpo": [4],
            "bapo": [4],
        }
        norms = row["gradient_norms"]
        assert norms["bapo"] == pytest.approx(norms["grpo"], rel=1e-4)
        assert min(norms["grpo"]) > 0
    assert content["machine"]["torch"] == importlib.metadata.version("torch")
    assert str(tmp_path) not in first.read_text()  # no path of one machine
    assert render(content).strip() in made.stdout
    assert render(content).strip() in call("--table", first).stdout

    # As a call leaves it that is cut in its second case
    cut = layout.pop("mean a quarter of the limit")
    first.write_text(json.dumps(content))
    continued = call(*tiny, "layout", "--output", second, "--continue", first)
    assert continued.returncode == 0, continued.stderr
    cases = json.loads(second.read_text())["parts"]["layout"]["cases"]
    assert {name: cases[name] for name in layout} == layout  # not made again
    assert cases["mean a quarter of the limit"].keys() == cut.keys()

    other = call("--device", "cpu", "--sizes", "full", "--output", second, "--continue", first)
    assert other.returncode == 2
    assert "was made with" in other.stderr


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Restrict the plan to these parts, given by the functions of their cases; return a file without their rows."""

    def begin(**cases) -> Path:
        made = {part: {name: trainers.Case(measure) for name, measure in own.items()} for part, own in cases.items()}
        monkeypatch.setattr(plan, "PARTS", {part: lambda setup, own=own: own for part, own in made.items()})
        plan.write({"parts": {part: {"cases": {}} for part in cases}}, tmp_path / "run.json")
        return tmp_path / "run.json"

    return begin


def shown_alone(part: str, rows: dict[str, dict]) -> str:
    machine, done = {"device": "none", "driver": None}, {"status": "done", "cases": rows}
    return render({"machine": machine, "date": "-", "asked": {"seed": 0}, "parts": {part: done}})


def carry_out(file: Path, seconds: float) -> None:
    """Run all cases of the parts within a time limit."""
    names = list(json.loads(file.read_text())["parts"])
    plan.run_plan(plan.make_plan(names, TINY), TINY, file, time.monotonic() + seconds)


def test_a_case_that_raises_or_ends_its_process_is_a_row_and_the_others_go_on(begin):
    def broken():
        raise RuntimeError("out of memory")

    def killed():
        os.kill(os.getpid(), signal.SIGKILL)

    file = begin(search={"one": broken, "two": killed, "three": dict})
    carry_out(file, 60)
    rows = plan.rows_of(file, "search")
    assert rows["one"]["error"] == "RuntimeError: out of memory"
    assert rows["two"]["error"] == "the process ended, exit code -9"
    assert "error" not in rows["three"]


def test_a_case_is_started_only_if_its_like_took_less_than_what_is_left(begin):
    file = begin(cost={"one": dict, "two": dict}, memory={"one": dict})
    plan.write_row(file, "cost", "one", {"took_s": 61.0})
    carry_out(file, 60)  # 60 s are left, the like of "cost: two" took 61
    planned = plan.make_plan(["cost", "memory"], TINY)
    assert plan.next_batch(planned, file, time.monotonic() + 60) == []  # nor a process for it
    plan.run_cases([("cost", "two")], TINY, file, time.monotonic() + 60)  # nor within a process
    assert list(plan.rows_of(file, "cost")) == ["one"]
    assert list(plan.rows_of(file, "memory")) == ["one"]

    plan.write_row(file, "cost", "one", {"took_s": 20.0})
    carry_out(file, 60)
    assert list(plan.rows_of(file, "cost")) == ["one", "two"]


def test_a_case_at_the_limit_is_cut_with_all_that_it_has_started(begin, tmp_path):
    def slow():
        launched = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (tmp_path / "pid").write_text(str(launched.pid))
        threading.Event().wait(600)

    file = begin(cost={"one": dict, "two": slow, "three": dict})
    carry_out(file, 5)
    first, second = plan.rows_of(file, "cost").items()
    assert (first[0], second) == ("one", ("two", {"error": "cut at the time limit"}))
    launched = int((tmp_path / "pid").read_text())
    has_ended = not psutil.pid_exists(launched) or psutil.Process(launched).status() == psutil.STATUS_ZOMBIE
    if not has_ended:
        os.kill(launched, signal.SIGKILL)
    assert has_ended


def test_memory_of_a_layout_is_the_highest_above_that_before_an_update(monkeypatch):
    """A counter of updates replaces the device's memory. Of eight rounds in turns, GRPOTrainer ends the last."""
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(0))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 100 + len(resets))
    monkeypatch.setattr(layouts, "time_s", lambda update, device: update() or 1.0)
    setup = SimpleNamespace(**{name: getattr(TINY, name) for name in ("sizes", "device", "seed")}, on_gpu=True)
    monkeypatch.setattr(layouts, "make_for_layout", lambda *args: make_for_layout(*args[:5], TINY, *args[6:]))
    monkeypatch.setattr(
        layouts, "trained_model", lambda *args, **kwargs: trainers.trained_model(TINY, *args[1:], **kwargs)
    )
    row = layouts.layout(setup)["equal lengths"].measure()
    assert row["peak_bytes"] == {"grpo": 16, "bapo": 15}
    shown = shown_alone("layout", {"equal lengths": {**row, "peak_bytes": {"grpo": 100, "bapo": 103}}})
    assert "| 1.000 (1.000 to 1.000) | at most 1.02: yes |" in shown
    assert "| 1.030 | at most 1.02: **no** |" in shown


def test_the_time_to_an_accuracy_is_that_of_seeds_that_both_reached():
    def row(seconds, reached=True, rewards=(0.1, 0.2, 0.3, 0.4), **phases):
        found = {"reached": reached, "seconds": seconds, "tokens": 10, "updates": 2.5, "target": 0.4}
        times = {**dict.fromkeys(to_accuracy.PHASES_WITH_VLLM, 1.0), **phases}
        return {"curve": [[0, 0.2], [4, 0.5]], "to_target": found, "rewards": rewards, "seconds_of_phases": times,
                "uses_vllm": True}  # fmt: skip

    rows = {f"TRL, seed {seed}": row(10) for seed in range(3)}
    found = {0: row(5), 1: row(1.25), 2: row(1, reached=False)}
    rows |= {f"recommendation, seed {seed}": each for seed, each in found.items()}
    shown = shown_alone("time", rows)
    assert "0.25 (geometric mean of 2 seeds that both reached)" in shown  # the root of 1/2 * 1/8
    assert "over 1.0" in shown
    none = {case: row(10, reached=False) for case in ("TRL, seed 0", "recommendation, seed 0")}
    assert "No seed reached it with both." in shown_alone("time", none)
    assert to_accuracy.learned_in_time(row(1))
    assert not to_accuracy.learned_in_time(row(1, rewards=(0.4, 0.3, 0.2, 0.1)))
    assert not to_accuracy.learned_in_time(row(1, weights=0.0))
    assert to_accuracy.learned_in_time(row(1, weights=0.0) | {"uses_vllm": False})


def test_the_settings_of_time_are_accepted_at_the_full_size(tmp_path, monkeypatch):
    monkeypatch.setattr(to_accuracy.importlib.util, "find_spec", lambda name: True)
    updates = {}
    for run in to_accuracy.make_study(ON_GPU, tmp_path).runs()[:2]:
        flags = {**run.flags, "use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
        settings = parse_arguments([*as_arguments(flags), "--output_dir", str(tmp_path / "run")], TRAIN)
        assert settings.training.vllm_mode == "colocate"
        updates[run.arm] = settings.training.steps_per_generation
    assert updates == {"TRL": 1, "recommendation": 16}


def test_a_training_of_one_process_resumes_exactly_and_tells_the_pause_of_a_save(monkeypatch):
    monkeypatch.setattr(sharded.subprocess, "run", lambda command, **options: run_python(command[1:]))  # a fork
    cases = sharded.sharded(TINY)
    assert cases["FSDP2"].lacks == cases["DeepSpeed ZeRO-3"].lacks == "needs a GPU, not cpu"
    row = cases["one process"].measure()
    assert row["updates"] == len(row["seconds_of_updates"]) == 16
    assert row["updates_resumed"] == 8
    assert row["largest_difference"] == 0.0 < row["largest_change_of_a_weight"]

    # Saves after updates 4, 8 and 12 count, the one at the end has no update after it
    seconds = [1.0] * 16
    for saved in (4, 8, 12):
        seconds[saved - 1], seconds[saved] = 3.0, 2.0
    shown = shown_alone("sharded", {"one process": {**row, "seconds_of_updates": seconds}})
    assert "| 1.00 s | 3.00 s | 2.00 s |" in shown


def test_a_sharded_training_takes_all_gpus_and_settings_of_the_full_size(tmp_path, monkeypatch):
    launched = {}

    def parse(command, env, **options):
        place = command.index("benchmarks.gpu_first_run.clocked_training") + 1
        launched[name] = env.get("CUDA_VISIBLE_DEVICES"), parse_arguments(command[place + 1 :], TRAIN), command[:place]
        Path(command[place]).write_text("[1.0]")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(sharded.subprocess, "run", parse)
    monkeypatch.setattr(sharded, "warm_start_path", lambda seed, task: "embedded")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,5")
    monkeypatch.chdir(ROOT)
    for name in sharded.LAUNCH_FILES:
        sharded._train(trainers.Setup("cpu", "full", 0), name, tmp_path / "run")
    assert {settings.training.max_steps for _, settings, _ in launched.values()} == {16}
    assert launched["one process"][0] == "2"
    for name in ("FSDP2", "DeepSpeed ZeRO-3"):
        seen, _, launcher = launched[name]
        assert seen == "2,3,4,5"
        assert launcher[launcher.index("--num_processes") + 1] == "4"


@pytest.mark.parametrize("case", ["bfloat16, vLLM", "4 bits, vLLM", "4 bits, transformers"])
def test_qlora_trains_a_model_in_4_bits_with_and_without_vllm(case, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    take_scripted_llm(monkeypatch)
    monkeypatch.setattr(qlora, "load_chat_sums", lambda seed: load_task(seed))
    toy_model(hidden_size=64).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    with patch.dict(os.environ):  # TRL leaves RANK and its like in it
        row = qlora.qlora(dataclasses.replace(TINY, chat_model=tmp_path))[case].measure()
    assert row["updates"] == TINY.sizes.chat_updates
    assert row["tokens"] > 0
    assert row["seconds"] > row["generation_s"] > 0
    for one in row["generations"]:
        assert one.get("sampling/sampling_logp_difference/mean", 0.0) < 0.02
    assert f"| {case} " in shown_alone("qlora", {case: row})
