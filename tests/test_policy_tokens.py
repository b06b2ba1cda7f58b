"""Weights, ratios and masks of rows without tokens."""

import torch

from bapo_trl.clip_bounds.tokens import policy_tokens


LOGPS = torch.log(torch.tensor([[0.5, 0.4, 0.9], [0.2, 0.8, 0.3]]))
OLD = torch.log(torch.tensor([[0.25, 0.4, 0.1], [0.4, 0.2, 0.7]]))
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
ADVANTAGES = torch.tensor([1.0, -1.0])


def test_a_row_without_tokens_has_weight_zero():
    row = policy_tokens(LOGPS, OLD, ADVANTAGES, torch.zeros_like(MASK), weighs_by_length=True)
    assert torch.equal(row.weights, torch.zeros(2, 3))


def test_ratio_mask_follows_the_shape_of_the_ratios():
    by_token = policy_tokens(LOGPS, OLD, ADVANTAGES, MASK)
    assert torch.equal(by_token.ratio_mask, MASK.bool())
    empty_row = torch.tensor([[0, 0, 0], [1, 1, 1]])
    rows = policy_tokens(LOGPS, OLD, ADVANTAGES, empty_row, importance_sampling_level="sequence")
    assert torch.equal(rows.ratio_mask, torch.tensor([[False], [True]]))
    assert rows.ratio[0] == 1  # padding has none
