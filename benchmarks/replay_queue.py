"""
Measure memory, time and disk throughput of a full replay buffer: 100,000 samples of 1,000 tokens.

    python -m benchmarks.replay_queue

Memory is the growth of the process while the buffer was filled. Samples are added and drawn in batches of 512. Saving
and loading are compared with writing and reading a file of the same size at once. Both wait for the disk, without the
page cache.
"""

import argparse
import ctypes
import gc
import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bapo_trl.batch.samples import Rows, batch_to_rows, concat_rows
from bapo_trl.replay.buffer import FILES, ReplayBuffer, deal_out
from benchmarks.common import save_result, spread, time_s


PAD, PROMPT, COMPLETION = 0, 100, 900
BATCH, EXCHANGES, DISK_ROUNDS = 512, 30, 8
BLOCK = 4 * 2**20


def generation(count: int, version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return a text batch like TRL's, with all per-token tensors; the mean length is half of the maximum."""
    lengths = torch.randint(1, 2 * COMPLETION, (count, 1), generator=generator)
    prompt_lengths = torch.randint(1, 2 * PROMPT, (count, 1), generator=generator)
    mask = (torch.arange(2 * COMPLETION) < lengths).long()
    prompt_mask = (torch.arange(2 * PROMPT - 1, -1, -1) < prompt_lengths).long()
    floats = {
        key: torch.randn(count, 2 * COMPLETION, generator=generator) * mask
        for key in ("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps")
    }
    return {
        "prompt_ids": torch.randint(1, 50_000, prompt_mask.shape, generator=generator) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(1, 50_000, mask.shape, generator=generator) * mask,
        "completion_mask": mask,
        **floats,
        "importance_sampling_ratio": torch.ones(count, 2 * COMPLETION),
        "advantages": torch.randn(count, generator=generator),
        "policy_version": torch.full((count,), version),
    }


def resident_bytes() -> int:
    """Return the resident memory of this process, after the allocator released free memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(queue: ReplayBuffer, rows: int, batch: int, generator: torch.Generator) -> None:
    """Add rows, a generation at a time, until there are `rows`."""
    while len(queue) < rows:
        queue.add(batch_to_rows(generation(min(batch, rows - len(queue)), len(queue) // batch, generator), PAD))


def exchange(queue: ReplayBuffer, rows: Rows, version: int) -> None:
    """Add rows, and draw as many."""
    queue.add(rows)
    parts, _ = queue.draw(BATCH, version, version + 1)
    concat_rows(parts)


def leave_page_cache(path: Path) -> None:
    """Drop a file from the page cache, so that the next read comes from the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_plainly(path: Path, size: int) -> None:
    """Write `size` bytes to the disk, into a new file that replaces the old one."""
    block = np.random.default_rng(0).bytes(BLOCK)
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "wb", buffering=0) as file:
        for _ in range(size // BLOCK):
            file.write(block)
        file.write(block[: size % BLOCK])
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read_plainly(path: Path) -> None:
    buffer = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def time_disk(queue: ReplayBuffer, capacity: int, folder: Path, is_plain_first: bool) -> tuple[float, float]:
    """
    Return the throughput of saving and of loading, relative to plain writing and reading.

    The second measurement reuses memory that the first has released, which matters on virtual machines: callers must
    alternate the order.
    """
    plain, copies = folder / "plain", folder / "checkpoint"
    size = sum(int(rows.row_bytes().sum()) for rows in queue.rows)

    def save() -> None:
        with open(FILES.write(copies, 0, 1, queue.state_dict()), "rb") as file:
            os.fsync(file.fileno())

    def load() -> None:
        FILES.load(copies, 0, 1, ReplayBuffer(capacity).load_state_dict, deal_out)

    writes = {"write": partial(write_plainly, plain, size), "save": save}
    reads = {"read": partial(read_plainly, plain), "load": load}
    seconds = {}
    for name in writes if is_plain_first else reversed(writes):
        seconds[name] = time_s(writes[name])
    for name in reads if is_plain_first else reversed(reads):
        leave_page_cache(plain if name == "read" else next(copies.iterdir()))
        seconds[name] = time_s(reads[name])
    print(f"{size / 1e9:.2f} GB: {seconds}")
    return seconds["write"] / seconds["save"], seconds["read"] / seconds["load"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    batch_to_rows(generation(BATCH, 0, generator), PAD)  # what the first call sets up is not the queue's

    before = resident_bytes()
    queue = ReplayBuffer(arguments.rows)
    fill(queue, arguments.rows, BATCH, generator)
    memory = (resident_bytes() - before) / sum(int(rows.row_bytes().sum()) for rows in queue.rows)
    print(f"memory over payload: {memory:.3f}")

    milliseconds = []
    for version in range(1000, 1000 + EXCHANGES):
        rows = batch_to_rows(generation(BATCH, version, generator), PAD)
        milliseconds.append(1000 * time_s(partial(exchange, queue, rows, version)))
    print(f"add and draw: {spread(milliseconds)} ms")

    rates = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        # The first use of memory and disk is slower than any later one
        time_disk(queue, arguments.rows, Path(folder), is_plain_first=False)
        for number in range(DISK_ROUNDS):
            rates.append(time_disk(queue, arguments.rows, Path(folder), is_plain_first=number % 2 == 0))
    saving, loading = zip(*rates, strict=True)
    settings = {"rows": arguments.rows, "tokens": PROMPT + COMPLETION, "batch": BATCH, "threads": 1}
    targets = {"memory_over_payload": 1.15, "add_and_draw_ms": 50, "rate_over_plain": 0.5}
    result = {
        "memory_over_payload": round(memory, 4),
        "add_and_draw_ms": spread(milliseconds),
        "save_rate_over_plain": spread(saving),
        "load_rate_over_plain": spread(loading),
    }
    save_result("replay_queue", {**settings, "targets": targets}, [result])


if __name__ == "__main__":
    main()
