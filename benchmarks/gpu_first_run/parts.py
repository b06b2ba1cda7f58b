"""The parts of the first run on a GPU: the cases of each, as functions that return a row of figures."""

import gc
import math
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import bapo_trl
from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.clip_bounds import MEASURES
from bapo_trl.tasks import character_tokenizer
from benchmarks import partial_rollouts, search_cost
from benchmarks.common import synchronize
from benchmarks.gpu_first_run.shapes import SIZES, Load, Shape, Sizes, end_by_hazards, lora, make_model
from benchmarks.update_cost import SteppedTraining


MICRO_BATCHES = 4
WARMUP_ROUNDS = 2
SCOPES = ("batch", "micro_batch", "carried_over")
FIXED = {"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2}
HALF_WEIGHT = {"loss_type": "vespo", "negative_weight_min": 0.5, "positive_contribution_target": 1.0}
PARTIAL: dict[str, Any] = {
    "partial_rollout_oversampling": 1.5,
    "partial_rollout_chunk_length": 4,
    "max_completion_length": 32,
}
PARTIAL_MEDIAN_TOKENS = 8  # of lengths that differ: else all end at once, and none is carried over


@dataclass(frozen=True)
class Setup:
    """What the command was asked for."""

    device: str
    sizes_name: str
    seed: int

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.sizes_name]

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class Part:
    """Independent cases under one time limit."""

    cases: Callable[[Setup], dict[str, Callable[[], dict]]]
    limit_s: float
    needs_gpu: bool = False

    def runs_on(self, device: str) -> bool:
        return device == "cuda" or not self.needs_gpu


def reward(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward what differs from row to row, so that no group ties."""
    return [((sum(map(ord, text)) + len(ids)) % 7) / 7 for text, ids in zip(completions, completion_ids, strict=True)]


def settings_for(setup: Setup, rows: int, completion_tokens: int, **settings: Any) -> dict[str, Any]:
    """Return settings of GRPOConfig: TRL's defaults but for sizes, device and what would be written."""
    chosen = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_generation": MICRO_BATCHES,
        "num_iterations": 2,
        "num_generations": 4,
        "max_completion_length": completion_tokens,
        "max_steps": 2,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": setup.seed,
    }
    on_cpu = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
    return {**chosen, **({} if setup.on_gpu else on_cpu), **settings}


def make_trainer(kind: str, model: Any, folder: str, settings: dict[str, Any], **options: Any) -> GRPOTrainer:
    """Return a trainer: `kind` is "grpo", or the search scope of a `BAPOTrainer`."""
    data = Dataset.from_dict({"prompt": [f"{i}+{i + 1}=" for i in range(64)]})
    options = {"train_dataset": data, "processing_class": character_tokenizer(), "callbacks": [], **options}
    if kind == "grpo":
        trainer = GRPOTrainer(model, reward, GRPOConfig(folder, **settings), **options)
    else:
        trainer = BAPOTrainer(model, reward, BAPOConfig(folder, search_scope=kind, **settings), **options)
    trainer.remove_callback(PrinterCallback)
    return trainer


def trained_model(setup: Setup, shape: Shape, uses_lora: bool) -> Any:
    """Return a model on the device: in float32, as TRL trains all weights under autocast; under LoRA in bfloat16."""
    dtype = torch.bfloat16 if uses_lora and setup.on_gpu else torch.float32
    return make_model(shape, setup.device, dtype, setup.seed)


# 1. It runs


def runs(setup: Setup) -> dict[str, Callable[[], dict]]:
    later = {"max_steps": 4}  # the second generation meets what the first has left
    settings: dict[str, tuple[str, dict, bool]] = {
        "GRPOTrainer": ("grpo", {}, False),
        "batch": ("batch", {}, False),
        "micro_batch": ("micro_batch", {}, False),
        "carried_over": ("carried_over", {"negative_weight_min": 0.5}, False),
        "replay": (
            "batch",
            {"replay_capacity": 64, "replay_fraction": 0.5, "replay_max_staleness": 8, **later},
            False,
        ),
        "partial rollouts": ("batch", {**PARTIAL, **later}, False),
        "LoRA": ("batch", {}, True),
        "VESPO, half the weight": ("batch", HALF_WEIGHT, False),
    }
    cases = {name: partial(_train, setup, *given) for name, given in settings.items()}
    return {**cases, "fixed bounds against GRPOTrainer": partial(_compare_fixed_bounds, setup)}


def _train(setup: Setup, kind: str, settings: dict, uses_lora: bool) -> dict:
    sizes = setup.sizes
    with tempfile.TemporaryDirectory() as folder:
        model = _model_for(setup, settings, uses_lora)
        given = settings_for(setup, 4, sizes.completion_tokens, **settings)
        trainer = make_trainer(kind, model, folder, given, peft_config=lora() if uses_lora else None)
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    numbers = [log[key] for log in logs for key in ("loss", "grad_norm")]
    bounds = [] if kind == "grpo" else vars(trainer.clip_bounds).values()
    tensors = [value for value in bounds if isinstance(value, torch.Tensor)]
    misplaced = [str(tensor.device) for tensor in tensors if tensor.device.type != setup.device]
    row = {
        "updates": trainer.state.global_step,
        "losses": [log["loss"] for log in logs],
        "gradient_norms": [log["grad_norm"] for log in logs],
        "is_finite": all(math.isfinite(number) for number in numbers),
        "misplaced_tensors": misplaced,
        "dtypes": sorted({str(weight.dtype) for weight in trainer.model.parameters()}),
        "gradient_checkpointing": trainer.args.gradient_checkpointing,
        "bf16": trainer.args.bf16,
    }
    own = ("bapo/clip_low", "bapo/clip_high", "replay/fraction", "partial/segments_max", "staleness/max")
    return {**row, **{key: [log.get(key) for log in logs] for key in own if any(key in log for log in logs)}}


def _model_for(setup: Setup, settings: dict, uses_lora: bool) -> Any:
    if PARTIAL.items() <= settings.items():
        model = trained_model(setup, replace(setup.sizes.trained, ties_embeddings=False), uses_lora)
        longest, first = PARTIAL["max_completion_length"], len(character_tokenizer())
        end_by_hazards(model, PARTIAL_MEDIAN_TOKENS, partial_rollouts.TAIL, longest, first_token=first)
        return model
    return trained_model(setup, setup.sizes.trained, uses_lora)


def _compare_fixed_bounds(setup: Setup) -> dict:
    """Train twice with GRPOTrainer and once with BAPOTrainer at the same bounds: the first pair is the noise."""
    weights = []
    for kind, settings in (("grpo", {}), ("grpo", {}), ("batch", FIXED)):
        with tempfile.TemporaryDirectory() as folder:
            given = settings_for(setup, 4, setup.sizes.completion_tokens, **settings)
            trainer = make_trainer(kind, trained_model(setup, setup.sizes.trained, False), folder, given)
            trainer.train()
        weights.append([weight.detach().cpu() for weight in trainer.model.parameters()])
        del trainer
        free()
    first, again, fixed = weights

    def largest_difference(others: list[torch.Tensor]) -> float:
        return max((one - other).abs().max().item() for one, other in zip(first, others, strict=True))

    return {
        "largest_difference": largest_difference(fixed),
        "largest_difference_of_grpo_from_itself": largest_difference(again),
    }


# 2. Cost, and 3. memory


class RandomCompletions:
    """A `rollout_func` of random tokens, of half to all of a length: nothing is generated, and nothing timed of it."""

    def __init__(self, load: Load, seed: int):
        self.load = load
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        longest, end = self.load.completion_tokens, trainer.model.config.eos_token_id
        lengths = torch.randint(longest // 2, longest + 1, (len(prompts),), generator=self.generator).tolist()
        lengths[0] = longest
        tokens = [torch.randint(5, 40, (length - 1,), generator=self.generator).tolist() for length in lengths]
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": prompt_ids, "completion_ids": [[*row, end] for row in tokens], "logprobs": None}


def load_settings(setup: Setup, load: Load, rounds: int) -> dict[str, Any]:
    """Return the settings of updates that train on one generation for the whole run: stale from the second on."""
    updates = WARMUP_ROUNDS + rounds + 1
    return settings_for(
        setup, load.rows, load.completion_tokens, num_iterations=updates, max_steps=updates, learning_rate=1e-6
    )


@contextmanager
def loaded_trainers(setup: Setup, load: Load, kinds: dict[str, str], rounds: int) -> Iterator[dict[str, GRPOTrainer]]:
    """Hand out trainers of one model, by name; at the end the device's memory is free again."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = trained_model(setup, load.shape, load.uses_lora)
        trainers: dict[str, GRPOTrainer] = {}
        for name, kind in kinds.items():
            trainers[name] = make_trainer(
                kind,
                model,
                f"{folder}/{name}",  # a folder has one live run
                load_settings(setup, load, rounds),
                peft_config=lora() if load.uses_lora and not trainers else None,
                rollout_func=RandomCompletions(load, setup.seed),
            )
            model = trainers[name].model  # with the adapter that the first has put on
        yield trainers
    del model, trainers
    free()


def free() -> None:
    """Give back the device's memory that nothing holds."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def cost(setup: Setup) -> dict[str, Callable[[], dict]]:
    return {load.name: partial(_time_updates, setup, load) for load in setup.sizes.loads}


def _time_updates(setup: Setup, load: Load) -> dict:
    kinds = {"grpo": "grpo", "grpo again": "grpo", **{scope: scope for scope in SCOPES}}
    with loaded_trainers(setup, load, kinds, load.rounds) as trainers:
        updates = {name: SteppedTraining(trainer) for name, trainer in trainers.items()}
        for update in updates.values():
            update.start()
        seconds: dict[str, list[float]] = {name: [] for name in updates}
        names = list(updates)
        for index in range(WARMUP_ROUNDS + load.rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                synchronize(setup.device)
                start = time.perf_counter()
                updates[name].update()
                synchronize(setup.device)
                seconds[name].append(time.perf_counter() - start)
        for update in updates.values():
            update.finish()
    return {
        "tokens_a_micro_batch": load.rows * load.completion_tokens,
        "micro_batches": MICRO_BATCHES,
        "seconds": {name: values[WARMUP_ROUNDS:] for name, values in seconds.items()},
    }


class MemoryReader(TrainerCallback):
    """The most that the device held in the last update, and what it held as each of its micro-batches began."""

    def __init__(self):
        self.peak = 0
        self.between: list[int] = []

    def watch(self, trainer: GRPOTrainer) -> None:
        compute_loss = trainer.compute_loss

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.between.append(torch.cuda.memory_allocated())
            return compute_loss(*args, **kwargs)

        trainer.compute_loss = watched  # ty: ignore

    def on_step_begin(self, args, state, control, **kwargs):
        self.between = []
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args, state, control, **kwargs):
        self.peak = torch.cuda.max_memory_allocated()


def memory(setup: Setup) -> dict[str, Callable[[], dict]]:
    return {load.name: partial(_read_memory, setup, load) for load in setup.sizes.loads}


def _read_memory(setup: Setup, load: Load) -> dict:
    row: dict[str, Any] = {"completion_tokens": load.rows * load.completion_tokens * MICRO_BATCHES}
    for kind in ("grpo", *SCOPES):
        with loaded_trainers(setup, replace(load, rounds=1), {kind: kind}, rounds=1) as trainers:
            reader = MemoryReader()
            trainers[kind].add_callback(reader)
            reader.watch(trainers[kind])
            trainers[kind].train()
        row[kind] = {"peak_bytes": reader.peak, "bytes_between_micro_batches": reader.between}
    return row


# 4. Reads by the host


def reads(setup: Setup) -> dict[str, Callable[[], dict]]:
    load = setup.sizes.loads[0]
    return {kind: partial(_count_reads, setup, load, kind) for kind in ("grpo", *SCOPES)}


class WatchedUpdate(TrainerCallback):
    """Has the device tell of every call that waits for it, in the last update."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps - 1:
            torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, args, state, control, **kwargs):
        torch.cuda.set_sync_debug_mode("default")


def _in_package(file: str) -> str | None:
    """Return the path of a file from the name of the package on, of ours or TRL's; `None` for another."""
    folders = (Path(package.__file__).parent for package in (bapo_trl, trl))
    return next(
        (str(Path(file).relative_to(folder.parent)) for folder in folders if folder in Path(file).parents), None
    )


def _count_reads(setup: Setup, load: Load, kind: str) -> dict:
    lines: Counter[str] = Counter()

    def keep(message, category, filename, lineno, file=None, line=None):
        if "called a synchronizing" not in str(message):  # and not what torch says of this mode
            return
        stack = traceback.extract_stack()
        place = next((frame for frame in reversed(stack) if _in_package(frame.filename) is not None), stack[-2])
        file = _in_package(place.filename) or place.filename.split("site-packages/")[-1]
        lines[f"{file}:{place.lineno}: {place.line}"] += 1

    with loaded_trainers(setup, load, {kind: kind}, rounds=1) as trainers:
        warnings.simplefilter("always")
        warnings.showwarning = keep  # put back at the end of `loaded_trainers`, which keeps what was there
        trainers[kind].add_callback(WatchedUpdate())
        trainers[kind].train()
    return {"synchronizing_calls": lines.total(), "lines": dict(lines.most_common())}


# 5. The search


def search(setup: Setup) -> dict[str, Callable[[], dict]]:
    return {measure: partial(_time_search, setup, measure) for measure in MEASURES}


def _time_search(setup: Setup, measure: str) -> dict:
    rows, target = setup.sizes.search_rows, search_cost.OUT_OF_REACH
    tokens = search_cost.make_tokens(setup.device, rows)
    search_cost.check_same_bounds(tokens, measure)
    on_cpu = search_cost.make_tokens("cpu", rows)
    targets = (0.1, 0.25, 0.3, 0.33, 0.36, 0.4, target)
    bounds = [search_cost.fast_search(*tokens, measure, at) for at in targets]
    bounds_on_cpu = [search_cost.fast_search(*on_cpu, measure, at) for at in targets]
    functions = {"search": search_cost.fast_search, **search_cost.LOOPS}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(2 + 7):
        for name, function in functions.items():
            timed = partial(function, *tokens, measure, target)
            seconds[name].append(search_cost.time_s(timed, setup.device))
    return {
        "tokens": rows * search_cost.LENGTH_TOKENS,
        "seconds": {name: values[2:] for name, values in seconds.items()},
        "same_bounds_as_on_the_cpu": bounds == bounds_on_cpu,
    }


# 6. Partial rollouts


def rollouts(setup: Setup) -> dict[str, Callable[[], dict]]:
    return {"oversampling 1.5, chunk a quarter of the median": partial(_time_rollouts, setup)}


def _time_rollouts(setup: Setup) -> dict:
    sizes = setup.sizes
    shape = replace(sizes.trained, ties_embeddings=False)
    median, cap = sizes.median_tokens, partial_rollouts.CAP * sizes.median_tokens
    given = {} if not setup.on_gpu else {"use_cpu": False, "bf16": True, "dataloader_pin_memory": True}
    measured: dict[str, list[dict]] = {"whole": [], "partial": []}
    for index in range(sizes.rounds):
        settings = {"whole": partial_rollouts.SYNCHRONOUS, "partial": 1.5}
        for name in list(settings) if index % 2 == 0 else reversed(settings):
            model = trained_model(setup, shape, False)
            end_by_hazards(model, median, partial_rollouts.TAIL, cap, first_token=len(character_tokenizer()))
            row = partial_rollouts.measure(
                settings[name], partial_rollouts.CHUNK, median, sizes.generations,
                {"seed": index, **given}, model, sizes.groups,
            )  # fmt: skip
            measured[name].append(row)
            del model
            free()
    return measured


PARTS = {
    "runs": Part(runs, 180),
    "cost": Part(cost, 240),
    "memory": Part(memory, 180, needs_gpu=True),
    "reads": Part(reads, 90, needs_gpu=True),
    "search": Part(search, 60),
    "rollouts": Part(rollouts, 180),
}
