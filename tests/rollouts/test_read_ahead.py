"""Reading ahead of the data loader, against a loop without it: the same batches, and the same random numbers."""

import math

import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from trl.trainer.utils import RepeatSampler

from bapo_trl.rollouts.read_ahead import ReadAhead


def loader_of(num_prompts: int, prompts: int, repeats: int, num_workers: int):
    """TRL's data loader: the prompts of a rollout batch, in a random order, once for each of its micro-batches."""
    rows = list(range(num_prompts))
    sampler = RepeatSampler(rows, mini_repeat_count=2, batch_size=prompts, repeat_count=repeats, shuffle=True, seed=3)
    loader = DataLoader(rows, batch_size=2 * prompts, sampler=sampler, collate_fn=list, num_workers=num_workers)
    return prepare_data_loader(loader, put_on_device=False)


def updates_of(loader, take, window, max_updates, skipped=0):
    """Go through the epochs as transformers does; yield the batches of each update, and a random number drawn then."""
    steps = len(loader)
    epoch, done = divmod(skipped, steps)
    made = epoch * math.ceil(steps / window) + done // window
    while made < max_updates:
        of_epoch = skip_first_batches(loader, done) if done else loader
        of_epoch.set_epoch(epoch)
        iterator = iter(of_epoch)
        for update in range(done // window, math.ceil(steps / window)):
            count = min(window, steps - update * window)
            yield epoch, take(iterator, count, max_updates - made - 1), torch.rand(()).item()
            made += 1
            if made == max_updates:
                return
        epoch, done = epoch + 1, 0


def plain(iterator, count, updates_left):
    return [next(iterator) for _ in range(count)]


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.integers(1, 3), num_rollout_batches=st.integers(1, 4), left_over=st.integers(0, 2),
    repeats=st.integers(1, 4), window=st.integers(1, 5), max_updates=st.integers(1, 14), skipped=st.integers(0, 30),
)  # fmt: skip
def test_batches_and_random_numbers_are_those_without_reading_ahead(
    prompts, num_rollout_batches, left_over, repeats, window, max_updates, skipped
):
    steps = num_rollout_batches * repeats  # of an epoch
    num_prompts = prompts * num_rollout_batches + min(left_over, prompts - 1)
    skipped = skipped % (2 * steps) // window * window if skipped % (2 * steps) < steps else steps
    num_epochs = math.ceil(max_updates / math.ceil(steps / window))
    loader = loader_of(num_prompts, prompts, repeats, num_workers=0)
    torch.manual_seed(0)
    expected = list(updates_of(loader, plain, window, max_updates, skipped))

    loader = loader_of(num_prompts, prompts, repeats, num_workers=0)
    reader = ReadAhead(loader, repeats, skipped, skipped // steps, num_epochs)
    place, order, found = skipped, [batch for _, batches, _ in expected for batch in batches], []

    def take(iterator, count, left):
        return list(reader.take(iterator, place, count, left * window))

    torch.manual_seed(0)
    for epoch, batches, number in updates_of(loader, take, window, max_updates, skipped):
        found.append((epoch, batches, number))
        for _ in batches:
            if place % repeats == 0:  # TRL generates here
                next_one = place + repeats - skipped
                assert reader.at(place + repeats) == (order[next_one] if next_one < len(order) else None)
            place += 1
    assert found == expected
