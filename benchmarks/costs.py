"""
Measure what the parts of a training cost on a CPU, for reports/costs.md. Each writes a file into `results/`.

    python -m benchmarks.costs search    # 2 minutes
    python -m benchmarks.costs replay    # 3 minutes; needs 5 GB of memory and of disk
    python -m benchmarks.costs save      # minutes
    python -m benchmarks.costs llm       # minutes

- `search`: speed of the bound search relative to Algorithm 1, which recomputes the contribution of every token at each
  of 52 candidate pairs, on a million tokens, with a target out of reach; and the memory that is allocated in addition
  to the inputs, from the allocator's record (`torch.profiler`). Freed memory stays with the process, which leaves only
  the arithmetic.
- `replay`: memory, exchange and disk rate of a full replay buffer: 100,000 samples of 1,000 tokens. Memory is the
  growth of the process while the buffer was filled. Saving and loading are compared with writing and reading a file of
  the same size at once. Both wait for the disk, without the page cache.
- `save`: time of an atomic checkpoint relative to plain transformers, for a model of SmolLM2-135M's shape and its
  optimizer, in turns. Before each save, the disk has finished its writes. Plain transformers leaves its files in the
  page cache; an atomic checkpoint is on the disk.
- `llm`: CPU-seconds of a generation and its first update with the chat model, with and without the optimizations in
  `bapo_trl.upstream.cpu_speed`: 128 samples of at most 16 tokens with prompts of 30 tokens, and an update on 32 of
  them, LoRA. Each measurement runs in a process of its own with one thread; ratios are of consecutive measurements.
"""

import argparse
import ctypes
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bapo_trl import BAPOTrainer
from bapo_trl.batch.samples import batch_to_rows, concat_rows
from bapo_trl.clip_bounds import MEASURES, BoundGrid, contributions, search_bounds
from bapo_trl.replay.buffer import FILES, ReplayBuffer, deal_out
from bapo_trl.tasks import load_chat_sums, smollm2_path
from bapo_trl.upstream import cpu_speed
from benchmarks.common import ROOT, in_turns, keep_freed_memory, save_result, spread, time_s
from benchmarks.gpu_first_run.shapes import lora
from benchmarks.gpu_first_run.trainers import Setup, make_trainer, settings_for
from benchmarks.watched_training import UpdateClock


ON_CPU = Setup("cpu", "tiny", 0)


# The search


SEARCH_ROWS, SEARCH_TOKENS, OUT_OF_REACH = 512, 2048, 0.99
GRID = BoundGrid()


def make_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ratios (B, T), advantages (B,) and weights (B, T): a quarter of the rows positive, uneven lengths."""
    generator = torch.Generator().manual_seed(0)
    ratio = torch.exp(0.35 * torch.randn(SEARCH_ROWS, SEARCH_TOKENS, generator=generator))
    advantages = torch.where(torch.arange(SEARCH_ROWS) % 4 == 0, 1.0, -1.0)
    lengths = torch.randint(SEARCH_TOKENS // 2, SEARCH_TOKENS + 1, (SEARCH_ROWS, 1), generator=generator)
    return ratio, advantages, (torch.arange(SEARCH_TOKENS) < lengths).float()


def fast_search(ratio, advantages, weights, measure: str, target: float = OUT_OF_REACH) -> tuple[float, float]:
    """Return the bounds from the package's search."""
    bounds = search_bounds(contributions(ratio, advantages, weights, GRID, measure=measure), GRID, target)
    return bounds.low.item(), bounds.high.item()


def loop(ratio, advantages, weights, measure: str, target: float = OUT_OF_REACH) -> tuple[float, float]:
    """Return the bounds from Algorithm 1, with all contributions recomputed at each pair of bounds."""
    advantages, uppers, lowers = advantages.unsqueeze(1), GRID.upper.tolist(), GRID.lower.tolist()
    for low, high in [*((lowers[0], high) for high in uppers), *((low, uppers[-1]) for low in lowers[1:])]:
        if measure == "gradient":
            passes = torch.where(advantages > 0, ratio <= high, ratio >= low)
            terms = ratio * advantages * weights * passes
        else:
            terms = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages) * weights
        positive, negative = (
            terms.clamp(**limit).sum(dtype=torch.float64).abs() for limit in ({"min": 0}, {"max": 0})
        )
        if (positive / (positive + negative)).item() >= target:
            break
    return low, high


def peak_extra_bytes(function: Callable) -> int:
    """Return the peak number of bytes that `function` allocates in addition to memory in use before the call."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes), default=0)


def search(rounds: int) -> None:
    keep_freed_memory()
    tokens, results = make_tokens(), []
    for measure, num_threads in itertools.product(MEASURES, sorted({1, len(os.sched_getaffinity(0))})):
        torch.set_num_threads(num_threads)
        for target in (0.1, 0.25, 0.3, 0.33, 0.36, 0.4, OUT_OF_REACH):  # all along the path; warms up, too
            found, expected = (each(*tokens, measure, target) for each in (fast_search, loop))
            if found != expected:
                raise RuntimeError(f"target {target}, {measure}: search {found}, loop {expected}.")
        seconds: dict[Callable, list[float]] = {fast_search: [], loop: []}
        for _, function in in_turns(seconds, rounds):
            seconds[function].append(time_s(partial(function, *tokens, measure)))
        extra = peak_extra_bytes(partial(fast_search, *tokens, measure)) / tokens[0].nbytes
        speedup = spread([slow / fast for slow, fast in zip(seconds[loop], seconds[fast_search], strict=True)])
        ms = spread([1000 * each for each in seconds[fast_search]])
        results.append(
            {"measure": measure, "threads": num_threads, "ms": ms, "speedup": speedup, "extra": round(extra, 3)}
        )
        print(results[-1], flush=True)
    settings = {"tokens": SEARCH_ROWS * SEARCH_TOKENS, "speedup_target": 10.0, "extra_memory_target": 4.0}
    save_result("search_cost", settings, results)


# The replay buffer


PAD, PROMPT, COMPLETION, BATCH, BLOCK = 0, 100, 900, 512, 4 * 2**20


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


def leave_page_cache(path: Path) -> None:
    """Drop a file from the page cache, so that the next read comes from the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_plainly(path: Path, size: int) -> None:
    """Write `size` bytes to the disk, into a new file that replaces the old one."""
    block, unfinished = np.random.default_rng(0).bytes(BLOCK), path.with_suffix(".unfinished")
    with open(unfinished, "wb", buffering=0) as file:
        for start in range(0, size, BLOCK):
            file.write(block[: size - start])
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read_plainly(path: Path) -> None:
    buffer = bytearray(BLOCK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def time_disk(queue: ReplayBuffer, folder: Path, is_plain_first: bool) -> tuple[float, float]:
    """
    Return the rates of saving and of loading, relative to plain writing and reading.

    The second measurement reuses memory that the first has released, which matters on virtual machines: callers must
    alternate the order.
    """
    plain, copies = folder / "plain", folder / "checkpoint"
    size = sum(int(rows.row_bytes().sum()) for rows in queue.rows)

    def save() -> None:
        with open(FILES.write(copies, 0, 1, queue.state_dict()), "rb") as file:
            os.fsync(file.fileno())

    def load() -> None:
        FILES.load(copies, 0, 1, ReplayBuffer(len(queue)).load_state_dict, deal_out)

    writes = {"write": partial(write_plainly, plain, size), "save": save}
    reads = {"read": partial(read_plainly, plain), "load": load}
    seconds = {}
    for name in writes if is_plain_first else reversed(writes):
        seconds[name] = time_s(writes[name])
    for name in reads if is_plain_first else reversed(reads):
        leave_page_cache(plain if name == "read" else next(copies.iterdir()))
        seconds[name] = time_s(reads[name])
    return seconds["write"] / seconds["save"], seconds["read"] / seconds["load"]


def replay(rounds: int, num_rows: int = 100_000) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def sampled(version: int, count: int = BATCH):
        return batch_to_rows(generation(count, version, generator), PAD)

    sampled(0)  # what the first call sets up is not the buffer's
    before, queue = resident_bytes(), ReplayBuffer(num_rows)
    while len(queue) < num_rows:
        queue.add(sampled(len(queue) // BATCH, min(BATCH, num_rows - len(queue))))
    memory = (resident_bytes() - before) / sum(int(rows.row_bytes().sum()) for rows in queue.rows)

    def exchange(rows, version: int) -> None:
        queue.add(rows)
        concat_rows(queue.draw(BATCH, version, version + 1)[0])

    milliseconds = [1000 * time_s(partial(exchange, sampled(version), version)) for version in range(1000, 1030)]
    with tempfile.TemporaryDirectory() as folder:
        # The first use of memory and disk is slower than any later one
        rates = [time_disk(queue, Path(folder), number % 2 == 1) for number in range(1 + rounds)][1:]
    saving, loading = zip(*rates, strict=True)
    targets = {"memory_over_payload": 1.15, "add_and_draw_ms": 50, "rate_over_plain": 0.5}
    row = {
        "memory_over_payload": round(memory, 4),
        "add_and_draw_ms": spread(milliseconds),
        "save_rate_over_plain": spread(saving),
        "load_rate_over_plain": spread(loading),
    }
    print(row)
    save_result("replay_queue", {"rows": num_rows, "tokens": PROMPT + COMPLETION, "targets": targets}, [row])


# Checkpoints


def smollm2_shaped() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1))


def time_save(trainer) -> float:
    """Return the seconds of a save."""
    trainer.state.global_step += 1
    os.sync()
    return time_s(lambda: trainer._save_checkpoint(trainer.model, None))


def save(rounds: int) -> None:
    torch.set_num_threads(1)
    settings = settings_for(
        ON_CPU, 2, 2, num_generations=2, num_iterations=1, gradient_accumulation_steps=1, steps_per_generation=1,
        max_steps=1, save_total_limit=2, gradient_checkpointing=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            name: make_trainer(kind, smollm2_shaped(), f"{folder}/{name}", settings)
            for name, kind in (("plain", "grpo"), ("atomic", "batch"))
        }
        for trainer in trainers.values():
            trainer.train()  # so that the optimizer has a state
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        for _, name in in_turns(trainers, 1 + rounds):
            seconds[name].append(time_save(trainers[name]))
    plain, atomic = (values[1:] for values in seconds.values())  # the first use of a disk is slower
    over_plain = spread([ours / plainly for plainly, ours in zip(plain, atomic, strict=True)])
    row = {
        "size": "135 million weights",
        "plain_s": spread(plain),
        "atomic_s": spread(atomic),
        "over_plain": over_plain,
    }
    print(row)
    save_result("save_cost", {"rounds": rounds, "target": 1.1}, [row])


# The chat model


def llm_seconds(is_fast: bool, seed: int) -> float:
    """Return the CPU seconds of a generation and its first update in this process."""
    torch.set_num_threads(1)
    if is_fast:
        cpu_speed.score_completions_only()
    has_bfloat16 = is_fast and cpu_speed.has_bfloat16()
    task, clock = load_chat_sums(), UpdateClock(time.process_time)
    loading = {"dtype": "bfloat16" if has_bfloat16 else "float32", "attn_implementation": "eager"}
    settings = settings_for(
        ON_CPU, 32, 16, bf16=has_bfloat16, model_init_kwargs=loading, gradient_checkpointing=False, num_generations=8,
        gradient_accumulation_steps=1, num_iterations=1, max_steps=1, seed=seed,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer: BAPOTrainer = make_trainer(
            "batch", str(smollm2_path()), folder, settings, train_dataset=task.train_dataset, peft_config=lora(),
            reward_funcs=task.reward_func, processing_class=None, callbacks=[clock],
        )  # fmt: skip
        if is_fast:
            cpu_speed.make_head_input_contiguous(trainer.model)
        trainer.train()
    began, ended = clock.readings
    return ended - began


def llm(rounds: int) -> None:
    smollm2_path()  # so that no process has to build it
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    seconds: dict[str, list[float]] = {"all": [], "none": []}
    for index, name in in_turns(seconds, rounds):
        call = f"from benchmarks.costs import llm_seconds; print(llm_seconds({name == 'all'}, {index}))"
        command = [sys.executable, "-W", "ignore", "-c", call]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        seconds[name].append(float(done.stdout.splitlines()[-1]))
        print(f"round {index}, {name}: {seconds[name][-1]}", flush=True)
    ratios = [slow / fast for slow, fast in zip(seconds["none"], seconds["all"], strict=True)]
    row = {**{name: spread(values) for name, values in seconds.items()}, "none_over_all": spread(ratios)}
    save_result("llm_speed", {"target_seconds": 25, "completion_tokens": 16, "threads": 1}, [row])


ROUNDS = {search: 9, replay: 8, save: 12, llm: 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cost", choices=[function.__name__ for function in ROUNDS])
    parser.add_argument("--rounds", type=int, help="measurements of each, at least two")
    args = parser.parse_args()
    (function,) = (each for each in ROUNDS if each.__name__ == args.cost)
    function(args.rounds or ROUNDS[function])


if __name__ == "__main__":
    main()
