"""
The model RL starts from: built once from a seed, kept in a cache folder.

Invariant: a folder under its final name is complete. It is written under a temporary name and renamed, so an
interrupted build is never reused, and of two processes that build at once one wins and both read the same files.
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from .arithmetic import LARGEST_NUMBER, NUM_TEST_PROBLEMS, load_task
from .model import MODEL_SETTINGS, tiny_model
from .tokenizer import VOCABULARY, character_tokenizer


IGNORED_LABEL = -100


@dataclass(frozen=True)
class WarmStartSettings:
    """
    How the warm start is trained.

    Attributes:
        num_steps (`int`):
            Optimizer updates. A fixed number, not an accuracy to reach, so that a seed always gives the same weights.
        batch_size (`int`):
            Demonstrations an update.
        learning_rate (`float`):
            Peak learning rate of AdamW.
        warmup_steps (`int`):
            Updates over which the learning rate rises from 0.
        forgotten_carry_rate (`float`):
            Chance that a demonstration forgets a carry (37+58=85). The model learns this habit together with the right
            way, and settles at an accuracy that hardly depends on the seed; RL is to unlearn it.
    """

    num_steps: int = 600
    batch_size: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    forgotten_carry_rate: float = 0.75


SETTINGS = WarmStartSettings()


def warm_start_path(seed: int = 0) -> Path:
    """
    Give the folder of the warm-started model and its tokenizer, building it on first use.

    The folder lies in `$BAPO_TRL_CACHE`, or in `~/.cache/bapo_trl` if that is not set. Its name contains a hash of all
    that shapes the weights: task, model, training settings, seed and library versions.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the problems, the initial weights and the demonstrations.

    Returns:
        `pathlib.Path`: Folder in Hugging Face format, for `AutoModelForCausalLM.from_pretrained` and
        `AutoTokenizer.from_pretrained`.
    """
    root = Path(os.environ.get("BAPO_TRL_CACHE") or Path.home() / ".cache" / "bapo_trl").expanduser()
    path = root / f"sums-{_fingerprint(seed)}"
    if path.is_dir():
        return path

    root.mkdir(parents=True, exist_ok=True)
    print("Building the warm-start model, once (about 20 s) ...", flush=True)
    started = time.perf_counter()
    unfinished = Path(tempfile.mkdtemp(prefix=f"{path.name}.unfinished-", dir=root))
    try:
        _build(unfinished, seed)
        try:
            unfinished.rename(path)
        except OSError:
            if not path.is_dir():  # anything but another process that finished first
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"Built the warm-start model in {path} ({time.perf_counter() - started:.0f} s, once).", flush=True)
    return path


def _fingerprint(seed: int) -> str:
    """Hash all that shapes the weights."""
    shaping = {
        "task": [LARGEST_NUMBER, NUM_TEST_PROBLEMS],
        "vocabulary": VOCABULARY,
        "model": MODEL_SETTINGS,
        "training": asdict(SETTINGS),
        "seed": seed,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:12]


def _build(folder: Path, seed: int) -> None:
    """Train the model on demonstrations and save it with its tokenizer."""
    tokenizer = character_tokenizer()
    model = tiny_model(tokenizer, seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=SETTINGS.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, SETTINGS.warmup_steps))
    )
    prompts = load_task(seed).train_dataset["prompt"][:]
    rng = random.Random(seed)
    for _ in range(SETTINGS.num_steps):
        chosen = rng.choices(prompts, k=SETTINGS.batch_size)
        batch = _collate(tokenizer, chosen, [_demonstrate(prompt, rng) for prompt in chosen])
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _demonstrate(prompt: str, rng: random.Random) -> str:
    """Add column by column as a careless pupil: `"37+58="` gives `"95"` or, with the carry forgotten, `"85"`."""

    def carry(column: int) -> int:
        return int(column >= 10 and rng.random() >= SETTINGS.forgotten_carry_rate)

    a, b = map(int, prompt.rstrip("=").split("+"))
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + carry(ones)
    return str(100 * carry(tens) + 10 * (tens % 10) + ones % 10)


def _collate(tokenizer, prompts: list[str], answers: list[str]) -> dict[str, torch.Tensor]:
    """Pad prompts on the left and answers on the right, as generation sees them; only answers carry labels."""
    prompt_part = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    answer_part = tokenizer(
        [answer + tokenizer.eos_token for answer in answers], padding=True, padding_side="right", return_tensors="pt"
    )
    answer_labels = answer_part["input_ids"].masked_fill(answer_part["attention_mask"] == 0, IGNORED_LABEL)
    attention_mask = torch.cat([prompt_part["attention_mask"], answer_part["attention_mask"]], dim=1)
    return {
        "input_ids": torch.cat([prompt_part["input_ids"], answer_part["input_ids"]], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        "labels": torch.cat([torch.full_like(prompt_part["input_ids"], IGNORED_LABEL), answer_labels], dim=1),
    }
