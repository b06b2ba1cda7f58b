"""The first run on a GPU, on the CPU at tiny sizes; GPU-only functions are replaced by fakes."""

import dataclasses
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.autograd import DeviceType
from trl.generation import vllm_generation

from bapo_trl.compare.study import as_arguments
from bapo_trl.script.commands import TRAIN
from bapo_trl.script.settings.parser import parse_arguments
from bapo_trl.tasks import character_tokenizer, load_task
from benchmarks.common import ROOT
from benchmarks.gpu_first_run import (
    __main__,
    layouts,
    parts,
    plan,
    runs,
    sampled,
    shapes,
    sharded,
    to_accuracy,
    trainers,
    updates,
)
from benchmarks.gpu_first_run.table import passes, render
from benchmarks.layout_cost import make
from tests.helpers.commands import run_command
from tests.helpers.forked import run_python
from tests.helpers.scripted_llm import SamplingParams, ScriptedLLM
from tests.helpers.toy import toy_model


pytestmark = pytest.mark.trainings


TINY = trainers.Setup("cpu", "tiny", 0)
ON_GPU = trainers.Setup("cuda", "full", 0)


def call(*arguments: object) -> subprocess.CompletedProcess:
    return run_python(["-m", "benchmarks.gpu_first_run", *arguments])


def test_the_command_writes_all_that_a_cpu_can_tell_and_goes_on_where_it_was_cut(tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    tiny = ("--device", "cpu", "--sizes", "tiny", "--parts")
    made = call(*tiny, "runs", "cost", "layout", "search", "rollouts", "memory", "reads", "colocate", "chat", "qlora",
                "--output", first)  # fmt: skip
    assert made.returncode == 0, made.stderr
    content = json.loads(first.read_text())
    assert {part["status"] for part in content["parts"].values()} == {"done"}
    rows = [row for part in content["parts"].values() for row in part["cases"].values()]
    assert not [row for row in rows if "error" in row]
    reasons = {name: {row.get("skipped") for row in part["cases"].values()} for name, part in content["parts"].items()}
    assert reasons == {
        "runs": {None}, "cost": {None}, "layout": {None}, "search": {None}, "rollouts": {None},
        "memory": {"needs a GPU, not cpu"},
        "reads": {"needs a GPU, not cpu"}, "colocate": {"needs a GPU, not cpu"},
        "chat": {"needs a model: `--chat_model FOLDER`"}, "qlora": {"needs a model: `--chat_model FOLDER`"},
    }  # fmt: skip
    trained = content["parts"]["runs"]["cases"]
    assert all(passes(row) for row in trained.values())
    assert trained["fixed bounds against GRPOTrainer"]["largest_difference"] == 0
    assert trained["replay"]["replay/fraction"][2] > 0  # of the second generation
    assert trained["partial rollouts"]["partial/segments_max"][2] > 1  # of a completion that was carried over
    cost = content["parts"]["cost"]["cases"]["tiny, LoRA"]
    assert {len(values) for values in cost["seconds"].values()} == {2}
    counts = {name: profile["kernels"] for name, profile in cost["profiles"].items()}
    assert counts["grpo"] == counts["grpo again"] < counts["micro_batch"] < counts["batch"]  # a forward pass more
    layout = content["parts"]["layout"]["cases"].values()
    assert [round(row["padding"]["skipped"], 2) for row in layout] == [0, 0, 0.44]  # 7 of 16 groups
    assert [row["padding"]["computed"] < 1.5 for row in layout] == [True] * 3
    for row in layout:
        assert {kind: [len(each) for each in own] for kind, own in row["seconds"].items()} == {
            "grpo": [4],
            "bapo": [4],
        }
        norms = row["gradient_norms"]
        assert norms["bapo"] == pytest.approx(norms["grpo"], rel=1e-4)
        assert min(norms["grpo"]) > 0
    assert content["machine"]["torch"] == importlib.metadata.version("torch")
    assert content["asked"]["seed"] == 0
    assert str(tmp_path) not in first.read_text()  # no path of one machine
    assert render(content).strip() in made.stdout

    # As a call leaves it that is cut in its second part
    del content["parts"]["cost"]["cases"]["tiny, LoRA"]
    kept = content["parts"]["runs"]["cases"]
    first.write_text(json.dumps(content))
    went_on = call(*tiny, "runs", "cost", "--output", second, "--continue", first)
    assert went_on.returncode == 0, went_on.stderr
    content = json.loads(second.read_text())
    assert content["parts"]["runs"]["cases"] == kept  # not made again
    assert "seconds" in content["parts"]["cost"]["cases"]["tiny, LoRA"]

    other = call("--device", "cpu", "--sizes", "full", "--output", second, "--continue", first)
    assert other.returncode == 2
    assert "was made with" in other.stderr


def test_runs_trains_at_the_full_vocabulary(monkeypatch):
    """Almost all sampled tokens are outside the tokenizer's 258 tokens, so they decode to nothing."""
    wide = dataclasses.replace(shapes.TINY, hidden=16, vocabulary=shapes.QWEN_05B.vocabulary)
    monkeypatch.setitem(shapes.SIZES, "wide", dataclasses.replace(shapes.SIZES["tiny"], trained=wide))
    setup = trainers.Setup("cpu", "wide", 0)
    row = runs.runs(setup)["batch"].measure()
    assert passes(row), row

    # By the text of the completions all rewards of a group tie, and nothing is trained
    monkeypatch.setattr(trainers, "reward", lambda completions, **kwargs: [len(text) / 7 for text in completions])
    tied = runs.runs(setup)["batch"].measure()
    assert tied["is_finite"]
    assert not passes(tied)


GOOD = {"is_finite": True, "misplaced_tensors": [], "gradient_norms": [1.0, 0.1], "largest_change_of_a_weight": 1e-5}
FIXED = {"largest_difference": 1e-6, "largest_difference_of_grpo_from_itself": 1e-6, "largest_change_of_a_weight": 1.0}


@pytest.mark.parametrize(
    ("row", "is_good"),
    [
        (GOOD, True),
        (GOOD | {"gradient_norms": [1.0, 0.0]}, False),
        (GOOD | {"largest_change_of_a_weight": 0.0}, False),
        (GOOD | {"is_finite": False}, False),
        (GOOD | {"misplaced_tensors": ["cpu"]}, False),
        (FIXED, True),
        (FIXED | {"largest_difference": 2e-6}, False),
        (FIXED | {"largest_change_of_a_weight": 0.0}, False),
    ],
)
def test_a_case_passes_only_if_each_update_has_a_gradient_and_the_weights_moved(row, is_good):
    assert passes(row) == is_good


def test_it_needs_none_of_the_packages_that_it_does_not_name():
    hidden = ["hypothesis", "math_verify", "matplotlib", "pytest", "requests", "scipy", "tensorboard"]
    imports = "from benchmarks.gpu_first_run import __main__"
    result = run_command([sys.executable, "-c", f"import sys; sys.modules |= dict.fromkeys({hidden}); {imports}"])
    assert result.returncode == 0, result.stderr


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


def test_no_case_of_7b_or_of_long_completions_comes_before_the_small_cases_of_all_parts():
    stages = [(case.stage, part, name) for part, name, case in plan.make_plan(list(parts.PARTS), ON_GPU)]
    assert stages == sorted(stages, key=lambda case: case[0])
    small = {(part, name) for stage, part, name in stages if stage == 0}
    assert {part for part, _ in small} >= {"search", "cost", "memory", "reads", "runs", "rollouts"}
    assert not [name for part, name in small if "7B" in name or "8k" in name]
    sevens = [name for _, part, name in stages if part == "cost" and "7B" in name]
    assert sevens == ["7B, LoRA, 2k, one row", "7B, LoRA, 8k"]


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


def test_cases_share_a_process_but_for_parts_with_processes_of_their_own(tmp_path):
    file = tmp_path / "run.json"
    measures = ["gradient", "surrogate"]
    for done, begun in (([], measures), (measures, ["one process"])):
        rows = {name: {"took_s": 1} for name in done}
        plan.write({"parts": {"sharded": {"cases": {}}, "search": {"cases": rows}}}, file)
        batch = plan.next_batch(plan.make_plan(["sharded", "search"], ON_GPU), file, time.monotonic() + 60)
        assert [case.name for case in batch] == begun


def test_the_tables_are_printed_from_a_file(tmp_path, monkeypatch, capsys):
    row = {"tokens": 8, "seconds": {"search": [1.0], "recomputed": [3.0], "hoisted": [2.0]},
           "same_bounds_as_on_the_cpu": True}  # fmt: skip
    content = {
        "machine": {"device": "none", "driver": None}, "date": "-", "asked": {"seed": 0},
        "parts": {"search": {"status": "done", "cases": {"gradient": row}},
                  "rollouts": {"status": "not reached: one", "cases": {}},
                  "learns": {"status": "done", "cases": {"vLLM": {"skipped": "vllm is not installed"}}}},
    }  # fmt: skip
    file = tmp_path / "run.json"
    file.write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["gpu_first_run", "--table", str(file)])
    __main__.main()
    shown = capsys.readouterr().out
    assert "3.000 (3.000 to 3.000)" in shown
    assert "Part `rollouts`: not reached: one." in shown
    assert "- vLLM: skipped: vllm is not installed" in shown


def test_memory_is_the_peak_of_the_last_update(monkeypatch):
    """A counter of updates replaces the device's memory."""
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: len(resets))
    (case,) = updates.memory(TINY).values()
    row = case.measure()
    count = updates.WARMUP_ROUNDS + 2
    assert [row[kind]["peak_bytes"] for kind in ("grpo", *trainers.SCOPES)] == [count * n for n in (1, 2, 3, 4)]
    same = {**row, **{kind: {"peak_bytes": 100 + 2 * n} for n, kind in enumerate(("grpo", *trainers.SCOPES))}}
    assert [line.split(" | ")[-2:] for line in shown_alone("memory", {"tiny": same}).splitlines()[-3:]] == [
        ["1.020", "yes |"], ["1.040", "**no** |"], ["1.060", "**no** |"],
    ]  # fmt: skip


def test_memory_of_a_layout_is_the_highest_above_that_before_an_update(monkeypatch):
    """A counter of updates replaces the device's memory. Of eight rounds in turns, GRPOTrainer ends the last."""
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(0))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 100 + len(resets))
    monkeypatch.setattr(layouts, "time_s", lambda update, device: update() or 1.0)
    setup = SimpleNamespace(**{name: getattr(TINY, name) for name in ("sizes", "device", "seed")}, on_gpu=True)
    monkeypatch.setattr(layouts, "make", lambda *args: make(*args[:5], TINY, *args[6:]))
    monkeypatch.setattr(
        layouts, "trained_model", lambda *args, **kwargs: trainers.trained_model(TINY, *args[1:], **kwargs)
    )
    row = layouts.layout(setup)["equal lengths"].measure()
    assert row["peak_bytes"] == {"grpo": 16, "bapo": 15}
    shown = shown_alone("layout", {"equal lengths": {**row, "peak_bytes": {"grpo": 100, "bapo": 103}}})
    assert "| 1.000 (1.000 to 1.000) | at most 1.02: yes |" in shown
    assert "| 1.030 | at most 1.02: **no** |" in shown


def test_calls_that_wait_are_counted_in_one_update_with_the_line_of_ours_or_trls(monkeypatch):
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
    row = updates.reads(TINY)["grpo"].measure()
    assert modes.count("warn") == 1
    assert row["synchronizing_calls"] == sum(row["lines"].values()) > 0  # not what torch says of the mode
    # 24 of TRL's losses and metrics, 2 of the log of transformers, in no call of TRL's
    files = Counter(line.split(":")[0] for line, count in row["lines"].items() for _ in range(count))
    assert files == {"trl/trainer/grpo_trainer.py": 24, "transformers/trainer.py": 2}


def test_a_profile_sums_what_runs_on_the_device_alone(monkeypatch):
    """Profile a kernel of 3 us, a copy of 1 us, a user range around both, and a host call."""

    def event(kind, microseconds, is_annotation=False):
        return SimpleNamespace(
            device_type=lambda: kind, duration_ns=lambda: 1000 * microseconds, is_user_annotation=lambda: is_annotation
        )

    on_device, on_host = DeviceType.CUDA, DeviceType.CPU
    events = [event(on_device, 3), event(on_device, 1), event(on_device, 5, True), event(on_host, 9)]

    class Profile:
        def __init__(self, activities):
            assert activities == [torch.profiler.ProfilerActivity.CUDA]
            self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))

    class Training:
        def update(self, around):
            assert isinstance(around, Profile)

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(updates, "synchronize", lambda device: None)
    assert updates._profile(Training(), "cuda") == {"device_seconds": 4e-6, "kernels": 2, "host_waits": 0}


def test_the_goal_of_an_update_is_held_against_the_time_on_the_device():
    def profile(seconds):
        return {"device_seconds": seconds, "kernels": 10, "host_waits": 2}

    seconds = {"grpo": [1.0, 1.0], "micro_batch": [3.0, 3.0], "carried_over": [1.0, 1.0]}  # of the clock: noise
    profiles = {"grpo": profile(1.0), "micro_batch": profile(1.019), "carried_over": profile(1.021)}
    rows = {"0.5B": {"seconds": seconds, "profiles": profiles}}
    shown = shown_alone("cost", rows)
    lines = {line.split(" | ")[1]: line for line in shown.splitlines() if line.startswith("| 0.5B")}
    assert "| 1.0190 | yes |" in lines["`micro_batch`"]
    assert "| 1.0210 | **no** |" in lines["`carried_over`"]


@pytest.fixture
def scripted_vllm(monkeypatch):
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", ScriptedLLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SamplingParams, raising=False)
    before = dict(os.environ)
    yield
    os.environ.clear()  # TRL leaves RANK and its like in it, and a second trainer would look for other processes
    os.environ.update(before)


@pytest.mark.parametrize("case", ["LoRA", "all weights, replay, partial rollouts, sleep mode"])
def test_colocate_tells_speed_and_log_probabilities_of_each_generation(case, scripted_vllm, monkeypatch):
    monkeypatch.setattr(sampled, "COLOCATE_UPDATES", 4)
    row = sampled.colocate(TINY)[case].measure()
    assert row["updates"] == 4
    assert len(row["generations"]) == 2
    for one in row["generations"]:
        assert 0 <= one["sampling/sampling_logp_difference/mean"] < 1e-5
        assert one["reward"] > 0
    rows = 16 * 4  # of a generation, each of 1 to 8 tokens
    assert 2 * rows * 4 < row["tokens"] <= 3 * rows * 8
    assert 0 < row["generation_s"] < row["seconds"]
    assert "random weights" in shown_alone("colocate", {case: row})


@pytest.mark.parametrize("case", ["vLLM", "transformers, partial rollouts"])
def test_learns_trains_the_embedded_model_by_each_sampler(case, scripted_vllm):
    row = sampled.learns(TINY)[case].measure()
    assert row["updates"] == 8
    assert len(row["generations"]) == 2
    assert ("sampling/sampling_logp_difference/mean" in row["generations"][0]) == (case == "vLLM")


def test_the_curves_of_both_samplers_agree_within_a_tenth_at_the_end():
    def row(*rewards):
        generations = [{"reward": reward} for reward in rewards]
        return {"updates": 4, "generations": generations, "tokens": 10, "generation_s": 1, "seconds": 2, "start_s": 1}

    curves = {"transformers": row(0.1, 0.2, 0.3, 0.50), "vLLM": row(0.9, 0.9, 0.9, 0.41)}  # the last quarter counts
    assert "Within 0.1: yes" in shown_alone("learns", curves)
    assert "Within 0.1: **no**" in shown_alone("learns", {**curves, "vLLM": row(0.1, 0.2, 0.3, 0.39)})


def test_chat_asks_for_each_merge_and_each_runner_with_each_seed(tmp_path, monkeypatch):
    setup = dataclasses.replace(ON_GPU, chat_model=tmp_path)
    cases = sampled.chat(setup)
    assert {case.stage for name, case in cases.items() if "seed 2" in name} == {3}  # one seed after the other
    older = {name for name, case in cases.items() if case.environment}
    assert older == {f"vLLM, merge stochastic, older runner, seed {seed}" for seed in range(3)}
    asked, prompts = {}, set()

    def note(setup, name, model, settings, uses_lora, merge, train_dataset, **options):
        asked[name] = settings, merge
        prompts.add(str(train_dataset["prompt"][:4]))
        return {}

    monkeypatch.setattr(sampled, "train", note)
    monkeypatch.setattr(sampled.AutoTokenizer, "from_pretrained", lambda folder: character_tokenizer())
    for case in cases.values():
        case.measure()
    assert asked.keys() == cases.keys()
    assert len(prompts) == 3  # by seed
    for name, (settings, merge) in asked.items():
        assert settings["max_steps"] == 32
        assert settings["learning_rate"] == 1e-4  # the recipe's
        assert settings["steps_per_generation"] == 4
        assert settings["seed"] == int(name[-1])
        assert settings.get("use_vllm", False) == (merge is not None) == ("vLLM" in name)
        assert merge is None or f"merge {merge}" in name
        assert ("replay_capacity" in settings) == ("replay" in name)
        assert ("partial_rollout_oversampling" in settings) == ("partial rollouts" in name)


@pytest.mark.parametrize("case", ["bfloat16, vLLM", "4 bits, vLLM"])
def test_qlora_trains_a_model_in_4_bits_over_vllm(case, scripted_vllm, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(sampled, "load_chat_sums", lambda seed: load_task(seed))
    toy_model(hidden_size=64).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    setup = dataclasses.replace(TINY, chat_model=tmp_path)
    row = sampled.qlora(setup)[case].measure()
    assert row["updates"] == TINY.sizes.chat_updates
    assert all(one["sampling/sampling_logp_difference/mean"] < 0.02 for one in row["generations"])
    assert f"| {case} " in shown_alone("qlora", {case: row})


def test_rewards_of_the_chat_model_are_averaged_over_seeds():
    def row(*rewards):
        generations = [{"reward": reward} for reward in rewards]
        return {"updates": 4, "generations": generations, "tokens": 10, "generation_s": 1, "seconds": 2, "start_s": 1}

    rows = {"vLLM, seed 0": row(0.1, 0.2, 0.3, 0.5), "vLLM, seed 1": row(0.0, 0.0, 0.0, 0.2), "other": row(1)}
    shown = shown_alone("chat", rows)
    assert "| vLLM | 2 | 0.05 | 0.35 | 0.50, 0.20 |" in shown
    assert "| other | 1 | 1.00 | 1.00 | 1.00 |" in shown


@pytest.mark.parametrize(("merge", "is_trls"), [("nearest", True), ("stochastic", False)])
def test_the_merge_is_trls_own_where_it_is_to_the_nearest(merge, is_trls, scripted_vllm, tmp_path, monkeypatch):
    model = shapes.make_model(shapes.TINY, "cpu", torch.float32, 0)
    settings = trainers.settings_for(TINY, 4, 4, **sampled.over_vllm(0.1))
    model.save_pretrained(tmp_path / "model")
    trainer = trainers.make_trainer(
        "batch", str(tmp_path / "model"), str(tmp_path / "run"), settings, peft_config=shapes.lora()
    )
    sampled.choose_merge(trainer, merge)
    own = vllm_generation.VLLMGeneration.sync_weights
    assert (getattr(trainer.vllm_generation.sync_weights, "__func__", None) is own) == is_trls


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


def test_time_comes_first_and_is_skipped_without_a_chat_model(tmp_path, monkeypatch):
    monkeypatch.setattr(to_accuracy.importlib.util, "find_spec", lambda name: True)
    setup = dataclasses.replace(ON_GPU, chat_model=tmp_path)
    first = [case.part for case in plan.make_plan(list(parts.PARTS), setup)][:6]
    assert first == ["time"] * 6
    assert {case.lacks for case in to_accuracy.time_to_accuracy(TINY).values()} == {
        "needs a model: `--chat_model FOLDER`"
    }


def test_the_settings_of_time_are_accepted_at_the_full_size(tmp_path, monkeypatch):
    monkeypatch.setattr(to_accuracy.importlib.util, "find_spec", lambda name: True)
    for run in to_accuracy.make_study(ON_GPU, tmp_path).runs()[:2]:
        flags = {**run.flags, "use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
        settings = parse_arguments([*as_arguments(flags), "--output_dir", str(tmp_path / "run")], TRAIN)
        assert settings.training.vllm_mode == "colocate"
        assert settings.training.steps_per_generation == 1


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


def test_the_script_accepts_the_settings_of_the_full_size(tmp_path, monkeypatch):
    accepted = []

    def parse(command, **options):
        flags = command[command.index("benchmarks.gpu_first_run.clocked_training") + 2 :]
        accepted.append(parse_arguments(flags, TRAIN).training.max_steps)
        Path(command[command.index("benchmarks.gpu_first_run.clocked_training") + 1]).write_text("[1.0]")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(sharded.subprocess, "run", parse)
    monkeypatch.setattr(sharded, "warm_start_path", lambda seed, task: "embedded")
    monkeypatch.chdir(ROOT)
    sharded._train(trainers.Setup("cpu", "full", 0), "one process", tmp_path / "run")
    assert accepted == [16]


def test_deepspeed_is_on_the_path_of_its_own_training_alone(tmp_path, monkeypatch):
    environments = {}

    def note(command, env, **options):
        environments[name] = env["PYTHONPATH"].split(os.pathsep)
        clock = Path(command[command.index("benchmarks.gpu_first_run.clocked_training") + 1])
        clock.write_text("[1.0]")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(sharded.subprocess, "run", note)
    setup = trainers.Setup("cuda", "tiny", 0, deepspeed=tmp_path)
    for name in sharded.LAUNCH_FILES:
        sharded._train(setup, name, tmp_path / "run")
    assert {name: str(tmp_path) in paths for name, paths in environments.items()} == {
        "one process": False, "FSDP2": False, "DeepSpeed ZeRO-3": True,
    }  # fmt: skip
