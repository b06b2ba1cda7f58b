"""How commands end that fail: one line for a user's error, the traceback of anything else."""

import json
import os
import signal
import subprocess
import sys

import pytest

from bapo_trl import cli
from bapo_trl.errors import InputError
from bapo_trl.script.failures import run_command
from tests.helpers.commands import run_command as run_process
from tests.helpers.commands import succeeded
from tests.helpers.script_runs import flags as short_flags


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


@pytest.mark.parametrize("flags", [[], ["--traceback"]], ids=str)
def test_ctrl_c_ends_a_command_in_one_line(folder, flags, capsys):
    reward = "import signal\ndef interrupt(completions, **kwargs):\n    signal.raise_signal(signal.SIGINT)\n"
    (folder / "interrupting.py").write_text(reward)
    own = short_flags(reward_funcs="interrupting.interrupt", eval_dataset="test.jsonl")
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
            cli.main(["evaluate", *own, *flags])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert getattr(ended.value, "code", None) == 130
    said = capsys.readouterr().err
    assert "in interrupt\n" in said if flags else said == "bapo-trl evaluate: interrupted\n"


@pytest.mark.processes
@pytest.mark.parametrize("redirected", ["| true", ">&- 2>&-"])
def test_a_terminal_that_is_gone_ends_no_training(tmp_path, redirected):
    flags = "--config quickstart --max_steps 2 --logging_steps 1 --output_dir out --report_to none --do_eval false"
    command = f"{sys.executable} -m bapo_trl train {flags} {redirected}; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=300).returncode == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / "report.png").exists()


def test_a_users_own_error_file_hides_no_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "of" / "errors" / "error.json"))
    (tmp_path / "of").mkdir()
    first, second = failed(reject, capsys=capsys), failed(reject, capsys=capsys)
    assert first == second != ""
    assert list(tmp_path.iterdir()) == [tmp_path / "of"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
@pytest.mark.parametrize("flags", [["recipes"], ["--help"]])
def test_output_that_cannot_be_written_is_an_error(flags):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "bapo_trl", *flags]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "No space left on device" in line


@pytest.mark.processes
def test_a_training_goes_on_where_the_terminal_knows_ascii_alone(tmp_path):
    flags = "--config quickstart --max_steps 2 --save_steps 1 --logging_steps 1 --per_device_train_batch_size 8"
    own = ["--output_dir", "\u00e9t\u00e9", "--max_eval_samples", "8", "--log_completions", "true"]
    command = [sys.executable, "-m", "bapo_trl", "train", *flags.split(), *own]
    printed = succeeded(run_process(command, cwd=tmp_path, PYTHONIOENCODING="ascii"))
    assert "Saved ?t?" in printed
    assert (tmp_path / "\u00e9t\u00e9" / "model.safetensors").exists()
