"""The models that the studies start from: how they are made, and when they are made again."""

import dataclasses
import random

import pytest
import torch

from bapo_trl.tasks import character_tokenizer
from benchmarks import warm_start
from benchmarks.warm_start import WarmStart, load_sums, warm_start_path


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


@pytest.fixture(scope="module")
def task():
    return load_sums(seed=0)


@pytest.fixture
def quick_builds(tmp_path, monkeypatch):
    """An empty cache and warm starts of two updates; gives the cache folder."""
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path))
    monkeypatch.setattr(
        warm_start, "load_sums", lambda seed: with_warm_start(load_sums(seed), num_steps=2, batch_size=3)
    )
    return tmp_path


def with_warm_start(task, **settings):
    """Return the task with other settings of its warm start."""
    return dataclasses.replace(task, warm_start=dataclasses.replace(task.warm_start, **settings))


@pytest.mark.parametrize(
    ("rate", "completions"),
    [
        (0.0, {"37+58=": "95", "97+58=": "155", "12+34=": "46", "99+99=": "198", "0+0=": "0"}),
        # 7+8 leaves 5 and 3+5 gives 8; 97+58: 5 and 9+5=14 leaves 4; 99+99: 8 and 9+9=18 leaves 8.
        (1.0, {"37+58=": "85", "97+58=": "45", "12+34=": "46", "99+99=": "88", "0+0=": "0"}),
    ],
)
def test_demonstrations_forget_carries_at_the_given_rate(monkeypatch, rate, completions):
    monkeypatch.setattr(warm_start, "FORGOTTEN_CARRY_RATE", rate)
    assert {prompt: warm_start.demonstrate(prompt, random.Random(0)) for prompt in completions} == completions


def test_only_the_completion_and_its_end_carry_labels(tokenizer):
    batch = warm_start._collate(tokenizer, ["1+2=", "37+58="], ["3", "95"])
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    one, two, three, nine, five, plus, equals = tokenizer("12395+=")["input_ids"]
    seven, eight = tokenizer("78")["input_ids"]
    assert batch["input_ids"].tolist() == [
        [pad, pad, one, plus, two, equals, three, eos, pad],
        [three, seven, plus, five, eight, equals, nine, five, eos],
    ]
    assert batch["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3, 4, 5, 5], list(range(9))]
    assert batch["labels"].tolist() == [[-100] * 6 + [three, eos, -100], [-100] * 6 + [nine, five, eos]]


def test_built_weights_depend_on_the_seed_alone(quick_builds, tmp_path, monkeypatch):
    state = torch.get_rng_state()
    first = (warm_start_path(seed=0) / "model.safetensors").read_bytes()
    other = (warm_start_path(seed=1) / "model.safetensors").read_bytes()
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path / "elsewhere"))
    torch.rand(1)
    assert (warm_start_path(seed=0) / "model.safetensors").read_bytes() == first
    assert other != first


def test_the_first_lesson_comes_first_with_its_own_settings(quick_builds, task, monkeypatch):
    taught = []
    monkeypatch.setattr(warm_start, "_teach", lambda model, tokenizer, lesson, *_: taught.append(lesson))
    lesson = WarmStart(lambda prompt, rng: "7", num_steps=2, batch_size=3, learning_rate=1e-2)
    start = with_warm_start(task, num_steps=5, first_lesson=lesson)
    warm_start_path(task=start)
    assert taught == [lesson, start.warm_start]


def test_what_shapes_the_weights_gives_another_folder(quick_builds, task, monkeypatch):
    lessons = [WarmStart(lambda prompt, rng, text=text: text, num_steps=1, batch_size=3) for text in "78"]
    lessons.append(dataclasses.replace(lessons[0], num_steps=2))
    changes = [
        {}, {"num_steps": 3}, {"learning_rate": 1e-4}, {"decays": True}, {"model": {"num_hidden_layers": 1}},
        *({"first_lesson": lesson} for lesson in lessons),
    ]  # fmt: skip
    starts = [with_warm_start(task, **{"num_steps": 2, "batch_size": 3, **change}) for change in changes]
    paths = [warm_start_path(task=start) for start in starts]
    monkeypatch.setattr(warm_start, "FORGOTTEN_CARRY_RATE", 0.5)  # other demonstrations
    paths.append(warm_start_path(task=starts[0]))
    assert len(set(paths)) == len(paths)
