"""A resumed run continues at its place in the data, whatever its batches are, and notices other data."""

import warnings

import pytest
from datasets import Dataset, IterableDataset

from bapo_trl.errors import InputError
from tests.helpers.toy import toy_run


PROMPTS = [f"{number}+1=" for number in range(24)]
EPOCH = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 1,
    "num_generations": 2, "max_steps": -1, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 4,
}  # fmt: skip


def run(folder, prompts=PROMPTS, **settings):
    """Return the prompts that a run trains on, in order, and its trainer."""
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(dict.fromkeys(prompts))
        return [float(len(completion)) for completion in completions]

    data = prompts if isinstance(prompts, IterableDataset) else Dataset.from_dict({"prompt": prompts})
    trainer = toy_run(folder, reward_funcs=reward, trainer_args={"train_dataset": data}, **{**EPOCH, **settings})
    return seen, trainer


@pytest.mark.trainings
@pytest.mark.parametrize(
    ("change", "repeated"),
    [
        ({}, 0),
        ({"gradient_accumulation_steps": 2}, 0),
        ({"num_generations": 4}, 0),
        ({"per_device_train_batch_size": 8}, 0),
        ({"steps_per_generation": 3}, 2),
    ],
)
def test_every_prompt_is_trained_on_once_with_another_batch(tmp_path, change, repeated):
    straight, _ = run(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed, trainer = run(tmp_path / "new", **change, resume=str(tmp_path / "checkpoint-4"))
    assert resumed == straight[8 - repeated :]
    assert trainer.state.epoch == 1
    said = [str(each.message) for each in caught if "are repeated" in str(each.message)]
    assert [f"last {repeated} prompts" in message for message in said] == [True] * bool(repeated)


@pytest.mark.trainings
def test_a_change_of_the_data_gives_a_warning_or_an_error(tmp_path):
    run(tmp_path)
    edited = [*PROMPTS[:-1], "9+9="]
    for prompts, change in ((edited, "other values"), (PROMPTS * 2, "rows 24, now 48")):
        with pytest.warns(UserWarning, match=rf"Resumed with other data: .*{change}.* after 8 prompts"):
            run(tmp_path / "new", prompts, resume=str(tmp_path / "checkpoint-4"))
    for prompts in (edited, PROMPTS[:12]):
        with pytest.raises(InputError, match="Nothing would be trained: the train dataset is not that of the check"):
            run(tmp_path / "new", prompts, resume=str(tmp_path / "checkpoint-12"))
    assert run(tmp_path / "new", resume=str(tmp_path / "checkpoint-12"))[0] == []  # finished, with the same data
