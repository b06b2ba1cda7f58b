"""Sample several completions per prompt, save them, and compute accuracies and mean rewards."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from xxhash import xxh3_128

from ..batch.reward_sums import best_of_k, weighted_sums
from ..checkpoints.rank_errors import from_main_process
from ..errors import InputError
from .accuracy import Estimate, PromptResult, summarize
from .answers import canonical
from .equality import same_answer, same_text
from .sampling import SOURCE_COLUMN, Record, SamplesCompletions


_SAMPLING_SETTINGS = (
    "seed", "bf16", "fp16", "use_vllm", "cast_lm_head_to_fp32", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "max_completion_length", "generation_kwargs", "chat_template_kwargs",
)  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation."""

    accuracies: dict[str, Estimate]  # avg@k, pass@k and maj@k; empty if no prompt has a reward
    metrics: dict[str, float]  # mean rewards and completion lengths, under the names of TRL without a prefix
    num_prompts: int  # with a reward

    def as_results(self, prefix: str) -> dict[str, float]:
        """Return all values by name, with `PREFIX_` in front; standard errors are named `PREFIX_NAME_stderr`."""
        results = {f"{prefix}_{name}": value for name, value in self.metrics.items()}
        for name, estimate in self.accuracies.items():
            results[f"{prefix}_{name}"] = estimate.mean
            if not math.isnan(estimate.error):
                results[f"{prefix}_{name}_stderr"] = estimate.error
        return results


def evaluate(
    trainer: SamplesCompletions,
    dataset: Dataset | IterableDataset,
    path: Path,
    extract_answer: Callable[[str], str | None] | None = None,
    origin: Any = None,
    replaces: bool = True,
) -> Evaluation:
    """
    Sample `num_generations_eval` completions for each prompt, score them, and return the accuracy.

    Call this function on all processes. A completion counts as right if its first reward is at least 1.

    Args:
        trainer ([`~sampling.SamplesCompletions`]): Trainer with the model and the reward functions.
        dataset (`Dataset` or `IterableDataset`): Prompts, and the columns that the reward functions need. If prompts
            differ in their `data_source`, the accuracy of each source is reported as well.
        path (`Path`): JSON Lines file that the completions are written to, batch by batch.
        extract_answer (`Callable[[str], str | None]`, *optional*): Function that finds the answer in a completion,
            for maj@k.
        origin (*optional*): Description of the loaded model, as JSON. Completions in `path` that were sampled with the
            same origin, prompts and sampling settings are not sampled again, but scored again. Only the main process
            reads it.
        replaces (`bool`, *optional*, defaults to `True`): Whether the completions of another evaluation in `path` are
            replaced. Otherwise, an `InputError` is raised.

    Returns:
        [`Evaluation`]: The results, the same on all processes.
    """
    rows = list(dataset) if isinstance(dataset, IterableDataset) else dataset
    num_completions = trainer.num_generations_eval
    key = _key(trainer, rows, origin)

    @from_main_process
    def start() -> dict[int, Record]:
        kept = {} if key is None else _read_kept(path, key, num_completions)
        if not replaces and not kept and path.is_file() and path.stat().st_size:
            raise InputError(
                f"`output_dir` is {path.parent}, which holds {path.name} of another evaluation (its model, prompts or "
                "sampling settings differ): give another --output_dir, or replace it with --overwrite_output_dir true."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, kept, num_completions, key)  # without what a killed evaluation wrote in part
        return kept

    def save(sampled: dict[int, Record]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(_lines(sampled, num_completions, key))

    @from_main_process
    def finish() -> Evaluation:
        _write(path, dict(enumerate(scored)), num_completions, key)
        return count(_read(path), trainer.reward_weights, extract_answer)

    kept = start()
    scored = trainer.sample_completions(rows, num_completions, kept, save) if len(rows) else []
    return finish()


@from_main_process
def save_results(trainer: SamplesCompletions, results: dict[str, Any]) -> None:
    """Write the results of an evaluation, and keep those that a training measured before its first update."""
    earlier = Path(trainer.args.output_dir, "eval_results.json")
    if earlier.exists():
        found = json.loads(earlier.read_text())
        results = {name: value for name, value in found.items() if name.startswith("before_")} | results
    trainer.save_metrics("eval", results)


def count(
    records: Sequence[Mapping[str, Any]],
    reward_weights: torch.Tensor,
    extract_answer: Callable[[str], str | None] | None = None,
) -> Evaluation:
    """
    Return the accuracies and metrics of saved completions, which are ordered by prompt, equally many for each.

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
    groups = [list(group) for _, group in groupby(records, itemgetter("prompt_index"))]
    if (size := len(groups[0])) > 1:
        metrics[f"reward_best_of_{size}"] = best_of_k(rewards, weights, size).mean().item()
    for name, mean in zip(records[0]["rewards"], rewards.nanmean(dim=0).tolist(), strict=True):
        metrics[f"rewards/{name}/mean"] = mean
    metrics["completions/mean_length"] = sum(record["tokens"] for record in records) / len(records)
    metrics["completions/clipped_ratio"] = sum(record["cut_off"] for record in records) / len(records)

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


@from_main_process
def _key(trainer: SamplesCompletions, rows: Any, origin: Any) -> str | None:
    """Return a hash of everything that determines the completions; `None` without an `origin`."""
    if origin is None:
        return None
    settings = {name: getattr(trainer.args, name, None) for name in _SAMPLING_SETTINGS}
    config, template = trainer.model.config, getattr(trainer.processing_class, "chat_template", None)
    loaded = [str(trainer.model.dtype), getattr(config, "quantization_config", None), config._commit_hash, template]
    digest = xxh3_128()
    for part in ([origin, loaded, settings, trainer.num_generations_eval], *map(trainer.prompt_of, rows)):
        digest.update(json.dumps(part, sort_keys=True, default=_described).encode())
    return digest.hexdigest()[:16]


def _described(value: Any) -> str:
    return xxh3_128(value.tobytes()).hexdigest() if hasattr(value, "tobytes") else str(value)  # of images


def _read_kept(path: Path, key: str, num_completions: int) -> dict[int, Record]:
    """Return the completions of an evaluation with this key, by index; none if the file holds another."""
    records = _read(path) if path.is_file() else []
    if any(record.get("evaluation") != key for record in records):
        return {}
    return {
        record["prompt_index"] * num_completions + record["number"]: {
            name: value for name, value in record.items() if name not in ("rewards", "correct")
        }
        for record in records
    }


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the records in a file, up to a line that a killed process wrote in part."""
    records = []
    with path.open("rb") as lines:
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:
                break
    return records


def _write(path: Path, records: Mapping[int, Record], *details: Any) -> None:
    """Write records atomically."""
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(_lines(records, *details)), encoding="utf-8")
    part.replace(path)


def _lines(records: Mapping[int, Record], num_completions: int, key: str | None) -> Iterator[str]:
    """Return a line for each completion, with its rewards once it is scored."""
    for place, record in records.items():
        index, number = divmod(place, num_completions)
        of_evaluation = {} if key is None else {"evaluation": key}
        found = {"prompt_index": index, "number": number, **record, **of_evaluation}
        yield f"{json.dumps(found, ensure_ascii=False, default=str)}\n"


def _answer(record: Mapping[str, Any], extract_answer: Callable[[str], str | None]) -> str | None:
    answer = extract_answer(record["completion"])
    return None if answer is None else canonical(answer) or None  # an empty answer does not vote
