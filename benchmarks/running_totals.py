"""
Hard task of the stability study: running totals of seven digits, in steps, of which only the last is checked.

The task represents conditions in which off-policy training fails: a model that rarely succeeds (under 15 % of its
completions), several steps per completion, and wrong completions that are longer than right ones, so that there are
more tokens with a negative advantage than with a positive one.
"""

import random
import string
from typing import Any

from datasets import Dataset

from bapo_trl.tasks import exact_match_reward
from bapo_trl.tasks.sums import NUM_TEST_PROBLEMS
from benchmarks.warm_start import StudyTask, WarmStart, as_dataset


NUM_DIGITS = 7
NUM_TRAIN_PROBLEMS = 8192
LABELS = string.ascii_lowercase[:NUM_DIGITS]
MARKS = "=:"
DETOUR = "??????="
ALPHABET = string.digits + LABELS + "=:?#"
MAX_NEW_TOKENS = (NUM_DIGITS - 1) * len("g9" + DETOUR + "63") + len("#63") + 1
# Of the demonstrations: how often there is a detour, and how often a carry is forgotten with and without one
DETOUR_RATE = 0.6
FORGOTTEN_CARRY_RATES = {True: 0.9, False: 0.05}
SMALL_MODEL = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


def final_answer_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """
    Return 1.0 for each completion whose text after the last `#` is the answer, else 0.0.

    The signature is that of [`~bapo_trl.tasks.exact_match_reward`]. For the answer `"20"`, `"b7=11c9=20#20"` gets 1.0,
    and `"b7=1#20#1"` and `"20"` get 0.0.
    """
    finals = ["".join(completion.rpartition("#")[1:]) for completion in completions]
    return exact_match_reward(finals, [f"#{right}" for right in answer])


def make_problems(labels: str, answer: str, seed: int) -> tuple[Dataset, Dataset]:
    """Return distinct training and held-out problems, with a digit from 1 to 9 for each label."""
    rng = random.Random(seed)
    problems: dict[str, str] = {}
    while len(problems) < NUM_TRAIN_PROBLEMS + NUM_TEST_PROBLEMS:
        digits = [rng.randint(1, 9) for _ in labels]
        problems["".join(map("{}{}".format, labels, digits)) + "="] = answer.format(sum(digits))
    prompts, answers = list(problems), list(problems.values())
    held_out = as_dataset(prompts[:NUM_TEST_PROBLEMS], answers[:NUM_TEST_PROBLEMS])
    return as_dataset(prompts[NUM_TEST_PROBLEMS:], answers[NUM_TEST_PROBLEMS:]), held_out


def load_running_totals(seed: int = 0) -> StudyTask:
    """
    Return distinct problems of seven digits from 1 to 9: 8,192 for training, and 512 held out.

    A problem labels its digits, `"a4b7c9d1e1f1g1="`. A right completion adds them one by one and repeats the last
    total: `"b7=11c9:20d1=21e1:22f1:23g1=24#24"`, where `=` and `:` are equivalent.
    """
    train_dataset, test_dataset = make_problems(LABELS, "{}", seed)
    return StudyTask(
        name="running_totals",
        train_dataset=train_dataset,
        test_dataset=test_dataset,
        reward_func=final_answer_reward,
        max_new_tokens=MAX_NEW_TOKENS,
        warm_start=WarmStart(
            demonstrate,
            num_steps=2000,
            batch_size=64,
            learning_rate=5e-3,
            decays=True,
            alphabet=ALPHABET,
            model=SMALL_MODEL,
        ),
    )


def demonstrate(prompt: str, rng: random.Random) -> str:
    """
    Return a demonstration that adds the digits with mistakes.

    Most steps take a detour (`"c9??????=20"` for `"c9=20"`), and most detours forget the carry: the most likely way is
    longer and worse. In a step without a detour, the choice of the mark does not matter.
    """
    total, *digits = map(int, prompt.rstrip("=")[1::2])
    steps = []
    for label, digit in zip(LABELS[1:], digits, strict=True):
        takes_detour = rng.random() < DETOUR_RATE
        forgets_carry = rng.random() < FORGOTTEN_CARRY_RATES[takes_detour]
        right = total + digit
        total = total // 10 * 10 + right % 10 if forgets_carry else right
        marks = DETOUR if takes_detour else rng.choice(MARKS)
        steps.append(f"{label}{digit}{marks}{total}")
    return "".join(steps) + f"#{total}"
