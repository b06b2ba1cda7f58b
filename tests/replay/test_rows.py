"""Cutting TRL's batch into rows and putting it together again."""

import pytest
import torch

from bapo_trl.batch.samples import Rows, batch_to_rows, concat_rows, rows_to_batch


PAD = 0


def row_of(rows, index):
    """The values of one row by key, those of one value a row as a number."""
    return {key: values[0] for key, values in rows_to_batch(rows.select([index]), PAD, "cpu").items()}


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


@pytest.mark.parametrize(
    "extra",
    [
        {},
        EXTRAS,
        {"importance_sampling_ratio": torch.tensor([[0.5], [0.7], [0.9]])},
        {"advantages": torch.tensor([[1.0, 2, 3, 0, 0], [4, 0, 0, 0, 0], [5, 6, 7, 8, 9]])},
    ],
)
def test_cutting_and_putting_together_gives_every_value_back(extra):
    whole = batch(**extra)
    again = rows_to_batch(batch_to_rows(whole, PAD), PAD, "cpu")
    del whole["num_items_in_batch"]  # a value of the whole batch: it has to be counted anew
    assert set(again) == set(whole)
    for key, tensor in whole.items():
        assert again[key].dtype == tensor.dtype, key
        counts = whole["completion_mask"] == 1 if key == "ref_per_token_logps" else torch.ones_like(tensor).bool()
        assert torch.equal(again[key][counts], tensor[counts]), key


def test_padded_reference_log_probabilities_cannot_make_the_kl_term_overflow():
    again = rows_to_batch(batch_to_rows(batch(**EXTRAS), PAD), PAD, "cpu")
    difference = again["ref_per_token_logps"] - torch.tensor(-100.0)  # a policy that is sure of another token
    k3 = difference.exp() - difference - 1
    assert k3[again["completion_ids"] == PAD].isfinite().all()


def test_rows_have_no_padding_and_share_no_memory_with_the_batch():
    whole = batch()
    rows = batch_to_rows(whole, PAD)
    assert rows.lengths["left"].tolist() == [2, 4, 1]
    assert rows.lengths["right"].tolist() == [3, 1, 5]  # the token of the masked row is kept
    whole["advantages"].zero_()
    whole["old_per_token_logps"].zero_()
    assert row_of(rows, 2)["advantages"] == 2.0
    assert row_of(rows, 2)["old_per_token_logps"].all()
    assert rows.values["old_per_token_logps"].untyped_storage().nbytes() == (3 + 1 + 5) * 4


def test_rows_of_different_batches_are_padded_to_the_longest():
    rows = batch_to_rows(batch(), PAD)
    mixed = rows_to_batch(rows.select([1, 0]), PAD, "cpu")
    assert mixed["prompt_ids"].tolist() == [[7, 8, 9, 5], [0, 0, 5, 6]]
    assert mixed["completion_ids"].tolist() == [[9, 0, 0], [5, 6, 1]]
    assert rows_to_batch(rows.select([0]), PAD, "cpu", pad_to_multiple_of=4)["completion_ids"].shape == (1, 4)
    of_another_tokenizer = rows_to_batch(rows.select([1, 0]), 3, "cpu")
    assert of_another_tokenizer["prompt_ids"].tolist() == [[7, 8, 9, 5], [3, 3, 5, 6]]
    assert of_another_tokenizer["completion_ids"].tolist() == [[9, 3, 3], [5, 6, 1]]
    assert of_another_tokenizer["old_per_token_logps"][0, 1:].tolist() == [0, 0]


def test_unknown_keys_are_rejected_by_name():
    with pytest.raises(ValueError, match=r"`rewards_of_tools`, which the replay buffer does not support"):
        batch_to_rows(batch(rewards_of_tools=torch.ones(3)), PAD)


def test_one_token_rows_go_with_longer_ones_and_keep_a_value_a_token():
    ratio = torch.tensor([[0.5, 2, 1, 1, 1], [0.7, 1, 1, 1, 1], [1, 1, 0.1, 1, 0.3]])
    rows = batch_to_rows(batch(importance_sampling_ratio=ratio), PAD)
    short = {key: value[1:2, :1] if value.dim() == 2 else value[1:2] for key, value in batch().items() if value.dim()}
    one_token = batch_to_rows({**short, "importance_sampling_ratio": torch.tensor([[0.25]])}, PAD)
    mixed = rows_to_batch(concat_rows([(one_token, [0]), (rows, [2, 0])]), PAD, "cpu")
    assert torch.equal(
        mixed["importance_sampling_ratio"],
        torch.tensor([[0.25, 1, 1, 1, 1], [1, 1, 0.1, 1, 0.3], [0.5, 2, 1, 1, 1]]),
    )


def test_rows_of_different_settings_are_not_mixed():
    rows = batch_to_rows(batch(), PAD)
    fewer = Rows({key: each for key, each in rows.values.items() if key != "old_per_token_logps"}, rows.lengths)
    with pytest.raises(ValueError, match=r"\['old_per_token_logps'\].*`replay_discard_saved`"):
        concat_rows([(rows, [0]), (fewer, [0])])
    ratio = EXTRAS["importance_sampling_ratio"]
    levels = [batch_to_rows(batch(importance_sampling_ratio=each), PAD) for each in (ratio[:, :1], ratio)]
    with pytest.raises(ValueError, match=r"one `importance_sampling_ratio` per token.*`replay_discard_saved`"):
        concat_rows([(rows, [0]) for rows in levels])


def test_what_some_generations_lack_has_its_default_for_them():
    """Without a mask the policy wrote all tokens; without a sampler's log-probabilities they are the trainer's."""
    told = batch(sampling_per_token_logps=torch.full((3, 5), -9.0), tool_mask=EXTRAS["tool_mask"])
    both = concat_rows([(batch_to_rows(told, PAD), [0]), (batch_to_rows(batch(), PAD), [2])])
    first, second = (row_of(both, index) for index in range(2))
    assert first["sampling_per_token_logps"].tolist() == [-9.0] * 3
    assert first["tool_mask"].tolist() == [1, 0, 1]
    assert second["sampling_per_token_logps"].equal(second["old_per_token_logps"])
    assert second["tool_mask"].tolist() == [1] * 5


def test_rows_with_an_advantage_are_told_by_row_and_by_token():
    assert batch_to_rows(batch(advantages=torch.tensor([0.0, -1.0, 0.0])), PAD).has_advantage().tolist() == [0, 1, 0]
    token_advantages = torch.tensor(
        [[0.0, 0, 0, 9, 9], [4, 0, 0, 0, 0], [0, 0, 0, 0, 9]]
    )  # the 9s of row 0 are padding
    assert batch_to_rows(batch(advantages=token_advantages), PAD).has_advantage().tolist() == [False, True, True]
