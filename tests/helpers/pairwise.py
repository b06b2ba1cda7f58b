"""Few combinations of settings that hold every pair of values of any two settings."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(settings: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """
    Combine settings such that any two values of different settings come together at least once.

    Greedy: each combination starts from a pair that is still missing; every other setting takes the value that
    covers most of the missing pairs.
    """
    generator = random.Random(seed)
    names = list(settings)
    missing = {
        frozenset({(left, i), (right, j)})
        for left, right in itertools.combinations(names, 2)
        for i in range(len(settings[left]))
        for j in range(len(settings[right]))
    }
    combinations = []
    while missing:
        chosen = dict(min(missing, key=sorted))
        for name in generator.sample(names, len(names)):
            if name not in chosen:
                places = generator.sample(range(len(settings[name])), len(settings[name]))
                chosen[name] = max(
                    places,
                    key=lambda place: sum(frozenset({(name, place), other}) in missing for other in chosen.items()),
                )
        missing -= {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        combinations.append({name: settings[name][chosen[name]] for name in names})
    return combinations
