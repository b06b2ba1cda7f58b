"""The replay queue against a plain list, and its limits."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bapo_trl.batch.samples import Rows, concat_rows
from bapo_trl.replay.buffer import ReplayBuffer


def make_rows(version, count, first=0, advantages=None):
    """Row i has 1 + i % 3 tokens; its first is its name."""
    lengths = {"left": np.ones(count), "right": 1 + np.arange(count) % 3}
    tokens = [torch.arange(first + index, first + index + length) for index, length in enumerate(lengths["right"])]
    values = {
        "policy_version": torch.full((count, 1), version),
        "prompt_ids": torch.ones(count, dtype=torch.int32),
        "completion_ids": torch.cat([torch.empty(0), *tokens]).int(),
        "completion_mask": torch.ones(sum(map(len, tokens)), dtype=torch.bool),
        "advantages": torch.tensor([1.0] * count if advantages is None else advantages).unsqueeze(1),
    }
    return Rows(values, lengths)


def names(rows):
    starts = rows.lengths["right"].cumsum() - rows.lengths["right"]
    return rows.values["completion_ids"][starts].tolist()


def contents(queue):
    """Names of the rows in the queue, in the order of entry."""
    return [name for rows in queue.rows for name in names(rows)]


def drawn(queue, *args, **kwargs):
    """Names of the rows that a draw gives."""
    parts, _ = queue.draw(*args, **kwargs)
    return names(concat_rows(parts)) if parts else []


class QueueMachine(RuleBasedStateMachine):
    """Every call on the queue is made on a list of [name, version, uses, turn] too."""

    @initialize(
        capacity=st.integers(1, 12),
        max_staleness=st.none() | st.integers(0, 5),
        min_staleness=st.integers(0, 3),
        max_reuse=st.none() | st.integers(1, 3),
    )
    def start(self, capacity, max_staleness, min_staleness, max_reuse):
        self.limits = (capacity, max_staleness, min_staleness, max_reuse)
        self.queue = ReplayBuffer(capacity, max_staleness, min_staleness, max_reuse)
        self.model, self.version, self.turn, self.entered, self.name = [], 0, 0, 0, 0
        self.left = {"used": 0, "expired": 0, "overflowed": 0}

    @rule(count=st.integers(0, 6), uses=st.integers(0, 1))
    def add(self, count, uses):
        capacity, _, _, max_reuse = self.limits
        self.queue.add(make_rows(self.version, count, self.name), uses)
        self.entered += count
        if max_reuse is not None and uses >= max_reuse:
            self.left["used"] += count
        else:
            for index in range(count):
                self.model.append([self.name + index, self.version, uses, self.turn])
                self.turn += 1
            while len(self.model) > capacity:
                self.model.pop(0)
                self.left["overflowed"] += 1
        self.name += count

    @rule(updates=st.integers(1, 3))
    def update(self, updates):
        self.version += updates

    @rule(count=st.integers(0, 6), more_updates=st.integers(0, 2))
    def draw(self, count, more_updates):
        _, max_staleness, min_staleness, max_reuse = self.limits
        last = self.version + more_updates
        parts, uses = self.queue.draw(count, self.version, last)
        if max_staleness is not None:
            self.left["expired"] += sum(last - row[1] > max_staleness for row in self.model)
            self.model = [row for row in self.model if last - row[1] <= max_staleness]
        allowed = [row for row in self.model if self.version - row[1] >= min_staleness]
        allowed.sort(key=lambda row: (row[2], row[3]))
        expected = allowed[:count]
        assert (names(concat_rows(parts)) if parts else []) == [row[0] for row in expected]
        for row in expected:
            row[2] += 1
            row[3] = self.turn
            self.turn += 1
        assert uses.tolist() == [row[2] for row in expected]
        if max_reuse is not None:
            self.left["used"] += sum(row[2] >= max_reuse for row in self.model)
            self.model = [row for row in self.model if row[2] < max_reuse]

    @rule()
    def save_and_load(self):
        state = self.queue.state_dict()
        self.queue = ReplayBuffer(*self.limits)
        self.queue.load_state_dict(copy.deepcopy(state))

    @invariant()
    def same_rows_and_every_departure_counted(self):
        if hasattr(self, "model"):
            assert contents(self.queue) == [row[0] for row in self.model]
            assert self.queue.evictions == self.left
            assert self.entered == len(self.queue) + sum(self.left.values())
            values = sum(tensor.nbytes for rows in self.queue.rows for tensor in rows.values.values())
            live = values + 32 * len(self.queue)  # length and end of prompt and completion
            assert live <= self.queue.num_bytes <= 1.15 * live


QueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
TestQueueMachine = QueueMachine.TestCase


def test_mix_trades_the_last_fresh_rows_for_queued_ones():
    queue = ReplayBuffer(100)
    first = queue.draw_first_pass(make_rows(0, 4), 0.5, False, 0, 1)
    assert (names(first.rows), first.from_buffer) == ([0, 1, 2, 3], 0)  # nothing queued yet: fresh rows fill
    second = queue.draw_first_pass(make_rows(2, 4, first=10), 0.5, False, 2, 3)
    assert (names(second.rows), second.from_buffer, second.uses) == ([0, 1, 10, 11], 2, 2 + 2 + 1 + 1)
    # never trained: the displaced 12 and 13; of those trained once, 2 and 3 have waited longest
    third = queue.draw_first_pass(make_rows(4, 4, first=20), 0.5, False, 4, 5)
    assert names(third.rows) == [12, 13, 20, 21]
    assert drawn(queue, 4, 6, 7) == [22, 23, 2, 3]


def test_rows_without_advantage_give_their_place_and_do_not_enter():
    queue = ReplayBuffer(100)
    queue.add(make_rows(0, 3))
    batch = queue.draw_first_pass(make_rows(2, 4, first=10, advantages=[1.0, 0.0, 0.0, -1.0]), 0.0, True, 2, 2)
    assert (names(batch.rows), batch.from_buffer, batch.zero_advantage_filled) == ([0, 1, 10, 13], 2, 2)
    assert sorted(contents(queue)) == [0, 1, 2, 10, 13]
    alone = ReplayBuffer(100).draw_first_pass(make_rows(2, 3, first=10, advantages=[0.0, 1.0, 0.0]), 0.0, True, 2, 2)
    assert (names(alone.rows), alone.zero_advantage_filled) == ([11, 10, 12], 0)  # an empty queue: they fill the shape


def test_rows_without_a_trained_token_are_displaced_first_and_do_not_enter():
    queue = ReplayBuffer(100)
    queue.add(make_rows(0, 4))
    rows = make_rows(2, 4, first=10)
    fresh = concat_rows([(rows.masked(), [0]), (rows, [1]), (rows.masked(), [2]), (rows, [3])])
    batch = queue.draw_first_pass(fresh, 0.25, False, 2, 2)
    assert names(batch.rows) == [0, 11, 13, 10]  # without the flag, no more than the fraction
    assert (batch.from_buffer, batch.zero_advantage_filled, batch.untrained, batch.masked) == (1, 1, 2, 0)
    assert sorted(contents(queue)) == [0, 1, 2, 3, 11, 13]
    batch = queue.draw_first_pass(fresh, 0.25, True, 2, 2)
    assert (batch.from_buffer, batch.zero_advantage_filled, batch.untrained) == (3, 2, 2)


def test_a_later_pass_that_finds_too_few_rows_keeps_the_shape_with_masked_ones():
    queue = ReplayBuffer(100, max_reuse=2)
    fresh = make_rows(0, 3)
    queue.draw_first_pass(fresh, 0.5, True, 0, 0)
    queue.draw(2, 1, 1)
    batch = queue.draw_later_pass(fresh, 1, 1)
    assert (len(batch.rows), batch.from_buffer, batch.masked, batch.uses) == (3, 1, 2, 2)
    assert batch.rows.has_trained_token().tolist() == [True, False, False]


def rows_of_first_passes(updates, passes, num_generations=9, **limits):
    """How many rows the first passes draw from the queue, of a share of a half."""
    queue, count = ReplayBuffer(1000, **limits), 0
    for generation in range(num_generations):
        first, *later = ((generation * passes + number) * updates for number in range(passes))
        rows = make_rows(first, 4)
        count += queue.draw_first_pass(rows, 0.5, False, first, first + updates - 1).from_buffer
        for version in later:
            queue.draw_later_pass(rows, version, version + updates - 1)
    return count


@pytest.mark.parametrize(("updates", "passes"), [(1, 1), (3, 1), (1, 2), (2, 2), (2, 3)])
def test_the_smallest_limits_under_which_a_first_pass_draws(updates, passes):
    versions = updates * passes
    for min_staleness in range(0, 2 * versions + 2):
        stays = {"min_staleness": min_staleness}
        smallest = max(1, math.ceil(min_staleness / versions)) * versions + updates - 1  # as in `BAPOConfig`
        assert rows_of_first_passes(updates, passes, max_staleness=smallest - 1, **stays) == 0
        assert rows_of_first_passes(updates, passes, max_reuse=passes, **stays) == 0
        assert rows_of_first_passes(updates, passes, max_staleness=smallest, max_reuse=passes + 1, **stays) > 0
