"""The process group over which weights go from the trainer (rank 0) to the workers of a vLLM server."""

import socket
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, DistStoreError, ProcessGroupGloo, TCPStore


TIMEOUT = timedelta(seconds=300)


def open_weight_store(host: str, port: int, world_size: int) -> TCPStore:
    """
    Open the store at which the members of the group meet, on this address alone. For rank 0, before the others come.

    It is made without torch's rendezvous, which under `accelerate launch` would look for the launcher's store.

    Args:
        host (`str`):
            Address of the trainer's main process.
        port (`int`):
            Port to open there.
        world_size (`int`):
            1 + number of the server's workers.

    Raises:
        OSError: If the port is taken.
    """
    listener = socket.create_server((host, port))
    return TCPStore(
        host, port, world_size, is_master=True, timeout=TIMEOUT, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def join_weight_group(
    store: TCPStore, rank: int, world_size: int, check: Callable[[], None] | None = None
) -> ProcessGroupGloo:
    """
    Join the group; wait until all have.

    Args:
        store (`TCPStore`):
            Of [`open_weight_store`] for rank 0, a client of it for the workers.
        rank (`int`):
            0 for the trainer, then the workers.
        world_size (`int`):
            1 + number of workers.
        check (`Callable`, *optional*):
            Called every second while the others are missing; what it raises ends the wait.

    Raises:
        torch.distributed.DistStoreError: If the others do not come within 5 minutes.
    """
    store.set(f"here-{rank}", "")
    everybody = [f"here-{number}" for number in range(world_size)]
    for second in range(int(TIMEOUT.total_seconds())):
        try:
            store.wait(everybody, timedelta(seconds=1))
            break
        except DistStoreError:
            if check is not None:
                check()
            if second + 1 == int(TIMEOUT.total_seconds()):
                raise
    return ProcessGroupGloo(store, rank, world_size, TIMEOUT)


def broadcast(group: ProcessGroupGloo, tensor: torch.Tensor) -> None:
    """Send a contiguous CPU tensor from rank 0, or receive into it."""
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
