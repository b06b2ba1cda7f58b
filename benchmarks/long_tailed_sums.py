"""
The task of the partial rollouts' benchmarks: the sums of the demo, in completions of long-tailed length.

A completion is a filler, and then the answer: `"CCBBAA=j5"`. The filler counts down in letters, two of each. With its
first letter, the model draws how long it gets. The lengths are lognormal: half of the completions have at most 12
tokens, one of twenty more than five times as many. The answer has nothing to do with the filler: long completions are
as often right as short ones.

With a filler of dots, each dot would be a choice whether to go on. Training shifts all of these choices together, and
within tens of updates the lengths are no longer long-tailed. Here they are one choice a completion.

The tens of a number are a letter (`"d7"` is 37, `"o3"` is 143). The tiny model then knows a digit by what it is, for
after a filler it cannot know it by where it stands.
"""

import math
import random
import string
from typing import Any

from datasets import Dataset

from bapo_trl.tasks import exact_match_reward, load_task
from benchmarks.warm_start import StudyTask, WarmStart, as_dataset
from benchmarks.warm_start import demonstrate as add


TENS = string.ascii_lowercase[:20]  # from 0 to 19
COUNTS = string.ascii_uppercase + string.ascii_lowercase[20:] + "!#$%&*,-./:;?@^_|~()[]{}"  # from 1 on
TOKENS_EACH = 2
# Of the lengths of demonstrations in tokens, the end token among them: lognormal, drawn again above the longest. That
# lowers the median to 12.
SCALE, SIGMA, LONGEST = 13, 1.3, 108
MAX_NEW_TOKENS = 120  # ten times the median; room for a count that slips


def final_sum_reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """
    Reward a completion that is any number of filler letters, `=` and the answer, and nothing else.

    Takes and returns what [`~bapo_trl.tasks.exact_match_reward`] does. For the answer `"j5"`, `"BBAA=j5"` and `"=j5"`
    get 1.0, and `"j5"`, `"AA=j5A"`, `"=Aj5"` and `"BBAA"` get 0.0.
    """
    return exact_match_reward([completion.lstrip(COUNTS) for completion in completions], [f"={a}" for a in answer])


def load_long_tailed_sums(seed: int = 0) -> StudyTask:
    """Make the problems of the demo, in its splits: `"37+58="` reads `"d7+f8"`, and its answer `"j5"`."""
    sums = load_task(seed)
    return StudyTask(
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
            alphabet=string.digits + TENS + "+=" + COUNTS,
            model={"max_position_embeddings": 128},
            # Among fillers, the sums are learnt in ten times as long
            first_lesson=WarmStart(demonstrate_sum, num_steps=250),
        ),
    )


def demonstrate(prompt: str, rng: random.Random) -> str:
    """Fill, and then add as the careless demonstrator of the demo does."""
    while (tokens := round(rng.lognormvariate(math.log(SCALE), SIGMA))) > LONGEST:
        pass
    text = demonstrate_sum(prompt, rng)
    count = max(0, round((tokens - len(text) - 1) / TOKENS_EACH))
    return "".join(letter * TOKENS_EACH for letter in reversed(COUNTS[:count])) + text


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
    return f"{TENS[number // 10]}{number % 10}"


def read(text: str) -> int:
    """Return the number that [`write`] wrote."""
    return 10 * TENS.index(text[0]) + int(text[1])


def _with_letters(sums: Dataset) -> Dataset:
    prompts = ["+".join(write(int(number)) for number in prompt.rstrip("=").split("+")) for prompt in sums["prompt"]]
    return as_dataset(prompts, [write(int(answer)) for answer in sums["answer"]])
