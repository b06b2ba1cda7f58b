"""Accuracy of a model outside a trainer, on held-out problems; that of a run is [`~evaluation.measure.evaluate`]'s."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..upstream.forward_passes import forked_random_state, in_eval_mode
from .sums import MAX_ANSWER_CHARACTERS, exact_match_reward


@dataclass(frozen=True)
class HeldOutAccuracy:
    """Share that is right of greedy and of sampled completions, and of problems with a right one sampled (pass@k)."""

    greedy: float
    sampled: float
    solved: float


def held_out_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Iterable[Mapping[str, Any]],
    num_samples: int = 4,
    max_new_tokens: int = MAX_ANSWER_CHARACTERS + 1,
    batch_size: int = 512,
    reward_func: Callable[..., list[float]] = exact_match_reward,
) -> HeldOutAccuracy:
    """
    Measure accuracy, greedy and sampled at temperature 1 from a fixed seed, without side effects.

    The random state of torch and `model.training` are afterwards what they were before.

    Args:
        model ([`~transformers.PreTrainedModel`]): Model to measure.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        problems (iterable of mappings): Rows with `prompt`, text or messages, and `answer`; at least one.
        num_samples (`int`, *optional*, defaults to `4`): Sampled completions a problem, at least 1.
        max_new_tokens (`int`, *optional*, defaults to `4`): Longest completion; the default holds the longest answer
            of the demo's task and the end token.
        batch_size (`int`, *optional*, defaults to `512`): Sequences generated at once.
        reward_func (`Callable`, *optional*, defaults to [`exact_match_reward`]): Takes completions and answers; gives
            1.0 for a right completion and 0.0 for any other.
    """
    rows = list(problems)
    if not rows or num_samples < 1:
        raise ValueError(f"`problems` has {len(rows)} and `num_samples` is {num_samples}: give at least 1 of each.")
    chat: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    texts = [row["prompt"] for row in rows]
    texts = [text if isinstance(text, str) else tokenizer.apply_chat_template(text, **chat) for text in texts]
    generate: Any = model.generate  # not every model has it, says its type

    def score(copies: int, **generation: object) -> list[float]:
        prompts, completions = texts * copies, []
        for start in range(0, len(prompts), batch_size):
            batch = tokenizer(
                prompts[start : start + batch_size], return_tensors="pt", padding=True, padding_side="left"
            ).to(model.device)
            output = generate(**batch, max_new_tokens=max_new_tokens, **generation)
            completions += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return reward_func(completions, [row["answer"] for row in rows] * copies)

    with torch.no_grad(), in_eval_mode(model), seeded(model.device, 0):
        greedy = score(1, do_sample=False)
        # The neutral top_k and top_p matter: generate() would otherwise cut the distribution to its 50 best tokens
        sampled = score(num_samples, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    best = [max(sampled[index :: len(rows)]) for index in range(len(rows))]
    return HeldOutAccuracy(*map(statistics.mean, (greedy, sampled, best)))


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch, and give the random states of the CPU and of `device` back at the end."""
    with forked_random_state(device):
        torch.manual_seed(seed)
        yield
