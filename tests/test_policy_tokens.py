"""Ratios and weights of the tokens, by hand."""

import math

import pytest
import torch

from bapo_trl.clip_bounds.tokens import policy_tokens


LOGPS = torch.log(torch.tensor([[0.5, 0.4, 0.9], [0.2, 0.8, 0.3]]))
OLD = torch.log(torch.tensor([[0.25, 0.4, 0.1], [0.4, 0.2, 0.7]]))
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
ADVANTAGES = torch.tensor([1.0, -1.0])


def tokens(**settings):
    return policy_tokens(LOGPS, OLD, ADVANTAGES, MASK, **{"loss_type": "dapo", **settings})


def test_token_ratios_are_probabilities_over_behaviour_probabilities():
    torch.testing.assert_close(tokens().ratio, torch.tensor([[2.0, 1.0, 9.0], [0.5, 4.0, 3 / 7]]))


def test_sequence_ratios_are_geometric_means_over_the_mask():
    # row 0: sqrt(2 * 1), the masked 9 left out; row 1: cube root of 0.5 * 4 * 3 / 7
    expected = torch.tensor([[math.sqrt(2)], [(6 / 7) ** (1 / 3)]])
    torch.testing.assert_close(tokens(importance_sampling_level="sequence").ratio, expected)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "dr_grpo", "luspo"])
def test_most_losses_weigh_all_tokens_alike(loss_type):
    assert torch.equal(tokens(loss_type=loss_type).weights, MASK.float())


def test_grpo_weights_tokens_by_the_inverse_length_of_their_row():
    expected = torch.tensor([[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(tokens(loss_type="grpo").weights, expected)


def test_a_row_without_tokens_has_weight_zero():
    row = policy_tokens(LOGPS, OLD, ADVANTAGES, torch.zeros_like(MASK), loss_type="grpo")
    assert torch.equal(row.weights, torch.zeros(2, 3))


def test_factors_and_behaviour_probabilities_multiply():
    factors = [torch.tensor([[1.0], [0.0]]), torch.tensor([[2.0, 3.0, 5.0], [1.0, 1.0, 1.0]])]
    expected = torch.tensor([[2 * 0.25, 3 * 0.4, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(tokens(factors=factors, weighting="behavior_prob").weights, expected)


def test_the_graph_is_left_alone():
    logps = LOGPS.clone().requires_grad_()
    result = policy_tokens(logps, OLD, ADVANTAGES, MASK, loss_type="dapo")
    assert not result.ratio.requires_grad
    assert not result.weights.requires_grad


def test_ratio_mask_follows_the_shape_of_the_ratios():
    assert torch.equal(tokens().ratio_mask, MASK.bool())
    empty_row = torch.tensor([[0, 0, 0], [1, 1, 1]])
    rows = policy_tokens(LOGPS, OLD, ADVANTAGES, empty_row, loss_type="dapo", importance_sampling_level="sequence")
    assert torch.equal(rows.ratio_mask, torch.tensor([[False], [True]]))
