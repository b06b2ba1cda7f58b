"""`bapo-trl` and its sub-commands. What `train` and `evaluate` do is in the tests of the script."""

import json
import sys
from itertools import pairwise

import pytest

from bapo_trl import cli
from tests.helpers.commands import ROOT, ends, run_command, succeeded


SERVER = """
import json, os, sys
found = {"development": os.environ["VLLM_SERVER_DEV_MODE"], "prompts": os.environ["VLLM_MAX_COMPLETION_PROMPTS"]}
print(json.dumps({"flags": sys.argv[1:], "pid": os.getpid(), **found}))
sys.exit(3)
"""


@pytest.mark.parametrize("arguments", [["--traceback", "train"], ["train", "--traceback"]])
def test_the_traceback_of_an_error_is_shown_wherever_the_flag_is(arguments, capsys):
    ends(cli.main, [*arguments, "--config", "none"], code=1)
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert said.splitlines()[-1].startswith("bapo_trl.errors.InputError: ")


AT_THE_FIRST_LIBRARY = """
import os, runpy, sys

class Finder:
    def find_spec(self, name, *rest):
        if name in ("accelerate", "datasets", "huggingface_hub", "torch", "transformers", "trl"):
            print(os.environ.get("HF_HOME"), os.environ.get("HF_HUB_OFFLINE"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Finder())
program, *sys.argv[1:] = sys.argv[1:]
run = runpy.run_path if program.endswith(".py") else runpy.run_module
run(program, run_name="__main__")
"""


@pytest.mark.parametrize(
    "command",
    [
        ["bapo_trl", "train", "--config"],
        ["bapo_trl", "evaluate", "--max_steps", "3", "--config"],
        ["bapo_trl", "train", "--accelerate_config", "cpu_ddp", "--config"],
        [str(ROOT / "train_bapo.py"), "--traceback", "--config"],
    ],
    ids=" ".join,
)
def test_the_variables_of_a_recipe_are_set_before_a_library_reads_them(command, tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text("dataset_name: x.jsonl\nenv: {HF_HOME: /of/the/recipe, HF_HUB_OFFLINE: 0}\n")
    found = run_command(
        [sys.executable, "-c", AT_THE_FIRST_LIBRARY, *command, str(recipe)], HF_HOME="x", HF_HUB_OFFLINE="1"
    )
    assert succeeded(found) == "/of/the/recipe 0\n"


@pytest.fixture
def vllm(tmp_path):
    """A folder with a stand-in for vLLM, which says how it was started and ends with code 3."""
    main = tmp_path / "vllm" / "entrypoints" / "cli" / "main.py"
    main.parent.mkdir(parents=True)
    main.write_text(SERVER)
    set_version(tmp_path, "0.29.0")
    return tmp_path


def set_version(folder, version):
    (folder / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}")
    metadata = folder / "vllm-0.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def serve(folder, *flags):
    """Serve from the checkout, with the stand-in and the plugin beside it; return what vLLM takes, too."""
    path = f"{folder}:{ROOT / 'plugins' / 'vllm_gloo'}"
    result = run_command([sys.executable, "-m", "bapo_trl", "serve", *flags], PYTHONPATH=path)
    server = json.loads(result.stdout)
    return result, server, dict(pairwise(server["flags"]))  # of a flag, the last value


def test_the_server_is_vllm_on_the_loopback_address(vllm):
    result, server, values = serve(vllm, "--model", "org/model", "--device", "cpu")
    assert result.returncode == 3  # vLLM's own
    assert result.stderr == ""
    assert server["development"] == "1"  # the endpoints through which weights come in
    assert int(server["prompts"]) >= 4096  # of a request: partial rollouts send each sample of a rollout batch
    assert "--enable-scale-out" not in server["flags"]
    settings = {
        "serve": "org/model", "--host": "127.0.0.1", "--port": "8000", "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": "-1", "--weight-transfer-config": '{"backend": "gloo"}', "--dtype": "float32",
    }  # fmt: skip
    assert {name: values[name] for name in settings} == settings


def test_on_a_gpu_weights_come_over_nccl_and_vllms_flags_pass_through(vllm):
    further = ["--tensor-parallel-size", "2", "--max-logprobs", "20", "--enable-prefix-caching"]
    flags = ["--host=0.0.0.0", "--device", "cuda", "--model", "model", "--port", "8001"]
    set_version(vllm, "0.30.0")
    result, server, values = serve(vllm, *further[:3], *flags, *further[3:])
    assert server["flags"][-len(further) :] == further
    assert "--enable-scale-out" in server["flags"]  # of TRL's `build_command`, from vLLM 0.30 on
    settings = {"--weight-transfer-config": '{"backend": "nccl"}', "--dtype": "auto", "--host": "0.0.0.0"}
    assert {name: values[name] for name in settings} == settings
    assert values["--port"] == "8001"
    assert result.stderr.startswith("Anyone who can reach port 8001 of 0.0.0.0 can replace the weights")


@pytest.mark.parametrize(
    ("missing", "code", "flags", "message"),
    [
        ("vllm", 1, ["--model", "model"], "vLLM is not installed: pip install 'bapo-trl[vllm]'; on a CPU, `pip in"),
        ("bapo_trl_gloo", 1, ["--model", "model", "--device", "cpu"], "`device` is 'cpu', but bapo-trl-gloo, "),
        (None, 2, [], "the following arguments are required: --model"),
        (None, 2, ["--model", "model", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_what_cannot_be_served_ends_in_one_line(missing, code, flags, message, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else True)
    ends(cli.main, ["serve", *flags], code)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"bapo-trl serve: error: {message}")
