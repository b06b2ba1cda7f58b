"""How commands end that fail: one line for a user's error, the traceback of anything else."""

import json
import subprocess
import sys

import pytest

from bapo_trl.errors import InputError
from bapo_trl.script.failures import run_command
from tests.helpers.commands import run_command as run_process


def failed(function, *arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(function, arguments, "bapo-trl train")
    assert ended.value.code == 1
    return capsys.readouterr().err


def reject(arguments):
    try:
        raise KeyError("within")
    except KeyError as error:
        rejection = InputError("`seed` is 1.5:\nset it to a whole number.")
        rejection.add_note("Or leave it out.")
        raise rejection from error


def divide(arguments):
    json.loads("[", object_hook=lambda parsed: 1 / 0)


def test_an_error_of_a_user_is_one_line_with_its_notes(capsys):
    line = "bapo-trl train: error: `seed` is 1.5: set it to a whole number. Or leave it out.\n"
    assert failed(reject, capsys=capsys) == line
    assert failed(reject, "--traceback", capsys=capsys).count("Traceback (most recent call last)") == 2


def test_any_other_error_keeps_its_traceback(capsys):
    text = failed(divide, capsys=capsys)
    assert "in divide\n" in text
    assert "decoder.py" in text
    assert text.splitlines()[-1].startswith("json.decoder.JSONDecodeError: ")


def test_the_flag_is_taken_out_and_results_are_handed_on():
    assert run_command(list, ["--a", "--traceback", "1"], "x") == ["--a", "1"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "code", "line"),
    [
        (["--seed", "abc"], 2, "bapo-trl train: error: argument --seed: invalid int value: 'abc'\n"),
        (["--config", "none.yaml"], 1, "bapo-trl train: error: `config` is 'none.yaml', which does not exist"),
    ],
)
def test_of_the_ranks_of_a_launcher_one_says_what_is_wrong(flags, code, line):
    launch = ["-m", "bapo_trl", "launch", "--accelerate", "cpu_ddp", "--num_processes", "2"]
    result = run_process([sys.executable, *launch, "train", *flags])
    assert result.returncode == code
    assert result.stderr.count(line) == 1
    assert "usage: " not in result.stderr
    assert "Root Cause" not in result.stderr  # torch's banner


@pytest.mark.processes
@pytest.mark.parametrize("redirected", ["| true", ">&- 2>&-"])
def test_a_terminal_that_is_gone_ends_no_training(tmp_path, redirected):
    flags = "--config quickstart --max_steps 2 --logging_steps 1 --output_dir out --report_to none --do_eval false"
    command = f"{sys.executable} -m bapo_trl train {flags} {redirected}; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=300).returncode == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / "report.png").exists()
