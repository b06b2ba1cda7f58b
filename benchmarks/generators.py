"""
How throughput and staleness move with the number of generators: a simulation, nothing is trained or generated.

    python benchmarks/generators.py

As TRL works in server mode: weights go to the servers, they sample a generation while the trainers wait, then the
trainers make one or more passes over it while the servers wait. A server samples `SLOTS` answers at a time and starts
the next one when one ends. Staleness comes from the replay queue itself, on rows without content.
"""

import heapq

import numpy as np
import torch

from bapo_trl.batching import Column, Rows
from bapo_trl.replay_queue import ReplayQueue
from measuring import save_result


ROWS, UPDATES_PER_PASS = 512, 8
MEAN_TOKENS, SIGMA, LONGEST = 2000, 0.8, 8192  # log-normal lengths of the answers
SLOTS, TOKENS_PER_SECOND = 64, 40  # of one server: answers at a time, and tokens a second of each
UPDATE_SECONDS, SYNC_SECONDS = 20.0, 2.0
GENERATORS, PASSES = (1, 2, 4, 8, 16), (1, 2, 4)
GENERATIONS = 50


def generation_seconds(lengths: np.ndarray, servers: int) -> tuple[float, float]:
    """Return how long the servers take for answers of these lengths, and the share of their slots' time in use."""
    slots = [0.0] * (servers * SLOTS)
    for length in lengths:
        heapq.heappush(slots, heapq.heappop(slots) + length / TOKENS_PER_SECOND)
    end = max(slots)
    return end, float(lengths.sum()) / TOKENS_PER_SECOND / (end * len(slots))


def staleness(passes: int) -> tuple[float, int]:
    """Return mean and largest age of the trained rows, with half of the first pass from the queue."""
    queue = ReplayQueue(capacity=8 * ROWS)
    ages = []
    for generation in range(GENERATIONS):
        version = generation * passes * UPDATES_PER_PASS
        fresh = Rows(
            {
                "policy_version": Column(torch.full((ROWS,), version)),
                "completion_mask": Column(torch.ones(ROWS, dtype=torch.bool), [1] * ROWS),
                "advantages": Column(torch.ones(ROWS)),
            }
        )
        for number in range(passes):
            now = version + number * UPDATES_PER_PASS
            last = now + UPDATES_PER_PASS - 1
            drawn = queue.mix(fresh, 0.5, False, now, last) if number == 0 else queue.redraw(ROWS, fresh, now, last)
            if generation >= GENERATIONS // 2:  # the queue is filled
                ages += [now - drawn.rows.policy_versions + update for update in range(UPDATES_PER_PASS)]
    ages = np.concatenate(ages)
    return float(ages.mean()), int(ages.max())


def main():
    random = np.random.default_rng(0)
    location = np.log(MEAN_TOKENS) - SIGMA**2 / 2
    generations = [np.minimum(random.lognormal(location, SIGMA, ROWS), LONGEST) for _ in range(GENERATIONS)]
    results = []
    for passes in PASSES:
        mean_age, oldest = staleness(passes)
        for servers in GENERATORS:
            times, busy = zip(*(generation_seconds(lengths, servers) for lengths in generations), strict=True)
            sampling, training = float(np.mean(times)), passes * UPDATES_PER_PASS * UPDATE_SECONDS
            cycle = sampling + training + SYNC_SECONDS
            results.append(
                {
                    "passes": passes,
                    "servers": servers,
                    "sampling_s": round(sampling, 1),
                    "slots_in_use": round(float(np.mean(busy)), 3),
                    "updates_per_hour": round(3600 * passes * UPDATES_PER_PASS / cycle, 1),
                    "trainers_wait": round(1 - training / cycle, 3),
                    "staleness_same_rows": [
                        (passes * UPDATES_PER_PASS - 1) / 2,
                        passes * UPDATES_PER_PASS - 1,
                    ],
                    "staleness_queue": [round(mean_age, 1), oldest],
                }
            )
            print(results[-1])
    settings = {
        "rows": ROWS,
        "updates_per_pass": UPDATES_PER_PASS,
        "mean_tokens": round(float(np.mean(np.concatenate(generations)))),
        "longest": LONGEST,
        "slots": SLOTS,
        "tokens_per_second": TOKENS_PER_SECOND,
        "update_s": UPDATE_SECONDS,
        "sync_s": SYNC_SECONDS,
    }
    save_result("generators", "cpu", settings, results)


if __name__ == "__main__":
    main()
