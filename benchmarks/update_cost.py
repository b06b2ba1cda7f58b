"""
Time optimizer updates of `BAPOTrainer` against those of `GRPOTrainer`, on the same stale samples.

    python -m benchmarks.update_cost
    python -m benchmarks.update_cost --device cuda

Both trainers run their own `train()` in one process and alternate, one update each: one waits while the other works,
and who goes first changes from round to round. The time of an update is all that `train()` does between two
`on_step_begin` events: micro-batches, clipping of the gradient, optimizer step, logging.

Both trainers generate in the same way, so generation is left out: one prepared batch is reused for the whole run. On
the first update this batch is still fresh. That update is among the rounds that warm up and are not counted.

The time of an update varies by a few percent with the place of its tensors in memory. Some of the differences looked
for are smaller. Against that:

- Both trainers train the same model.
- Freed memory stays with the process (`keep_freed_memory`).
- Everything is run twice, once with each trainer made first; the ratio of a round is the geometric mean of the two
  runs' ratios BAPO / GRPO, and a figure is the median over the rounds.
- The row `control` times `GRPOTrainer` against itself: what it differs from 1 is noise.

The ratio of the CPU times of the process is given, too: it leaves out waiting for a core on a busy machine. The model
is a randomly initialised Qwen2.
"""

import argparse
import math
import statistics
import tempfile
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import PrinterCallback, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import character_tokenizer
from benchmarks.common import keep_freed_memory, save_result, spread, synchronize


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a micro-batch."""

    hidden: int
    layers: int
    vocabulary: int
    rows: int
    prompt_tokens: int
    completion_tokens: int


SIZES = {
    "cpu": Size(hidden=256, layers=4, vocabulary=1024, rows=4, prompt_tokens=32, completion_tokens=224),
    "cuda": Size(hidden=1024, layers=24, vocabulary=32768, rows=8, prompt_tokens=128, completion_tokens=896),
}


@dataclass(frozen=True)
class Setting:
    """One row of the results. `scope` is `None` for the control, `GRPOTrainer` in place of `BAPOTrainer`."""

    name: str
    scope: str | None
    micro_batches: int
    gradient_checkpointing: bool
    target: float | None


SETTINGS = (
    Setting("control", None, 4, False, None),
    Setting("micro_batch", "micro_batch", 4, False, 1.02),
    Setting("carried_over", "carried_over", 4, False, 1.02),
    Setting("batch", "batch", 4, False, 1.40),
    Setting("batch_checkpointing", "batch", 4, True, 1.30),
    Setting("batch_of_one", "batch", 1, False, 1.02),
)
WARMUP_ROUNDS = 3


class SteppedTraining(TrainerCallback):
    """
    A trainer whose `train()` runs in a thread of its own, and only while an update is asked for.

    The thread stops at every `on_step_begin`. So updates of several trainers can alternate and never overlap.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self.forwards = 0  # forward passes of the model
        self._resume = threading.Semaphore(0)
        self._stops: SimpleQueue[Exception | None] = SimpleQueue()
        self._around: AbstractContextManager = nullcontext()
        self._entered = ExitStack()
        self._thread = threading.Thread(target=self._train, daemon=True)
        trainer.add_callback(self)
        trainer.model.register_forward_pre_hook(self._count_forward)

    def start(self):
        """Run up to the first update."""
        self._thread.start()
        self._wait_for_stop()

    def update(self, around: AbstractContextManager | None = None):
        """Run one update, up to the next one, in the thread of the training `around` it."""
        self._around = nullcontext() if around is None else around
        self._resume.release()
        self._wait_for_stop()

    def finish(self):
        """Run the last update and end the training."""
        self.update()
        self._thread.join()

    def on_step_begin(self, args, state, control, **kwargs):
        """Hand over to the caller until it asks for this update."""
        self._entered.close()
        self._stops.put(None)
        self._resume.acquire()
        self._entered.enter_context(self._around)

    def _train(self):
        try:
            self.trainer.train()
        except Exception as error:
            self._stops.put(error)
        else:
            self._stops.put(None)

    def _wait_for_stop(self):
        error = self._stops.get()
        if error is not None:
            raise error

    def _count_forward(self, module, inputs):
        self.forwards += 1


def prepared_batch(trainer: GRPOTrainer, size: Size) -> dict[str, torch.Tensor]:
    """
    Return a generation batch with the keys of TRL's: random tokens of uneven length, one row in four rewarded.

    The samples' log-probabilities are those of the model with noise, so that ratios are spread around 1.
    """
    device = trainer.accelerator.device
    rows = size.rows * trainer.args.steps_per_generation
    generator = torch.Generator().manual_seed(0)

    def random_ids(length: int) -> torch.Tensor:
        return torch.randint(size.vocabulary, (rows, length), generator=generator).to(device)

    lengths = torch.randint(size.completion_tokens // 2, size.completion_tokens + 1, (rows, 1), generator=generator)
    lengths[0] = size.completion_tokens
    completion_mask = (torch.arange(size.completion_tokens) < lengths).int().to(device)
    is_rewarded = torch.arange(rows, device=device) % 4 == 0
    batch = {
        "prompt_ids": random_ids(size.prompt_tokens),
        "prompt_mask": torch.ones(rows, size.prompt_tokens, dtype=torch.int, device=device),
        "completion_ids": random_ids(size.completion_tokens),
        "completion_mask": completion_mask,
        "advantages": torch.where(is_rewarded, 3**0.5, -(3**-0.5)),  # rewards 1, 0, 0, 0 over their deviation
        "num_items_in_batch": completion_mask.sum(),
    }
    with torch.no_grad():
        logps, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            size.completion_tokens,
            batch_size=size.rows,
        )
    noise = 0.3 * torch.randn(logps.shape, generator=generator)
    return {**batch, "old_per_token_logps": logps.float() + noise.to(device)}


def make_model(size: Size) -> Qwen2ForCausalLM:
    """Return a Qwen2 with random weights."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=max(1, size.hidden // 128),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def make_trainer(model, scope: str | None, setting: Setting, size: Size, rounds: int, device: str, folder: str):
    """Return a `BAPOTrainer` with this search scope, or a `GRPOTrainer` if `scope` is `None`."""
    on_cpu = torch.device(device).type == "cpu"
    updates = WARMUP_ROUNDS + rounds + 1  # the last one ends the training and is not counted
    arguments = {
        "per_device_train_batch_size": size.rows,
        "gradient_accumulation_steps": setting.micro_batches,
        "steps_per_generation": setting.micro_batches,
        "num_iterations": updates,  # one generation for all updates
        "num_generations": size.rows,
        "max_completion_length": size.completion_tokens,
        "max_steps": updates,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": setting.gradient_checkpointing,
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    options = {
        "reward_funcs": lambda completions, **kwargs: [0.0] * len(completions),
        "train_dataset": Dataset.from_dict({"prompt": [str(i) for i in range(setting.micro_batches * size.rows)]}),
        "processing_class": character_tokenizer(),
    }
    if scope is None:
        trainer = GRPOTrainer(model, args=GRPOConfig(folder, **arguments), **options)
    else:
        weight = 0.05 if scope == "carried_over" else 1.0  # with all that this scope is for
        config = BAPOConfig(folder, search_scope=scope, negative_weight_min=weight, **arguments)
        trainer = BAPOTrainer(model, args=config, **options)
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure_setting(setting: Setting, size: Size, rounds: int, device: str) -> dict:
    """Return one row of the results."""
    halves = [_measure_pair(setting, size, rounds, device, order) for order in (("grpo", "bapo"), ("bapo", "grpo"))]

    def ratio(clock: str) -> dict[str, float | int]:
        pairs = [zip(half["grpo", clock], half["bapo", clock], strict=True) for half in halves]
        ratios = [[bapo / grpo for grpo, bapo in half] for half in pairs]
        return spread([math.sqrt(first * second) for first, second in zip(*ratios, strict=True)])

    return {
        **asdict(setting),
        "ratio": ratio("wall"),
        "cpu_time_ratio": ratio("cpu"),
        "grpo_update_s": round(statistics.median(seconds for half in halves for seconds in half["grpo", "wall"]), 3),
    }


def _measure_pair(
    setting: Setting, size: Size, rounds: int, device: str, order: tuple[str, str]
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of each counted update by trainer and clock; the trainers are made and started in `order`."""

    def generate(trainer, inputs):
        torch.manual_seed(0)  # TRL shuffles what comes back: alike for both trainers
        return prepared_batch(trainer, size)

    replaced_generation = patch.object(GRPOTrainer, "_generate_and_score_completions", generate)
    with tempfile.TemporaryDirectory() as folder, replaced_generation:
        model = make_model(size)
        scopes = {"grpo": None, "bapo": setting.scope}
        runs = {
            name: SteppedTraining(make_trainer(model, scopes[name], setting, size, rounds, device, folder))
            for name in order
        }
        for run in runs.values():
            run.start()
        times_s = {(name, clock): [] for name in order for clock in ("wall", "cpu")}
        for i in range(WARMUP_ROUNDS + rounds):
            for name in order if i % 2 == 0 else reversed(order):
                forwards_before = runs[name].forwards
                synchronize(device)
                wall_start, cpu_start = time.perf_counter(), time.process_time()
                runs[name].update()
                synchronize(device)
                times_s[name, "cpu"].append(time.process_time() - cpu_start)
                times_s[name, "wall"].append(time.perf_counter() - wall_start)
                _check_forwards(name, runs[name].forwards - forwards_before, setting, is_fresh=i == 0)
        for run in runs.values():
            run.finish()
    return {key: seconds[WARMUP_ROUNDS:] for key, seconds in times_s.items()}


def _check_forwards(name: str, forwards: int, setting: Setting, is_fresh: bool):
    # The figure would be void if the samples were fresh and the search could do without its forward passes.
    looks_ahead = name == "bapo" and setting.scope == "batch" and setting.micro_batches > 1
    expected = setting.micro_batches * (2 if looks_ahead else 1)
    if not is_fresh and forwards != expected:
        raise RuntimeError(f"{setting.name}: {forwards} forward passes in an update of {name}, expected {expected}.")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each setting")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()

    keep_freed_memory()
    torch.set_num_threads(args.threads)
    size = SIZES[args.device]
    results = []
    print("setting              micro-batches  checkpointing  BAPO / GRPO (quartiles)  CPU time  target  GRPO update")
    for setting in SETTINGS:
        row = measure_setting(setting, size, args.rounds, args.device)
        results.append(row)
        ratio = row["ratio"]
        print(
            f"{setting.name:<20} {setting.micro_batches:>13}  {setting.gradient_checkpointing!s:>13}  "
            f"{ratio['median']:>9.3f} ({ratio['lower_quartile']:.3f}-{ratio['upper_quartile']:.3f})  "
            f"{row['cpu_time_ratio']['median']:>8.3f}  {setting.target or '-':>6}  {row['grpo_update_s']:>10.2f}s",
            flush=True,
        )
    save_result("update_cost", args.device, {"threads": args.threads, **asdict(size)}, results)


if __name__ == "__main__":
    main()
