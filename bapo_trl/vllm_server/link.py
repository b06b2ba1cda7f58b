"""The main process's tie to a vLLM server: notices that it failed or was started anew, waits for it, joins it again.

No collective: what is found out comes back as a [`Verdict`], which the trainer hands to the other ranks.
"""

import time
import warnings
from typing import Any, NamedTuple

import torch

from .client import ServerFailure, describe, retry_until


NUM_REPEATS = 3
"""How often a generation is repeated, at most, after failures and restarts of the server."""


class Verdict(NamedTuple):
    """What becomes of a generation."""

    has_joined: bool = False  # the server: it has not got the weights, and what it sampled may be of others
    end: str | None = None  # why the run must end


class ServerLink:
    """Ties the main process to a server."""

    def __init__(self, client: Any, device: torch.device, timeout_s: float):
        self._client, self._device, self._timeout_s = client, device, timeout_s
        self._instance: str | None = None  # vLLM's name for a server from its start to its end, if it has one
        self._num_repeats = 0
        self._deadline: float | None = None  # of `time.monotonic()`

    def meet(self) -> Verdict:
        """Say what became of the client's making, and remember the server."""
        failure = self._client.take_failure()
        if failure is None:
            try:
                self._instance = self._ask_instance()
            except Exception as error:
                failure = describe("the start", error)
        if failure is not None:
            return Verdict(end=self._tell(failure))
        if self._instance is None:
            warnings.warn(
                "The vLLM server has several API processes, which look like different servers: its restart between "
                "two requests would not be noticed. Start it with `--api-server-count 1` to have it joined again."
            )
        return Verdict()

    def begin(self) -> None:
        """Begin to count repetitions anew."""
        self._num_repeats, self._deadline = 0, None

    def hold_failures(self) -> None:
        """Let the client keep the next failure until [`ServerLink.settle`]."""
        self._client.hold_failures()

    def is_same(self) -> bool:
        """Return whether the server answers, and is the one that was joined last."""
        try:
            return self._ask_instance() == self._instance
        except Exception:
            return False

    def settle(self) -> Verdict:
        """
        Say whether the server did all it was asked for since failures are held, by the client it was joined with.

        If not, wait for it and join it again, unless that does not help: after [`NUM_REPEATS`], when the time is up,
        or if the server refuses what it is asked for.
        """
        failure = self._client.take_failure()
        if failure is None:
            try:
                instance = self._ask_instance()
                if instance == self._instance or instance is None:
                    return Verdict()
                failure = ServerFailure("between two requests", "it was started anew", is_passing=True)
            except Exception as error:
                failure = describe("between two requests", error)
        before, began = self._instance, time.monotonic()
        is_late = self._deadline is not None and began > self._deadline
        if not failure.is_passing or is_late or self._num_repeats == NUM_REPEATS:
            return Verdict(end=self._tell(failure, repeated=True))
        self._num_repeats += 1
        self._deadline = self._deadline or began + self._timeout_s
        if failure.error != "it was started anew":
            warnings.warn(f"{self._tell(failure)} Waiting for it, {self._timeout_s:g} seconds at most.")
        try:
            retry_until(self._deadline, self._join)
        except Exception as error:
            waited = f" Waited {time.monotonic() - began:.0f} s for it (`vllm_server_timeout` {self._timeout_s:g}): "
            return Verdict(end=f"{self._tell(failure)}{waited}{describe('', error).error}.")
        if self._instance != before:
            self._deadline = None
            warnings.warn("The vLLM server was started anew: it is joined again, and gets the current weights.")
        else:
            warnings.warn("The vLLM server is there again: it is joined again, and gets the current weights.")
        return Verdict(has_joined=True)

    def _join(self) -> None:
        self._client.check_health()
        instance = self._ask_instance()
        self._client.join_again(self._device, is_same=instance == self._instance)
        self._instance = instance

    def _ask_instance(self) -> str | None:
        info = self._client.get_server_info()
        # Each API process of a server has a name of its own
        return info["instance_id"] if info["parallel_config"].get("_api_process_count", 1) == 1 else None

    def _tell(self, failure: ServerFailure, repeated: bool = False) -> str:
        times = f", after {self._num_repeats} repetitions" if repeated and self._num_repeats else ""
        return f"The vLLM server at {self._client.base_url} failed in {failure.during}{times}: {failure.error}."
