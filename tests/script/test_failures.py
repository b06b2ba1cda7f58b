"""How commands end that fail: one line for a user's error, a short traceback for anything else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bapo_trl.errors import InputError, MissingPackageError
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
        raise InputError("`seed` is 1.5:\nset it to a whole number") from error


def divide(arguments):
    json.loads("[", object_hook=lambda parsed: 1 / 0)


def test_an_error_of_a_user_is_one_line(capsys):
    assert failed(refuse, capsys=capsys) == "bapo-trl train: error: `seed` is 1.5: set it to a whole number\n"
    assert failed(refuse, "--traceback", capsys=capsys).count("Traceback (most recent call last)") == 2


def test_notes_of_such_an_error_belong_to_the_line(capsys):
    def refuse_with_a_note(arguments):
        error = MissingPackageError("no peft.")
        error.add_note("Install it.")
        raise error

    assert failed(refuse_with_a_note, capsys=capsys) == "bapo-trl train: error: no peft. Install it.\n"
    assert issubclass(MissingPackageError, ImportError)


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
@pytest.mark.parametrize("kind", ["InputError", "ZeroDivisionError"])
def test_several_processes_say_it_once(tmp_path, kind):
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys\nfrom bapo_trl.errors import InputError\nfrom bapo_trl.script.failures import run_command\n"
        f"def main(arguments):\n    raise {kind}('the same on all ranks')\nrun_command(main, sys.argv[1:], 'x.py')\n"
    )
    result = run_process([sys.executable, *accelerate_launcher("cpu_ddp"), str(script)])
    assert result.returncode != 0
    said = "x.py: error: the same" if kind == "InputError" else f"{kind}: the same"
    assert result.stderr.count(said) == 1


@pytest.mark.processes
def test_of_the_ranks_of_a_launcher_one_says_what_a_flag_lacks():
    launch = ["-m", "bapo_trl", "launch", "--accelerate", "cpu_ddp", "--num_processes", "2"]
    result = run_process([sys.executable, *launch, "train", "--seed", "abc"])
    assert result.returncode == 2
    assert result.stderr.count("bapo-trl train: error: argument --seed: invalid int value: 'abc'\n") == 1
    assert "usage: " not in result.stderr
    assert "Root Cause" not in result.stderr  # torch's banner


REFUSED = {
    "wrong type": (["--config", "seed.yaml"], "seed.yaml: `seed` is 1.5: set it to a whole number"),
    "text": (["--config", "folder.yaml"], "folder.yaml: `output_dir` is 5: set it to text, in quotes"),
    "list for a number": (["--config", "rate.yaml"], "rate.yaml: `learning_rate` is [1]: set it to a number"),
    "no list": (["--config", "datasets.yaml"], "datasets.yaml: `datasets` is 5: set it to a list"),
    "list or text": (
        ["--config", "report.yaml"],
        "report.yaml: `report_to` is 5: set it to a list or text, in quotes",
    ),
    "in a list": (
        ["--config", "trackers.yaml"],
        "trackers.yaml: `report_to` is ['none', 5]: set it to a list of text, in quotes",
    ),
    "of TRL": (["--load_in_4bit", "true", "--load_in_8bit", "true"], "use 8 bit and 4 bit precision at the same time"),
    "of transformers": (["--logging_steps", "0"], "IntervalStrategy.STEPS requires non-zero --logging_steps"),
    "optimizer": (["--optim", "sgdd"], "argument --optim: invalid choice: 'sgdd' (choose from "),
    "value of a flag": (["--seed", "abc"], "argument --seed: invalid int value: 'abc'"),
    "no name": (["--config", "list.yaml"], "is not valid YAML ("),
    "twice": (["--config", "twice.yaml"], "(the key `max_steps` is there twice, again in line 3)"),
    "learning rate": (["--learning_rate", "-1"], "`learning_rate` is -1.0: set it to at least 0, e.g. 1e-6."),
    "empty name": (["--eval_dataset", ""], "`eval_dataset` is empty: give a name, or leave it out."),
    "broken file": (
        ["--dataset_name", "files"],
        "`dataset_name` is the file 'files/b.jsonl', which cannot be read (JSON",
    ),
    "different files": (
        ["--dataset_name", "mixed"],
        "`dataset_name` is the folder 'mixed', whose files cannot be read to",
    ),
    "no prompts": (["--dataset_name", "lists.jsonl"], "is a list, but not of messages with a `role` and a `content`"),
    "adapter": (["--model_name_or_path", "adapter"], "an adapter whose adapter/adapter_config.json is damaged"),
    "push": (["--push_to_hub", "true"], "`push_to_hub` is set, but the Hub cannot be pushed to ("),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    for name, text in {
        "seed.yaml": "seed: 1.5\n",
        "folder.yaml": "output_dir: 5\n",
        "rate.yaml": "learning_rate: [1]\n",
        "datasets.yaml": "datasets: 5\n",
        "report.yaml": "report_to: 5\n",
        "trackers.yaml": "report_to: [none, 5]\n",
        "list.yaml": "? [a, b]\n: 1\n",
        "twice.yaml": "max_steps: 1\nseed: 2\nmax_steps: 3\n",
        "files/a.jsonl": '{"prompt": "1+1="}\n',
        "files/b.jsonl": '{"prompt": \n',
        "mixed/a.jsonl": '{"prompt": "1+1="}\n',
        "mixed/b.jsonl": '{"prompt": ["1"], "x": 1}\n',
        "lists.jsonl": '{"prompt": ["1+1=", "2"]}\n',
        "adapter/adapter_config.json": '{"base_',
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.processes
def test_what_a_user_gets_wrong_ends_in_one_line(folder):
    """In one process, which imports everything once."""
    code = (
        "import json, sys\nfrom bapo_trl import cli\n"
        "for name, arguments in json.load(open(sys.argv[1])).items():\n"
        "    print(f'== {name}', file=sys.stderr, flush=True)\n"
        "    try:\n        cli.main(['train', *arguments])\n"
        "    except SystemExit as end:\n        print(f'code {end.code}', file=sys.stderr, flush=True)\n"
    )
    quick = [
        "--output_dir=out", "--use_cpu=true", "--bf16=false", "--report_to=none", "--max_steps=1",
        "--model_name_or_path=embedded", "--reward_funcs=think_format_reward", "--dataset_name=embedded",
    ]  # fmt: skip
    calls = {
        name: flags if "--config" in flags else [*(q for q in quick if q.partition("=")[0] not in flags), *flags]
        for name, (flags, _) in REFUSED.items()
    }
    (folder / "calls.json").write_text(json.dumps(calls))
    result = run_process([sys.executable, "-c", code, "calls.json"], cwd=folder)
    said = dict(part.split("\n", 1) for part in result.stderr.split("== ")[1:])
    assert set(said) == set(REFUSED)
    for name, (_, message) in REFUSED.items():
        *_, line, code = said[name].strip().splitlines()
        assert line.startswith("bapo-trl train: error: "), said[name]
        assert message in line
        assert code in ("code 1", "code 2")
        assert "Traceback" not in said[name]
        assert "usage: " not in said[name]


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
