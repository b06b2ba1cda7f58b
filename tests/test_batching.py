"""Cutting TRL's batch into rows and putting it together again."""

import pytest
import torch

from bapo_trl.batching import cut_into_rows, masked_copy, put_together


PAD = 0


def batch(**extra):
    """Three rows: prompts of 2, 4 and 1 tokens, completions of 3, 1 and 5; the second is truncated and masked."""
    return {
        "prompt_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 5], [0, 0, 0, 6]]),
        "prompt_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]),
        "completion_ids": torch.tensor([[5, 6, 1, 0, 0], [9, 0, 0, 0, 0], [5, 6, 7, 8, 1]]),
        "completion_mask": torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]),
        "advantages": torch.tensor([0.5, -1.0, 2.0]),
        "old_per_token_logps": torch.tensor(
            [[-0.1, -0.2, -0.3, 0, 0], [-0.4, 0, 0, 0, 0], [-0.5, -0.6, -0.7, -0.8, -0.9]]
        ),
        "policy_version": torch.tensor([3, 3, 3]),
        "num_items_in_batch": torch.tensor(8),
        **extra,
    }


EXTRAS = {
    "ref_per_token_logps": -torch.rand(3, 5) * torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]),
    "tool_mask": torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 1]]),
    "importance_sampling_ratio": torch.tensor([[0.5, 2, 1, 1, 1], [0.7, 1, 1, 1, 1], [1, 1, 0.1, 1, 0.3]]),
}


@pytest.mark.parametrize("extra", [{}, EXTRAS, {"importance_sampling_ratio": torch.tensor([[0.5], [0.7], [0.9]])}])
def test_cutting_and_putting_together_gives_every_value_back(extra):
    whole = batch(**extra)
    again = put_together(cut_into_rows(whole, PAD), PAD, "cpu")
    del whole["num_items_in_batch"]  # a value of the whole batch: it has to be counted anew
    assert set(again) == set(whole)
    for key, tensor in whole.items():
        assert again[key].dtype == tensor.dtype, key
        assert torch.equal(again[key], tensor), key


def test_token_advantages_are_cut_and_padded_with_zeros():
    token_advantages = torch.tensor([[1.0, 2, 3, 0, 0], [4, 0, 0, 0, 0], [5, 6, 7, 8, 9]])
    rows = cut_into_rows(batch(advantages=token_advantages), PAD)
    assert [row["advantages"].tolist() for row in rows] == [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    assert torch.equal(put_together(rows, PAD, "cpu")["advantages"], token_advantages)


def test_rows_have_no_padding_and_share_no_memory_with_the_batch():
    whole = batch()
    rows = cut_into_rows(whole, PAD)
    assert [len(row["prompt_ids"]) for row in rows] == [2, 4, 1]
    assert [len(row["completion_ids"]) for row in rows] == [3, 1, 5]  # the token of the masked row is kept
    whole["advantages"].zero_()
    whole["old_per_token_logps"].zero_()
    assert rows[2]["advantages"] == 2.0
    assert rows[0]["old_per_token_logps"].untyped_storage().nbytes() == 3 * 4


def test_rows_of_different_batches_are_padded_to_the_longest():
    rows = cut_into_rows(batch(), PAD)
    mixed = put_together([rows[1], rows[0]], PAD, "cpu")
    assert mixed["prompt_ids"].tolist() == [[7, 8, 9, 5], [0, 0, 5, 6]]
    assert mixed["completion_ids"].tolist() == [[9, 0, 0], [5, 6, 1]]
    assert put_together(rows[:1], PAD, "cpu", pad_to_multiple_of=4)["completion_ids"].shape == (1, 4)


def test_one_token_completions_and_sequence_ratios_do_not_get_mixed_up():
    short = {key: value[:, :1] if value.dim() == 2 else value for key, value in batch().items()}
    short["importance_sampling_ratio"] = torch.tensor([[0.5], [0.7], [0.9]])
    rows = cut_into_rows(short, PAD)
    assert torch.equal(put_together(rows, PAD, "cpu")["importance_sampling_ratio"], short["importance_sampling_ratio"])


def test_unknown_and_multimodal_keys_are_refused_by_name():
    with pytest.raises(ValueError, match=r"`rewards_of_tools`, which cannot be cut into rows"):
        cut_into_rows(batch(rewards_of_tools=torch.ones(3)), PAD)
    with pytest.raises(ValueError, match=r"`pixel_values`: multimodal samples cannot be replayed"):
        cut_into_rows(batch(pixel_values=torch.ones(3, 2)), PAD)


def test_rows_of_different_settings_are_not_mixed():
    rows = cut_into_rows(batch(), PAD)
    with pytest.raises(ValueError, match=r"\['old_per_token_logps'\]"):
        put_together([rows[0], {k: v for k, v in rows[1].items() if k != "old_per_token_logps"}], PAD, "cpu")


def test_a_masked_copy_keeps_the_shape_and_counts_nothing():
    row = cut_into_rows(batch(), PAD)[0]
    copy = masked_copy(row)
    assert copy["completion_ids"] is row["completion_ids"]
    assert not copy["completion_mask"].any()
    assert row["completion_mask"].all()
