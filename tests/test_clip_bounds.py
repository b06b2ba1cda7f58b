"""The search against a plain loop over Algorithm 1, hand-worked values, and its invariances."""

import itertools
import math
import operator
from functools import reduce
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_trl.clip_bounds import (
    MEASURES,
    SEARCH_ORDERS,
    BoundGrid,
    Contributions,
    contributions,
    search_bounds,
    share_under,
    sum_dtype,
)
from bapo_trl.clip_bounds import curves as curves_module
from tests.helpers import oracle
from tests.helpers.kernels import Kernels


def as_tensors(rows):
    """Rows of (ratio, advantage, weight) tokens, all of one length, as three (B, T) float64 tensors."""
    tokens = torch.tensor(rows, dtype=torch.float64)
    return tokens[..., 0], tokens[..., 1], tokens[..., 2]


def random_batch(rows=5, length=11):
    generator = torch.Generator().manual_seed(0)
    ratio = torch.exp(0.5 * torch.randn(rows, length, generator=generator, dtype=torch.float64))
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    mask = (torch.rand(rows, length, generator=generator) < 0.8).double()
    return ratio, advantages, mask


def computed_as(on_cpu: bool):
    """Have tensors of the CPU summed as a CPU sums, or as an accelerator does."""
    return mock.patch.object(curves_module, "_on_cpu", return_value=on_cpu)


# Grids


def test_candidates_are_whole_steps_from_the_start_to_the_end_of_the_range():
    assert BoundGrid().upper[-1] == 3.0  # 36 repeated additions of 0.05 to 1.2 give 3.0000000000000013
    # 0.15 / 0.05 is 2.9999999999999996, and 0.3 does not divide 1.0
    grid = BoundGrid(lower_start=0.8, lower_max=0.95, lower_step=0.05, upper_start=1.0, upper_max=2.0, upper_step=0.3)
    torch.testing.assert_close(grid.lower, torch.tensor([0.8, 0.85, 0.9, 0.95], dtype=torch.float64))
    torch.testing.assert_close(grid.upper, torch.tensor([1.0, 1.3, 1.6, 1.9], dtype=torch.float64))
    assert (grid.num_lower, grid.num_upper) == (4, 4)


def test_writing_to_a_grids_candidates_changes_no_other_grid():
    BoundGrid().lower.zero_()
    BoundGrid().upper.zero_()
    assert BoundGrid().lower[0] == 0.6
    assert BoundGrid().upper[0] == 1.2


def test_a_grid_is_fixed_where_no_bound_can_move():
    assert not BoundGrid(lower_start=0.8, lower_max=0.8).is_fixed
    assert BoundGrid(lower_start=0.8, lower_max=0.8, upper_start=1.2, upper_max=1.2).is_fixed


# Golden values


SMALL_GRID = BoundGrid(lower_start=0.5, lower_max=1.0, lower_step=0.25, upper_start=1.0, upper_max=2.0, upper_step=0.5)


def test_delta_caps_what_passes():
    ratio, advantages, weights = as_tensors([[(3.0, -1.0, 1.0), (2.0, -1.0, 1.0), (2.5, 1.0, 1.0)]])
    # gradient: ratio 3.0 > delta passes no gradient, 2.0 does; the positive token lies above every upper bound
    gradient = contributions(ratio, advantages, weights, SMALL_GRID, "gradient", delta=2.0)
    assert (gradient.negative.tolist(), gradient.positive.tolist()) == ([2.0] * 3, [0.0] * 3)
    # surrogate: min(3, 2) + min(2, 2) = 4
    surrogate = contributions(ratio, advantages, weights, SMALL_GRID, "surrogate", delta=2.0)
    assert (surrogate.negative.tolist(), surrogate.positive.tolist()) == ([4.0] * 3, [1.0, 1.5, 2.0])


def test_search_moves_the_upper_bound_first_or_the_lower():
    curves = Contributions(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 3.0, 2.0]))
    # upper first: 1/5, 2/6, 3/7, then 3/6 = 0.5; lower first: 1/5, 1/4, 1/3, 2/4 = 0.5
    upper_first = search_bounds(curves, SMALL_GRID, 0.5, "upper_first")
    lower_first = search_bounds(curves, SMALL_GRID, 0.5, "lower_first")
    assert (upper_first.low, upper_first.high, upper_first.steps) == (0.75, 2.0, 3)
    assert (lower_first.low, lower_first.high, lower_first.steps) == (1.0, 1.5, 3)
    for bounds in (upper_first, lower_first):
        assert bounds.target_met
        assert bounds.positive_share == 0.5
        assert bounds.initial_positive_share == 0.2


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
def test_nothing_to_count_keeps_the_start_bounds_with_an_undefined_share(measure, shape):
    curves = contributions(torch.ones(shape), torch.zeros(shape[0]), torch.ones(shape), BoundGrid(), measure)
    bounds = search_bounds(curves, BoundGrid(), 0.5)
    assert (bounds.low.item(), bounds.high.item(), bounds.steps.item()) == (0.6, 1.2, 0)
    assert bounds.positive_share.isnan()
    assert bounds.initial_positive_share.isnan()
    assert not bounds.target_met


@pytest.mark.parametrize("measure", MEASURES)
def test_tokens_of_weight_or_advantage_zero_count_nowhere_whatever_their_ratio(measure):
    ratio = torch.tensor([[1.0, math.inf, math.nan], [1.0, 1.0, math.inf]])
    advantages = torch.tensor([[1.0, 1.0, -1.0], [-1.0, -1.0, 0.0]])
    weights = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    if measure == "surrogate":
        ratio = ratio.nan_to_num(nan=5.0)
    curves = contributions(ratio, advantages, weights, BoundGrid(), measure)
    assert torch.equal(curves.positive, torch.ones(37, dtype=torch.float64))
    assert torch.equal(curves.negative, torch.ones(16, dtype=torch.float64))


# Against the oracle


def fractions(smallest: int, largest: int, parts: int):
    """Multiples of a power of two: their sums and products are exact in any order, and a tie is a tie."""
    return st.integers(smallest * parts, largest * parts).map(lambda number: number / parts)


WEIGHTS = fractions(0, 2, 2) | fractions(0, 8, 1).map(lambda number: number / 1024)  # which hardly change a share
TOKEN = st.tuples(fractions(0, 4, 32), fractions(-2, 2, 4), WEIGHTS)  # ratio, advantage, weight
ROWS = st.integers(1, 4).flatmap(
    lambda length: st.lists(st.lists(TOKEN, min_size=length, max_size=length), min_size=1, max_size=5)
)
GRIDS = [
    SMALL_GRID,
    BoundGrid(lower_start=0.625, lower_max=0.9375, lower_step=1 / 32, upper_start=1.25, upper_step=1 / 16),
    BoundGrid(lower_start=0.75, lower_max=0.75, upper_start=1.0, upper_max=3.5, upper_step=0.125),
    BoundGrid(lower_start=0.5, lower_max=1.0, lower_step=0.125, upper_start=1.25, upper_max=1.25),
    BoundGrid(lower_start=0.75, lower_max=0.75, upper_start=1.25, upper_max=1.25),
]


@settings(max_examples=400)
@given(
    ROWS, st.sampled_from(GRIDS), st.sampled_from([0.125, 0.375, 0.5, 0.75, 1.0]), st.sampled_from(MEASURES),
    st.sampled_from(SEARCH_ORDERS), st.sampled_from([1.0, 0.5, 1 / 64]), st.booleans(),
)  # fmt: skip
def test_search_equals_a_plain_loop_over_algorithm_1(rows, grid, target, measure, order, weight_min, on_cpu):
    expected = oracle.search([token for row in rows for token in row], grid, target, measure, order, weight_min)
    with computed_as(on_cpu):
        curves = contributions(*as_tensors(rows), grid, measure)
    found = search_bounds(curves, grid, target, order, weight_min)
    assert {name: value.item() for name, value in vars(found).items()} == pytest.approx(
        vars(expected), rel=1e-9, nan_ok=True
    )


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_curves_equal_one_pass_for_each_bound_on_many_tokens(measure, dtype):
    ratio, advantages, weights = random_batch(rows=60, length=2000)
    grid = BoundGrid()
    ratio = ratio.to(dtype)
    ratio[0, :37], ratio[1, :16] = grid.upper.to(dtype), grid.lower.to(dtype)  # ties, in the type of the ratio
    advantage = advantages.unsqueeze(1)
    curves = contributions(ratio, advantages, weights, grid, measure)
    totals = weights * advantage.abs()
    for sign, bounds, found in ((1, grid.upper, curves.positive), (-1, grid.lower, curves.negative)):
        is_of_sign = (sign * advantage > 0).expand_as(ratio)
        for k, bound in enumerate(bounds):
            passes = sign * ratio <= sign * bound.to(dtype)
            clipped = torch.where(passes, ratio.double(), 0.0 if measure == "gradient" else bound)
            torch.testing.assert_close(found[k], (totals * clipped)[is_of_sign].sum(), rtol=1e-12, atol=0)


# On an accelerator


@pytest.mark.parametrize("measure", MEASURES)
def test_an_accelerator_chooses_the_bounds_of_the_cpu_to_the_bit(measure):
    ratio, advantages, weights = random_batch(rows=70, length=1000)  # more than one call sums at once
    ratio[6:8, 5], weights[6:8, 5] = math.inf, 0.5  # above every upper bound of a token that counts
    of_tokens = advantages.unsqueeze(1) * (torch.arange(1000) % 3 - 1)
    steps = set()
    for inputs in itertools.product((ratio, ratio[:, 300:301]), (advantages, of_tokens), (None, 3.5)):
        tokens = (*inputs[:2], weights, BoundGrid(), measure, inputs[2])
        expected = contributions(*tokens)
        with computed_as(on_cpu=False):
            curves = contributions(*tokens)
        # Sums in another order: at most 70,000 roundings of 1.1e-16 each
        torch.testing.assert_close(curves.as_vector(), expected.as_vector(), rtol=1e-11, atol=0)
        for target, order in itertools.product([k / 50 for k in range(15, 35)], SEARCH_ORDERS):
            found = search_bounds(curves, BoundGrid(), target, order)
            on_cpu = search_bounds(expected, BoundGrid(), target, order)
            assert (found.low, found.high, found.steps) == (on_cpu.low, on_cpu.high, on_cpu.steps)
            steps.add(found.steps.item())
    assert len(steps) > 5


@pytest.mark.parametrize(
    ("rows", "length", "advantage"), [(64, 700, 0.57735), (32, 333, 1.118034), (32, 700, 0.9354143)]
)
def test_the_order_of_the_sums_does_not_decide_a_tie(rows, length, advantage):
    # Fresh samples, half of them right: P = N, a share of 0.5. Their sums differ from it by up to 4e-15
    ratio, weights = torch.ones(rows, length), torch.ones(rows, length) / length
    advantages = torch.tensor([advantage, -advantage]).repeat(rows // 2)

    def curves_of(rows: torch.Tensor) -> Contributions:
        return contributions(ratio[rows], advantages[rows], weights[rows], BoundGrid())

    everything = torch.arange(rows)
    found = [curves_of(everything)]
    with computed_as(on_cpu=False):
        found.append(curves_of(everything))
    micro_batches = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).chunk(3)
    found.append(reduce(operator.add, map(curves_of, micro_batches)))
    for curves in found:
        for weight_min in (1.0, 0.1):
            bounds = search_bounds(curves, BoundGrid(), 0.5, negative_weight_min=weight_min)
            assert (bounds.steps, bounds.target_met, bounds.negative_weight) == (0, True, 1)


GRID = BoundGrid(lower_start=0.5, lower_max=0.5, upper_start=1.0, upper_max=2.0, upper_step=0.5)


@pytest.mark.parametrize(
    ("positive", "target", "steps", "is_met"),
    [  # P at the three upper bounds, with N = 1 - P at the first
        ([0.5, 0.5, 0.5], 0.5 + 5e-4, 0, True),
        ([0.5, 0.5, 0.5], 0.5 + 2e-3, 0, False),
        ([0.5 - 2e-7, 0.5, 0.5], 0.5, 0, True),
        ([0.4, 0.401, 0.401], 0.7, 0, False),  # 0.401 / 1.001 = 0.4006
        ([0.4, 0.402, 0.402], 0.7, 2, False),  # 0.402 / 1.002 = 0.4012
        ([0.4, 0.45, 0.6], 0.5 + 9e-4, 2, True),  # 0.6 / 1.2 = 0.5
        ([0.4, 0.45, 0.6], 0.5 + 11e-4, 2, False),
        ([0.4995, 0.6, 0.7], 0.5, 0, True),
        ([0.4985, 0.6, 0.7], 0.5, 1, True),  # 0.6 / 1.1015
    ],
)
def test_the_target_counts_as_met_from_a_thousandth_below_and_bounds_without_an_effect_stay(
    positive, target, steps, is_met
):
    curves = Contributions(torch.tensor(positive).double(), 1 - torch.tensor(positive[:1]).double())
    bounds = search_bounds(curves, GRID, target)
    assert (bounds.steps.item(), bounds.target_met.item()) == (steps, is_met)


@pytest.mark.parametrize(
    ("weight_min", "share", "is_met"),
    [  # P = 1, N = 4, target 0.5: a weight of 0.25 reaches it, one of 0.251 misses it by 0.001
        (0.1, 0.5, True),
        (0.25, 0.5, True),
        (0.2505, 0.4995, True),
        (0.26, 0.4902, False),
        (1.0, 0.2, False),
    ],
)
def test_the_weight_works_where_the_bounds_have_no_effect_and_its_share_decides_whether_the_target_is_met(
    weight_min, share, is_met
):
    bounds = search_bounds(
        Contributions(torch.ones(3).double(), torch.tensor([4.0]).double()), GRID, 0.5, negative_weight_min=weight_min
    )
    assert bounds.negative_weight.item() == pytest.approx(max(weight_min, 0.25))
    assert bounds.positive_share.item() == pytest.approx(share, abs=1e-4)
    assert (bounds.steps, bounds.target_met) == (0, is_met)


@pytest.mark.parametrize(("rows", "most"), [(512, 60), (4, 40)])  # 2,048 tokens each
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("delta", [None, 3.5])
def test_a_search_on_an_accelerator_takes_few_kernels_and_little_memory(monkeypatch, measure, rows, most, delta):
    monkeypatch.setattr(curves_module, "sum_dtype", lambda device: torch.float64)  # as on CUDA
    ratio, weights = torch.ones(2, rows, 2048, device="meta")
    advantages = torch.ones(rows, device="meta")
    contributions(ratio, advantages, weights, BoundGrid(), measure)  # the tables of the grid are made once
    with Kernels() as kernels:
        curves = contributions(ratio, advantages, weights, BoundGrid(), measure, delta)
        search_bounds(curves, BoundGrid(), 0.5)
    assert 10 < len(kernels.names) <= most
    with Kernels() as of_weight:
        search_bounds(curves, BoundGrid(), 0.5, negative_weight_min=0.05)
    assert len(of_weight.names) < 28
    if rows == 512:  # a small tensor more: 57 pairs of bounds
        assert kernels.peak_bytes <= 4 * ratio.nbytes + 2**12


# Invariances


def test_sequence_ratios_and_token_advantages_broadcast():
    ratio, _, weights = random_batch()
    advantages = torch.randn(5, 11, dtype=torch.float64)
    sequence_ratio = ratio[:, :1]
    curves = contributions(sequence_ratio, advantages, weights, BoundGrid())
    expected = contributions(sequence_ratio.expand(5, 11).clone(), advantages, weights, BoundGrid())
    assert torch.equal(curves.as_vector(), expected.as_vector())


def test_inputs_are_left_as_they_were():
    inputs = random_batch()
    copies = [tensor.clone() for tensor in inputs]
    for measure in MEASURES:
        contributions(*inputs, BoundGrid(), measure, delta=4.0)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))


def test_search_reads_nothing_back_to_the_host():
    # On the meta device there are no values: reading one back raises.
    curves = contributions(
        torch.ones(4, 6, device="meta"), torch.ones(4, device="meta"), torch.ones(4, 6, device="meta"), BoundGrid()
    )
    bounds = search_bounds(curves, BoundGrid(), 0.5, negative_weight_min=0.05)
    bounds = share_under(bounds, curves, BoundGrid())
    assert all((each.device.type, each.shape) == ("meta", ()) for each in vars(bounds).values())


def test_sums_are_double_precision_where_the_device_has_it():
    assert sum_dtype("cpu") == sum_dtype("cuda") == torch.float64
    assert sum_dtype("mps") == sum_dtype("xpu") == torch.float32
    ratio, advantages, weights = (tensor.float() for tensor in random_batch())
    assert contributions(ratio, advantages, weights, BoundGrid()).positive.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"measure": "odds"}, "measure.*odds.*gradient"),
        ({"ratio": torch.ones(3, 4)}, r"ratio.*\(3, 4\).*\(2, 4\)"),
        ({"advantages": torch.ones(4)}, r"advantages.*\(4,\).*\(2,\)"),
        ({"weights": torch.ones(2)}, r"weights.*\(2,\).*\(B, T\)"),
    ],
)
def test_wrong_shapes_and_measures_are_rejected(arguments, message):
    good = {"ratio": torch.ones(2, 4), "advantages": torch.ones(2), "weights": torch.ones(2, 4), "grid": BoundGrid()}
    with pytest.raises(ValueError, match=message):
        contributions(**{**good, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": BoundGrid()}, r"3 upper and 3 lower.*37 and 16"),
        ({"order": "sideways"}, r"order.*sideways.*upper_first"),
        ({"target": 1.5}, r"target.*1.5.*\(0, 1\]"),
        ({"negative_weight_min": 0.0}, r"negative_weight_min.*0.0.*\(0, 1\]"),
    ],
)
def test_a_search_on_foreign_curves_or_settings_is_rejected(arguments, message):
    curves = Contributions(torch.ones(3), torch.ones(3))
    with pytest.raises(ValueError, match=message):
        search_bounds(curves, **{"grid": SMALL_GRID, "target": 0.5, **arguments})
