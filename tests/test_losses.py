"""The losses and the tokens that they weigh: what the table says, against TRL's own loss and worked-out values."""

import ast
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from bapo_trl.batch.losses import CLIPPED_LOSS_TYPES, LOSSES
from bapo_trl.clip_bounds.tokens import policy_tokens


def test_the_table_has_the_losses_of_trl_and_no_other():
    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss)))
    comparisons = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    named = {
        constant.value
        for node in comparisons
        if ast.unparse(node.left) == "self.loss_type"
        for constant in ast.walk(node.comparators[0])
        if isinstance(constant, ast.Constant)
    }
    assert named == set(LOSSES)
    assert set(LOSSES) - set(CLIPPED_LOSS_TYPES) == {"cispo", "sapo", "vespo"}


@pytest.mark.parametrize(
    ("loss_type", "settings", "expected"),
    [
        ("cispo", {"epsilon": 0.2, "epsilon_high": 1.5}, [0.5, 1.5]),  # min(r, 1.5)
        ("cispo", {"epsilon": 0.2, "epsilon_high": None}, [0.2, 0.2]),  # as TRL: `epsilon` stands in
        # 4 s (1 - s) r: at r = 0.5, s = 1 / (1 + e^0.5) = 0.37754, and 4 * 0.37754 * 0.62246 * 0.5 = 0.47000;
        # at r = 2 and a negative advantage, s = 1 / (1 + e^-2) = 0.88080, and 4 * 0.88080 * 0.11920 * 2 = 0.83995
        ("sapo", {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 2.0}, [0.47000, 0.83995]),
    ],
)
def test_gradient_sizes_worked_out(loss_type, settings, expected):
    logps = torch.log(torch.tensor([[0.5], [2.0]]))
    tokens = policy_tokens(logps, torch.zeros_like(logps), torch.tensor([1.0, -1.0]), torch.ones_like(logps))
    size = LOSSES[loss_type].gradient_size(tokens, SimpleNamespace(**settings), None)
    torch.testing.assert_close(size.squeeze(1), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_vespo_has_the_weights_of_trl():
    logps = torch.log(torch.tensor([[0.5, 1.5], [2.0, 1.0]]))
    mask = torch.tensor([[1, 1], [1, 0]])
    tokens = policy_tokens(logps, torch.zeros_like(logps), torch.tensor([1.0, -1.0]), mask)
    settings = GRPOConfig("unused", use_cpu=True, bf16=False, loss_type="vespo", vespo_k_pos=1.5)
    size = LOSSES["vespo"].gradient_size(tokens, settings, None)
    expected = GRPOTrainer.get_gamma_weights(torch.tensor([[1.0], [-1.0]]), logps, mask, None, 1.5, 3.0, 3.0, 2.0)
    assert torch.equal(size, expected)


def test_rows_without_tokens_have_weight_zero_and_ratios_of_sequences_a_mask_of_rows():
    logps, old = torch.log(torch.tensor([[0.5, 0.4, 0.9], [0.2, 0.8, 0.3]])), torch.full((2, 3), -1.0)
    advantages, mask = torch.tensor([1.0, -1.0]), torch.tensor([[0, 0, 0], [1, 1, 0]])
    by_token = policy_tokens(logps, old, advantages, mask, weighs_by_length=True)
    assert torch.equal(by_token.weights, torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.5, 0.0]]))
    assert torch.equal(by_token.ratio_mask, mask.bool())
    rows = policy_tokens(logps, old, advantages, mask, importance_sampling_level="sequence")
    assert torch.equal(rows.ratio_mask, torch.tensor([[False], [True]]))
    assert rows.ratio[0] == 1  # padding has none
