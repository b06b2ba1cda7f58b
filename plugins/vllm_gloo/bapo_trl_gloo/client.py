"""Trainer side of the weight transfer over gloo: clients of a vLLM server for CPUs."""

import atexit
import gc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from trl.generation.vllm_client import VLLMClient
from vllm.utils.network_utils import get_ip

from bapo_trl.vllm_server.client import ServerClient

from .weight_group import broadcast, join_weight_group, open_weight_store


LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")  # noqa: S104 - TRL's name for this host


class GlooClient(VLLMClient):
    """
    TRL's [`~trl.generation.vllm_client.VLLMClient`] that sends weights over gloo instead of NCCL.

    The server must use the backend `gloo`. For TRL's own trainers, put it in place of TRL's client before the trainer
    is made: `trl.generation.vllm_generation.VLLMClient = GlooClient`.
    """

    communicator: Any
    request_timeout_s: float = 1500.0

    def init_communicator(self, *args, **kwargs):
        config = self.get_server_info()["weight_transfer_config"]
        backend = None if config is None else config["backend"]
        if backend != "gloo":
            raise RuntimeError(
                f"The vLLM server at {self.base_url} transfers weights by {backend!r}, but the trainer runs on a CPU: "
                "start the server with `bapo-trl serve --model MODEL`, or with "
                """`--weight-transfer-config '{"backend": "gloo"}'` where bapo-trl-gloo is installed."""
            )
        world_size = self.get_world_size() + 1
        address = "127.0.0.1" if self.host in LOOPBACK else get_ip()
        init_info = {
            "master_address": address,
            "master_port": self.group_port,
            "rank_offset": 1,
            "world_size": world_size,
        }
        timeout = timedelta(seconds=self.request_timeout_s)
        store = open_weight_store(address, self.group_port, world_size, timeout)
        # The server answers after its workers have joined, which requires that the trainer joins too.
        with self._posting("init_weight_transfer_engine", {"init_info": init_info}) as answer:
            self.communicator = join_weight_group(store, 0, world_size, timeout, lambda: _raise_if_failed(answer))
        atexit.register(self.close_communicator)

    def update_named_params(self, metadata, named_params, *args, **kwargs):
        names, dtype_names, shapes = (list(field) for field in zip(*metadata, strict=True))
        update_info = {"names": names, "dtype_names": dtype_names, "shapes": shapes}
        if not self._updating_weights:
            self._start_weight_update()
        with self._posting("update_weights", {"update_info": update_info}) as answer:
            for _, tensor in named_params:
                _raise_if_failed(answer)
                broadcast(self.communicator, tensor.detach().cpu().contiguous())
        if not self._updating_weights:
            self._finish_weight_update()

    def close_communicator(self):
        """Leave the process group, and free its port."""
        self.communicator = None
        gc.collect()  # an exception and its frames, a reference cycle, may keep the group or its store alive

    @contextmanager
    def _posting(self, endpoint: str, body: dict) -> Iterator[Future]:
        """Send a request to the server, let the trainer do its part in this context, and wait for the answer."""
        executor = ThreadPoolExecutor(max_workers=1)
        answer = executor.submit(self._post, f"{self.base_url}/{endpoint}", json=body)
        try:
            yield answer
            answer.result()
        finally:
            executor.shutdown(wait=False)  # after an error, the server may never answer


class GlooVLLMClient(ServerClient, GlooClient):
    """[`~bapo_trl.vllm_server.client.ServerClient`] that sends weights over gloo instead of NCCL."""


def _raise_if_failed(answer: Future) -> None:
    """Raise the server's error if its answer is an error."""
    if answer.done():
        answer.result()
