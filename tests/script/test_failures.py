"""How commands end that fail: one line for a user's error, a short traceback for anything else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bapo_trl.errors import InputError
from bapo_trl.script import failures
from bapo_trl.script.failures import run_command
from tests.helpers.commands import accelerate_launcher
from tests.helpers.commands import run_command as run_process
from tests.helpers.script_runs import fill_folder, flags, train_bapo


def failed(function, *arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(function, arguments, "bapo-trl train")
    assert ended.value.code == 1
    return capsys.readouterr().err


def refuse(arguments):
    try:
        raise KeyError("within")
    except KeyError as error:
        refusal = InputError("`seed` is 1.5:\nset it to a whole number.")
        refusal.add_note("Or leave it out.")
        raise refusal from error


def divide(arguments):
    json.loads("[", object_hook=lambda parsed: 1 / 0)


def test_an_error_of_a_user_is_one_line_with_its_notes(capsys):
    line = "bapo-trl train: error: `seed` is 1.5: set it to a whole number. Or leave it out.\n"
    assert failed(refuse, capsys=capsys) == line
    assert failed(refuse, "--traceback", capsys=capsys).count("Traceback (most recent call last)") == 2


def test_a_bug_keeps_the_frames_of_the_user_and_ours(capsys):
    text = failed(divide, capsys=capsys)
    assert "in divide\n" in text
    assert "... 4 frames of python" in text or "... 3 frames of python" in text
    assert "decoder.py" not in text
    assert text.splitlines()[-2].startswith("json.decoder.JSONDecodeError: ")
    assert text.splitlines()[-1] == "--traceback shows all frames."
    assert "decoder.py" in failed(divide, "--traceback", capsys=capsys)


def test_what_was_raised_first_is_shown_first(capsys):
    def explain(arguments):
        try:
            divide(arguments)
        except ValueError as error:
            raise RuntimeError("that was no JSON") from error

    lines = failed(explain, capsys=capsys).splitlines()
    first, last = (
        next(i for i, line in enumerate(lines) if name in line) for name in ("JSONDecodeError: ", "no JSON")
    )
    assert first < lines.index("Which was the cause of this:") < last


def test_errors_of_a_group_are_shown_and_an_error_that_caused_itself_ends(capsys):
    def several(arguments):
        raise ExceptionGroup("in a reward", [KeyError("solution"), ValueError("no number")])

    text = failed(several, capsys=capsys)
    assert "KeyError: 'solution'" in text
    assert "ValueError: no number" in text

    def itself(arguments):
        try:
            raise ValueError("a circle")
        except ValueError as error:
            raise error from error

    assert failed(itself, capsys=capsys).count("ValueError: a circle") == 1


def test_the_flag_is_taken_out_and_results_are_handed_on():
    assert run_command(list, ["--a", "--traceback", "1"], "x") == ["--a", "1"]


@pytest.mark.processes
def test_several_processes_say_it_once(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys\nfrom bapo_trl.errors import InputError\nfrom bapo_trl.script.failures import run_command\n"
        "def main(arguments):\n    raise InputError('the same on all ranks')\n"
        "run_command(main, sys.argv[1:], 'x.py')\n"
    )
    result = run_process([sys.executable, *accelerate_launcher("cpu_ddp"), str(script)])
    assert result.returncode != 0
    assert result.stderr.count("x.py: error: the same") == 1


@pytest.mark.processes
def test_of_the_ranks_of_a_launcher_one_says_what_a_flag_lacks():
    launch = ["-m", "bapo_trl", "launch", "--accelerate", "cpu_ddp", "--num_processes", "2"]
    result = run_process([sys.executable, *launch, "train", "--seed", "abc"])
    assert result.returncode == 2
    assert result.stderr.count("bapo-trl train: error: argument --seed: invalid int value: 'abc'\n") == 1
    assert "usage: " not in result.stderr
    assert "Root Cause" not in result.stderr  # torch's banner


@pytest.mark.processes
@pytest.mark.parametrize("terminal", ["gone", "closed", "ascii"])
def test_a_terminal_that_is_gone_or_knows_no_umlauts_loses_no_result(tmp_path, terminal):
    recipe = yaml.safe_load((Path(failures.PACKAGE) / "recipes" / "quickstart.yaml").read_text())
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump({**recipe, "max_steps": 2, "logging_steps": 1, "output_dir": "größe"})
    )
    command = f"exec {sys.executable} -m bapo_trl train --config recipe.yaml --report_to none"
    if terminal == "closed":
        command += " >&-"
    stderr = "write" if terminal == "gone" else "2"
    code = f"import os, subprocess, sys\nread, write = os.pipe()\nstdout, stderr = 1, {stderr}\n" + (
        "" if terminal != "gone" else "os.close(read)\nstdout = write\n"
    )
    code += "sys.exit(subprocess.run(['bash', '-c', sys.argv[1]], stdout=stdout, stderr=stderr).returncode)"
    ended = subprocess.run(
        [sys.executable, "-c", code, command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        stdout=subprocess.PIPE,
        timeout=300,
    )
    assert ended.returncode == 0
    assert (b"Model: gr\\xf6\\xdfe" in ended.stdout) == (terminal == "ascii")
    assert (tmp_path / "größe" / "model.safetensors").exists()
    assert (tmp_path / "größe" / "report.png").exists()


@pytest.mark.trainings
def test_a_reward_that_raises_keeps_the_frames_of_the_user_and_ours(tmp_path, monkeypatch, capsys):
    fill_folder(tmp_path, monkeypatch)
    Path("my_rewards.py").write_text("def has_digit(completions, **kwargs):\n    return [1 / 0]\n")
    text = failed(train_bapo.main, *flags(dataset_name="train.jsonl"), capsys=capsys)
    assert 'my_rewards.py", line 2, in has_digit\n' in text
    assert "\nZeroDivisionError: division by zero\nRaised by the reward function `has_digit` on " in text
    assert "bapo_trainer.py" in text
    assert " of trl\n" in text
    assert "site-packages" not in text
