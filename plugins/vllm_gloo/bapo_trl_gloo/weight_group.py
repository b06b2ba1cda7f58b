"""The process group over which weights go from the trainer (rank 0) to the workers of a vLLM server."""

import math
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, DistStoreError, ProcessGroupGloo, TCPStore


TIMEOUT = timedelta(seconds=300)
"""How long a worker of the server waits for the others, and for a tensor."""


def open_weight_store(host: str, port: int, world_size: int, timeout: timedelta = TIMEOUT) -> TCPStore:
    """
    Open the store at which the members of the group meet, on this address alone. For rank 0, before the others come.

    It is made without torch's rendezvous, which under `accelerate launch` would look for the launcher's store. A port
    that is taken raises an `OSError`.
    """
    listener = socket.create_server((host, port))
    return TCPStore(
        host, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def join_weight_group(
    store: TCPStore,
    rank: int,
    world_size: int,
    timeout: timedelta = TIMEOUT,
    check: Callable[[], None] | None = None,
) -> ProcessGroupGloo:
    """
    Join the group, of the trainer (rank 0) and the workers; wait until all have (`DistStoreError` if not in time).

    The workers' `store` is a client of that of rank 0. The timeout is of the wait for the others, here and in each
    [`broadcast`]. `check` is called every second while others are missing; what it raises ends the wait.
    """
    store.set(f"here-{rank}", "")
    everybody = [f"here-{number}" for number in range(world_size)]
    seconds = math.ceil(timeout.total_seconds())
    for second in range(seconds):
        try:
            store.wait(everybody, timedelta(seconds=1))
            break
        except DistStoreError:
            if check is not None:
                check()
            if second + 1 == seconds:
                raise
    return ProcessGroupGloo(store, rank, world_size, timeout)


def broadcast(group: ProcessGroupGloo, tensor: torch.Tensor) -> None:
    """Send a contiguous CPU tensor from rank 0, or receive into it; `ConnectionError` if a member is gone or late."""
    options = BroadcastOptions()
    options.rootRank = 0
    try:
        group.broadcast([tensor], options).wait()
    except RuntimeError as error:
        raise ConnectionError(f"a tensor of the weights was not taken: {error}") from error
