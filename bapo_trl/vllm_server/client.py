"""TRL's client for a vLLM server, with a time limit on every request and errors deferred until all ranks can react.

Only the main process talks to the server. If it raised an error at once, the other ranks would wait for it in TRL's
next collective. Invariant: between [`ServerClient.defer_failures`] and [`ServerClient.take_failure`], no method that
TRL calls raises an error. The first failure is stored, later calls send nothing to the server, and each answer has the
shape that TRL passes on to the other ranks. The trainer then handles the failure on all ranks.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import requests
import torch
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from ..upstream.trl_compat import VLLMClient, check_trl, missing_overrides


T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0  # limit for the server to accept a connection, and to answer a health check
ENGINE_TIMEOUT_S = 30.0  # limit for the engine behind the server to answer before connecting to it

# Errors that may disappear once the server is back, unlike a request that it rejects
_PASSING = (OSError, torch.distributed.DistError)


class ServerFailure(NamedTuple):
    """An error of the server: what it happened during, and whether a retry may help."""

    during: str
    error: str
    is_passing: bool


def describe(during: str, error: Exception) -> ServerFailure:
    return ServerFailure(during, f"{type(error).__name__}: {error}", isinstance(error, _PASSING))


def retry_until(deadline: float, call: Callable[[], T]) -> T:
    """
    Call a function until it raises no temporary error, at least once, and return its result.

    No call begins after the deadline, a value of `time.monotonic()`. The pauses grow from 0 to 15 s.
    """
    pauses = Retry(total=None, backoff_factor=0.1, backoff_max=15)
    while True:
        try:
            return call()
        except _PASSING:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
        pauses = pauses.increment()
        time.sleep(min(pauses.get_backoff_time(), left))


class LimitedAdapter(HTTPAdapter):
    """
    Send HTTP requests that always end: with an answer, or with an error of `requests` once a limit is reached.

    A request that did not reach the server, or got a status of 502 to 504, is retried up to three times with growing
    pauses. An interrupted request is not retried, because the server may have processed it.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        retries = Retry(3, read=False, status_forcelist=(502, 503, 504), allowed_methods=None, backoff_factor=0.2,
                        raise_on_status=False, respect_retry_after_header=False)  # fmt: skip
        super().__init__(max_retries=retries, pool_maxsize=64)  # as in TRL

    def send(self, request, stream=False, timeout=None, verify=True, cert=None, proxies=None):
        """Send a request as `requests` does, within the limit; raise an error for a status of 500 or more."""
        response = super().send(
            request, stream, timeout or (CONNECT_TIMEOUT_S, self._timeout_s), verify, cert, proxies
        )
        if response.status_code >= 500:
            raise requests.HTTPError(f"status {response.status_code} from {request.url}: {response.text[:1000]}")
        return response


WAIT_S = 0.5
"""Seconds between two checks of how long the answer to a request may still take."""


def _call_in_thread(call: Callable[[], T]) -> "Future[T]":
    """Call a function in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="vLLM request", daemon=True).start()
    return future


class ServerClient(VLLMClient):
    """TRL's [`~trl.generation.vllm_client.VLLMClient`] with limits. A new client defers failures from the start."""

    request_timeout_s: float = 1500.0
    communicator: Any
    _failure: ServerFailure | None = None
    _defers_failures = False
    _is_requesting = False
    _request: Future | None = None  # a generation request without an answer yet

    def __init__(self, *args, **kwargs):
        self.defer_failures()
        self._try("startup", super().__init__, *args, **kwargs)

    def defer_failures(self) -> None:
        """Store the next failure instead of raising it."""
        self._failure, self._defers_failures = None, True

    def take_failure(self) -> ServerFailure | None:
        """Return the failure since [`ServerClient.defer_failures`], if any, and stop deferring failures."""
        failure, self._failure, self._defers_failures = self._failure, None, False
        return failure

    def _try(self, during: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call; `None` after a deferred failure, of this call or an earlier one."""
        if self._failure is not None:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if not self._defers_failures:
                raise
            # Keep the first failure, which may be of a nested call. Store text only: a traceback would keep the weight
            # group, and its port, alive
            self._failure = self._failure or describe(during, error)
            return None

    # Methods that TRL calls in the main process between two collectives

    def generate(self, prompts, features=None, n=1, *args, **kwargs):
        """Generate as in TRL; return one token per completion after a deferred failure and inside `requesting`."""
        rows, output = len(prompts) * n, None
        generate = functools.partial(super().generate, prompts, features, n, *args, **kwargs)
        if self._is_requesting:
            self._request = _call_in_thread(generate)
        else:
            request, self._request = self._request, None
            output = self._try("generation", generate if request is None else request.result)
        return output or {
            "prompt_ids": list(prompts),
            "completion_ids": [[0] for _ in range(rows)],
            "logprobs": [[[0.0]] for _ in range(rows)],
            "logprob_token_ids": [[[0]] for _ in range(rows)],
        }

    @contextmanager
    def requesting(self) -> Iterator[None]:
        """Send the generation inside this context in a thread: the next generation waits for its answer."""
        self._is_requesting = True
        try:
            yield
        finally:
            self._is_requesting = False

    def has_answer(self, limit_s: Callable[[], float | None]) -> bool:
        """
        Wait for the answer to a request, up to a limit that may change meanwhile; return whether it arrived.

        If the request failed, the failure is deferred.
        """
        if self._request is None:
            return False
        begun = time.monotonic()
        while not wait([self._request], WAIT_S).done:
            limit = limit_s()
            if limit is not None and time.monotonic() - begun >= limit:
                return False
        error = self._request.exception()
        if error is None:
            return True
        self._request = None
        if not isinstance(error, Exception):
            raise error
        self._failure = describe("generation", error)
        return False

    def drop_request(self) -> None:
        """Ignore the answer to a request."""
        self._request = None

    def image_features(self, images, *args, **kwargs):
        """Process images as in TRL; return none after a deferred failure."""
        output = self._try("generation", super().image_features, images, *args, **kwargs)
        return [None for _ in images] if output is None else output

    def update_named_params(self, metadata, named_params, *args, **kwargs):
        """Send weights as in TRL; after a deferred failure, only gather the rest together with the other ranks."""
        self._try("a weight transfer", super().update_named_params, metadata, named_params, *args, **kwargs)
        if self._failure is not None:
            for _ in named_params:  # the other ranks still iterate over these
                pass

    def reset_prefix_cache(self, *args, **kwargs):
        """Clear the server's prefix cache as in TRL."""
        self._try("a weight transfer", super().reset_prefix_cache, *args, **kwargs)

    def init_communicator(self, *args, **kwargs):
        """Create the process group of trainer and server workers for the weight transfer."""
        self._try("the setup of the weight transfer", super().init_communicator, *args, **kwargs)

    def get_server_info(self, *args, **kwargs) -> dict:
        """Return the server's configuration as in TRL; after a deferred failure, only the entries that TRL reads."""
        info = self._try("a request for its configuration", super().get_server_info, *args, **kwargs)
        return info or {"model_config": {"logprobs_mode": "processed_logprobs"}}

    # The server

    def check_server(self, total_timeout: float = 0.0, *args, **kwargs):
        """Wait up to `total_timeout` seconds for the server; raise a `ConnectionError` if it is not up by then."""
        for scheme in ("http://", "https://"):  # here, as TRL's constructor calls this method before any other
            self.session.mount(scheme, LimitedAdapter(self.request_timeout_s))
        try:
            retry_until(time.monotonic() + total_timeout, self.check_health)
        except requests.RequestException as error:
            raise ConnectionError(
                f"not up within {total_timeout:g} seconds (`vllm_server_timeout`): {error}"
            ) from error

    def reconnect(self, device: torch.device, is_same: bool) -> None:
        """Reconnect to a server that is up. If it is the same as before, end a transfer that may be unfinished."""
        self.close_communicator()  # releases a worker that still waits for weights
        # If no engine processed it, a request to connect would stay in the server's queue and break the next group
        self.session.post(f"{self.base_url}/reset_prefix_cache", timeout=ENGINE_TIMEOUT_S).raise_for_status()
        self.init_communicator(device)
        if is_same:  # vLLM counts the weights of a layer: this ends an open transfer, even if it answers with a 500
            with suppress(requests.HTTPError):
                self._start_weight_update()
            with suppress(requests.HTTPError):
                self._finish_weight_update()

    def check_health(self) -> None:
        """Raise an error if the server is not up."""
        requests.get(f"{self.base_url}/health", timeout=CONNECT_TIMEOUT_S).raise_for_status()

    def _post(self, url: str, *args, **kwargs) -> dict:
        try:
            return super()._post(url, *args, **kwargs)
        except Exception:
            # NCCL has no time limit: its part of the transfer, in another thread, would wait for the worker forever
            if url.endswith("/update_weights") and hasattr(self.communicator, "destroy"):
                self.communicator.destroy()
            raise


check_trl(missing_overrides(ServerClient, VLLMClient))
