"""The tested version of TRL's `AsyncGRPOTrainer`, checked at import."""

import trl


TESTED_VERSION = "1.16.0"
"""TRL version that the tests of the asynchronous trainer pass with. Later releases of the same minor count as well."""


def _needs(reason: str) -> ImportError:
    return ImportError(
        f'{reason}. Install the version that `AsyncBAPOTrainer` is tested with: pip install "trl~={TESTED_VERSION}".'
    )


try:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
except ImportError as error:
    raise _needs(f"trl {trl.__version__} has no asynchronous trainer ({error})") from error


def check_async_trl() -> None:
    """Raise an `ImportError` for a TRL version other than the tested one."""
    if trl.__version__.split(".")[:2] != TESTED_VERSION.split(".")[:2]:
        raise _needs(f"trl is {trl.__version__}, and its asynchronous trainer changes with each release")


__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "check_async_trl"]
