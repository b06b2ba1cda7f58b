"""How commands end that fail: one line for a user's error, the traceback of anything else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_trl.errors import InputError
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


def test_any_other_error_keeps_its_traceback(capsys):
    text = failed(divide, capsys=capsys)
    assert "in divide\n" in text
    assert "decoder.py" in text
    assert text.splitlines()[-1].startswith("json.decoder.JSONDecodeError: ")


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
@pytest.mark.parametrize("redirected", ["| true", ">&- 2>&-"])
def test_a_terminal_that_is_gone_ends_no_training(tmp_path, redirected):
    flags = "--config quickstart --max_steps 2 --logging_steps 1 --output_dir out --report_to none --do_eval false"
    command = f"{sys.executable} -m bapo_trl train {flags} {redirected}; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=300).returncode == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / "report.png").exists()


@pytest.mark.trainings
def test_a_reward_that_raises_is_named_in_its_traceback(tmp_path, monkeypatch, capsys):
    fill_folder(tmp_path, monkeypatch)
    Path("my_rewards.py").write_text("def has_digit(completions, **kwargs):\n    return [1 / 0]\n")
    text = failed(train_bapo.main, *flags(dataset_name="train.jsonl"), capsys=capsys)
    assert 'my_rewards.py", line 2, in has_digit\n' in text
    assert text.rstrip().endswith("ZeroDivisionError: division by zero")
