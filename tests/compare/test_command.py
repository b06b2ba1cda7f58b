"""`bapo-trl compare` through its command, with real runs."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from bapo_trl import cli
from bapo_trl.compare import execution
from bapo_trl.compare.execution import environments
from bapo_trl.compare.results import Row, read_rows, write_row
from bapo_trl.compare.study import as_arguments, read_study
from bapo_trl.report.runs import STATE_FILE
from tests.helpers.commands import ends
from tests.helpers.forked import ForkedRun
from tests.helpers.script_runs import SHORT, train_bapo


BASE = {
    **{name: value for name, value in SHORT.items() if name not in ("output_dir", "num_generations_eval")},
    "dataset_name": "train.jsonl", "per_device_eval_batch_size": 6, "max_steps": 4,
}  # fmt: skip
STUDY = {
    "base": BASE,
    "arms": {"GRPO": {"method": "grpo"}, "BAPO": {"method": "bapo"}},
    "seeds": [0, 1],
    "measure": {"every": 2, "avg_at": 3, "dataset": "test.jsonl"},
}


def accuracies(rng, trials: int, gain: float, seeds: int = 5, prompts: int = 256, samples: int = 4):
    """
    Return avg@4 of two methods with its standard error over the prompts, each of shape (trials, 2, seeds).

    All methods and seeds answer the same prompts, of all difficulties. Seeds have an effect of their own.
    """
    difficulty = rng.uniform(0.1, 0.9, prompts)
    skill = rng.normal(0.0, 0.005, (trials, 2, seeds, 1)) + gain * np.array([0, 1])[:, None, None]
    right = rng.binomial(samples, (difficulty + skill).clip(0, 1)) / samples
    return right.mean(-1), right.std(-1) / prompts**0.5


@pytest.fixture
def folder(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    return folder


def write_study(**changes) -> None:
    Path("study.yaml").write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))


def compare(*arguments: str) -> int | None:
    return cli.main(["compare", "study.yaml", "--output_dir", "study", *arguments])


def rejection(capsys, message: str, *arguments: str) -> str:
    """Check that a study ends with a one-line error before any run; return its other output."""
    ends(cli.main, ["compare", "study.yaml", "--output_dir", "study", *arguments], code=1)
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("bapo-trl compare: error: ")
    assert message in line
    assert not Path("study").exists()
    return out


def invent_rows(finals: dict[str, list[float]]) -> None:
    """Write a row for each run of the study, as if it had ended."""
    for run in read_study("study.yaml").runs():
        row = Row(run.arm, run.sweep, run.seed, run.settings, final=finals[run.arm][run.seed], seconds=30.0)
        write_row(row, Path("study", "runs", f"{run.key}.json"))


@pytest.mark.processes
def test_a_study_is_made_once_and_its_runs_share_their_prompts(folder, capsys):
    with Path("my_rewards.py").open("a") as file:
        file.write('\ndef broken(**kwargs):\n    raise RuntimeError("no reward today")\n')
    write_study(arms={**STUDY["arms"], "broken": {"reward_funcs": "my_rewards.broken"}}, seeds=[0])
    compare()
    text = capsys.readouterr().out
    assert "3 of 3 runs to do" in text
    assert "[3/3]" in text
    assert "broken, seed 0, failed: exit code 1: " in text  # and the others went on
    rows = {row.arm: row for row in read_rows(Path("study")).values()}
    assert "RuntimeError: no reward today (study/logs/broken" in rows["broken"].error
    for row in (rows["GRPO"], rows["BAPO"]):
        assert [step for step, _ in row.curve] == [0, 2, 4]
        assert row.curve[-1][1] == pytest.approx(row.final, abs=1e-4)
        assert 0 <= row.final <= row.pass_at_k <= 1
        assert row.generated_tokens > 0
    # Measured with the weights of the start, which all arms share
    assert rows["GRPO"].curve[0] == rows["BAPO"].curve[0]
    assert rows["broken"].final is None
    assert Path("study/comparison.md").read_text().strip() in text
    assert Path("study/comparison.png").stat().st_size > 1000
    assert not list(Path("study").glob(".run-*"))  # no weights are kept

    # What the arms start from is sampled once for a seed
    (of_bapo,) = Path("study/runs").glob("BAPO*.json")
    of_bapo.unlink()
    start = Path("study/starts/seed-0.jsonl")
    sampled = [json.loads(line) for line in start.read_text().splitlines()]
    assert len(sampled) == 6 * 3
    other = {"completion": "1", "rewards": {"has_digit": 0.0}, "correct": False}
    start.write_text("".join(json.dumps({**each, **other}) + "\n" for each in sampled))
    compare("--only", "BAPO")
    (again,) = (row for row in read_rows(Path("study")).values() if row.arm == "BAPO")
    assert again.curve[0] == [0, 1.0] != rows["BAPO"].curve[0]  # what was sampled is taken, and scored again
    assert again.curve[1:] == rows["BAPO"].curve[1:]  # and the training is the same


STOPPING_REWARD = """
import os, signal
from pathlib import Path
def has_digit(completions, trainer_state, **kwargs):
    stopped = Path("stopped")
    if stopped.exists() and trainer_state.max_steps and trainer_state.global_step == 2:
        name, *pids = stopped.read_text().split()
        stopped.unlink()
        for pid in (*map(int, pids), os.getpid()):
            os.kill(pid, getattr(signal, name))
    return [float(any(map(str.isdigit, text))) for text in completions]
"""


@pytest.mark.processes
@pytest.mark.parametrize(("name", "stops_study"), [("SIGTERM", False), ("SIGTERM", True), ("SIGKILL", False)])
def test_a_run_that_a_signal_stopped_is_resumed(folder, monkeypatch, name, stops_study):
    monkeypatch.setattr(execution, "subprocess", SimpleNamespace(Popen=ForkedRun, DEVNULL=None))
    Path("my_rewards.py").write_text(STOPPING_REWARD)
    base = {**BASE, "gradient_accumulation_steps": 2}  # a generation for each update
    if name == "SIGKILL":  # saves nothing at the end
        base |= {"save_strategy": "steps", "save_steps": 1}
    write_study(arms={"BAPO": STUDY["arms"]["BAPO"]}, seeds=[0], base=base)
    Path("stopped").write_text(f"{name} {os.getpid()}" if stops_study else name)
    if stops_study:
        with pytest.raises(SystemExit) as ended:
            compare()
        assert ended.value.code == 128 + signal.SIGTERM
        assert not list(Path("study/runs").glob("*"))
        (work,) = Path("study").glob(".run-*")
        assert [path.name for path in work.glob("checkpoint-*")] == ["checkpoint-3"]
    assert compare() is None
    assert not Path("stopped").exists()
    (log,) = Path("study/logs").glob("*.log")
    if name == "SIGTERM":
        assert log.read_text().count("Stopped by SIGTERM after update 3, saved in") == 1
    update = 3 if name == "SIGTERM" else 1  # killed in the evaluation after the second update, before its save
    assert re.search(rf"\nResumes from study/\.run-.*/checkpoint-{update}\.\n", log.read_text())
    assert not list(Path("study").glob(".run-*"))
    (row,) = read_rows(Path("study")).values()
    assert row.error is None
    assert [step for step, _ in row.curve] == [0, 2, 4]

    (run,) = read_study("study.yaml").runs()
    train_bapo.main([*as_arguments(run.flags), "--output_dir", "straight"])
    (state,) = Path("study/logs").glob("*.trainer_state.json")
    resumed, straight = (
        [{name: log.get(name) for name in ("step", "grad_norm", "reward", "eval_avg@3")} for log in history]
        for history in (json.loads(path.read_text())["log_history"] for path in (state, Path("straight", STATE_FILE)))
    )
    assert resumed == straight


def test_no_file_of_a_study_has_the_value_of_a_secret(folder, monkeypatch, capsys):
    Path("own.yaml").write_text("env: {WANDB_API_KEY: the-key}\n")
    write_study(seeds=[0], base={**BASE, "config": "own.yaml", "hub_token": "the-token"})
    fails = "import sys; sys.exit('401: wrong key the-key, wrong token the-token')"
    monkeypatch.setattr(execution, "command_of", lambda *args: [sys.executable, "-c", fails])
    assert compare() == 1
    written = [path.read_text() for path in (*Path("study", "runs").iterdir(), Path("study/comparison.md"))]
    assert len(written) == 3
    for text in (*written, capsys.readouterr().out):
        assert "401: wrong key <" in text
        assert not re.search("the-(key|token)", text)


ON_GPUS = {**BASE, "use_cpu": "false"}


def launch_file(**settings) -> str:
    content = {"distributed_type": "MULTI_GPU", "num_processes": 2, "num_machines": 1, **settings}
    Path("launch.yaml").write_text(yaml.safe_dump(content))
    return "launch.yaml"


@pytest.mark.parametrize(
    ("jobs", "processes", "visible", "seen"),
    [
        (1, None, "4,5", ["4,5"]),
        (2, None, "4,5", ["4", "5"]),
        (4, None, "4, 5", ["4", "5", "4", "5"]),
        (2, None, None, ["0", "1"]),
        (2, None, "", ["", ""]),
        # Launched runs have as many as they have processes, of their own
        (1, 2, "4,5,6,7", ["4,5,6,7"]),
        (2, 2, "4,5,6,7,8", ["4,5", "6,7"]),
        (4, 2, "GPU-a,GPU-b,2,3,4,5,6,7", ["GPU-a,GPU-b", "2,3", "4,5", "6,7"]),
        (2, 3, None, ["0,1,2", "3,4,5"]),
    ],
)
def test_runs_at_a_time_have_gpus_of_their_own(folder, monkeypatch, jobs, processes, visible, seen):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    write_study(base=ON_GPUS, accelerate=processes and launch_file(num_processes=processes))
    assert [env["CUDA_VISIBLE_DEVICES"] for env in environments(read_study("study.yaml"), jobs)] == seen
    write_study(accelerate="cpu_ddp")  # uses none
    assert {env.get("CUDA_VISIBLE_DEVICES") for env in environments(read_study("study.yaml"), jobs)} == {visible}


def test_a_finished_study_only_prints_its_tables(folder, capsys):
    write_study()
    invent_rows({"GRPO": [0.5, 0.6], "BAPO": [0.7, 0.9]})
    assert compare() is None
    text = capsys.readouterr().out
    assert "to do" not in text
    assert "| +0.250 ± 0.635 |" in text  # 0.2 and 0.3: t(1) 12.706 * 0.0707 / sqrt(2)
    compare("--against", "BAPO")
    assert "| -0.250 ± 0.635 |" in capsys.readouterr().out


def test_a_dry_run_lists_the_runs_and_the_time_left(folder, capsys):
    write_study(seeds=[0])
    invent_rows({"GRPO": [0.5], "BAPO": [0.7]})
    write_study()
    compare("--dry_run", "--jobs", "2")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "done   GRPO, seed 0", "done   BAPO, seed 0", "to do  GRPO, seed 1", "to do  BAPO, seed 1",
        "4 runs, 2 to do, 2 at the same time: about 0:00:30 at the current pace",
    ]  # fmt: skip
    compare("--dry_run", "--only", "BAPO")
    assert capsys.readouterr().out.splitlines()[:2] == ["done   BAPO, seed 0", "to do  BAPO, seed 1"]
    assert not Path("study/logs").exists()


def test_a_run_without_results_is_a_row_with_its_error(folder, capsys, monkeypatch):
    write_study(seeds=[0])
    monkeypatch.setattr(execution, "command_of", lambda *args: [sys.executable, "-c", "pass"])
    assert compare() == 1
    rows = read_rows(Path("study")).values()
    assert [row.arm for row in rows if "no results can be read (FileNotFoundError" in row.error] == ["BAPO", "GRPO"]
    assert "failed: no results can be read" in capsys.readouterr().out
    write_study(seeds=[0], base={**BASE, "learning_rate": 0.5})  # other settings, mended or not, are other runs
    compare("--dry_run")
    assert "2 runs, 2 to do" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "sys.exit(137)"])  # of a run, and of its launcher
def test_a_run_that_is_killed_repeatedly_keeps_its_checkpoints_for_the_next_call(folder, monkeypatch, capsys, ending):
    write_study(arms={"BAPO": STUDY["arms"]["BAPO"]}, seeds=[0])
    (run,) = read_study("study.yaml").runs()
    saves = (
        "import json, os, sys; calls = open('calls', 'a'); calls.write(f'{len(sys.argv)} '); calls.close(); "
        f"saved = {f'study/.run-{run.key}'!r} + '/checkpoint-2'; os.makedirs(saved, exist_ok=True); "
        "json.dump({'global_step': 2, 'epoch': 1.0}, open(saved + '/trainer_state.json', 'w')); "
    )
    monkeypatch.setattr(execution, "command_of", lambda *args: [sys.executable, "-c", saves + ending])
    for calls in ("1 3 ", "1 3 3 "):  # started, and resumed once in each call: no new checkpoint was saved
        assert compare() == 1
        assert Path("calls").read_text() == calls
        assert not read_rows(Path("study"))
        assert Path(f"study/.run-{run.key}/checkpoint-2").is_dir()
    assert "failed" not in capsys.readouterr().out
    monkeypatch.setattr(execution, "command_of", lambda *args: [sys.executable, "-c", saves])
    monkeypatch.setattr(execution, "row_of", lambda run, *args: Row(run.arm, run.sweep, run.seed, final=0.5))
    for name in ("trainer_state.json", "run_settings.json"):
        Path(f"study/.run-{run.key}/{name}").touch()
    assert compare() is None
    assert Path("calls").read_text() == "1 3 3 3 "
    assert not list(Path("study").glob(".run-*"))


def test_the_error_of_a_run_is_the_end_of_its_error_output(folder, monkeypatch):
    write_study(arms={"BAPO": STUDY["arms"]["BAPO"]}, seeds=[0])
    program = (
        "import sys; print({'eval_error': 0.5, 'sampling_error': 1.0}); sys.stdout.flush(); "
        "print('no memory left for', 'the batch', sep='\\n', end='\\n\\n', file=sys.stderr); "
        "print({'late_error': 0.5}); sys.exit(3)"
    )
    monkeypatch.setattr(execution, "command_of", lambda *args: [sys.executable, "-c", program])
    assert compare() == 1
    (row,) = read_rows(Path("study")).values()
    assert row.error.startswith("exit code 3: no memory left for | the batch (study/logs/")


def test_the_printed_tables_claim_real_differences_and_few_others(folder, capsys, monkeypatch):
    """Five seeds and 256 prompts: a paired t-test shows a difference of 0.03 most of the time."""
    monkeypatch.setattr("bapo_trl.compare.figure.save_figure", lambda *args: None)
    trials, rng = 300, np.random.default_rng(1)
    write_study(over={"max_grad_norm": [1 + trial / 1e6 for trial in range(2 * trials)]}, seeds=list(range(5)))
    drawn = zip(accuracies(rng, trials, 0.0), accuracies(rng, trials, 0.03), strict=True)
    finals, errors = (np.concatenate(both) for both in drawn)
    for place, run in enumerate(read_study("study.yaml").runs()):  # by seed, then by setting, then by arm
        at = place // 2 % (2 * trials), place % 2, run.seed
        row = Row(run.arm, run.sweep, run.seed, final=float(finals[at]), errors={"final": float(errors[at])})
        write_row(row, Path("study", "runs", f"{run.key}.json"))
    assert compare() is None
    claims = []
    for text in capsys.readouterr().out.split("\n## ")[1:]:
        cells = [cell.strip() for cell in re.search(r"^\| BAPO .* \| [+-].*$", text, re.MULTILINE)[0].split("|")]
        (mean, half), p = map(float, cells[5].split(" ± ")), float(cells[6])
        claims.append("BAPO reached a higher" in text or "GRPO reached a higher" in text)
        if p != 0.05 and abs(mean) != half:  # not printed with so few digits
            assert claims[-1] == (abs(mean) > half) == (p < 0.05)
    assert len(claims) == 2 * trials
    assert 0.03 < np.mean(claims[:trials]) < 0.07
    assert np.mean(claims[trials:]) > 0.6
