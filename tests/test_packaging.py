"""The package as an index would have it: built, installed where nothing of the checkout is, and run."""

import shutil
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

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
