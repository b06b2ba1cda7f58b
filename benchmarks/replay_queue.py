"""
Memory, time and disk rate of a full replay queue: 100,000 rows of 1,000 tokens.

    python -m benchmarks.replay_queue

Memory is what the process grew by while the queue was filled. An exchange is what stands between generation and
training: cut a generation of 512 rows, add it, draw as many, pad them. Saving and loading are paired with writing and
reading a file of the same size in one go. Both wait for the disk; the page cache is left out.
"""

import argparse
import ctypes
import gc
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bapo_trl.batch.samples import batch_to_rows, concat_rows, rows_to_batch
from bapo_trl.replay.queue import FILES, ReplayQueue, deal_out
from benchmarks.common import save_result, spread


PAD, PROMPT, COMPLETION = 0, 100, 900
BLOCK = 4 * 2**20


def generation(count: int, version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return a batch as TRL makes it, on average of half its largest length, with every per-token tensor of text."""
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
    """Return the memory that this process holds, without what the allocator keeps for later."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(queue: ReplayQueue, rows: int, batch: int, generator: torch.Generator) -> None:
    """Add rows, a generation at a time, until there are `rows`."""
    while len(queue) < rows:
        queue.add(batch_to_rows(generation(min(batch, rows - len(queue)), len(queue) // batch, generator), PAD))


def time_exchanges(queue: ReplayQueue, batch: int, count: int, generator: torch.Generator) -> dict[str, list[float]]:
    """Return the milliseconds of each part of each exchange, and of the whole."""
    times: dict[str, list[float]] = {"cut": [], "add_and_draw": [], "pad": [], "whole": []}
    for version in range(1000, 1000 + count):
        fresh = generation(batch, version, generator)
        start = time.perf_counter()
        rows = batch_to_rows(fresh, PAD)
        cut = time.perf_counter()
        queue.add(rows)
        parts, _ = queue.draw(batch, version, version + 1)
        drawn = concat_rows(parts)
        joined = time.perf_counter()
        rows_to_batch(drawn, PAD, "cpu")
        end = time.perf_counter()
        for name, seconds in zip(times, (cut - start, joined - cut, end - joined, end - start), strict=True):
            times[name].append(1000 * seconds)
    return times


def leave_page_cache(path: Path) -> None:
    """Have the next read of the file come from the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_plainly(path: Path, size: int) -> float:
    """Return the seconds that `size` bytes take to the disk, into a new file that takes the place of the old one."""
    block = np.random.default_rng(0).bytes(BLOCK)
    unfinished = path.with_suffix(".unfinished")
    start = time.perf_counter()
    with open(unfinished, "wb", buffering=0) as file:
        for _ in range(size // BLOCK):
            file.write(block)
        file.write(block[: size % BLOCK])
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return time.perf_counter() - start


def read_plainly(path: Path) -> float:
    """Return the seconds that a file takes from the disk."""
    leave_page_cache(path)
    buffer = bytearray(BLOCK)
    start = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def time_disk(queue: ReplayQueue, capacity: int, folder: Path, is_plain_first: bool) -> tuple[float, float]:
    """
    Return the rates of saving and of loading over the plain ones.

    What goes second finds memory that the first has just given back, which counts on virtual machines: the order
    has to alternate.
    """
    plain, copies = folder / "plain", folder / "checkpoint"

    def save() -> float:
        start = time.perf_counter()
        path = FILES.write(copies, 0, 1, queue.state_dict())
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        return time.perf_counter() - start

    def load() -> float:
        leave_page_cache(next(copies.iterdir()))
        start = time.perf_counter()
        FILES.load(copies, 0, 1, ReplayQueue(capacity).load_state_dict, deal_out)
        return time.perf_counter() - start

    size = sum(int(rows.row_bytes().sum()) for rows in queue.rows)
    if is_plain_first:
        write, saving = write_plainly(plain, size), save()
        read, loading = read_plainly(plain), load()
    else:
        saving, write = save(), write_plainly(plain, size)
        loading, read = load(), read_plainly(plain)
    print(f"{size / 1e9:.2f} GB: save {saving:.2f} s, plain {write:.2f} s; load {loading:.2f} s, plain {read:.2f} s")
    return write / saving, read / loading


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--exchanges", type=int, default=30)
    parser.add_argument("--disk-rounds", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    batch_to_rows(generation(arguments.batch, 0, generator), PAD)  # what the first call sets up is not the queue's

    before = resident_bytes()
    queue = ReplayQueue(arguments.rows)
    fill(queue, arguments.rows, arguments.batch, generator)
    memory = (resident_bytes() - before) / sum(int(rows.row_bytes().sum()) for rows in queue.rows)
    print(f"memory over payload: {memory:.3f}")

    times = time_exchanges(queue, arguments.batch, arguments.exchanges, generator)
    exchanges = {"fifo": {part: spread(milliseconds) for part, milliseconds in times.items()}}
    print({part: times["median"] for part, times in exchanges["fifo"].items()})

    rates = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        # The first use of memory and disk is slower than any later one
        time_disk(queue, arguments.rows, Path(folder), is_plain_first=False)
        for number in range(arguments.disk_rounds):
            rates.append(time_disk(queue, arguments.rows, Path(folder), is_plain_first=number % 2 == 0))
    saving, loading = zip(*rates, strict=True)
    settings = {"rows": arguments.rows, "tokens": PROMPT + COMPLETION, "batch": arguments.batch, "threads": 1}
    targets = {"memory_over_payload": 1.15, "add_and_draw_ms": 50, "rate_over_plain": 0.5}
    result = {
        "memory_over_payload": round(memory, 4),
        "exchange_ms": exchanges,
        "save_rate_over_plain": spread(saving),
        "load_rate_over_plain": spread(loading),
    }
    save_result("replay_queue", "cpu", {**settings, "targets": targets}, [result])


if __name__ == "__main__":
    main()
