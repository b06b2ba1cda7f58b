"""Metrics of an update: entropy covariance by hand, merging, what is undefined."""

import math
import operator
from dataclasses import replace
from functools import reduce

import pytest
import torch

from bapo_trl.clip_bounds import BoundGrid, Contributions, search_bounds
from bapo_trl.clip_bounds.tokens import policy_tokens
from bapo_trl.clip_bounds.update_log import measure_tokens, update_metrics


GRID = BoundGrid(lower_start=0.5, lower_max=1.0, lower_step=0.25, upper_start=1.0, upper_max=2.0, upper_step=0.5)
BOUNDS = search_bounds(Contributions(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 3.0, 2.0])), GRID, 0.5)


def measured(ratios, ages, mask=None, advantages=None, gradient_size=None, **guarded):
    logps = torch.log(torch.tensor(ratios))
    mask = torch.ones_like(logps, dtype=torch.int64) if mask is None else torch.tensor(mask)
    advantages = torch.ones(len(logps)) if advantages is None else torch.tensor(advantages)
    tokens = policy_tokens(logps, torch.zeros_like(logps), advantages, mask)
    log_probs = {name: each for name, each in {"per_token_logps": logps, **guarded}.items() if each is not None}
    tokens = replace(tokens, gradient_size=gradient_size, log_probs=log_probs)
    bounds = replace(BOUNDS, negative_weight=torch.tensor(0.5))
    return measure_tokens(tokens, torch.tensor(ages), bounds)


def closed(measurements, gather=lambda tensor: tensor, searches=(BOUNDS,)):
    return update_metrics(searches, reduce(operator.add, measurements), gather, update=7)


def test_entropy_covariance_by_hand():
    """Over tokens that the bounds (0.75, 2.0) let through, negative advantages at half their weight."""
    parts = [
        measured([[0.5, 1.0, 3.0]], ages=[0], advantages=[1.0]),
        measured([[0.5, 0.8, 4.0]], [0], advantages=[-2.0]),
    ]
    logps, advantages = [math.log(r) for r in (0.5, 1.0, 0.8, 4.0)], [1.0, 1.0, -1.0, -1.0]
    mean = sum(logps) / 4
    expected = sum((logp - mean) * advantage for logp, advantage in zip(logps, advantages, strict=True)) / 4
    assert closed(parts)["bapo/entropy_covariance"] == pytest.approx(expected, rel=1e-5)
    assert math.isnan(closed([measured([[3.0]], [0])])["bapo/entropy_covariance"])  # nothing passes
    # Without clip bounds: all pass, by the size of their gradient
    sized = measured([[0.5, 4.0]], [0], advantages=[-2.0], gradient_size=torch.tensor([[1.0, 3.0]]))
    expected = (math.log(4.0) - math.log(0.5)) / 2 * (-3.0 - -1.0) / 2
    assert closed([sized])["bapo/entropy_covariance"] == pytest.approx(expected, rel=1e-5)


def test_micro_batches_and_ranks_merge_to_the_whole():
    rows = [[0.5, 1.5, 3.0], [0.25, 1.0, 1.0], [2.0, 2.0, 0.125], [1.0, 0.75, 4.0]]
    whole = closed([measured(rows, ages=[0, 5, 2, 1])])
    parts = [measured(rows[:1], [0]), measured(rows[1:3], [5, 2]), measured(rows[3:], [1])]
    other = (parts[1] + parts[2]).over_ranks(lambda own: own, "cpu", torch.float64)
    other_rank = torch.stack([*other.sums.values(), *other.maxima.values()]).unsqueeze(0)
    gathered = []
    of_ranks = closed(parts[:1], gather=lambda own: gathered.append(own) or torch.cat([own, other_rank]))
    for metrics in (closed(parts), of_ranks):
        assert metrics == pytest.approx(whole, rel=1e-12)
    assert len(gathered) == 1  # for all metrics


def test_several_searches_are_averaged_and_those_without_a_token_are_left_out():
    empty = search_bounds(Contributions(torch.zeros(3), torch.zeros(3)), GRID, 0.5)
    higher = replace(BOUNDS, high=torch.tensor(2.5), target_met=torch.tensor(False))
    part = [measured([[1.0]], [0])]
    metrics = closed(part, searches=[BOUNDS, empty, higher])
    assert (metrics["bapo/clip_low"], metrics["bapo/clip_high"]) == (0.75, (2.0 + 2.5) / 2)
    assert (metrics["bapo/positive_share"], metrics["bapo/target_met"]) == (0.5, 0.5)
    alone = closed(part, searches=[empty])
    assert (alone["bapo/clip_low"], alone["bapo/clip_high"], alone["bapo/search_steps"]) == (0.5, 1.0, 0)
    assert math.isnan(alone["bapo/positive_share"])
    assert math.isnan(alone["bapo/target_met"])


def test_without_a_token_ratios_and_staleness_are_undefined():
    metrics = closed([measured([[1.0, 2.0]], [4], mask=[[0, 0]])])
    assert all(math.isnan(value) for name, value in metrics.items() if name.startswith(("ratio/", "staleness/")))


def test_only_rows_that_train_have_an_age():
    metrics = closed([measured([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]], [4, 9, 1], mask=[[1, 0], [0, 0], [1, 1]])])
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (2.5, 4)


def test_values_outside_the_mask_stop_nothing():
    closed([measured([[1.0, math.nan]], [0], mask=[[1, 0]], old_per_token_logps=torch.tensor([[0.0, math.inf]]))])
