"""The package as an index would have it: built, installed where nothing of the checkout is, and run."""

import ast
import configparser
import re
import shutil
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from bapo_trl import __version__
from tests.helpers.commands import ROOT, run_command, succeeded


NOT_OF_THE_PROJECT = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "outputs", "site")
TWO_UPDATES = {
    "max_steps": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 2,
    "num_generations": 4, "logging_steps": 1,
}  # fmt: skip


class Built(NamedTuple):
    sdist: Path
    wheel: Path


def build(kind: str, source: Path, folder: Path) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    return folder / succeeded(run_command([sys.executable, "-c", code], cwd=source)).splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    """The sdist of a copy of the checkout, and the wheel of the sdist, which therefore has all that it takes."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=NOT_OF_THE_PROJECT)
    sdist = build("sdist", folder / "checkout", folder)
    shutil.unpack_archive(sdist, folder / "sdist")  # `extractall(filter=...)` begins with Python 3.11.4
    return Built(sdist, build("wheel", folder / "sdist" / f"bapo_trl-{__version__}", folder))


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory) -> Path:
    """The commands of an environment with the wheel and what it depends on, but without the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    succeeded(run_command([*pip, "install", "--no-index", "--no-deps", str(built.wheel)], cwd=folder, PYTHONPATH=""))
    # Only now: pip would take an editable install among the dependencies for the package
    (site_packages,) = folder.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies))
    return folder / "bin"


def test_sdist_and_wheel_hold_every_file_of_the_package(built):
    files = [path for path in (ROOT / "bapo_trl").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    package = {path.relative_to(ROOT).as_posix() for path in files}
    assert {
        "bapo_trl/recipes/quickstart.yaml",
        "bapo_trl/accelerate_configs/zero3.yaml",
        "bapo_trl/deepspeed_configs/zero3.json",
    } <= set(package)
    with zipfile.ZipFile(built.wheel) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == package
    with tarfile.open(built.sdist) as sdist:
        names = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    assert {name for name in names if name.startswith("bapo_trl/")} == package
    besides = {name for name in names if not name.startswith(("bapo_trl/", "bapo_trl.egg-info/"))}
    assert besides == {
        "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml",
        "setup.cfg",
    }  # fmt: skip


@pytest.mark.processes
def test_the_wheel_trains_two_updates_and_reports_them(environment, tmp_path):
    def run(command: str, *arguments: str) -> str:
        return succeeded(
            run_command([str(environment / command), *arguments], cwd=tmp_path, PYTHONPATH="", HF_HUB_OFFLINE="1")
        )

    package = Path(run("python", "-c", "import bapo_trl.bapo_trainer; print(bapo_trl.__file__)").strip())
    assert package.is_relative_to(environment.parent)
    assert run("bapo-trl", "--version") == f"bapo-trl {__version__}\n"
    settings = {"config": "quickstart", "output_dir": "run", **TWO_UPDATES}
    out = run("bapo-trl", "train", *(f"--{name}={value}" for name, value in settings.items()))
    assert "BAPO on the embedded task" in out  # the recipe is the package's
    assert "Report: run/report.png\n" in out
    assert (tmp_path / "run" / "report.png").stat().st_size > 0
    assert "Report: report/report.png\n" in run("bapo-trl", "report", "run")
    assert (tmp_path / "report" / "report.png").stat().st_size > 0
    assert (tmp_path / "run" / "checkpoint-2" / "model.safetensors").exists()


def imported(path: Path) -> set[str]:
    """Names of the packages that a file of Python imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"bapo_trl"}


def required(lines: Iterable[str]) -> set[str]:
    """Names of the distributions that are required whatever the extras."""
    parsed = map(Requirement, lines)
    return {each.name.lower() for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})}


def test_what_the_package_imports_is_what_it_requires():
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    lines = [line for line in options["options"]["install_requires"].split("\n") if line and not line.startswith("#")]
    named = required(lines)
    # What a required one cannot do without is there too, such as transformers' tokenizers
    there = named.union(*(required(metadata.requires(name) or []) for name in named))
    extras = {line for text in options["options.extras_require"].values() for line in text.split("\n") if line}
    extras |= {"vllm"} if "trl[vllm]" in extras else set()
    extras.add("bapo_trl_gloo")  # of the same repository
    optional = {re.split(r"[\[>=<]", line)[0].replace("-", "_") for line in extras}
    optional |= {name.replace("-", "_") for name in required(metadata.requires("math-verify"))}  # brings it
    distributions = metadata.packages_distributions()
    files = list((ROOT / "bapo_trl").rglob("*.py"))
    assert {"torch", "requests", "yaml"} <= set().union(*map(imported, files))
    for path in files:
        missing = {name for name in imported(path) if distributions.get(name, [name])[0].lower() not in there}
        assert missing <= optional, path
