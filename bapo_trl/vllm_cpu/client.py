"""Trainer side of the weight transfer over gloo: TRL's client of a vLLM server, on a CPU."""

import atexit
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from trl.generation.vllm_client import VLLMClient
from vllm.utils.network_utils import get_ip

from .weight_group import broadcast, join_weight_group


LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


class GlooVLLMClient(VLLMClient):
    """
    Client that sends weights over gloo instead of NCCL, to a server with the backend `gloo`.

    All else is TRL's [`~trl.generation.vllm_client.VLLMClient`].
    """

    def init_communicator(self, device: torch.device | str | int = "cpu"):
        """
        Form the group of trainer and server workers.

        Raises:
            RuntimeError: If the server has another backend of weight transfer than `gloo`, or none.
        """
        config = self.get_server_info()["weight_transfer_config"]
        backend = None if config is None else config["backend"]
        if backend != "gloo":
            raise RuntimeError(
                f"The vLLM server at {self.base_url} transfers weights by {backend!r}, but the trainer runs on a CPU: "
                "start the server with `scripts/serve_vllm.sh MODEL`, or with "
                """`--weight-transfer-config '{"backend": "gloo"}'` where bapo-trl is installed."""
            )
        world_size = self.get_world_size() + 1
        address = "127.0.0.1" if self.host in LOOPBACK else get_ip()
        init_info = {
            "master_address": address,
            "master_port": self.group_port,
            "rank_offset": 1,
            "world_size": world_size,
        }
        # The server answers when its workers have joined, for which the trainer must have come too.
        with ThreadPoolExecutor(max_workers=1) as executor:
            joined = executor.submit(
                self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": init_info}
            )
            self.communicator = join_weight_group(address, self.group_port, rank=0, world_size=world_size)
            joined.result()
        atexit.register(self.close_communicator)

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ):
        """Send the weights of the iterator, as `metadata` announces them: name, vLLM's name of the dtype, shape."""
        names, dtype_names, shapes = (list(field) for field in zip(*metadata, strict=True))
        update_info = {"names": names, "dtype_names": dtype_names, "shapes": shapes}
        update = nullcontext() if self._updating_weights else self.weight_update()
        with update, ThreadPoolExecutor(max_workers=1) as executor:
            received = executor.submit(
                self._post, f"{self.base_url}/update_weights", json={"update_info": update_info}
            )
            for _, tensor in named_params:
                broadcast(self.communicator, tensor.detach().cpu().contiguous())
            received.result()

    def close_communicator(self):
        """Leave the group."""
        self.communicator = None
