"""The models that the studies start from: what shapes them, and when they are made again."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_trl.tasks import character_tokenizer
from benchmarks import warm_start
from benchmarks.make_task import TASKS
from benchmarks.warm_start import WarmStart, load_sums, warm_start_path


SHORT = {"num_steps": 2, "batch_size": 3}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path))


def started(task, **settings):
    """Return the task with other settings of its warm start, which is short."""
    return replace(task, warm_start=replace(task.warm_start, **{**SHORT, **settings}))


def test_only_the_completion_and_its_end_carry_labels():
    tokenizer = character_tokenizer()
    batch = warm_start._collate(tokenizer, ["1+2=", "37+58="], ["3", "95"])
    pad, eos, no = tokenizer.pad_token_id, tokenizer.eos_token_id, warm_start.IGNORED_LABEL
    short, long = (tokenizer(text)["input_ids"] for text in ("1+2=3", "37+58=95"))
    assert batch["input_ids"].tolist() == [[pad, pad, *short, eos, pad], [*long, eos]]
    assert batch["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3, 4, 5, 5], list(range(9))]
    assert batch["labels"].tolist() == [[no] * 6 + [short[-1], eos, no], [no] * 6 + [*long[-2:], eos]]


def test_built_weights_depend_on_the_seed_alone(tmp_path, monkeypatch):
    state = torch.get_rng_state()
    task = started(load_sums())
    first, other = ((warm_start_path(seed, task) / "model.safetensors").read_bytes() for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path / "elsewhere"))
    torch.rand(1)
    assert (warm_start_path(0, task) / "model.safetensors").read_bytes() == first != other


def test_a_change_that_affects_the_weights_gives_another_folder(monkeypatch):
    lessons = [WarmStart(lambda prompt, rng, text=text: text, num_steps=1, batch_size=3) for text in "78"]
    changes = [
        {}, {"num_steps": 3}, {"learning_rate": 1e-4}, {"decays": True}, {"model": {"num_hidden_layers": 1}},
        *({"first_lesson": lesson} for lesson in (*lessons, replace(lessons[0], num_steps=2))),
    ]  # fmt: skip
    paths = [warm_start_path(task=started(load_sums(), **change)) for change in changes]
    monkeypatch.setattr(warm_start, "FORGOTTEN_CARRY_RATE", 0.5)  # other demonstrations
    paths.append(warm_start_path(task=started(load_sums())))
    assert len(set(paths)) == len(paths)


def test_the_first_lesson_comes_first_with_its_own_settings(monkeypatch):
    taught = []
    monkeypatch.setattr(warm_start, "_teach", lambda model, tokenizer, lesson, *_: taught.append(lesson))
    lesson = WarmStart(lambda prompt, rng: "7", num_steps=3)
    task = started(load_sums(), first_lesson=lesson)
    warm_start_path(task=task)
    assert taught == [lesson, task.warm_start]


def test_a_task_has_a_tokenizer_and_a_model_of_its_own():
    task = TASKS["long_tailed_sums"]()
    path = warm_start_path(task=started(task, first_lesson=replace(task.warm_start.first_lesson, **SHORT)))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert path.name.startswith("long_tailed_sums-")
    assert model.config.max_position_embeddings == 128
    assert model.config.vocab_size == len(tokenizer) == 10 + 20 + 56 + len("+=") + 2
    assert tokenizer.decode(tokenizer("/.CCBBAA=j5")["input_ids"]) == "/.CCBBAA=j5"
