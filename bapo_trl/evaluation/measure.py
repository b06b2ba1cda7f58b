"""Evaluation of a model on prompts: several completions of each, kept on disk, and how many of them are right."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from datasets import Dataset, IterableDataset
from transformers.utils import cached_file
from xxhash import xxh3_128, xxh3_128_hexdigest

from ..checkpoints.rank_errors import on_main_process, raising_on_all_ranks
from ..reward_sums import best_of_k, weighted_sums
from .accuracy import Estimate, PromptResult, summarize
from .answers import canonical
from .completions_file import CompletionsFile
from .sampling import Completion, EvaluatedTrainer


SOURCE_COLUMN = "data_source"
_SAMPLING_SETTINGS = (
    "seed", "bf16", "fp16", "use_vllm", "cast_lm_head_to_fp32",
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length", "generation_kwargs",
    "chat_template_kwargs",
)  # fmt: skip
# Weights, and what they are loaded and asked with. Of an output folder, nothing else: a run writes there
_MODEL_FILE = re.compile(
    r"(pytorch_|adapter_)?model.*\.(safetensors|bin)|(adapter_|generation_)?config\.json|chat_template\.jinja"
    r"|(special_)?token.*\.(json|model)|added_tokens\.json|vocab\..*|merges\.txt|(pre)?processor_config\.json"
)


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    accuracies: dict[str, Estimate]  # as `accuracy.summarize` names them; empty if no prompt has a reward
    metrics: dict[str, float]  # rewards, lengths and numbers, by TRL's names without a prefix
    num_prompts: int  # with a reward

    def as_results(self, prefix: str) -> dict[str, float]:
        """Return everything by name, behind `prefix`; standard errors as `NAME_stderr`, where there are any."""
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
    model: str,
    extract_answer: Callable[[str], str | None] | None = None,
) -> Evaluation:
    """
    Sample `num_generations_eval` completions of each prompt, score them, and count.

    All processes make this call together. A completion is right if its first reward is at least 1.

    Args:
        trainer ([`~sampling.EvaluatedTrainer`]): Trainer with the model and the reward functions.
        dataset (`Dataset` or `IterableDataset`): Prompts, with what the reward functions read; `data_source` says
            where a prompt comes from.
        path (`Path`): File of the completions. Those of the same model, sampling and prompts that are there already
            are kept, and scored anew.
        model (`str`): What tells the model from any other, as [`model_identity`] returns it. Only the main process
            reads it.
        extract_answer (`Callable[[str], str | None]`, *optional*): Finds the answer in a completion, for maj@k.

    Returns:
        [`Evaluation`]: The same on all processes.
    """
    rows = list(dataset) if isinstance(dataset, IterableDataset) else dataset
    num_completions = trainer.num_generations_eval
    names = trainer.reward_func_names
    file: Any = None  # of the main process
    kept: list[dict[str, Any]] = []

    def read() -> list[tuple[int, int]]:
        nonlocal file, kept
        file = CompletionsFile(path, _identity(trainer, rows, model), num_completions)
        kept = file.records()
        return file.missing(len(rows))

    pending = on_main_process(read)
    rescored = trainer.score_completions(rows, [_as_completion(record) for record in kept])
    with raising_on_all_ranks():
        if kept:
            file.replace(
                _as_record(completion, record["prompt_index"], record["number"], rows[record["prompt_index"]], names)
                for record, completion in zip(kept, rescored, strict=True)
            )

    def write(completions: list[Completion]) -> None:
        file.append(
            _as_record(completion, *pending[completion.position], rows[pending[completion.position][0]], names)
            for completion in completions
        )

    if pending:
        trainer.sample_completions(_RowsOf(pending, rows), write, seed=str(pending[0]))
    return on_main_process(lambda: count(file.records(), num_completions, trainer.reward_weights, extract_answer))


def count(
    records: Iterable[Mapping[str, Any]],
    num_completions: int,
    reward_weights: torch.Tensor,
    extract_answer: Callable[[str], str | None] | None = None,
) -> Evaluation:
    """
    Count the completions of a file of completions, `num_completions` of each prompt, one after the other.

    A prompt none of whose completions has a first reward is left out of the accuracies, and counted in
    `prompts_without_reward`. `reward_weights` has shape `(F,)`.
    """
    records = [record for record in records if record["number"] < num_completions]
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
    scored = [group for group in groups if any(_first_reward(record) is not None for record in group)]
    if len(scored) < len(groups):
        metrics["prompts_without_reward"] = len(groups) - len(scored)
    accuracies = summarize(
        PromptResult(
            tuple(record["correct"] for record in group),
            None if extract_answer is None else tuple(_answer(record, extract_answer) for record in group),
            _source(group[0]),
        )
        for group in scored
    )
    return Evaluation(accuracies, metrics, len(scored))


def model_identity(parts: Iterable[tuple[str, str | None]]) -> str:
    """
    Return what tells a model from any other, wherever it is: a digest of the files that it is loaded from.

    Without a weight file among them it is another one at each call: nothing tells such models apart.

    Args:
        parts (iterable of pairs): Name and revision of the model; for an adapter, those of its base as well.

    Raises:
        OSError: If one of them is neither here nor on the Hub.
    """
    digest = xxh3_128()
    for name, revision in parts:
        files = sorted(path for path in _folder(name, revision).iterdir() if _MODEL_FILE.fullmatch(path.name))
        if not any(file.suffix in (".safetensors", ".bin") for file in files):  # a sharded save may write none
            digest.update(uuid4().bytes)
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            with file.open("rb") as content:
                while chunk := content.read(1 << 24):
                    digest.update(chunk)
    return digest.hexdigest()


class _RowsOf(Sequence[Mapping[str, Any]]):
    """The row of each completion, read when it is asked for: of images, all of them would not fit into memory."""

    def __init__(self, completions: Sequence[tuple[int, int]], rows: Any):
        self._completions, self._rows = completions, rows

    def __len__(self) -> int:
        return len(self._completions)

    def __getitem__(self, position: Any) -> Any:
        prompt, _ = self._completions[position]
        return self._rows[prompt]


def _folder(name: str, revision: str | None) -> Path:
    """Return the folder of a model; of one on the Hub, that of its revision in the cache."""
    if Path(name).is_dir():
        return Path(name)
    config: Any = cached_file(name, "config.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    return Path(config or cached_file(name, "adapter_config.json", revision=revision)).parent


def _identity(trainer: EvaluatedTrainer, rows: Any, model: str) -> str:
    settings = {name: getattr(trainer.args, name, None) for name in _SAMPLING_SETTINGS}
    loaded = [str(trainer.model.dtype), str(getattr(trainer.model.config, "quantization_config", None))]
    digest = xxh3_128()
    for part in chain([model, loaded, settings], map(trainer.prompt_of, rows)):
        digest.update(json.dumps(part, sort_keys=True, default=_content).encode())
    return digest.hexdigest()[:16]


def _content(value: Any) -> str:
    """Return what tells an image, or what else is no JSON, from others."""
    if type(value).__module__.partition(".")[0] != "PIL":
        return str(value)
    return f"{value.mode} {value.size} {xxh3_128_hexdigest(value.tobytes())}"


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
        "tokens": len(completion.token_ids),
        "cut_off": completion.is_cut_off,
        **({} if isinstance(completion.content, str) else {"messages": completion.content}),
        "token_ids": completion.token_ids,
    }


def _as_completion(record: Mapping[str, Any]) -> Completion:
    content = record.get("messages", record["completion"])
    return Completion(record["prompt_index"], content, record["token_ids"], record["cut_off"])


def _first_reward(record: Mapping[str, Any]) -> float | None:
    return next(iter(record["rewards"].values()))


def _answer(record: Mapping[str, Any], extract_answer: Callable[[str], str | None]) -> str | None:
    answer = extract_answer(record["completion"])
    return None if answer is None else canonical(answer) or None  # what is empty has no vote


def _source(record: Mapping[str, Any]) -> str | None:
    source = record.get(SOURCE_COLUMN)
    return source if source is None or isinstance(source, str) else json.dumps(source, sort_keys=True, default=str)
