"""Compute avg@k, pass@k and maj@k from right and wrong completions, with standard errors over the prompts."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PromptResult:
    """Results of at least one completion of a prompt: correctness, extracted answers, and the prompt's source."""

    correct: tuple[bool, ...]
    answers: tuple[str | None, ...] | None = None  # `None`: answers were not extracted
    source: str | None = None


@dataclass(frozen=True)
class Estimate:
    """Mean over prompts with its standard error, which is NaN for a single prompt."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if math.isnan(self.error) else f" ± {self.error:.3f}")


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """
    Return an unbiased estimate of the probability that at least one of `k` samples is right.

    The estimate is `1 - C(n - c, k) / C(n, k)`: the fraction of the subsets of `k` out of `n` samples that contain at
    least one of the `c` right samples. `k` is in [1, n], `c` in [0, n].

    References:
        Chen et al. 2021, Evaluating Large Language Models Trained on Code (https://arxiv.org/abs/2107.03374), Eq. 1.
    """
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_vote(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """
    Return the probability that the most frequent answer is right.

    Ties are broken at random. If completions with the same answer were judged differently, the answer counts as right
    by the fraction of right completions. Completions without an answer do not vote; without any vote, the result is 0.

    References:
        Wang et al. 2022, Self-Consistency Improves Chain of Thought Reasoning (https://arxiv.org/abs/2203.11171).
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = {answer for answer, count in votes.items() if count == most}
    right = sum(is_right for answer, is_right in zip(answers, correct, strict=True) if answer in winners)
    return right / (most * len(winners))


def mean_over_prompts(values: Sequence[float]) -> Estimate:
    """
    Return the mean of values in [0, 1] and half the width of Wilson's interval of one standard error (68 %).

    With the variance `v` of the values, half the width is `sqrt(v / n + 1 / (4 n^2)) / (1 + 1 / n)`: about the
    standard error, but not 0 if all values are 0 or all are 1. There is one value per prompt, as completions of the
    same prompt are not independent. At least one is needed.

    References:
        Wilson 1927, Probable Inference, the Law of Succession, and Statistical Inference.
        Miller 2024, Adding Error Bars to Evals (https://arxiv.org/abs/2411.00640), Section 2.2.
    """
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan)
    variance = math.fsum((value - mean) ** 2 for value in values) / count
    return Estimate(mean, math.sqrt(variance / count + 1 / (4 * count**2)) / (1 + 1 / count))


def summarize(results: Iterable[PromptResult]) -> dict[str, Estimate]:
    """
    Return all accuracies over all prompts and, if there are several sources, over the prompts of each source.

    All prompts have the same number of completions, `n`, and either all or none have answers. The names are `avg@n`;
    `pass@k` for `n` and for the powers of two from 2 to `n`; `maj@n` if there are answers; and the same names for each
    source, as in `avg@n/SOURCE`. If `n` is 1, only `avg@1` is returned. Without prompts, the result is empty.
    """
    results = list(results)
    summary = _accuracies(results)
    sources = sorted({result.source for result in results if result.source is not None})
    if len(sources) > 1:
        for source in sources:
            part = _accuracies([result for result in results if result.source == source])
            summary |= {f"{name}/{source}": estimate for name, estimate in part.items()}
    return summary


def _accuracies(results: list[PromptResult]) -> dict[str, Estimate]:
    if not results:
        return {}
    n = len(results[0].correct)
    summary = {f"avg@{n}": mean_over_prompts([sum(result.correct) / n for result in results])}
    if n == 1:
        return summary
    for k in sorted({*(2**power for power in range(1, n.bit_length())), n}):
        summary[f"pass@{k}"] = mean_over_prompts([pass_at_k(n, sum(result.correct), k) for result in results])
    if results[0].answers is not None:
        summary[f"maj@{n}"] = mean_over_prompts([majority_vote(result.answers, result.correct) for result in results])
    return summary


def accuracy_table(evaluations: Mapping[str, Mapping[str, Estimate]]) -> str:
    """Return a text table of accuracies with standard errors: a row per accuracy, a column per evaluation."""
    names = list(dict.fromkeys(name for accuracies in evaluations.values() for name in accuracies))
    columns = [["", *names]]
    for title, accuracies in evaluations.items():
        columns.append([title, *(str(accuracies.get(name, "")) for name in names)])
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    rows = ["  ".join(["", *cells]).rstrip() for cells in zip(*padded, strict=True)]
    return "\n".join(row for row in rows if row)
