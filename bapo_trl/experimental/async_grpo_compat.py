"""The tested version of TRL's `AsyncGRPOTrainer`, and the names in its loss that are used here, checked at import."""

import trl


TESTED_VERSION = "1.16.0"
"""TRL version that the tests of the asynchronous trainer pass with. Later releases of the same minor count as well."""

# Names that `compute_loss` uses: of the model's output and the bounds; keys of the batch
_NAMES = ("log_probs", "epsilon_low", "epsilon_high")
_KEYS = ("token_index", "old_log_probs", "advantages", "global_n_tokens")


def _needs(reason: str) -> ImportError:
    return ImportError(
        f'{reason}. Install the version that `AsyncBAPOTrainer` is tested with: pip install "trl~={TESTED_VERSION}".'
    )


try:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
except ImportError as error:
    raise _needs(f"trl {trl.__version__} has no asynchronous trainer ({error})") from error


def check_async_trl() -> None:
    """Raise an `ImportError` for a TRL version other than the tested one, or one whose loss reads other names."""
    if trl.__version__.split(".")[:2] != TESTED_VERSION.split(".")[:2]:
        raise _needs(f"trl is {trl.__version__}, and its asynchronous trainer changes with each release")
    code = AsyncGRPOTrainer.compute_loss.__code__
    missing = [name for name in _NAMES if name not in code.co_names]
    missing += [key for key in _KEYS if key not in code.co_consts]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise _needs(f"`AsyncGRPOTrainer.compute_loss` of trl {trl.__version__} does not read {names}")


__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "check_async_trl"]
