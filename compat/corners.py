"""Read `compat/corners.cfg`. Imports only Python's standard library, because it runs before anything is installed."""

import configparser
import re
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "trl", "transformers", "datasets", "peft", "accelerate")
"""Packages of which each release may change what this one relies on."""

_NOT_CORNERS = ("hardware", "not run")


def _read() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(delimiters=(":",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((ROOT / "compat" / "corners.cfg").read_text())
    return parser


def names() -> list[str]:
    """Return the names of the corners."""
    return [name for name in _read().sections() if name not in _NOT_CORNERS]


def why(name: str) -> str:
    """Return the purpose of a corner."""
    return _read()[name]["why"]


def python(name: str) -> str:
    """Return the minor version of Python that a corner runs on, such as `"3.11"`."""
    return _read()[name]["python"]


def hardware() -> dict[str, list[str]]:
    """Return what ran on CPUs and on one H100 and one H200, by feature."""
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in _read()["hardware"].items()}


def not_run() -> dict[str, str]:
    """Return versions and hardware without a test run, with the reasons."""
    return dict(_read()["not run"])


def pins(name: str) -> dict[str, str]:
    """Return the version of each package in a corner, by the name that pip compares."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line.split("==") for line in lines if "==" in line]
    own = [item for item in _read()[name].items() if item[0] not in ("why", "python")]
    return {normal_name(package): version for package, version in (*pinned, *own)}


def normal_name(package: str) -> str:
    """Return the name of a package as pip compares it: `"PyYAML"` is `"pyyaml"`."""
    return re.sub(r"[-_.]+", "-", package).lower()


def constraints(name: str) -> list[str]:
    """Return the lines of a corner's constraints file."""
    return [f"{package}=={version}" for package, version in sorted(pins(name).items())]
