"""Sample several completions per prompt, save them, and compute accuracies and mean rewards."""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from xxhash import xxh3_128

from ..batch.reward_sums import best_of_k, weighted_sums
from ..checkpoints.rank_errors import on_main_process
from .accuracy import Estimate, PromptResult, summarize
from .answers import canonical
from .equality import same_answer, same_text
from .sampling import Completion, EvaluatedTrainer


SOURCE_COLUMN = "data_source"
_SAMPLING_SETTINGS = (
    "seed", "bf16", "fp16", "use_vllm", "cast_lm_head_to_fp32", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "max_completion_length", "generation_kwargs", "chat_template_kwargs",
)  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """
    Results of an evaluation.

    Attributes:
        accuracies (`dict[str, Estimate]`):
            avg@k, pass@k and maj@k, each with `mean` and standard `error`. Empty if no prompt has a reward.
        metrics (`dict[str, float]`):
            Mean rewards and completion lengths, under the names of TRL without a prefix.
        num_prompts (`int`):
            Number of prompts with a reward.
    """

    accuracies: dict[str, Estimate]
    metrics: dict[str, float]
    num_prompts: int

    def as_results(self, prefix: str) -> dict[str, float]:
        """Return all values by name, with `PREFIX_` in front; standard errors are named `PREFIX_NAME_stderr`."""
        results = {f"{prefix}_{name}": value for name, value in self.metrics.items()}
        for name, estimate in self.accuracies.items():
            results[f"{prefix}_{name}"] = estimate.mean
            if not math.isnan(estimate.error):
                results[f"{prefix}_{name}_stderr"] = estimate.error
        return results


def evaluate(
    trainer: EvaluatedTrainer,
    dataset: Dataset | IterableDataset,
    path: Path,
    extract_answer: Callable[[str], str | None] | None = None,
    origin: Any = None,
) -> Evaluation:
    """
    Sample `num_generations_eval` completions for each prompt, score them, and return the accuracy.

    Call this function on all processes. A completion counts as right if its first reward is at least 1.

    Args:
        trainer ([`~sampling.EvaluatedTrainer`]): Trainer with the model and the reward functions.
        dataset (`Dataset` or `IterableDataset`): Prompts, and the columns that the reward functions need. If prompts
            differ in their `data_source`, the accuracy of each source is reported as well.
        path (`Path`): JSON Lines file that the completions are written to.
        extract_answer (`Callable[[str], str | None]`, *optional*): Function that finds the answer in a completion,
            for maj@k.
        origin (*optional*): Description of the loaded model, as JSON. If `path` holds the completions of an evaluation
            with the same origin, rows, source of the reward functions and sampling settings, they are used and
            nothing is sampled. Only the main process reads it.

    Returns:
        [`Evaluation`]: The results, the same on all processes.
    """
    rows = list(dataset) if isinstance(dataset, IterableDataset) else dataset
    num_completions = trainer.num_generations_eval
    key = on_main_process(lambda: None if origin is None else _key(trainer, rows, origin))
    if not on_main_process(lambda: key is not None and _has(path, key)):
        sampled = trainer.sample_completions(rows, num_completions) if len(rows) else []

        def write() -> None:
            records = [
                _as_record(sampled[prompt * num_completions + number], prompt, number, row, trainer.reward_func_names)
                for prompt, row in enumerate(rows)
                for number in range(num_completions)
            ]
            _write(path, records, key)

        on_main_process(write)
    return on_main_process(lambda: count(_read(path), num_completions, trainer.reward_weights, extract_answer))


def count(
    records: Sequence[Mapping[str, Any]],
    num_completions: int,
    reward_weights: torch.Tensor,
    extract_answer: Callable[[str], str | None] | None = None,
) -> Evaluation:
    """
    Return the accuracies and metrics of saved completions, which are ordered by prompt, `num_completions` for each.

    If no completion of a prompt has a first reward, the prompt is left out of the accuracies and counted in
    `prompts_without_reward`. `reward_weights` has shape `(F,)`.
    """
    if not records:
        return Evaluation({}, {}, 0)
    rewards = torch.tensor(
        [[math.nan if reward is None else reward for reward in record["rewards"].values()] for record in records]
    )
    weights = reward_weights.cpu()
    metrics = {"reward": weighted_sums(rewards, weights).nanmean().item()}
    if num_completions > 1:
        metrics[f"reward_best_of_{num_completions}"] = best_of_k(rewards, weights, num_completions).mean().item()
    for name, mean in zip(records[0]["rewards"], rewards.nanmean(dim=0).tolist(), strict=True):
        metrics[f"rewards/{name}/mean"] = mean
    metrics["completions/mean_length"] = sum(record["tokens"] for record in records) / len(records)
    metrics["completions/clipped_ratio"] = sum(record["cut_off"] for record in records) / len(records)

    groups = [records[start : start + num_completions] for start in range(0, len(records), num_completions)]
    first = next(iter(records[0]["rewards"]))
    scored = [group for group in groups if any(record["rewards"][first] is not None for record in group)]
    if len(scored) < len(groups):
        metrics["prompts_without_reward"] = len(groups) - len(scored)
    accuracies = summarize(
        PromptResult(
            tuple(record["correct"] for record in group),
            None if extract_answer is None else _votes([_answer(record, extract_answer) for record in group]),
            str(group[0][SOURCE_COLUMN]) if SOURCE_COLUMN in group[0] else None,
        )
        for group in scored
    )
    return Evaluation(accuracies, metrics, len(scored))


def _votes(answers: Sequence[str | None]) -> tuple[str | None, ...]:
    """Return each answer in the spelling of the first that is the same, as the reward decides with `math-verify`."""
    compare = same_answer if find_spec("math_verify") else same_text
    votes: list[str | None] = []
    for answer in answers:
        given = dict.fromkeys(vote for vote in votes if vote is not None)
        votes.append(answer and next((vote for vote in given if compare(vote, answer)), answer))
    return tuple(votes)


def _key(trainer: EvaluatedTrainer, rows: Any, origin: Any) -> str:
    """Return a hash of everything that determines the completions and their rewards."""
    settings = {name: getattr(trainer.args, name, None) for name in _SAMPLING_SETTINGS}
    loaded = [str(trainer.model.dtype), str(getattr(trainer.model.config, "quantization_config", None))]
    made_of = [origin, loaded, settings, trainer.num_generations_eval, trainer.reward_func_names]
    digest = xxh3_128(json.dumps(made_of, sort_keys=True, default=str).encode())
    for function in trainer.reward_funcs:
        digest.update(_source_of(function))
    for row in rows:  # with the right answers
        digest.update(json.dumps([trainer.prompt_of(row), row], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


def _source_of(function: Any) -> bytes:
    """Return the source of the module that defines a reward function; empty for a model or a notebook."""
    try:
        return Path(inspect.getsourcefile(inspect.unwrap(function)) or "").read_bytes()
    except (TypeError, OSError):
        return b""


def _has(path: Path, key: str) -> bool:
    return path.is_file() and all(record.get("evaluation") == key for record in _read(path))


def _read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _write(path: Path, records: Iterable[dict[str, Any]], key: str | None) -> None:
    """Write completions atomically."""
    kept = {} if key is None else {"evaluation": key}
    part = path.with_name(f"{path.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({**record, **kept}, ensure_ascii=False, default=str) for record in records)
    part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    part.replace(path)


def _as_record(
    completion: Completion, prompt_index: int, number: int, row: Mapping[str, Any], names: list[str]
) -> dict[str, Any]:
    first = completion.rewards[0]
    return {
        "prompt_index": prompt_index,
        "number": number,
        **({SOURCE_COLUMN: row[SOURCE_COLUMN]} if row.get(SOURCE_COLUMN) is not None else {}),
        "prompt": row["prompt"],
        "completion": completion.text,
        "rewards": dict(zip(names, completion.rewards, strict=True)),
        "correct": first is not None and first >= 1,
        "tokens": completion.num_tokens,
        "cut_off": completion.is_cut_off,
    }


def _answer(record: Mapping[str, Any], extract_answer: Callable[[str], str | None]) -> str | None:
    answer = extract_answer(record["completion"])
    return None if answer is None else canonical(answer) or None  # an empty answer does not vote
