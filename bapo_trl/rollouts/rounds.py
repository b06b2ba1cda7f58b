"""Decodes a generation in rounds, until every rank has the groups it needs, and hands these to TRL as rows.

What TRL and the model do comes in as plain functions. All ranks make the same calls in the same order, whatever their
completions: each round begins with one gather, which decides for all ranks whether there is one, and the scoring at
the end with another. Legend: `B` rows, `T` completion tokens.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from ..checkpoints.rank_errors import raising_on_all_ranks
from ..errors import InputError
from .checkpoint import load_pool, save_pool
from .checks import check_row
from .injected import InjectedRollouts
from .pool import Group, RolloutPool


PARTIAL_METRICS = (
    "partial/in_flight", "partial/parked_tokens", "partial/segments_mean", "partial/segments_max", "partial/rounds",
    "partial/waited", "partial/masked", "partial/trained_length_ratio",
)  # fmt: skip
"""Metrics of each generation with partial rollouts, defined in docs/metrics.md."""

Sampler = Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float | None]] | None]]
"""Continues token ids: prompts and the largest number of new tokens in; new tokens out, and their log-probabilities if
the sampler reports them."""

Scorer = Callable[[list[list[int]], list[list[int]]], list[list[float]]]
"""Scores completions after their prompts: the log-probability of each token under the current policy."""


@dataclass
class RolloutRounds:
    """Generations of one rank with partial rollouts."""

    pool: RolloutPool
    _: KW_ONLY
    num_groups: int  # of a generation on each rank
    num_held: int  # groups that stay in flight when a generation ends
    chunk_length: int  # largest number of tokens of a call
    gather: Callable[[list[float]], list[list[float]]]  # numbers of this rank in; those of each rank out

    def __post_init__(self):
        # The pool before the prompts of the latest generation entered, and before that of earlier ones of its update;
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
        Admit the prompts of a generation, decode until every rank has enough complete groups, and let these go.

        A prompt is its row of the dataset and its token ids. Groups with a token of a version before `oldest_version`
        are decoded to their end, and go; `None` for no limit. `is_within_update` tells whether an update has begun
        with samples of the generation before.

        As many groups go on each rank. With them come the values of [`PARTIAL_METRICS`], but for `partial/masked`.
        """
        earlier = self._before if is_within_update else []
        self._before = [*earlier, (policy_version if is_within_update else None, self.pool.state_dict())]
        self._is_generating = True
        with raising_on_all_ranks():
            for inputs, prompt_ids in prompts:
                check_row(inputs)
                self.pool.admit(inputs, prompt_ids)
        # Fewer while there are not yet enough in flight: at first, and after a resume with other settings
        smallest = int(min(size for (size,) in self.gather([len(self.pool)])))
        wanted = min(self.num_groups, smallest - self.num_held)

        waited, rounds = len(self.pool.overdue(oldest_version)), 0
        dummy = prompts[0][1][:1]  # as short as can be: it fits whatever the cap
        while self._decode_round(wanted, policy_version, oldest_version, sample, dummy):
            rounds += 1
        self._score(score, dummy)
        groups = self.pool.emit(wanted, oldest_version)
        self._is_generating = False
        return InjectedRollouts.of_groups(groups), self._measure(groups, waited, rounds)

    def save(self, folder: str | Path, is_boundary: bool, policy_version: int) -> None:
        """
        Write the pool into a checkpoint folder.

        Unless the latest generation has been trained to its end (`is_boundary`), or if one is under way, a resumed run
        generates it again, and with it those that an update of this version had begun with: the pool is written as it
        was before their prompts entered.
        """
        state = next(state for version, state in reversed(self._before) if version != policy_version)
        if is_boundary and not self._is_generating:
            state = self.pool.state_dict()
        save_pool(self.pool, folder, state)

    def load(self, folder: str | Path, reports_logps: bool) -> None:
        """Restore the pool from a checkpoint folder. Without one there, it starts empty, with a warning."""

        def check(state: dict[str, Any]) -> None:
            if len(state["tokens"]) and bool(len(state["sampler_logps"])) != reports_logps:
                raise InputError(
                    f"`use_vllm` is {reports_logps}, but the completions in flight of the checkpoint {folder} were "
                    f"begun {'without' if reports_logps else 'with'} vLLM, whose log-probabilities belong to them: "
                    "set it back."
                )

        if not load_pool(self.pool, folder, check):
            warnings.warn(f"The checkpoint {folder} holds no unfinished rollouts: starting without any.")
            return
        self._before = [(None, self.pool.state_dict())]
        held, limit = len(self.pool), self.num_held
        if held > limit and self.pool.rank == 0:
            too_old = ", too many for a `partial_rollout_max_staleness` to hold"
            warnings.warn(
                f"The checkpoint {folder} holds {held} groups in flight for each rank, more than the {limit} that "
                "`partial_rollout_oversampling` holds over. A generation trains as many groups as enter it, so that "
                f"they stay as many{too_old if held > self.num_groups else ''}. Set "
                "`partial_rollout_oversampling`, the sizes of a generation and the number of processes to what they "
                "were."
            )

    def describe_left(self, has_checkpoint: bool) -> str | None:
        """Return sentences on the groups that a run leaves in flight, on all ranks; `None` without any."""
        tokens = sum(len(each.tokens) for group in self.pool for each in group.completions)
        groups, tokens = (sum(column) for column in zip(*self.gather([len(self.pool), tokens]), strict=True))
        if not groups:
            return None
        number = "1 group" if groups == 1 else f"{groups} groups"
        saved = " A run that is resumed from its last checkpoint goes on from the groups of that."
        return (
            f"The run ends with {number} in flight ({tokens} tokens), which have trained nothing."
            f"{saved if has_checkpoint else ''}"
        )

    def _decode_round(
        self, wanted: int, policy_version: int, oldest_version: int | None, sample: Sampler, dummy: list[int]
    ) -> bool:
        """Continue what has not ended by a chunk; return `False`, on all ranks, if each has enough already."""
        continuations = self.pool.unfinished()
        # One cap holds for all of them. A server refuses prompts that it would take out of the model's window, so that
        # none may go beyond `max_completion_length`.
        cap = min([self.chunk_length, *(continuation.num_left for continuation in continuations)])
        ranks = self.gather([self.pool.has_enough(wanted, oldest_version), cap, len(continuations)])
        if all(has_enough for has_enough, _, _ in ranks):
            return False
        cap, most = int(min(cap for _, cap, _ in ranks)), int(max(number for _, _, number in ranks))
        # TRL's server mode hands its answer out in equal parts, and sharded models are called together: each rank
        # continues as many prompts.
        missing = most - len(continuations)
        prompts = [continuation.prompt_ids for continuation in continuations] + [dummy] * missing
        tokens, sampler_logps = sample(prompts, cap)
        if continuations:
            kept = slice(len(continuations))
            sampler_logps = None if sampler_logps is None else sampler_logps[kept]
            self.pool.take(continuations, tokens[kept], policy_version, cap, sampler_logps)
        return True

    def _score(self, score: Scorer, dummy: list[int]) -> None:
        """Score all tokens that this generation sampled, those that stay among them: the next policy differs."""
        rows = self.pool.unscored()
        most = int(max(count for (count,) in self.gather([len(rows)])))
        missing = most - len(rows)  # sharded models are called together, with as many rows
        prompts = [group.prompt_ids for group, _ in rows] + [dummy] * missing
        completions = [completion.tokens for _, completion in rows] + [dummy[-1:]] * missing
        logps = score(prompts, completions) if most else []
        for (_, completion), values in zip(rows, logps, strict=False):  # the dummies are left over
            completion.logps += values[len(completion.logps) : len(completion.tokens)]

    def _measure(self, groups: Sequence[Group], waited: int, rounds: int) -> dict[str, float]:
        counts = self.pool.counts
        segments = [len(each.segments) for group in groups for each in group.completions]
        parked = sum(len(each.tokens) for group in self.pool for each in group.completions)
        waiting = sum(len(group.completions) for group in self.pool)  # also those that ended before their group did
        numbers = [waiting, parked, sum(segments), len(segments), waited]
        numbers += [counts.emitted, counts.emitted_tokens, counts.ended, counts.ended_tokens]
        ranks = self.gather([*numbers, max(segments)])
        in_flight, parked, total, rows, waited, *lengths = (sum(column) for column in zip(*ranks, strict=True))
        emitted, emitted_tokens, ended, ended_tokens, _ = lengths
        return {
            "partial/in_flight": in_flight,
            "partial/parked_tokens": parked,
            "partial/segments_mean": total / rows,
            "partial/segments_max": max(numbers[-1] for numbers in ranks),
            "partial/rounds": rounds,
            "partial/waited": waited,
            "partial/trained_length_ratio": (emitted_tokens / emitted) / (ended_tokens / ended),
        }
