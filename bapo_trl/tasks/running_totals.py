"""
The hard task: running totals of seven digits, in steps, of which only the last total is checked.

It stands for the regime in which off-policy training goes wrong: a pupil who seldom succeeds (under 15 % of answers),
several steps an answer, and failed answers that are longer than right ones, so that tokens of negative advantage
outnumber the positive ones.
"""

import random
import string
from typing import Any

from .embedded import NUM_TEST_PROBLEMS, EmbeddedTask, as_dataset
from .sums import exact_match_reward


NUM_DIGITS = 7
NUM_TRAIN_PROBLEMS = 8192
LABELS = string.ascii_lowercase[:NUM_DIGITS]
MARKS = "=:"
DETOUR = "??????="
ALPHABET = string.digits + LABELS + "=:?#"
MAX_NEW_TOKENS = (NUM_DIGITS - 1) * len("g9" + DETOUR + "63") + len("#63") + 1
# The pupil of the demonstrations: how often he takes a detour, and forgets a carry with and without one
DETOUR_RATE = 0.6
FORGOTTEN_CARRY_RATES = {True: 0.9, False: 0.05}


def final_answer_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """
    Reward a completion whose text after the last `#` is the answer; without a `#`, the reward is 0.

    Takes and returns what [`exact_match_reward`] does.

    Example:

    ```python
    >>> final_answer_reward(["b7=11c9=20#20", "b7=1#20#1", "20"], answer=["20", "20", "20"])
    [1.0, 0.0, 0.0]

    ```
    """
    finals = ["".join(completion.rpartition("#")[1:]) for completion in completions]
    return exact_match_reward(finals, [f"#{right}" for right in answer])


def load_running_totals(seed: int = 0) -> EmbeddedTask:
    """
    Make problems of seven digits from 1 to 9, each problem once.

    A problem labels its digits, `"a4b7c9d1e1f1g1="`. A right answer adds one by one and repeats the last total:
    `"b7=11c9:20d1=21e1:22f1:23g1=24#24"`, where `=` and `:` mean the same.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the problems.

    Returns:
        [`EmbeddedTask`]: 8,192 problems to train on and 512 held out.
    """
    rng = random.Random(seed)
    problems: dict[str, str] = {}
    while len(problems) < NUM_TRAIN_PROBLEMS + NUM_TEST_PROBLEMS:
        digits = [rng.randint(1, 9) for _ in range(NUM_DIGITS)]
        problems["".join(map("{}{}".format, LABELS, digits)) + "="] = str(sum(digits))
    prompts, answers = list(problems), list(problems.values())
    return EmbeddedTask(
        train_dataset=as_dataset(prompts[NUM_TEST_PROBLEMS:], answers[NUM_TEST_PROBLEMS:]),
        test_dataset=as_dataset(prompts[:NUM_TEST_PROBLEMS], answers[:NUM_TEST_PROBLEMS]),
        reward_func=final_answer_reward,
        max_new_tokens=MAX_NEW_TOKENS,
        demonstrate=demonstrate,
    )


def demonstrate(prompt: str, rng: random.Random) -> str:
    """
    Add the digits as a careless pupil.

    Most often he takes a detour (`"c9??????=20"` for `"c9=20"`), and on it he forgets the carry more often than
    not: what he likes best is the longer and the worse way. Which mark he writes without a detour makes no difference.

    Args:
        prompt (`str`):
            A problem.
        rng (`random.Random`):
            Decides on detours, carries and marks.

    Returns:
        `str`: The pupil's steps and final answer.
    """
    total, *digits = map(int, prompt.rstrip("=")[1::2])
    steps = []
    for label, digit in zip(LABELS[1:], digits, strict=True):
        takes_detour = rng.random() < DETOUR_RATE
        forgets_carry = rng.random() < FORGOTTEN_CARRY_RATES[takes_detour]
        total = total // 10 * 10 + (total + digit) % 10 if forgets_carry else total + digit
        steps.append(f"{label}{digit}{DETOUR if takes_detour else rng.choice(MARKS)}{total}")
    return "".join(steps) + f"#{total}"
