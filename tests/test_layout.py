"""The layout of micro-batches, held against slow and obvious versions."""

from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_trl.batch.layout import balanced, lay_out, measure, plan, scoring_chunks, update_starts


def cost(lengths, parts) -> int:
    """Samples times the longest length, of the part where it is largest."""
    return max((len(part) * max(max(1, lengths[index]) for index in part) for part in parts if part), default=0)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 4))
def test_no_way_to_divide_samples_has_a_smaller_largest_cost(lengths, parts):
    divided = balanced(lengths, parts)
    ways = product(range(parts), repeat=len(lengths))
    best = min(
        cost(lengths, [[i for i, own in enumerate(way) if own == part] for part in range(parts)]) for way in ways
    )
    assert cost(lengths, divided) == best


@given(st.lists(st.integers(0, 3000), max_size=300), st.integers(1, 20))
def test_each_sample_is_in_one_part_and_lengths_ascend(lengths, parts):
    divided = balanced(lengths, parts)
    flat = [index for part in divided for index in part]
    assert len(divided) == parts
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[index] for index in flat] == sorted(lengths)
    assert sum(not part for part in divided) == max(0, parts - len(lengths))


@given(
    begin=st.integers(-5, 10), count=st.integers(1, 5), window=st.integers(1, 5), size=st.integers(1, 6),
    num_passes=st.integers(1, 3),
)  # fmt: skip
def test_no_update_of_any_pass_shares_a_segment_with_another(begin, count, window, size, num_passes):
    starts = update_starts(begin, count, window, size, num_passes)
    assert starts == sorted(set(starts))
    assert starts[0] == 0
    updates = {}  # the number of the update of each micro-batch of the generation, from the current one on
    for place in range(max(0, begin), size * num_passes):
        updates[place] = 0 if place < begin + count else 1 + (place - begin - count) // window
    for number in range(num_passes):
        for start, end in zip(starts, [*starts[1:], size], strict=True):
            own = {updates.get(number * size + place) for place in range(start, end)}
            assert len(own) == 1, (number, start, end)


def batch_of(prompts, completions, advantages, width=None, **more):
    """A padded batch with these numbers of tokens; each token is a number of its own."""
    prompt_width, completion_width = width or (max(prompts), max(1, *completions))
    count = len(prompts)
    prompt_mask = torch.zeros(count, prompt_width, dtype=torch.long)
    completion_mask = torch.zeros(count, completion_width, dtype=torch.long)
    for row, (left, right) in enumerate(zip(prompts, completions, strict=True)):
        prompt_mask[row, prompt_width - left :] = 1
        completion_mask[row, :right] = 1
    ids = torch.arange(1, count + 1)[:, None] * 1000
    return {
        "prompt_ids": (ids + torch.arange(prompt_width, 0, -1)) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": (ids + 100 + torch.arange(completion_width)) * completion_mask,
        "completion_mask": completion_mask,
        "old_per_token_logps": torch.randn(count, completion_width) * completion_mask,
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": completion_mask.sum(),
        **more,
    }


def split(batch, size):
    return [
        {key: value[start : start + size] if value.dim() else value for key, value in batch.items()}
        for start in range(0, len(batch["advantages"]), size)
    ]


samples = st.tuples(st.integers(1, 5), st.integers(0, 7), st.sampled_from([0.0, 0.0, 1.5, -0.5]))


@settings(max_examples=60)
@given(data=st.data(), size=st.integers(1, 3), places=st.integers(1, 4), num_ranks=st.integers(1, 3))
def test_each_rank_keeps_its_samples_of_each_update_in_as_many_rows_as_the_others(data, size, places, num_ranks):
    skips, layout = data.draw(st.booleans()), data.draw(st.sampled_from(["balanced", "trimmed"]))
    starts = sorted({0, *data.draw(st.sets(st.integers(0, places - 1)))})
    rows = st.lists(samples, min_size=size * places, max_size=size * places)
    batches = [batch_of(*zip(*data.draw(rows), strict=True)) for _ in range(num_ranks)]
    measures = np.stack([measure(batch).numpy() for batch in batches])
    planned = [plan(measures, rank, starts, size, layout=layout, skips=skips) for rank in range(num_ranks)]
    assert len({tuple(len(each.rows) for each in of_rank) for of_rank in planned}) == 1
    for batch, of_rank in zip(batches, planned, strict=True):
        has_gradient = ((batch["advantages"] != 0) & batch["completion_mask"].any(1)).tolist()
        cuts = starts if layout == "balanced" else list(range(places))
        laid_out = lay_out(split(batch, size), of_rank, cuts)
        assert len(laid_out) == places
        for start, end in zip(cuts, [*cuts[1:], places], strict=True):
            expected = [row for row in range(start * size, end * size) if has_gradient[row] or not skips]
            found = [
                row
                for each in of_rank[start:end]
                for row, is_filler in zip(each.rows.tolist(), each.is_filler, strict=True)
                if not is_filler
            ]
            assert sorted(found) == expected
        for micro_batch, each in zip(laid_out, of_rank, strict=True):
            assert_same_values(micro_batch, batch, each)


def assert_same_values(micro_batch, batch, planned):
    """The samples of a micro-batch are those of the batch, without padding that all of them have."""
    assert micro_batch["num_items_in_batch"] is batch["num_items_in_batch"]
    real = [not is_filler for is_filler in planned.is_filler]
    for place, (row, is_real) in enumerate(zip(planned.rows.tolist(), real, strict=True)):
        if not is_real:
            assert not micro_batch["completion_mask"][place].any()
            assert micro_batch["is_filler"][place]
            continue
        for side in ("prompt", "completion"):
            mask = micro_batch[f"{side}_mask"][place].bool()
            assert mask.sum() == batch[f"{side}_mask"][row].sum()
            before = batch[f"{side}_ids"][row][batch[f"{side}_mask"][row].bool()]
            assert micro_batch[f"{side}_ids"][place][mask].equal(before)
        mask = micro_batch["completion_mask"][place].bool()
        logps = batch["old_per_token_logps"][row][batch["completion_mask"][row].bool()]
        assert micro_batch["old_per_token_logps"][place][mask].equal(logps)
        assert micro_batch["advantages"][place] == batch["advantages"][row]
    widths = [micro_batch[f"{side}_mask"][real].sum(1).tolist() for side in ("prompt", "completion")]
    # TRL counts masked samples in its means where a micro-batch is one token wide
    has_masked = not micro_batch["completion_mask"].any(1).all()
    least = {"prompt": 1, "completion": min(2, batch["completion_ids"].shape[1]) if has_masked else 1}
    for side, lengths in zip(("prompt", "completion"), widths, strict=True):
        assert micro_batch[f"{side}_ids"].shape[1] == max([least[side], *lengths])


@settings(max_examples=60)
@given(data=st.data(), size=st.integers(1, 4), places=st.integers(1, 4), num_ranks=st.integers(1, 3))
def test_no_micro_batch_has_larger_logits_or_more_positions_than_those_of_trl(data, size, places, num_ranks):
    """As many rows as there are short samples would have, if one has a very long prompt."""
    multiple, skips = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    own = st.tuples(st.integers(1, 9) | st.integers(90, 99), st.integers(0, 30), st.sampled_from([0.0, 1.5, -0.5]))
    rows = st.lists(own, min_size=size * places, max_size=size * places)
    batches = []
    for _ in range(num_ranks):
        prompts, completions, advantages = zip(*data.draw(rows), strict=True)
        width = [-(-max(1, *each, 1) // multiple) * multiple for each in (prompts, completions)]
        batches.append(batch_of(prompts, completions, advantages, width))
    measures = np.stack([measure(batch).numpy() for batch in batches])
    of_trl = measures[:, 0, -2:]
    for rank in range(num_ranks):
        for each in plan(measures, rank, [0], size, skips=skips, multiple=multiple):
            assert len(each.rows) * each.completion_width <= size * of_trl[:, 1].max()
            assert len(each.rows) * (each.prompt_width + each.completion_width) <= size * of_trl.sum(1).max()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 5) | st.integers(30, 40), st.integers(2, 9)), min_size=6, max_size=6),
    st.sampled_from([2, 3]),
)
def test_no_other_cut_of_the_sorted_samples_is_smaller_in_relation_to_trls(widths, size):
    prompts, completions = zip(*widths, strict=True)
    batch = batch_of(prompts, completions, [1.0] * 6)
    of_trl = [max(prompts) + max(completions), max(completions)]
    ascending = sorted(widths, key=sum)

    def largest(parts):
        costs = []
        for part in parts:
            left, right = (max(each) for each in zip(*part, strict=True))
            costs += [len(part) * (left + right) / of_trl[0], len(part) * right / of_trl[1]]
        return max(costs)

    planned = plan(measure(batch).numpy()[None], 0, [0], size)
    cuts = combinations(range(1, 6), 6 // size - 1)
    best = min(largest([ascending[i:j] for i, j in pairwise((0, *cut, 6))]) for cut in cuts)
    assert largest([[widths[row] for row in each.rows] for each in planned]) == pytest.approx(best)


def test_a_pass_in_numbers():
    """Two updates of two micro-batches with two samples each, and what is left of them."""
    prompts, completions = [2, 1, 1, 1, 1, 1, 1, 3], [4, 1, 7, 2, 0, 5, 3, 1]
    batch = batch_of(prompts, completions, [1.0, 0.0, 1.0, -1.0, 1.0, 0.0, -1.0, 0.0])
    planned = plan(measure(batch).numpy()[None], 0, [0, 2], 2, mean_over="samples")
    # Update 1: lengths 6, 8 and 3 have a gradient, as 2 x 6 = 12 is more than 8, the longest is alone. Update 2: the
    # sample of length 4 alone; the one without completion trains nothing
    assert [each.rows.tolist() for each in planned] == [[3, 0], [2], [4], [6]]
    assert [each.is_filler.any().item() for each in planned] == [False, False, True, False]
    assert [(each.prompt_width, each.completion_width) for each in planned] == [(2, 4), (1, 7), (1, 2), (1, 3)]
    assert [each.factor for each in planned] == [1.0, 0.5, 0.5, 0.5]
    assert [each.computed for each in planned] == [12, 8, 3, 4]
    assert [each.unpadded for each in planned] == [9, 8, 0, 4]
    assert [each.loss_tokens for each in planned] == [6, 7, 0, 3]
    assert [each.skipped for each in planned] == [1, 0, 2, 1]
    assert [each.trl_masked for each in planned] == [0, 0, 1, 0]


def test_widths_are_multiples_and_at_least_one():
    batch = batch_of([3, 1], [0, 5], [1.0, 1.0])
    planned = plan(measure(batch).numpy()[None], 0, [0], 1, skips=False, multiple=4)
    assert [(each.prompt_width, each.completion_width) for each in planned] == [(4, 4), (4, 8)]


def test_a_mean_over_tokens_keeps_the_divisor_of_trl():
    batch = batch_of([1, 1], [3, 5], [1.0, 0.0])
    (planned,) = plan(measure(batch).numpy()[None], 0, [0], 2, layout="trimmed", mean_over="tokens")
    assert planned.rows.tolist() == [0]
    assert planned.factor == 3 / 8


@given(st.lists(samples, min_size=1, max_size=9), st.integers(1, 4), st.sampled_from(["balanced", "trimmed"]))
def test_scoring_takes_as_many_passes_as_trl_and_leaves_no_token_out(rows, size, layout):
    batch = batch_of(*zip(*rows, strict=True))
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    num_tokens = batch["completion_mask"].shape[1]
    chunks = scoring_chunks(attention_mask, num_tokens, size, layout)
    assert len(chunks) == -(-len(rows) // size)
    assert sorted(row for chunk in chunks for row in chunk.rows.tolist()) == list(range(len(rows)))
    for chunk in chunks:
        assert attention_mask[chunk.rows, chunk.columns].sum() == attention_mask[chunk.rows].sum()
        width = attention_mask[chunk.rows, chunk.columns].shape[1]
        assert width >= 1 + chunk.completion_width
        assert len(chunk.rows) * width <= size * attention_mask.shape[1]
        assert len(chunk.rows) * chunk.completion_width <= size * num_tokens


def test_prompts_keep_their_padding_where_it_counts():
    batch = batch_of([1, 2], [1, 1], [1.0, 1.0], width=(5, 4))
    assert measure(batch)[:, 0].tolist() == [1, 2]
    assert measure(batch, keeps_prompt_padding=True)[:, 0].tolist() == [5, 5]
    attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    chunks = scoring_chunks(attention_mask, 4, 1, keeps_prompt_padding=True)
    assert [chunk.columns for chunk in chunks] == [slice(0, 6)] * 2


@pytest.mark.parametrize("layout", ["trimmed", "balanced"])
def test_values_per_token_of_prompt_and_completion_and_unknown_ones_are_cut_alike(layout):
    batch = batch_of([2, 1], [3, 1], [1.0, 1.0], width=(4, 6))
    both = torch.arange(20).view(2, 10)
    batch |= {"token_type_ids": both, "of_completion": both[:, :6], "of_something": both[:, :9]}
    planned = plan(measure(batch).numpy()[None], 0, [0], 2, layout=layout, skips=False)
    (micro_batch,) = lay_out([batch], planned, [0])
    order = planned[0].rows.tolist()
    assert micro_batch["token_type_ids"].equal(both[order, 2:7])
    assert micro_batch["of_completion"].equal(both[order, :3])
    assert micro_batch["of_something"].equal(both[order, :9])
