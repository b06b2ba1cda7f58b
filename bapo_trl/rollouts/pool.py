"""The pool of unfinished rollouts: groups of completions that can be paused and continued under a later policy.

The pool is a state machine on token ids. It owns no model, draws no random numbers and does no communication.
Invariants:

- Every admitted group is emitted once, or is still in the pool.
- A completion keeps all tokens that were sampled for it, in order, each with the policy version that sampled it.
- Groups are emitted in the order in which they became complete, except that overdue groups come first.

Terms: a *group* is the `num_generations` completions of one prompt. A *segment* is the tokens of one completion that
one policy version sampled. A completion has *ended* with an EOS token, at `max_completion_length`, counted over all
its segments, or at the sampler's context window. A group is *complete* when all its completions have ended. It is
*overdue* if it has a token that would be too stale after waiting for another generation step.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..checkpoints.rank_files import RankFiles
from ..errors import InputError
from ..inputs.written_values import DECODER, to_json


FILES = RankFiles(
    "rollout pool", "5", "restart from the weights, with `model_name_or_path` set to the checkpoint's folder"
)
_NO_COUNTS = {"emitted": 0, "emitted_tokens": 0, "ended": 0, "ended_tokens": 0}


@dataclass
class PartialCompletion:
    """A completion that may not be finished yet."""

    tokens: list[int] = field(default_factory=list)
    segments: list[list[int]] = field(default_factory=list)  # policy version and number of tokens; versions rise
    # Log-probabilities under the policy that sampled each token, `None` if not known; the latest segment may not be
    # scored yet
    logps: list[float | None] = field(default_factory=list)
    sampler_logps: list[float | None] = field(default_factory=list)  # of each token; empty if the sampler reports none
    has_ended: bool = False

    @property
    def versions(self) -> list[int]:
        """Policy version that sampled each token."""
        return [version for version, length in self.segments for _ in range(length)]


@dataclass
class Group:
    """A prompt and its completions."""

    id: int  # unique over ranks and epochs
    inputs: dict[str, Any]  # the prompt's example in the dataset
    prompt_ids: list[int]
    completions: list[PartialCompletion]
    completed_as: int | None = None  # position in the order in which the pool's groups became complete, if complete

    @property
    def first_version(self) -> float:
        """Policy version of the oldest token; infinity if there is no token."""
        return min((each.segments[0][0] for each in self.completions if each.segments), default=math.inf)


@dataclass(frozen=True)
class Continuation:
    """A completion to continue, by up to `num_left` tokens."""

    group: Group
    completion: PartialCompletion
    num_left: int

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt and of the completion so far."""
        return self.group.prompt_ids + self.completion.tokens


class RolloutPool:
    """
    The groups of one rank that have not been trained on yet.

    `counts` has the numbers of completions and of their tokens since the start of the run, for completions that were
    `emitted` for training and for completions that have `ended`.
    """

    def __init__(
        self,
        num_generations: int,
        max_completion_length: int,
        eos_token_ids: Collection[int],
        rank: int = 0,
        num_ranks: int = 1,
        window: int | None = None,
    ):
        self.num_generations = num_generations
        self.max_completion_length = max_completion_length
        self.window = window
        self.counts = Counter(_NO_COUNTS)
        self._eos_token_ids = frozenset(eos_token_ids)
        self.rank, self.num_ranks = rank, num_ranks
        self._groups: list[Group] = []  # in the order of admission
        self._next_id = rank
        self._next_place = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def admit(self, inputs: dict[str, Any], prompt_ids: Sequence[int]) -> int:
        """Add a group for a prompt; return the group's number."""
        if self.window is not None and len(prompt_ids) >= self.window:
            raise InputError(
                f"A prompt has {len(prompt_ids)} tokens, but the sampler takes {self.window} with the completion: "
                "remove the prompt, or enlarge the sampler's context window (`--max-model-len` of a vLLM server, "
                "otherwise `vllm_max_model_length`)."
            )
        completions = [PartialCompletion() for _ in range(self.num_generations)]
        self._groups.append(Group(self._next_id, inputs, list(prompt_ids), completions))
        self._next_id += self.num_ranks
        return self._groups[-1].id

    def unfinished(self) -> list[Continuation]:
        """Return all completions that have not ended, in the order of admission."""
        return [
            Continuation(group, completion, self._num_left(group, completion))
            for group in self._groups
            for completion in group.completions
            if not completion.has_ended
        ]

    def take(
        self,
        continuations: Sequence[Continuation],
        tokens: Sequence[Sequence[int]],
        policy_version: int,
        cap: int,
        sampler_logps: Sequence[Sequence[float | None]] | None = None,
        are_scores: bool = False,
    ) -> None:
        """
        Append the new token ids that the sampler returned for each continuation.

        A completion has ended if its last token is an EOS token, if it has no tokens left, or if the sampler stopped
        before the cap of the call for another reason. No completion has fewer tokens left than the cap. `are_scores`
        says whether the sampler's log-probabilities also serve as those of the policy.
        """
        for index, (continuation, new) in enumerate(zip(continuations, tokens, strict=True)):
            completion, most = continuation.completion, min(cap, continuation.num_left)
            if not 0 < len(new) <= most:
                raise InputError(f"The sampler returned {len(new)} tokens instead of at least 1 and at most {most}.")
            if completion.segments and completion.segments[-1][0] == policy_version:
                completion.segments[-1][1] += len(new)
            else:
                completion.segments.append([policy_version, len(new)])
            completion.tokens += new
            if sampler_logps is not None:
                completion.sampler_logps += sampler_logps[index]
                completion.logps += sampler_logps[index] if are_scores else []
            if len(new) == continuation.num_left or new[-1] in self._eos_token_ids or len(new) < cap:
                completion.has_ended = True
                self.counts.update(ended=1, ended_tokens=len(completion.tokens))
        for group in self._groups:
            if group.completed_as is None and all(completion.has_ended for completion in group.completions):
                group.completed_as = self._next_place
                self._next_place += 1

    def unscored(self) -> list[tuple[Group, PartialCompletion]]:
        """Return the completions that have tokens without log-probabilities, in the order of admission."""
        pairs = ((group, completion) for group in self._groups for completion in group.completions)
        return [(group, each) for group, each in pairs if len(each.logps) < len(each.tokens)]

    def overdue(self, oldest_version: int | None) -> list[Group]:
        """
        Return the groups with a token older than `oldest_version`, which may not wait for another generation step.

        Groups with the oldest token come first. An `oldest_version` of `None` is no limit.
        """
        if oldest_version is None:
            return []
        overdue = [group for group in self._groups if group.first_version < oldest_version]
        return sorted(overdue, key=lambda group: group.first_version)

    def has_enough(self, count: int, oldest_version: int | None = None) -> bool:
        """Return whether `count` groups are complete, including all overdue groups, or the first `count` of them."""
        complete = sum(group.completed_as is not None for group in self._groups)
        first = self.overdue(oldest_version)[:count]
        return complete >= count and all(group.completed_as is not None for group in first)

    def emit(self, count: int, oldest_version: int | None = None) -> list[Group]:
        """
        Remove and return complete groups: overdue groups first, the others in the order in which they were completed.

        If more than `count` groups are overdue, the oldest are emitted.
        """
        overdue = {group.id for group in self.overdue(oldest_version)[:count]}
        complete = [group for group in self._groups if group.completed_as is not None]
        leaving = sorted(complete, key=lambda group: (group.id not in overdue, group.completed_as))[:count]
        left = {group.id for group in leaving}
        self._groups = [group for group in self._groups if group.id not in left]
        lengths = [len(completion.tokens) for group in leaving for completion in group.completions]
        self.counts.update(emitted=len(lengths), emitted_tokens=sum(lengths))
        return leaving

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything that a resumed run needs."""
        groups = [_state_of(group) for group in self._groups]
        return {
            "groups": groups,
            "counts": dict(self.counts),
            "next_id": self._next_id,
            "next_place": self._next_place,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of [`RolloutPool.state_dict`], from a run with any number of ranks."""
        groups = [_group_of(each) for each in state["groups"]]
        for group in groups:
            if len(group.completions) != self.num_generations:
                raise InputError(
                    f"`num_generations` is {self.num_generations}, but the paused groups in the checkpoint have "
                    f"{len(group.completions)} completions: set it to {len(group.completions)}."
                )
            for each in group.completions:
                left = self._num_left(group, each)
                if left < 0 or (left == 0 and not each.has_ended):
                    raise InputError(
                        f"`max_completion_length` is {self.max_completion_length}"
                        f"{'' if self.window is None else f', and the window of the sampler {self.window} tokens'}, "
                        f"but a paused completion has {len(each.tokens)} tokens: set it at least as high as before."
                    )
        self._groups = groups
        self.counts = Counter({name: state["counts"][name] for name in _NO_COUNTS})
        self._next_id = state["next_id"] + (self.rank - state["next_id"]) % self.num_ranks
        self._next_place = state["next_place"]

    def _num_left(self, group: Group, completion: PartialCompletion) -> int:
        most = self.max_completion_length
        if self.window is not None:
            most = min(most, self.window - len(group.prompt_ids))
        return most - len(completion.tokens)


def deal_out(states: Iterable[dict[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """
    Return one rank's part of the pools that another number of ranks saved.

    In the order of their numbers, the i-th group goes to rank i modulo the number of ranks. The counts of saved rank i
    go to the same rank.
    """
    states = list(states)
    groups = sorted((group for state in states for group in state["groups"]), key=lambda group: group["id"])
    counts = Counter(_NO_COUNTS)
    for state in states[rank::num_ranks]:
        counts.update(state["counts"])
    last = {name: max(state[name] for state in states) for name in ("next_id", "next_place")}
    return {"groups": groups[rank::num_ranks], "counts": dict(counts), **last}


def _state_of(group: Group) -> dict[str, Any]:
    """Return a copy of a group that can be stored as JSON."""
    return {**asdict(replace(group, inputs={})), "inputs": to_json(group.inputs)}


def _group_of(state: Mapping[str, Any]) -> Group:
    completions = [PartialCompletion(**each) for each in state["completions"]]
    return Group(**{**state, "inputs": DECODER.decode(state["inputs"]), "completions": completions})
