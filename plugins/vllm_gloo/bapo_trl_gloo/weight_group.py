"""Process group that sends weights from the trainer (rank 0) to the workers of a vLLM server."""

import math
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, DistStoreError, ProcessGroupGloo, TCPStore


TIMEOUT = timedelta(seconds=300)
"""Time limit of a server's worker for the others to join, and for each tensor."""


def open_weight_store(host: str, port: int, world_size: int, timeout: timedelta = TIMEOUT) -> TCPStore:
    """
    Open the store through which the group's members connect, only on this address. Rank 0 calls this first.

    Torch's rendezvous is not used, as under `accelerate launch` it would connect to the launcher's store. A port that
    is in use raises an `OSError`.
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
    Join the group of the trainer (rank 0) and the workers; raise a `DistStoreError` if a member is late.

    The workers' `store` is a client of rank 0's store. The timeout limits the wait for other members, here and in each
    [`broadcast`]. `check` is called every second while members are missing, and may raise an error to end the wait.
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
    """Send a contiguous CPU tensor from rank 0, or receive it; `ConnectionError` if a member is lost or late."""
    options = BroadcastOptions()
    options.rootRank = 0
    try:
        group.broadcast([tensor], options).wait()
    except RuntimeError as error:
        raise ConnectionError(f"a weight tensor was not transferred: {error}") from error
