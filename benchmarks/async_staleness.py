"""
Run the asynchronous trainer at constant staleness: accuracy by method, and the extra time per update of the bounds.

    python -m benchmarks.async_staleness --jobs 2              # pilot: learning rates, one seed
    python -m benchmarks.async_staleness --jobs 2 --seeds      # five seeds at the best learning rates of the pilot
    python -m benchmarks.async_staleness --cost                # time per update relative to TRL's trainer

The task is the sums, on a CPU, with torch's attention instead of FlashAttention 3 and a worker that samples from an
earlier policy. TRL's loader prefetches a micro-batch, so the smallest staleness is 1. A method's best learning rate is
the one with the highest final accuracy in the pilot (the lower one of equals); call the pilot twice, such that a
method whose best rate is the lowest also runs at half of it. Interrupted runs resume. To keep the
results: `python -m benchmarks.pages --keep outputs/async_staleness --commit COMMIT`.
"""

import argparse
import itertools
import multiprocessing
import queue
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from bapo_trl.compare.results import FOLDER, Row, read_rows, write_row
from bapo_trl.compare.tables import as_markdown, compare
from bapo_trl.experimental import AsyncBAPOConfig, AsyncBAPOTrainer
from benchmarks.common import ROOT, best_rates, save_result, spread
from benchmarks.tiny_model import tiny_model
from benchmarks.warm_start import load_sums, warm_start_path


GROUPS, GROUP_SIZE, UPDATES = 16, 8, 128
STALENESS, RATES, SEEDS, PILOT_SEED = (1, 4, 16, 64), (2.5e-4, 5e-4, 1e-3), range(1, 6), 0
ARMS = {
    "GRPO": {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2},
    "clip-higher": {
        "ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.28, "ratio_upper_max": 1.28,
    },
    "BAPO": {},
    "widest bounds": {
        "ratio_lower_start": 0.6, "ratio_lower_max": 0.6, "ratio_upper_start": 3.0, "ratio_upper_max": 3.0,
    },
}  # fmt: skip
QUIET = {
    "token_budget": 0, "max_staleness": 10**6, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
}  # fmt: skip
STUDY = ROOT / "outputs" / "async_staleness"


class StaleWorker:
    """Worker that samples a batch for each update from the policy of `staleness` versions ago."""

    def __init__(self, path: str, task, tokenizer, staleness: int, seed: int):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.weights = deque([self.model.state_dict()], maxlen=staleness)
        self.task, self.tokenizer = task, tokenizer
        self.random, self.generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.num_groups = 0

    def take(self, weights: dict[str, torch.Tensor]) -> None:
        """Store the weights of a new policy version."""
        self.weights.append({name: weight.clone() for name, weight in weights.items()})

    def start(self) -> None:
        self._sample(0)  # the loader takes the second batch before the first one is trained on
        self._sample(0)

    def stop(self) -> None:
        pass

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("No sample is left.")

    def update_model_version(self, model_version: int) -> None:
        if model_version > 1:  # the first transfer comes before the start
            self._sample(model_version)

    @torch.no_grad()
    def _sample(self, version: int) -> None:
        self.model.load_state_dict(self.weights[0], strict=False)
        chosen = self.random.integers(len(self.task.train_dataset), size=GROUPS).tolist()
        rows = [self.task.train_dataset[place] for place in chosen]
        prompts = [self.tokenizer(row["prompt"])["input_ids"] for row in rows]
        samples = {}
        for length in {len(prompt) for prompt in prompts}:
            alike = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            repeated = [prompts[number] for number in alike for _ in range(GROUP_SIZE)]
            ids, logps = sample(self.model, repeated, self.task.max_new_tokens, self.generator)
            groups = zip(ids[:, length:].split(GROUP_SIZE), logps.split(GROUP_SIZE), strict=True)
            samples |= dict(zip(alike, groups, strict=True))
        for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            self.num_groups += 1
            completions, logps = samples[number]
            ends = completions.tolist()
            texts = []
            for place, tokens in enumerate(ends):
                end = self.model.config.eos_token_id
                ends[place] = tokens = tokens[: tokens.index(end) + 1] if end in tokens else tokens
                texts.append(self.tokenizer.decode(tokens, skip_special_tokens=True))
            rewards = np.array(self.task.reward_func(completions=texts, answer=[row["answer"]] * GROUP_SIZE))
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
            for tokens, of_tokens, advantage, reward in zip(ends, logps.tolist(), advantages, rewards, strict=True):
                self.rollout_buffer.put(
                    RolloutSample(
                        [], [], np.array(prompt + tokens), np.array([0] * len(prompt) + [1] * len(tokens)),
                        np.array([0.0] * len(prompt) + of_tokens[: len(tokens)], dtype=np.float32),
                        float(advantage), version, self.num_groups, {"reward": float(reward)},
                    )
                )  # fmt: skip


def sample(model, prompts: list[list[int]], length: int, generator: torch.Generator):
    """Return samples, `(B, P + length)`, and the log-probabilities of the completions, `(B, length)`."""
    ids, logps = torch.tensor(prompts), []
    for _ in range(length):
        log_probs = model(ids).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(log_probs.exp(), 1, generator=generator)
        logps.append(log_probs.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    return ids, torch.cat(logps, dim=1)


class ToWorker:
    """Weight transfer to the worker in this process."""

    def __init__(self, worker: StaleWorker):
        self.worker = worker

    def init_weight_transfer(self) -> None:
        pass

    pause = resume = destroy = init_weight_transfer

    def send_weights(self, iterator) -> None:
        self.worker.take(dict(iterator))


def make_trainer(folder: str, trainer_class, config_class, staleness: int, seed: int, **settings):
    """Return a trainer for the sums. Call within `on_cpu`."""
    task = load_sums()
    path = str(warm_start_path(task=task))
    tokenizer = AutoTokenizer.from_pretrained(path)
    worker = StaleWorker(path, task, tokenizer, staleness, seed)
    args = config_class(
        folder, per_device_train_batch_size=GROUPS * GROUP_SIZE, num_generations=GROUP_SIZE, seed=seed, **QUIET,
        **settings,
    )  # fmt: skip
    trainer = trainer_class(
        path, [len], args, task.train_dataset, processing_class=tokenizer, rollout_worker=worker,
        weight_transfer=ToWorker(worker),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer, task


@torch.no_grad()
def accuracy(model, task, tokenizer) -> float:
    """Return the fraction of held-out problems whose greedy completion is right."""
    of_length: dict[int, list[tuple[list[int], str]]] = {}
    for row in task.test_dataset:
        ids = tokenizer(row["prompt"])["input_ids"]
        of_length.setdefault(len(ids), []).append((ids, row["answer"]))
    rewards = []
    for length, problems in of_length.items():
        ids = torch.tensor([prompt for prompt, _ in problems])
        for _ in range(task.max_new_tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        texts = [tokenizer.decode(each).split(tokenizer.eos_token)[0] for each in ids[:, length:].tolist()]
        rewards += task.reward_func(completions=texts, answer=[answer for _, answer in problems])
    return statistics.fmean(rewards)


def train(arm: str, staleness: int, learning_rate: float, seed: int) -> Row:
    """Train once, and return the result row."""
    from tests.helpers.asynchronous import on_cpu

    torch.set_num_threads(1)
    started, classes = time.monotonic(), (AsyncBAPOTrainer, AsyncBAPOConfig)
    settings = {"learning_rate": learning_rate, **ARMS[arm]}
    with tempfile.TemporaryDirectory() as folder, on_cpu():
        trainer, task = make_trainer(folder, *classes, staleness, seed, max_steps=UPDATES, **settings)
        trainer.train()
        plain = trainer.rollout_worker.model
        plain.load_state_dict(trainer.model.state_dict())
        final = accuracy(plain, task, trainer.processing_class)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    share = statistics.fmean(log["bapo/positive_share"] for log in logs if log["bapo/positive_share"] is not None)
    seconds = round(time.monotonic() - started, 1)
    sweep = {"staleness": staleness, "learning_rate": learning_rate}
    return Row(arm, sweep, seed, settings, round(final, 4), share=round(share, 4), seconds=seconds)


class TakesTurns(TrainerCallback):
    """Lets trainers in threads make one update after the other in turn, and records the CPU time of each update."""

    def __init__(self, turn: threading.Semaphore, following: threading.Semaphore):
        self.turn, self.following, self.seconds, self._began = turn, following, [], 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.turn.acquire()
        self._began = time.thread_time()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.seconds.append(time.thread_time() - self._began)
        self.following.release()


def random_trainer(folder: str, trainer_class, config_class, updates: int, **settings):
    """Return a trainer of a model of four layers on random samples: 2,048 tokens an update. Call within `on_cpu`."""
    from tests.helpers.asynchronous import NoTransfer, ScriptedWorker

    random, task = np.random.default_rng(0), load_sums()
    tokenizer = AutoTokenizer.from_pretrained(str(warm_start_path(task=task)))
    model = tiny_model(
        tokenizer, seed=0, vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        max_position_embeddings=256,
    )  # fmt: skip
    model.save_pretrained(f"{folder}/model")
    samples = []
    for number in range((updates + 2) * 8):
        mask = np.array([0] * 32 + [1] * 224)
        ids, logps = random.integers(3, 2048, 256), np.log(1 / 2048) + 0.3 * random.standard_normal(256)
        advantage = float(random.standard_normal())
        samples.append(
            RolloutSample([], [], ids, mask, (logps * mask).astype(np.float32), advantage, 0, number // 8, {})
        )
    args = config_class(
        folder, per_device_train_batch_size=8, num_generations=8, max_steps=updates, **QUIET, **settings
    )
    trainer = trainer_class(
        f"{folder}/model", [len], args, task.train_dataset, processing_class=tokenizer,
        rollout_worker=ScriptedWorker(samples), weight_transfer=NoTransfer(),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure_cost(updates: int = 16) -> None:
    """Compare the CPU time of updates of both trainers, which take turns. Ratios are of the same update's times."""
    from tests.helpers.asynchronous import on_cpu

    torch.set_num_threads(1)
    kinds = {
        "AsyncGRPOTrainer": (AsyncGRPOTrainer, AsyncGRPOConfig, {}),
        "again": (AsyncGRPOTrainer, AsyncGRPOConfig, {}),
        "carried_over": (AsyncBAPOTrainer, AsyncBAPOConfig, {"search_scope": "carried_over"}),
        "micro_batch": (AsyncBAPOTrainer, AsyncBAPOConfig, {"search_scope": "micro_batch"}),
    }
    turns = [threading.Semaphore(number == 0) for number in range(len(kinds))]
    clocks = {name: TakesTurns(turns[n], turns[(n + 1) % len(turns)]) for n, name in enumerate(kinds)}
    with tempfile.TemporaryDirectory() as folder, on_cpu():
        trainers = [
            random_trainer(f"{folder}/{name}", *classes, updates, **settings)
            for name, (*classes, settings) in kinds.items()
        ]
        for trainer, clock in zip(trainers, clocks.values(), strict=True):
            trainer.add_callback(clock)
        threads = [threading.Thread(target=trainer.train) for trainer in trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seconds = {name: np.array(clock.seconds[2:]) for name, clock in clocks.items()}  # the first ones allocate
    print({name: each.round(3).tolist() for name, each in seconds.items()})
    base = seconds.pop("AsyncGRPOTrainer")
    results = [{"trainer": name, "over AsyncGRPOTrainer": spread(list(each / base))} for name, each in seconds.items()]
    save_result("async_cost", {"samples": 8, "tokens": 256, "layers": 4, "updates": updates}, results)


def rates_of_pilot(rows: Iterable[Row]) -> dict[tuple[str, int], float]:
    """Return the best learning rate of each method at each staleness, from the pilot's runs."""
    return best_rates((row for row in rows if row.seed == PILOT_SEED), lambda row: (row.arm, row.sweep["staleness"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", action="store_true", help="the runs at the best rates of the pilot")
    parser.add_argument("--cost", action="store_true", help="the time of an update instead")
    options = parser.parse_args()
    if options.cost:
        return measure_cost()
    finished = read_rows(STUDY)
    if options.seeds:
        best = rates_of_pilot(finished.values())
        runs = [(*place, rate, seed) for seed in SEEDS for place, rate in best.items()]
    else:
        places = itertools.product(reversed(STALENESS), RATES, ARMS)
        runs = [(arm, staleness, rate, PILOT_SEED) for staleness, rate, arm in places]
        at_edge = [place for place, rate in rates_of_pilot(finished.values()).items() if rate == RATES[0]]
        runs += [(*place, RATES[0] / 2, PILOT_SEED) for place in at_edge]  # by a second call
    missing = {key: run for run in runs if (key := "-".join(map(str, run))) not in finished}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        for key, row in zip(missing, pool.map(train, *zip(*missing.values(), strict=True)), strict=True):
            write_row(row, STUDY / FOLDER / f"{key}.json")
            print(f"{key}: {row.final:.3f}, {row.seconds:.0f} s", flush=True)
    rows = [row for row in read_rows(STUDY).values() if (row.seed == PILOT_SEED) != options.seeds]
    print(as_markdown(compare(rows, list(ARMS), baseline="GRPO")))


if __name__ == "__main__":
    main()
