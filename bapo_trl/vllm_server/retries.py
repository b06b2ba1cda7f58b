"""Brings runs through failures of their vLLM server, or to an end on all ranks: see [`ServerRetries`]."""

import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from ..checkpoints.rank_errors import on_main_process
from .client import ServerFailure, describe, retry_until


NUM_REPEATS = 3  # of a generation, after failures and restarts of the server
RESTARTED = "it was started anew"


class ServerRetries:
    """
    Goes on when the vLLM server fails and comes back. All ranks make the same calls.

    A failure in the main process is held by its client until all ranks are past TRL's collectives, see
    [`~vllm_server.client.ServerClient`]. Then the main process waits for the server and joins it, and all ranks send
    it the weights and repeat the generation. A server that was started anew is noticed by its name: it has its first
    weights, and no group to get others. What it sampled before it had the weights is sampled again.

    `forget_sent_weights` has the trainer send the weights before the next request. `end_run` gets the reason, saves a
    checkpoint of the state before the generation, and raises, on all ranks.
    """

    def __init__(self, trainer: Any, forget_sent_weights: Callable[[], None], end_run: Callable[[str], NoReturn]):
        accelerator = trainer.accelerator
        self._client: Any = trainer.vllm_generation.vllm_client if accelerator.is_main_process else None
        self._device, self._timeout_s = accelerator.device, trainer.args.vllm_server_timeout
        self._forget_sent_weights, self._end_run = forget_sent_weights, end_run
        self._has_connected = False
        # Of the main process
        self._instance: str | None = None  # vLLM's name for a server from its start to its end, if it has one
        self._num_repeats = 0  # of this generation

    def begin_run(self) -> None:
        """Meet the server before the first run; before a later one, see that it is there."""
        self._num_repeats = 0
        self._reconnect_if_needed()

    def generate(self, attempt: Callable[[], Any], is_first_request: bool) -> Any:
        """
        Return what an attempt of all ranks returned by which the server did all it was asked for.

        An attempt sends the weights, if they were not yet, and requests samples. The first request does send them:
        over NCCL, a transfer to nobody would not end.
        """
        self._num_repeats = 0
        if is_first_request:
            self._reconnect_if_needed()
        while True:
            if self._client is not None:
                self._client.defer_failures()
            output = attempt()
            if not self._reconnect_if_needed():
                return output

    def has_same_server(self) -> bool:
        """Return whether the server answers, and is the one that got the weights."""

        def is_same() -> bool:
            try:
                return self._ask_instance() == self._instance
            except Exception:
                return False

        return on_main_process(is_same)

    def _reconnect_if_needed(self) -> bool:
        """Follow on all ranks what the main process finds: whether it joined the server, why the run must end."""
        has_reconnected, end = on_main_process(self._check_and_reconnect if self._has_connected else self._connect)
        self._has_connected = True
        if end is not None:
            self._end_run(end)
        if has_reconnected:
            self._forget_sent_weights()
        return has_reconnected

    # In the main process

    def _connect(self) -> tuple[bool, str | None]:
        """Say what became of the client's making, and remember the server."""
        failure = self._client.take_failure()
        if failure is None:
            try:
                self._instance = self._ask_instance()
            except Exception as error:
                failure = describe("the start", error)
        if failure is not None:
            return False, self._describe(failure)
        if self._instance is None:
            warnings.warn(
                "The vLLM server has several API processes, which look like different servers: its restart between "
                "two requests would not be noticed. Start it with `--api-server-count 1` to have it joined again."
            )
        return False, None

    def _check_and_reconnect(self) -> tuple[bool, str | None]:
        """
        Say whether the server did all it was asked for since failures are held, by the client it was joined with.

        If not, wait for it and join it again, unless that does not help: after [`NUM_REPEATS`], or if the server
        refuses what it is asked for.
        """
        failure = self._client.take_failure()
        if failure is None:
            try:
                instance = self._ask_instance()
                if instance == self._instance or instance is None:
                    return False, None
                failure = ServerFailure("between two requests", RESTARTED, is_passing=True)
            except Exception as error:
                failure = describe("between two requests", error)
        if not failure.is_passing or self._num_repeats == NUM_REPEATS:
            return False, self._describe(failure, self._num_repeats)
        self._num_repeats += 1
        before, began = self._instance, time.monotonic()
        if failure.error != RESTARTED:
            warnings.warn(f"{self._describe(failure)} Waiting for it, {self._timeout_s:g} seconds at most.")
        try:
            retry_until(began + self._timeout_s, self._reconnect)
        except Exception as error:
            waited = f" Waited {time.monotonic() - began:.0f} s for it (`vllm_server_timeout` {self._timeout_s:g}): "
            return False, f"{self._describe(failure)}{waited}{describe('', error).error}."
        what = "was started anew" if self._instance != before else "is there again"
        warnings.warn(f"The vLLM server {what}: it is joined again, and gets the current weights.")
        return True, None

    def _reconnect(self) -> None:
        self._client.check_health()
        instance = self._ask_instance()
        self._client.reconnect(self._device, is_same=instance == self._instance)
        self._instance = instance

    def _ask_instance(self) -> str | None:
        info = self._client.get_server_info()
        # Each API process of a server has a name of its own
        return info["instance_id"] if info["parallel_config"].get("_api_process_count", 1) == 1 else None

    def _describe(self, failure: ServerFailure, repeats: int = 0) -> str:
        times = f", after {repeats} repetitions" if repeats else ""
        return f"The vLLM server at {self._client.base_url} failed in {failure.during}{times}: {failure.error}."
