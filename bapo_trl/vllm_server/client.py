"""TRL's client of a vLLM server with a limit on every wait, and failures that do not part the ranks.

The main process alone talks to the server. Were an error raised where it comes up, the others would wait for it in
TRL's next collective. Invariant: between [`ServerClient.defer_failures`] and [`ServerClient.take_failure`], no method
that TRL calls raises. The first failure is kept, what follows asks the server for nothing, and each answer has the
shape that TRL hands on to the other ranks. The trainer then has all ranks agree.
"""

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import requests
import torch
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util.retry import Retry
from urllib3.util.wait import wait_for_read

from ..upstream.trl_compat import VLLMClient


T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0  # within which the server must take a connection, and answer whether it is up
ENGINE_TIMEOUT_S = 30.0  # within which the engine behind the server must answer before it is joined
PROBE_INTERVAL_S = 10.0  # between two looks at whether the server is still up, while an answer is awaited
NUM_PROBES = 30  # looks in a row without an answer, after which it is given up; vLLM writing a long one gives none

# May be gone when the server is there again, unlike a request that it refuses
_PASSING = (OSError, torch.distributed.DistError)


class ServerFailure(NamedTuple):
    """What went wrong with the server, and whether it may be tried again."""

    during: str
    error: str
    is_passing: bool


def describe(during: str, error: Exception) -> ServerFailure:
    return ServerFailure(during, f"{type(error).__name__}: {error}", isinstance(error, _PASSING))


def retry_until(deadline: float, call: Callable[[], T]) -> T:
    """
    Call, at least once, until that raises no error that may be gone later; return what it returned.

    No call begins after the deadline, of `time.monotonic()`. The pauses grow from 0 to 15 s.
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
    Sends requests over HTTP that end: with an answer, or with an error of `requests` once a limit is reached.

    A request that never reached the server, or that was turned away (502 to 504), is sent again up to three times,
    with growing pauses. One that broke off is not: the server may have done it.
    """

    def __init__(self, timeout_s: float, is_up: Callable[[], bool]):
        self._timeout_s, self._is_up = timeout_s, is_up
        retries = Retry(3, read=False, status_forcelist=(502, 503, 504), allowed_methods=None, backoff_factor=0.2,
                        raise_on_status=False, respect_retry_after_header=False)  # fmt: skip
        super().__init__(max_retries=retries, pool_maxsize=64)  # as in TRL

    def init_poolmanager(self, *args, **kwargs):
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {
            "http": self._watched(HTTPConnectionPool),
            "https": self._watched(HTTPSConnectionPool),
        }

    def send(self, request, stream=False, timeout=None, verify=True, cert=None, proxies=None):
        """Send a request as `requests` does, within the limit; an answer of 500 or more is an error."""
        response = super().send(
            request, stream, timeout or (CONNECT_TIMEOUT_S, self._timeout_s), verify, cert, proxies
        )
        if response.status_code >= 500:
            raise requests.HTTPError(f"answer {response.status_code} to {request.url}: {response.text[:1000]}")
        return response

    def _watched(self, pool: type) -> type:
        is_up = self._is_up

        class WatchedConnection(pool.ConnectionCls):  # type: ignore[name-defined]
            def getresponse(self):
                deadline, missed = time.monotonic() + (math.inf if self.timeout is None else self.timeout), 0
                while not wait_for_read(self.sock, max(0, min(PROBE_INTERVAL_S, deadline - time.monotonic()))):
                    if time.monotonic() >= deadline:
                        raise TimeoutError
                    missed = 0 if is_up() else missed + 1
                    if missed == NUM_PROBES:
                        raise ConnectionAbortedError("the server did not answer /health while an answer was awaited")
                return super().getresponse()

        return type(pool.__name__, (pool,), {"ConnectionCls": WatchedConnection})


WAIT_S = 0.5
"""Seconds between two looks at how long the answer to a request may take."""


def _call_in_thread(call: Callable[[], T]) -> "Future[T]":
    """Call in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="vLLM request", daemon=True).start()
    return future


class ServerClient(VLLMClient):
    """TRL's [`~trl.generation.vllm_client.VLLMClient`] with limits. It holds failures from its making on."""

    request_timeout_s: float = 1500.0
    communicator: Any
    _failure: ServerFailure | None = None
    _defers_failures = False
    _is_requesting = False
    _request: Future | None = None  # a generation whose answer is awaited

    def __init__(self, *args, **kwargs):
        self.defer_failures()
        self._try("the start", super().__init__, *args, **kwargs)

    def defer_failures(self) -> None:
        """Keep the next failure instead of raising it."""
        self._failure, self._defers_failures = None, True

    def take_failure(self) -> ServerFailure | None:
        """Return the failure since [`ServerClient.defer_failures`], if any, and raise failures again from here on."""
        failure, self._failure, self._defers_failures = self._failure, None, False
        return failure

    def _try(self, during: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a call returns; `None` after a failure that is held, an earlier one or its own."""
        if self._failure is not None:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if not self._defers_failures:
                raise
            # The first one: a call within this one may have failed. In words: a traceback would keep the weight group,
            # and its port
            self._failure = self._failure or describe(during, error)
            return None

    # What TRL calls in the main process between two collectives

    def generate(self, prompts, features=None, n=1, *args, **kwargs):
        """Generate as TRL does, see there; one token each after a failure that is held, and for a mere request."""
        rows, output = len(prompts) * n, None
        generate = functools.partial(super().generate, prompts, features, n, *args, **kwargs)
        if self._is_requesting:
            self._request = _call_in_thread(generate)
        else:
            request, self._request = self._request, None
            output = self._try("a generation", generate if request is None else request.result)
        return output or {
            "prompt_ids": list(prompts),
            "completion_ids": [[0] for _ in range(rows)],
            "logprobs": [[[0.0]] for _ in range(rows)],
            "logprob_token_ids": [[[0]] for _ in range(rows)],
        }

    @contextmanager
    def requesting(self) -> Iterator[None]:
        """Let the generation within be a request, in a thread: the next generation waits for its answer."""
        self._is_requesting = True
        try:
            yield
        finally:
            self._is_requesting = False

    def has_answer(self, limit_s: Callable[[], float | None]) -> bool:
        """
        Wait for the answer to a request, at most as long as the limit says, which may change; return whether it came.

        A request that failed is a held failure.
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
        self._failure = describe("a generation", error)
        return False

    def drop_request(self) -> None:
        """Do without the answer to a request."""
        self._request = None

    def image_features(self, images, *args, **kwargs):
        """Have images processed as TRL does, see there; after a failure that is held, none."""
        output = self._try("a generation", super().image_features, images, *args, **kwargs)
        return [None for _ in images] if output is None else output

    def update_named_params(self, metadata, named_params, *args, **kwargs):
        """Send weights as TRL does, see there; after a failure that is held, gather the rest along with the others."""
        self._try("a transfer of the weights", self._send_weights, metadata, named_params, *args, **kwargs)
        if self._failure is not None:
            for _ in named_params:  # the other ranks go on through these
                pass

    def reset_prefix_cache(self, *args, **kwargs):
        """Forget cached prompts as TRL does."""
        self._try("a transfer of the weights", super().reset_prefix_cache, *args, **kwargs)

    def init_communicator(self, *args, **kwargs):
        """Form the group of trainer and server workers."""
        self._try("joining its group for the weights", self._join_group, *args, **kwargs)

    def get_server_info(self, *args, **kwargs) -> dict:
        """Ask for the configuration as TRL does; after a failure that is held, give what TRL reads of it."""
        info = self._try("a question for its settings", super().get_server_info, *args, **kwargs)
        return info or {"model_config": {"logprobs_mode": "processed_logprobs"}}

    # The server

    def check_server(self, total_timeout: float = 0.0, *args, **kwargs):
        """Wait `total_timeout` seconds until the server is up (`ConnectionError` if it is not by then)."""
        for scheme in ("http://", "https://"):  # first of all that TRL's constructor asks for
            self.session.mount(scheme, LimitedAdapter(self.request_timeout_s, self._is_up))
        try:
            retry_until(time.monotonic() + total_timeout, self.check_health)
        except requests.RequestException as error:
            raise ConnectionError(
                f"not up within {total_timeout:g} seconds (`vllm_server_timeout`): {error}"
            ) from error

    def reconnect(self, device: torch.device, is_same: bool) -> None:
        """Join a server that is up; in the one that was joined before (`is_same`), a transfer may have broken off."""
        self.close_communicator()  # sets a worker free that still waits for weights
        # A request to join that no engine takes would stay in the server's queue, and spoil the next one's group
        self.session.post(f"{self.base_url}/reset_prefix_cache", timeout=ENGINE_TIMEOUT_S).raise_for_status()
        self.init_communicator(device)
        if is_same:  # vLLM counts the weights of a layer: an open transfer is ended, whether it says so (500) or not
            with suppress(requests.HTTPError):
                self._start_weight_update()
            with suppress(requests.HTTPError):
                self._finish_weight_update()

    def check_health(self) -> None:
        """Ask whether the server is up; raise if not."""
        requests.get(f"{self.base_url}/health", timeout=CONNECT_TIMEOUT_S).raise_for_status()

    def _is_up(self) -> bool:
        try:
            self.check_health()
        except requests.RequestException:
            return False
        return True

    # Over NCCL

    def _join_group(self, *args, **kwargs) -> None:
        super().init_communicator(*args, **kwargs)

    def _send_weights(self, metadata, named_params, *args, **kwargs) -> None:
        super().update_named_params(metadata, named_params, *args, **kwargs)

    def _post(self, url: str, *args, **kwargs) -> dict:
        try:
            return super()._post(url, *args, **kwargs)
        except Exception:
            # NCCL has no limit: its part of the transfer, in another thread, would wait for the worker for ever
            if url.endswith("/update_weights") and hasattr(self.communicator, "destroy"):
                self.communicator.destroy()
            raise
