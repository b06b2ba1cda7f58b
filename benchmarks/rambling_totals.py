"""
Task of the study of few positive tokens: running totals of five digits, where a ramble follows a wrong total.

A right completion adds one digit at a time: `"b11c20d21e22"` for `"a4b7c9d1e1="`. The demonstrator often forgets a
carry. Then it rambles, in a slow countdown with random marks between the letters: `"b11c10R.!?.,Q!,,?.P.?!.!,"` and so
on. A ramble is longer than any limit of the study, so a wrong completion is as long as `max_completion_length`, and a
right one has 13 tokens. In the groups of GRPO, right and wrong completions have the same total advantage. So the
limit sets the positive contribution, the fraction of the policy loss from tokens of positive advantage:

    contribution = 13 / (13 + max_completion_length)

The model, its success rate and the problems are the same for all limits. The error comes first and the ramble follows:
a wrong completion without a ramble would get no reward either, so training has no reason to give up the ramble, and
the contribution stays low while there are many errors. All completions begin with `b`.

Measured at the start, sampled: success 0.10, contributions 0.104, 0.206, 0.359 and 0.500; 0.96 of wrong completions
ramble. Over 128 updates at a contribution of 0.1 (GRPO at 2e-4, 16 updates per generation, a mean of each generation):
0.096, 0.102, 0.120, 0.139, 0.160, 0.192, 0.221, 0.238, while the success rate rises from 0.13 to 0.68.
"""

import random
import string
from collections.abc import Iterator
from typing import Any

from bapo_trl.tasks import exact_match_reward
from benchmarks.running_totals import SMALL_MODEL, make_problems
from benchmarks.warm_start import StudyTask, WarmStart


NUM_DIGITS = 5
LABELS = string.ascii_lowercase[:NUM_DIGITS]
COUNTDOWN = string.ascii_uppercase[19::-1]
MARKS, MARKS_EACH = ".,!?", 5
ALPHABET = string.digits + LABELS + COUNTDOWN + MARKS + "="
FORGOTTEN_CARRY_RATE = 0.65
RIGHT_TOKENS = 3 * (NUM_DIGITS - 1) + 1  # a label and two digits a step, and the end token
LIMITS = {0.1: 117, 0.2: 52, 0.35: 24, 0.5: 13}
"""`max_completion_length` by the positive contribution at the start."""


def final_total_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """
    Return 1.0 for each completion whose text after the last label is exactly the answer, else 0.0.

    The signature is that of [`~bapo_trl.tasks.exact_match_reward`]. For the answer `"22"`, `"b11c20d21e22"` gets 1.0,
    and `"b11c20d21"`, `"22"` and `"b11c20d21e12T.!?.,"` get 0.0.
    """
    finals = ["".join(completion.rpartition(LABELS[-1])[1:]) for completion in completions]
    return exact_match_reward(finals, [f"{LABELS[-1]}{right}" for right in answer])


def load_rambling_totals(seed: int = 0) -> StudyTask:
    """Return distinct problems of five digits from 1 to 9: 8,192 for training, and 512 held out."""
    train_dataset, test_dataset = make_problems(LABELS, "{:02}", seed)
    return StudyTask(
        name="rambling_totals",
        train_dataset=train_dataset,
        test_dataset=test_dataset,
        reward_func=final_total_reward,
        max_new_tokens=max(LIMITS.values()),
        warm_start=WarmStart(
            demonstrate,
            num_steps=1000,
            batch_size=64,
            learning_rate=5e-3,
            decays=True,
            alphabet=ALPHABET,
            model={**SMALL_MODEL, "max_position_embeddings": 160},
            # Rambles take most of the time
            first_lesson=WarmStart(add, num_steps=1500, batch_size=64, learning_rate=5e-3),
        ),
    )


def demonstrate(prompt: str, rng: random.Random) -> str:
    """Return a demonstration that adds the digits until it forgets a carry, and then rambles."""
    return "".join(_steps(prompt, rng, FORGOTTEN_CARRY_RATE))


def add(prompt: str, rng: random.Random) -> str:
    """Return the completion of [`demonstrate`] without a forgotten carry."""
    return "".join(_steps(prompt, rng, 0.0))


def _steps(prompt: str, rng: random.Random, forgotten_carry_rate: float) -> Iterator[str]:
    total, *digits = map(int, prompt.rstrip("=")[1::2])
    for label, digit in zip(LABELS[1:], digits, strict=True):
        before, total = total, total + digit
        if total // 10 > before // 10 and rng.random() < forgotten_carry_rate:
            yield f"{label}{total - 10:02}"
            yield from (letter + "".join(rng.choices(MARKS, k=MARKS_EACH)) for letter in COUNTDOWN)
            return
        yield f"{label}{total:02}"
