"""The model RL starts from: built once from a seed, kept in a cache folder."""

import hashlib
import json
import random
from functools import partial
from pathlib import Path

import torch
import transformers

from .cache import cached_folder
from .embedded import EmbeddedTask, WarmStart
from .model import MODEL_SETTINGS, character_tokenizer, tiny_model
from .sums import load_task


IGNORED_LABEL = -100


def warm_start_path(seed: int = 0, task: EmbeddedTask | None = None) -> Path:
    """
    Give the folder of the warm-started model of a task and its tokenizer, building it on first use.

    The folder lies in the cache ([`~cache.cached_folder`]), in Hugging Face format. Its name contains a hash of all
    that shapes the weights: task (by default `load_task(seed)`), model, training settings, library versions, and seed,
    of the initial weights and the demonstrations.
    """
    task = load_task(seed) if task is None else task
    return cached_folder(
        f"{task.name}-{_fingerprint(seed, task)}",
        "the warm-start model",
        "20 s to 2 minutes",
        partial(_build, seed=seed, task=task),
    )


def save_warm_start_shape(folder: Path) -> None:
    """Write configuration and tokenizer of the model of [`warm_start_path`], and no weights."""
    warm_start = load_task().warm_start
    tokenizer = character_tokenizer(warm_start.alphabet)
    tiny_model(tokenizer, seed=0, **warm_start.model).config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fingerprint(seed: int, task: EmbeddedTask) -> str:
    """Hash all that shapes the weights."""
    lessons = [
        {**vars(lesson), "demonstrations": _demonstrations(lesson, task, seed)} for lesson in _lessons(task.warm_start)
    ]
    for lesson in lessons:
        del lesson["demonstrate"], lesson["first_lesson"]  # hashed as what they write, and as a lesson of its own
    *before, training = lessons
    shaping = {
        **({"before": before} if before else {}),
        "demonstrations": training.pop("demonstrations"),
        "vocabulary": character_tokenizer(task.warm_start.alphabet).get_vocab(),
        "model": {**MODEL_SETTINGS, **task.warm_start.model},
        "training": training,
        "seed": seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:12]


def _lessons(warm_start: WarmStart) -> list[WarmStart]:
    """Return what the model learns, in order."""
    return [lesson for lesson in (warm_start.first_lesson, warm_start) if lesson is not None]


def _demonstrations(lesson: WarmStart, task: EmbeddedTask, seed: int) -> list[str]:
    """Return each prompt with what the demonstrator writes, from a seed."""
    rng = random.Random(seed)
    return [prompt + lesson.demonstrate(prompt, rng) for prompt in task.train_dataset["prompt"]]


def _build(folder: Path, seed: int, task: EmbeddedTask) -> None:
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
    """Pad prompts on the left and completions on the right, as generation sees them; only completions have labels."""
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
