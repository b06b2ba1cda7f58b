"""The process group over which weights go from the trainer (rank 0) to the workers of a vLLM server."""

from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore


TIMEOUT = timedelta(seconds=300)


def join_weight_group(host: str, port: int, rank: int, world_size: int) -> ProcessGroupGloo:
    """
    Join the group; wait until all have.

    It is made without torch's rendezvous, which under `accelerate launch` would look for the launcher's store.

    Args:
        host (`str`):
            Address of the trainer's main process.
        port (`int`):
            Port that rank 0 opens there.
        rank (`int`):
            0 for the trainer, then the workers.
        world_size (`int`):
            1 + number of workers.

    Raises:
        torch.distributed.DistError: If the others do not come within 5 minutes.
    """
    store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
    return ProcessGroupGloo(store, rank, world_size, TIMEOUT)


def broadcast(group: ProcessGroupGloo, tensor: torch.Tensor) -> None:
    """Send a contiguous CPU tensor from rank 0, or receive into it."""
    options = BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()
