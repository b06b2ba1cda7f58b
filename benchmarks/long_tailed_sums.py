"""
The task of the partial rollouts' benchmarks: the sums of the demo, in completions of long-tailed length.

A completion is a filler of dots, as long as chance has it, and then the answer: `"......=j5"`. Its length is
lognormal: half of the completions have at most 12 tokens, one of twenty more than five times as many. The answer has
nothing to do with the filler: long completions are as often right as short ones.

The tens of a number are a letter (`"d7"` is 37, `"o3"` is 143). The tiny model then knows a digit by what it is, for
after a filler it cannot know it by where it stands.
"""

import math
import random
import string
from typing import Any

from datasets import Dataset

from bapo_trl.tasks import EmbeddedTask, WarmStart, exact_match_reward, load_task
from bapo_trl.tasks.embedded import as_dataset
from bapo_trl.tasks.sums import demonstrate as add


FILLER = "."
LETTERS = string.ascii_lowercase[:20]  # tens from 0 to 19
# Of the lengths of demonstrations in tokens, the end token among them: lognormal, drawn again above the longest. That
# lowers the median to 12.
SCALE, SIGMA, LONGEST = 13, 1.3, 108
MAX_NEW_TOKENS = 120  # ten times the median; room beyond the longest, for the model learns no sharp end


def final_sum_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """
    Reward a completion that is any number of dots, `=` and the answer, and nothing else.

    Takes and returns what [`~bapo_trl.tasks.exact_match_reward`] does. For the answer `"j5"`, `"....=j5"` and `"=j5"`
    get 1.0, and `"j5"`, `"..=j5."`, `"=.j5"` and `"....."` get 0.0.
    """
    return exact_match_reward([completion.lstrip(FILLER) for completion in completions], [f"={a}" for a in answer])


def load_long_tailed_sums(seed: int = 0) -> EmbeddedTask:
    """
    Make the problems of the demo, in its splits: `"37+58="` reads `"d7+f8"`, and its answer `"j5"`.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Seed of the problems.

    Returns:
        [`~bapo_trl.tasks.EmbeddedTask`]: 9,488 problems to train on and 512 or 513 held out.
    """
    sums = load_task(seed)
    return EmbeddedTask(
        name="long_tailed_sums",
        train_dataset=_with_letters(sums.train_dataset),
        test_dataset=_with_letters(sums.test_dataset),
        reward_func=final_sum_reward,
        max_new_tokens=MAX_NEW_TOKENS,
        warm_start=WarmStart(
            demonstrate,
            num_steps=500,
            batch_size=32,
            decays=True,
            alphabet=string.digits + LETTERS + "+=" + FILLER,
            model={"max_position_embeddings": 128},
            # Among fillers, the sums are learnt in ten times as long
            first_lesson=WarmStart(demonstrate_sum, num_steps=250),
        ),
    )


def demonstrate(prompt: str, rng: random.Random) -> str:
    """
    Fill, and then add as the careless demonstrator of the demo does.

    Args:
        prompt (`str`):
            A problem.
        rng (`random.Random`):
            Decides on the length and on forgotten carries.

    Returns:
        `str`: Dots, `=` and the sum that the demonstrator writes.
    """
    while (tokens := round(rng.lognormvariate(math.log(SCALE), SIGMA))) > LONGEST:
        pass
    text = demonstrate_sum(prompt, rng)
    return FILLER * (tokens - len(text) - 1) + text


def demonstrate_sum(prompt: str, rng: random.Random) -> str:
    """Write what [`demonstrate`] does, without a filler."""
    a, b = map(read, prompt.split("+"))
    return "=" + write(int(add(f"{a}+{b}=", rng)))


def write(number: int) -> str:
    """
    Write a number below 200 with a letter for its tens.

    ```python
    >>> write(37), write(143), write(5)
    ('d7', 'o3', 'a5')

    ```
    """
    return f"{LETTERS[number // 10]}{number % 10}"


def read(text: str) -> int:
    """Return the number that [`write`] wrote."""
    return 10 * LETTERS.index(text[0]) + int(text[1])


def _with_letters(sums: Dataset) -> Dataset:
    prompts = ["+".join(write(int(number)) for number in prompt.rstrip("=").split("+")) for prompt in sums["prompt"]]
    return as_dataset(prompts, [write(int(answer)) for answer in sums["answer"]])
