"""Partial rollouts: decode in rounds until every rank has enough complete groups, then pass the groups to TRL.

TRL and the model are used through plain functions. All ranks make the same calls in the same order, whatever their
completions are. Each round begins with a gather, from which all ranks decide whether to decode another round. The
scoring at the end begins with a gather, too.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.rank_errors import on_main_process, raising_on_all_ranks
from ..errors import InputError
from ..inputs.generation_config import check_for_partial_rollouts, settings_of_model
from ..inputs.written_values import to_json
from .injected import InjectedRollouts, check_token_ids_suffice
from .pool import FILES, Group, RolloutPool, deal_out


PARTIAL_METRICS = (
    "partial/in_flight", "partial/parked_tokens", "partial/segments_mean", "partial/segments_max", "partial/rounds",
    "partial/waited", "partial/masked", "partial/trained_length_ratio",
)  # fmt: skip
"""Metrics of each generation with partial rollouts, defined in docs/metrics.md."""

Sampler = Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float | None]] | None]]
"""Continues token ids: takes prompts and the largest number of new tokens; returns new tokens, and their
log-probabilities if the sampler reports them."""

Scorer = Callable[[list[list[int]], list[list[int]]], list[list[float]]]
"""Scores completions after their prompts: the log-probability of each token under the current policy, padded."""


@dataclass
class RolloutRounds:
    """Generation steps of one rank with partial rollouts."""

    pool: RolloutPool
    _: KW_ONLY
    num_groups: int  # groups to train on per generation step, on each rank
    num_carried_over: int  # groups that remain in progress when a generation step ends
    chunk_length: int  # largest number of tokens of a call
    uses_sampler_logps: bool = False  # take the sampler's log-probabilities as those of the policy, instead of scoring
    gather: Callable[[list[float]], list[list[float]]]  # takes this rank's numbers, returns the numbers of each rank

    def __post_init__(self):
        # The pool before the prompts of the latest generation step were added, and before earlier steps of its update;
        # each with the policy version if that update had begun
        self._before: list[tuple[int | None, dict[str, Any]]] = [(None, self.pool.state_dict())]
        self._is_generating = False

    def generate(
        self,
        prompts: Sequence[tuple[dict[str, Any], list[int]]],
        policy_version: int,
        oldest_version: int | None,
        sample: Sampler,
        score: Scorer,
        is_within_update: bool = False,
    ) -> tuple[InjectedRollouts, dict[str, float]]:
        """
        Add the prompts of a generation step, decode until every rank has enough complete groups, and return them.

        A prompt is its example in the dataset and its token ids. Groups with a token older than `oldest_version` are
        decoded to their end and returned; `None` is no limit. `is_within_update` says whether an update has begun with
        samples of the previous generation step.

        Each rank returns the same number of groups, and the values of [`PARTIAL_METRICS`] except `partial/masked`.
        """
        earlier = self._before if is_within_update else []
        self._before = [*earlier, (policy_version if is_within_update else None, self.pool.state_dict())]
        self._is_generating = True
        with raising_on_all_ranks():
            for inputs, prompt_ids in prompts:
                _check_row(inputs)
                self.pool.admit(inputs, prompt_ids)
        # Fewer while not enough groups are in progress: at first, and after a resume with other settings
        smallest = int(min(size for (size,) in self.gather([len(self.pool)])))
        wanted = min(self.num_groups, smallest - self.num_carried_over)

        waited, rounds = len(self.pool.overdue(oldest_version)), 0
        dummy = prompts[0][1][:1]  # as short as possible, to fit with any cap
        while self._decode_round(wanted, policy_version, oldest_version, sample, dummy):
            rounds += 1
        self._score(score, dummy)
        groups = self.pool.emit(wanted, oldest_version)
        self._is_generating = False
        return InjectedRollouts.of_groups(groups), self._measure(groups, waited, rounds)

    def save(self, folder: str | Path, is_boundary: bool, policy_version: int) -> None:
        """
        Write the pool into a checkpoint folder.

        Unless all updates on the latest generation step are done (`is_boundary`), a resumed run regenerates this step
        and earlier ones that the current update began with. The pool is saved as before their prompts were added.
        """
        state = next(state for version, state in reversed(self._before) if version != policy_version)
        if is_boundary and not self._is_generating:
            state = self.pool.state_dict()
        FILES.write(folder, self.pool.rank, self.pool.num_ranks, state)

    def load(self, folder: str | Path, reports_logps: bool) -> None:
        """Restore the pool from a checkpoint folder. Without one there, it starts empty, with a warning."""
        if not FILES.load(folder, self.pool.rank, self.pool.num_ranks, self.pool.load_state_dict, deal_out):
            warnings.warn(f"The checkpoint {folder} has no unfinished rollouts: starting without any.")
        begun = [each for group in self.pool for each in group.completions if each.tokens]
        if any(bool(each.sampler_logps) != reports_logps for each in begun):
            raise InputError(
                f"`use_vllm` is {reports_logps}, but the unfinished completions of the checkpoint {folder} were begun "
                f"{'without' if reports_logps else 'with'} vLLM: set it to {not reports_logps}."
            )
        self._before = [(None, self.pool.state_dict())]

    def _decode_round(
        self, wanted: int, policy_version: int, oldest_version: int | None, sample: Sampler, dummy: list[int]
    ) -> bool:
        """Continue unfinished completions by a chunk; return `False`, on all ranks, if each has enough groups."""
        continuations = self.pool.unfinished()
        # One cap for all completions. A server rejects prompts that could exceed the model's context window, so no
        # completion may exceed `max_completion_length`.
        cap = min([self.chunk_length, *(continuation.num_left for continuation in continuations)])
        ranks = self.gather([self.pool.has_enough(wanted, oldest_version), cap, len(continuations)])
        if all(has_enough for has_enough, _, _ in ranks):
            return False
        cap, most = int(min(cap for _, cap, _ in ranks)), int(max(number for _, _, number in ranks))
        # TRL's server mode splits the answer into equal parts, and all ranks call sharded models together: each rank
        # continues the same number of prompts.
        missing = most - len(continuations)
        prompts = [continuation.prompt_ids for continuation in continuations] + [dummy] * missing
        tokens, sampler_logps = sample(prompts, cap)
        kept = slice(len(continuations))
        sampler_logps = None if sampler_logps is None else sampler_logps[kept]
        self.pool.take(continuations, tokens[kept], policy_version, cap, sampler_logps, self.uses_sampler_logps)
        return True

    def _score(self, score: Scorer, dummy: list[int]) -> None:
        """Score all tokens sampled in this generation step, including carried-over ones: the next policy differs."""
        rows = self.pool.unscored()
        most = int(max(count for (count,) in self.gather([len(rows)])))
        missing = most - len(rows)  # all ranks call sharded models together, with the same number of completions
        prompts = [group.prompt_ids for group, _ in rows] + [dummy] * missing
        completions = [completion.tokens for _, completion in rows] + [dummy[-1:]] * missing
        logps = score(prompts, completions) if most else []
        for (_, completion), values in zip(rows, logps, strict=False):  # the dummies come last and are ignored
            completion.logps += values[len(completion.logps) : len(completion.tokens)]

    def _measure(self, groups: Sequence[Group], waited: int, rounds: int) -> dict[str, float]:
        segments = [len(each.segments) for group in groups for each in group.completions]
        here = {
            "in_flight": sum(len(group.completions) for group in self.pool),  # including ended ones
            "parked_tokens": sum(len(each.tokens) for group in self.pool for each in group.completions),
            "segments": sum(segments),
            "rows": len(segments),
            "waited": waited,
            **self.pool.counts,
        }
        ranks = self.gather([*here.values(), max(segments)])
        total = dict(zip([*here, "longest"], map(sum, zip(*ranks, strict=True)), strict=True))
        trained_length, ended_length = (total[f"{name}_tokens"] / total[name] for name in ("emitted", "ended"))
        return {
            "partial/in_flight": total["in_flight"],
            "partial/parked_tokens": total["parked_tokens"],
            "partial/segments_mean": total["segments"] / total["rows"],
            "partial/segments_max": max(numbers[-1] for numbers in ranks),
            "partial/rounds": rounds,
            "partial/waited": total["waited"],
            "partial/trained_length_ratio": trained_length / ended_length,
        }


def make_rounds(trainer: Any) -> RolloutRounds:
    """
    Return the rounds of a run, with an empty pool. All ranks make this call together, once the server is up.

    Raises an `InputError` if the trainer's completions consist of more than token ids, or if the model's
    `generation_config` has settings that partial rollouts do not support.
    """
    check_token_ids_suffice(trainer, "partial rollouts", "`partial_rollout_oversampling` to 1.0")
    generation_config = trainer.model.generation_config
    check_for_partial_rollouts(settings_of_model(trainer.args, generation_config, trainer.processing_class))
    args, accelerator = trainer.args, trainer.accelerator
    pool = RolloutPool(
        trainer.num_generations,
        trainer.max_completion_length,
        trainer.eos_token_ids,
        accelerator.process_index,
        accelerator.num_processes,
        window=sampler_window(trainer),
    )
    return RolloutRounds(
        pool,
        num_groups=args.groups_per_generation,
        num_carried_over=args.groups_carried_over,
        chunk_length=args.partial_rollout_chunk_length,
        uses_sampler_logps=args.use_sampler_logps,
        gather=lambda numbers: accelerator.gather(torch.tensor([numbers], device=accelerator.device)).tolist(),
    )


def check_no_pool(folder: str | Path) -> None:
    """Raise an `InputError` if a run without partial rollouts resumes from a checkpoint with unfinished groups."""
    groups = sum(len(FILES.read(path)["groups"]) for path in FILES.find(folder))
    if groups:
        raise InputError(
            f"`partial_rollout_oversampling` is 1.0, but the checkpoint {folder} has {groups} unfinished groups, "
            "which would be lost: set it to its value in the run that saved the checkpoint."
        )


@contextmanager
def token_cap(trainer: Any, num_tokens: int) -> Iterator[None]:
    """Limit the trainer's sampler to `num_tokens` per call inside this context."""
    if trainer.use_vllm:
        name, settings = "max_completion_length", [vars(trainer.vllm_generation)]
    else:  # transformers uses the first, and TRL copies the second into the model's generation config
        name, settings = "max_new_tokens", [vars(trainer.generation_config), trainer.generation_kwargs]
    before = [values[name] for values in settings]
    for values in settings:
        values[name] = num_tokens
    try:
        yield
    finally:
        for values, value in zip(settings, before, strict=True):
            values[name] = value


def sampler_window(trainer: Any) -> int | None:
    """Return the largest length of a prompt with its completion in vLLM, the same on all ranks; else `None`."""
    if not trainer.use_vllm:
        return None
    if trainer.vllm_mode == "colocate":
        return trainer.vllm_generation.llm.llm_engine.model_config.max_model_len
    return on_main_process(
        lambda: trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["max_model_len"]
    )


def _check_row(row: dict[str, Any]) -> None:
    """Raise an `InputError` that names the column if an example cannot be stored in a checkpoint as JSON."""
    for name, value in row.items():
        try:
            to_json(value)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"The column `{name}` has a {type(value).__name__}, which a checkpoint of partial rollouts cannot "
                f"store ({error}): convert it to strings, numbers, lists and dictionaries (without `with_format`), "
                "remove it, or set `partial_rollout_oversampling` to 1.0."
            ) from error
