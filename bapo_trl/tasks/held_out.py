"""Accuracy of a model on held-out problems."""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .embedded import RewardFunc
from .sums import MAX_ANSWER_CHARACTERS, exact_match_reward


@dataclass(frozen=True)
class HeldOutAccuracy:
    """
    Share of completions that are right, each in [0, 1].

    Attributes:
        greedy (`float`): Accuracy of the greedy completions.
        sampled (`float`): Mean accuracy of the sampled completions.
        solved (`float`): Problems with a right completion among those sampled: pass@k, where k is their number.
    """

    greedy: float
    sampled: float
    solved: float


def held_out_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Iterable[Mapping[str, Any]],
    num_samples: int = 4,
    temperature: float = 1.0,
    max_new_tokens: int = MAX_ANSWER_CHARACTERS + 1,
    batch_size: int = 512,
    seed: int = 0,
    reward_func: RewardFunc = exact_match_reward,
) -> HeldOutAccuracy:
    """
    Measure accuracy, greedy and sampled, without side effects.

    The random state of torch and `model.training` are afterwards what they were before.

    Args:
        model ([`~transformers.PreTrainedModel`]): Model to measure.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer; must pad on the left.
        problems (iterable of mappings): Rows with `prompt`, text or messages, and `answer`, for example
            [`EmbeddedTask`]`.test_dataset`.
        num_samples (`int`, *optional*, defaults to `4`): Sampled completions a problem, at least 1.
        temperature (`float`, *optional*, defaults to `1.0`): Sampling temperature, above 0.
        max_new_tokens (`int`, *optional*, defaults to `4`): Longest completion; the default holds the longest answer
            of the demo's task and the end token.
        batch_size (`int`, *optional*, defaults to `512`): Sequences generated at once.
        seed (`int`, *optional*, defaults to `0`): Seed of the samples.
        reward_func (`RewardFunc`, *optional*, defaults to [`exact_match_reward`]): Gives 1.0 for a right completion
            and 0.0 for any other.

    Returns:
        [`HeldOutAccuracy`]: Greedy and sampled accuracy, and the share of problems that were solved.

    Raises:
        ValueError: If there are no problems, `num_samples` is below 1 or the tokenizer pads on the right.
    """
    rows = list(problems)
    if not rows:
        raise ValueError("`problems` is empty: accuracy needs at least one problem.")
    if num_samples < 1:
        raise ValueError(f"`num_samples` must be at least 1, got {num_samples}.")
    if tokenizer.padding_side != "left":
        raise ValueError(f"Generation needs `padding_side='left'`, the tokenizer has {tokenizer.padding_side!r}.")

    prompts = [_as_text(row["prompt"], tokenizer) for row in rows]
    answers = [row["answer"] for row in rows]
    # The neutral top_k and top_p matter: generate() would otherwise cut the distribution to its 50 best tokens.
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}

    generate: Any = model.generate  # not every model has it, says its type

    def score(prompts: list[str], answers: list[Any], **generation: object) -> list[float]:
        texts: list[str] = []
        for start in range(0, len(prompts), batch_size):
            batch = tokenizer(prompts[start : start + batch_size], return_tensors="pt", padding=True).to(model.device)
            output = generate(**batch, max_new_tokens=max_new_tokens, **generation)
            texts += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return reward_func(texts, answers)

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), seeded(model.device, seed):
            greedy = score(prompts, answers, do_sample=False)
            sampled = score(prompts * num_samples, answers * num_samples, **sampling)
    finally:
        model.train(was_training)
    best = [max(sampled[index :: len(rows)]) for index in range(len(rows))]
    return HeldOutAccuracy(*map(statistics.mean, (greedy, sampled, best)))


def _as_text(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators that sampling on `device` draws from, and restore them at the end."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.random.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
