"""The pool of unfinished rollouts: what comes in goes out once, whole and in order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bapo_trl.rollouts.pool import RolloutPool


EOS = 1
CAP = 12  # max_completion_length


def completion_of(group: int, index: int, length: int) -> list[int]:
    """The tokens that completion `index` of a group gets, if nothing goes wrong: all differ, EOS last."""
    return [1000 * group + 50 * index + 2 + place for place in range(length - 1)] + [EOS]


def go_on(pool, lengths, policy_version, cap):
    """Continue all that is unfinished by `cap` tokens of what each completion is to become, or fewer near an end."""
    continuations, tokens = pool.unfinished(), []
    cap = min([cap, *(continuation.num_left for continuation in continuations)])
    for continuation in continuations:
        group = continuation.group
        index = next(i for i, each in enumerate(group.completions) if each is continuation.completion)
        whole = completion_of(group.id, index, lengths[group.id][index])
        done = len(continuation.completion.tokens)
        assert continuation.prompt_ids == [group.id, *whole[:done]]
        tokens.append(whole[done : done + cap])
    pool.take(continuations, tokens, policy_version, cap, [[-float(t) for t in new] for new in tokens])


class PoolMachine(RuleBasedStateMachine):
    """Generations of any lengths, any chunks, any limit on the wait, against a plain record of what is to come out."""

    @initialize(
        num_groups=st.integers(1, 4),
        num_carried_over=st.integers(0, 4),
        num_generations=st.integers(1, 3),
        max_wait=st.none() | st.integers(0, 3),
    )
    def start(self, num_groups, num_carried_over, num_generations, max_wait):
        self.num_groups, self.num_carried_over = num_groups, min(num_carried_over, num_groups - 1)
        self.max_wait = max_wait
        self.pool = RolloutPool(num_generations, CAP, [EOS], rank=1, num_ranks=3)
        self.lengths: dict[int, list[int]] = {}  # of every admitted group
        self.completed: list[int] = []  # groups in the order in which they became complete
        self.emitted: list[int] = []
        self.version = 0

    @rule(data=st.data(), chunk=st.integers(1, CAP))
    def generation(self, data, chunk):
        for _ in range(self.num_groups):
            number = self.pool.admit({"n": len(self.lengths)}, [1 + 3 * len(self.lengths)])
            assert number == 1 + 3 * len(self.lengths)
            # Up to 3 beyond the cap: those never see their EOS
            sizes = st.lists(st.integers(1, CAP + 3), min_size=self.pool.num_generations)
            self.lengths[number] = data.draw(sizes.map(lambda s: s[: self.pool.num_generations]))
        count = min(self.num_groups, len(self.pool) - self.num_carried_over)
        oldest = None if self.max_wait is None else self.version - self.max_wait
        overdue = [group.id for group in self.pool.overdue(oldest)]
        while not self.pool.has_enough(count, oldest):
            complete_before = {group.id for group in self.pool if group.completed_as is not None}
            go_on(self.pool, self.lengths, self.version, chunk)
            self.completed += [g.id for g in self.pool if g.completed_as is not None and g.id not in complete_before]
        waiting = [number for number in self.completed if number not in self.emitted]
        expected = [n for n in waiting if n in overdue] + [n for n in waiting if n not in overdue]
        groups = self.pool.emit(count, oldest)
        assert [group.id for group in groups] == expected[:count]
        for group in groups:
            self.check(group)
        self.emitted += [group.id for group in groups]
        assert len(self.pool) == self.num_carried_over
        self.version += data.draw(st.integers(1, 2))

    def check(self, group):
        for index, completion in enumerate(group.completions):
            whole = completion_of(group.id, index, self.lengths[group.id][index])[:CAP]
            assert completion.tokens == whole
            assert completion.sampler_logps == [-float(token) for token in whole]
            assert sum(length for _, length in completion.segments) == len(whole) == len(completion.versions)
            assert completion.versions == sorted(completion.versions)
            if self.max_wait is not None:  # nothing waits longer than it may
                assert self.version - completion.versions[0] <= max(self.max_wait, 0) + 2

    @rule()
    def restart(self):
        """A pool made anew from the state goes on as the old one would have."""
        pool = RolloutPool(self.pool.num_generations, CAP, [EOS], rank=1, num_ranks=3)
        pool.load_state_dict(self.pool.state_dict())
        self.pool = pool

    @invariant()
    def every_admitted_group_is_in_the_pool_or_emitted_once(self):
        if hasattr(self, "pool"):
            inside = [group.id for group in self.pool]
            assert sorted([*inside, *self.emitted]) == sorted(self.lengths)
            tokens = sum(len(c.tokens) for g in self.pool for c in g.completions)
            ended = sum(len(c.tokens) for g in self.pool for c in g.completions if c.has_ended)
            assert self.pool.counts["ended_tokens"] - self.pool.counts["emitted_tokens"] == ended <= tokens


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=12)


def pool_with(*lengths: list[int]) -> tuple[RolloutPool, dict[int, list[int]]]:
    pool = RolloutPool(len(lengths[0]), CAP, [EOS])
    return pool, {pool.admit({}, [number]): sizes for number, sizes in enumerate(lengths)}


def test_what_may_not_wait_goes_first():
    pool, lengths = pool_with([9], [1])
    go_on(pool, lengths, policy_version=0, cap=4)
    number = pool.admit({}, [2])
    lengths[number] = [1]
    assert pool.has_enough(1)
    assert pool.overdue(0) == []  # a token of that very version may wait
    assert [group.id for group in pool.overdue(1)] == [0, 1]
    assert not pool.has_enough(1, oldest_version=1)  # group 0 has tokens of version 0, and goes on
    while not pool.has_enough(1, oldest_version=1):
        go_on(pool, lengths, policy_version=3, cap=4)
    # Group 1 was sampled by version 0 too, and group 2 by version 3
    assert [group.id for group in pool.emit(2, oldest_version=1)] == [1, 0]


def test_of_more_that_may_not_wait_than_can_go_the_oldest_go_first():
    pool, lengths = pool_with([1], [10])
    for version in range(2):
        go_on(pool, lengths, version, cap=4)
        lengths[pool.admit({}, [2 + version])] = [1]
    go_on(pool, lengths, 2, cap=1)
    # Groups 0 and 1 were begun by version 0, group 2 by version 1, group 3 by version 2; group 1 became complete last
    assert pool.has_enough(1, oldest_version=2)
    assert not pool.has_enough(2, oldest_version=2)
    assert [group.id for group in pool.emit(1, oldest_version=2)] == [0]
    assert not pool.has_enough(2, oldest_version=2)
    go_on(pool, lengths, 2, cap=4)
    assert [group.id for group in pool.emit(1, oldest_version=2)] == [1]
    assert [group.id for group in pool.emit(2, oldest_version=2)] == [2, 3]


def test_segments_tell_versions_apart_and_calls_of_one_version_not():
    pool, lengths = pool_with([7])
    for version, cap in ((0, 2), (0, 1), (4, 3), (5, 9)):
        go_on(pool, lengths, version, cap)
    (group,) = pool.emit(1)
    assert group.completions[0].segments == [[0, 3], [4, 3], [5, 1]]
    assert group.completions[0].versions == [0, 0, 0, 4, 4, 4, 5]
    assert group.first_version == 0


def test_a_completion_ends_with_the_window():
    """Of 9 tokens a prompt of 3 leaves 6, a prompt of 8 one; a call that reaches the end looks like any other."""
    pool = RolloutPool(1, CAP, [EOS], window=9)
    for prompt_ids in ([2, 3, 4], [5] * 8):
        pool.admit({}, prompt_ids)
    assert [continuation.num_left for continuation in pool.unfinished()] == [6, 1]
    pool.take(pool.unfinished(), [[50], [60]], 0, cap=1)
    pool.take(pool.unfinished(), [[51, 52, 53, 54, 55]], 0, cap=5)
    assert [group.completions[0].tokens for group in pool.emit(2)] == [[60], [50, 51, 52, 53, 54, 55]]
    with pytest.raises(ValueError, match="prompt has 9 tokens, but the sampler takes 9"):
        pool.admit({}, [5] * 9)
