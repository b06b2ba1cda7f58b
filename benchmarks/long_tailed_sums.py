"""
Task of the benchmarks of partial rollouts: the sums of the demo, with completions of long-tailed lengths.

A completion is a filler followed by the answer: `"CCBBAA=j5"`. The filler counts down in letters, two of each. The
first letter determines the length. The lengths are lognormal: half of the completions have at most 12 tokens, one in
twenty has more than five times as many. The answer does not depend on the filler: long completions are as often right
as short ones.

With a filler of dots, the model would decide at each dot whether to continue. Training shifts all of these decisions
together, so within tens of updates the lengths would no longer be long-tailed. Here a completion has one decision.

The tens digit of a number is a letter (`"d7"` is 37, `"o3"` is 143). So the tiny model can tell tens and ones apart,
which it cannot do by position after a filler.
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
    Return 1.0 for each completion that consists of filler letters (or none), `=` and the answer, else 0.0.

    The signature is that of [`~bapo_trl.tasks.exact_match_reward`]. For the answer `"j5"`, `"BBAA=j5"` and `"=j5"` get
    1.0, and `"j5"`, `"AA=j5A"`, `"=Aj5"` and `"BBAA"` get 0.0.
    """
    return exact_match_reward([completion.lstrip(COUNTS) for completion in completions], [f"={a}" for a in answer])


def load_long_tailed_sums(seed: int = 0) -> StudyTask:
    """Return the demo's problems and splits, rewritten: `"37+58="` becomes `"d7+f8"` with the answer `"j5"`."""
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
    """Return a filler and a sum, which forgets carries like the demo's demonstrator."""
    while (tokens := round(rng.lognormvariate(math.log(SCALE), SIGMA))) > LONGEST:
        pass
    text = demonstrate_sum(prompt, rng)
    count = max(0, round((tokens - len(text) - 1) / TOKENS_EACH))
    return "".join(letter * TOKENS_EACH for letter in reversed(COUNTS[:count])) + text


def demonstrate_sum(prompt: str, rng: random.Random) -> str:
    """Return the answer of [`demonstrate`] without a filler."""
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
