"""Recovery from failures of the vLLM server: reconnect and repeat, or end the run on all ranks."""

import time
import warnings
from collections.abc import Callable
from typing import Any

from ..checkpoints.rank_errors import on_main_process
from ..upstream.vllm_weights import forget_sent_weights
from .client import ServerFailure, describe, retry_until


NUM_REPEATS = 3  # repetitions of a generation after failures and restarts of the server
RESTARTED = "it was restarted"


class ServerRetries:
    """
    Continue the run after the vLLM server fails and comes back. All ranks make the same calls.

    The client in the main process defers a failure until all ranks have passed TRL's collectives, see
    [`~vllm_server.client.ServerClient`]. Then the main process waits for the server and reconnects, and all ranks send
    the weights and repeat the generation. A restarted server is recognized by its instance name: it has its initial
    weights, and no process group to receive others. Completions that it sampled with those weights are regenerated.

    Where a run must end, all ranks save a checkpoint of the state before the generation, and raise an error.
    """

    def __init__(self, trainer: Any):
        accelerator = trainer.accelerator
        self._client: Any = trainer.vllm_generation.vllm_client if accelerator.is_main_process else None
        self._device, self._timeout_s = accelerator.device, trainer.args.vllm_server_timeout
        self._trainer = trainer
        self._has_connected = False
        # Of the main process
        self._instance: str | None = None  # vLLM's name of the server process, if it has one
        self._num_repeats = 0  # of the current generation

    def begin_run(self) -> None:
        """Connect to the server before the first run; check before a later run that it is still there."""
        self._num_repeats = 0
        self._reconnect_if_needed()

    def generate(self, attempt: Callable[[], Any], is_first_request: bool) -> Any:
        """
        Repeat an attempt, on all ranks, until the server has processed all its requests; return its result.

        An attempt sends the weights, unless the server has them, and requests samples. `is_first_request` says that it
        will send them; the server is then checked first, as a transfer over NCCL to a missing server would not end.
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
        """Return whether the server answers and is the same one that got the weights."""

        def is_same() -> bool:
            try:
                return self._ask_instance() == self._instance
            except Exception:
                return False

        return on_main_process(is_same)

    def _reconnect_if_needed(self) -> bool:
        """Return, on all ranks, whether the main process had to reconnect; end the run if it could not."""
        has_reconnected, end = on_main_process(self._check_and_reconnect if self._has_connected else self._connect)
        self._has_connected = True
        if end is not None:
            checkpoint = self._trainer.save_for_resume()
            kept = "No checkpoint was saved." if checkpoint is None else f"The last checkpoint is {checkpoint}."
            raise RuntimeError(f"{end} This was after update {self._trainer.state.global_step}. {kept}")
        if has_reconnected:
            forget_sent_weights(self._trainer)
        return has_reconnected

    # In the main process

    def _connect(self) -> tuple[bool, str | None]:
        """Return the failure of creating the client, if any, and store the server's name."""
        failure = self._client.take_failure()
        if failure is None:
            try:
                self._instance = self._ask_instance()
            except Exception as error:
                failure = describe("startup", error)
        if failure is not None:
            return False, self._describe(failure)
        if self._instance is None:
            warnings.warn(
                "The vLLM server has several API processes, which look like different servers, so a restart between "
                "two requests cannot be detected. Start it with `--api-server-count 1` to enable the detection."
            )
        return False, None

    def _check_and_reconnect(self) -> tuple[bool, str | None]:
        """
        Reconnect if a request failed or the server was restarted; return whether it did, or why the run must end.

        The run must end after [`NUM_REPEATS`] repetitions, or if the server rejects a request or does not come back.
        """
        failure = self._client.take_failure()
        if failure is None:
            try:
                instance = self._ask_instance()
                if instance == self._instance or instance is None:
                    return False, None
                failure = ServerFailure("the time between two requests", RESTARTED, is_passing=True)
            except Exception as error:
                failure = describe("the time between two requests", error)
        if not failure.is_passing or self._num_repeats == NUM_REPEATS:
            return False, self._describe(failure, self._num_repeats)
        self._num_repeats += 1
        before, began = self._instance, time.monotonic()
        if failure.error != RESTARTED:
            warnings.warn(f"{self._describe(failure)} Waiting for it, for at most {self._timeout_s:g} seconds.")
        try:
            retry_until(began + self._timeout_s, self._reconnect)
        except Exception as error:
            waited = f" Waited {time.monotonic() - began:.0f} s for it (`vllm_server_timeout` {self._timeout_s:g}): "
            return False, f"{self._describe(failure)}{waited}{describe('', error).error}."
        what = "was restarted" if self._instance != before else "is back"
        warnings.warn(f"The vLLM server {what}: reconnected, and sending the current weights.")
        return True, None

    def _reconnect(self) -> None:
        self._client.check_health()
        instance = self._ask_instance()
        self._client.reconnect(self._device, is_same=instance == self._instance)
        self._instance = instance

    def _ask_instance(self) -> str | None:
        info = self._client.get_server_info()
        # Each API process of a server has its own name
        return info["instance_id"] if info["parallel_config"].get("_api_process_count", 1) == 1 else None

    def _describe(self, failure: ServerFailure, repeats: int = 0) -> str:
        times = f", after {repeats} repetitions" if repeats else ""
        return f"The vLLM server at {self._client.base_url} failed during {failure.during}{times}: {failure.error}."
