"""
Build the models that RL starts from in the studies, once per seed, in a cache folder.

    python -m benchmarks.warm_start

Writes the model of the demo, which is part of the package (`bapo_trl/tasks/sums_model/`).
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import transformers
from datasets import Dataset

from bapo_trl.tasks import MadeTask, character_tokenizer, load_task, sums_model_path
from bapo_trl.tasks.cache import cached_folder
from bapo_trl.tasks.sums import LARGEST_NUMBER
from benchmarks.tiny_model import MODEL_SETTINGS, tiny_model


# The model learns to forget carries (37+58=85) together with the right way, and settles at an accuracy that hardly
# depends on the seed; RL is to unlearn it.
FORGOTTEN_CARRY_RATE = 0.75
IGNORED_LABEL = -100
UNHASHED = ("demonstrate", "first_lesson")  # one as what it writes, the other as a lesson of its own


@dataclass(frozen=True)
class WarmStart:
    """Settings of the supervised training, on demonstrations with mistakes, of the model that RL starts from."""

    demonstrate: Callable[[str, random.Random], str]  # writes the completion of a careless demonstrator to a prompt
    num_steps: int = 600  # updates: a fixed number, not an accuracy to reach, so that a seed gives the same weights
    batch_size: int = 128  # demonstrations an update
    learning_rate: float = 3e-3  # at its peak, of AdamW
    warmup_steps: int = 50  # updates over which the learning rate rises from 0
    decays: bool = False  # whether the learning rate falls to 0 over the second half of the updates
    alphabet: str | None = None  # characters of the tokenizer; `None` for all bytes
    model: Mapping[str, int] = field(default_factory=dict)  # settings that differ from those of `tiny_model`
    # What the model learns before, from other demonstrations; its `alphabet`, `model` and `first_lesson` are not read
    first_lesson: "WarmStart | None" = None


@dataclass(frozen=True)
class StudyTask(MadeTask):
    """Task in plain text and its initial model. The names of its warm-start folders begin with the task's name."""

    max_new_tokens: int  # longest completion, with its end token, that training and evaluation should allow
    warm_start: WarmStart  # how the model to begin with is made


def load_sums(seed: int = 0) -> StudyTask:
    """Return the sums of the demo."""
    longest = len(str(2 * LARGEST_NUMBER)) + 1
    return StudyTask(**vars(load_task(seed)), max_new_tokens=longest, warm_start=WarmStart(demonstrate))


def as_dataset(prompts: list[str], answers: list[str]) -> Dataset:
    """Return a dataset with the columns `prompt` and `answer`."""
    return Dataset.from_dict({"prompt": prompts, "answer": answers})


def demonstrate(prompt: str, rng: random.Random) -> str:
    """Return a demonstration: `"37+58="` gives `"95"` or, with the carry forgotten, `"85"`."""

    def carry(column: int) -> int:
        return int(column >= 10 and rng.random() >= FORGOTTEN_CARRY_RATE)

    a, b = map(int, prompt.rstrip("=").split("+"))
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + carry(ones)
    return str(100 * carry(tens) + 10 * (tens % 10) + ones % 10)


def warm_start_path(seed: int = 0, task: StudyTask | None = None) -> Path:
    """
    Return the folder of a task's warm-started model and tokenizer, and build it on first use.

    The folder is in the cache ([`~cache.cached_folder`]), in Hugging Face format. Its name contains a hash of
    everything that determines the weights: task (by default `load_sums(seed)`), model, training settings, library
    versions, and the seed of the initial weights and the demonstrations.
    """
    task = load_sums(seed) if task is None else task
    return cached_folder(
        f"{task.name}-{_fingerprint(seed, task)}",
        "the warm-start model (20 s to 2 minutes)",
        partial(_build, seed=seed, task=task),
    )


def _fingerprint(seed: int, task: StudyTask) -> str:
    """Return a hash of everything that determines the weights."""
    prompts, shaping = task.train_dataset["prompt"][:], []
    for lesson in _lessons(task.warm_start):
        rng = random.Random(seed)
        shaping.append([lesson.demonstrate(prompt, rng) for prompt in prompts])
        shaping.append(
            {key: value for key, value in vars(lesson).items() if key not in ("demonstrate", "first_lesson")}
        )
    shaping += [prompts, character_tokenizer(task.warm_start.alphabet).get_vocab(), MODEL_SETTINGS]
    shaping += [seed, torch.__version__, transformers.__version__]
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:12]


def _lessons(warm_start: WarmStart) -> list[WarmStart]:
    """Return the lessons of the model, in order."""
    return [lesson for lesson in (warm_start.first_lesson, warm_start) if lesson is not None]


def _build(folder: Path, seed: int, task: StudyTask) -> None:
    """Train the model on demonstrations and save it with its tokenizer."""
    tokenizer = character_tokenizer(task.warm_start.alphabet)
    model = tiny_model(tokenizer, seed, **task.warm_start.model).train()
    for lesson in _lessons(task.warm_start):
        _teach(model, tokenizer, lesson, task.train_dataset["prompt"][:], seed)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _teach(model, tokenizer, settings: WarmStart, prompts: list[str], seed: int) -> None:
    """Train the model on the demonstrations of a lesson."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)

    def share_of_learning_rate(step: int) -> float:
        left = 2 * (1 - step / settings.num_steps) if settings.decays else 1.0
        return min(1.0, (step + 1) / max(1, settings.warmup_steps), left)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_learning_rate)
    rng = random.Random(seed)
    for _ in range(settings.num_steps):
        chosen = rng.choices(prompts, k=settings.batch_size)
        batch = _collate(tokenizer, chosen, [settings.demonstrate(prompt, rng) for prompt in chosen])
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _collate(tokenizer, prompts: list[str], completions: list[str]) -> dict[str, torch.Tensor]:
    """Pad prompts on the left and completions on the right, as in generation; only completions have labels."""
    left = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    right = tokenizer(
        [text + tokenizer.eos_token for text in completions], padding=True, padding_side="right", return_tensors="pt"
    )
    labels = right["input_ids"].masked_fill(right["attention_mask"] == 0, IGNORED_LABEL)
    attention_mask = torch.cat([left["attention_mask"], right["attention_mask"]], dim=1)
    return {
        "input_ids": torch.cat([left["input_ids"], right["input_ids"]], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "labels": torch.cat([torch.full_like(left["input_ids"], IGNORED_LABEL), labels], dim=1),
    }


if __name__ == "__main__":
    shutil.copytree(warm_start_path(), sums_model_path(), dirs_exist_ok=True)
    print(f"Written: {sums_model_path()}")
