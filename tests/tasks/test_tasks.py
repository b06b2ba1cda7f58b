"""The embedded task, its tokenizer and model, and the cached warm start."""

import dataclasses
import random
import re
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_trl import tasks
from bapo_trl.errors import InputError
from bapo_trl.tasks import sums, warm_start


@pytest.fixture(scope="module")
def tokenizer():
    return tasks.character_tokenizer()


@pytest.fixture(scope="module")
def task():
    return tasks.load_task(seed=0)


@pytest.fixture
def quick_builds(tmp_path, monkeypatch):
    """An empty cache and warm starts of two updates; gives the cache folder."""
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path))
    monkeypatch.setattr(
        warm_start, "load_task", lambda seed: with_warm_start(tasks.load_task(seed), num_steps=2, batch_size=3)
    )
    return tmp_path


def with_warm_start(task, **settings):
    """Return the task with other settings of its warm start."""
    return dataclasses.replace(task, warm_start=dataclasses.replace(task.warm_start, **settings))


# --- tokenizer -------------------------------------------------------------------------------------------------------


@given(text=st.text(alphabet=string.printable.replace("<", "")))  # no spelled-out special tokens
def test_tokenizer_gives_one_token_a_character_and_the_text_back(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_batch_decode_skips_special_tokens_and_inserts_no_spaces(tokenizer):
    batch = tokenizer(["37+58=", "1+2=", ""], padding=True, return_tensors="pt")
    assert batch["attention_mask"].tolist() == [[1] * 6, [0, 0, 1, 1, 1, 1], [0] * 6]
    ends = torch.full((3, 1), tokenizer.eos_token_id)
    ids = torch.cat([batch["input_ids"], ends], dim=1)
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == ["37+58=", "1+2=", ""]


def test_tokenizer_special_tokens(tokenizer):
    assert tokenizer.bos_token is None
    assert len(tokenizer) == 256 + 2
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id}) == 2
    assert tokenizer("5" + tokenizer.eos_token)["input_ids"] == [*tokenizer("5")["input_ids"], tokenizer.eos_token_id]


def test_tokenizer_of_an_alphabet_knows_its_characters_alone():
    tokenizer = tasks.character_tokenizer("01=")
    assert len(tokenizer) == 3 + 2
    ids = tokenizer("10=0")["input_ids"]
    assert tokenizer.decode(ids) == "10=0"
    assert tokenizer("120")["input_ids"] == tokenizer("10")["input_ids"]


def test_tokenizer_keeps_characters_beyond_ascii(tokenizer):
    ids = tokenizer("é+1=")["input_ids"]
    assert len(ids) == 5  # é is two bytes in UTF-8
    assert tokenizer.decode(ids) == "é+1="


# --- task ------------------------------------------------------------------------------------------------------------


def test_every_sum_is_there_once_and_its_answer_is_right(task):
    rows = [*task.train_dataset, *task.test_dataset]
    assert task.train_dataset.column_names == task.test_dataset.column_names == ["prompt", "answer"]
    assert {row["prompt"] for row in rows} == {f"{a}+{b}=" for a in range(100) for b in range(100)}
    assert len(rows) == 100 * 100
    for row in rows:
        a, b = re.fullmatch(r"(\d+)\+(\d+)=", row["prompt"]).groups()
        assert row["answer"] == str(int(a) + int(b))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_test_problem_is_in_train_even_with_its_numbers_swapped(seed):
    task = tasks.load_task(seed)
    assert len(task.test_dataset) in (512, 513)
    train = set(task.train_dataset["prompt"])
    for prompt in task.test_dataset["prompt"]:
        a, b = prompt.rstrip("=").split("+")
        assert f"{a}+{b}=" not in train
        assert f"{b}+{a}=" not in train


def test_problems_depend_on_the_seed_alone(task):
    again, other = tasks.load_task(seed=0), tasks.load_task(seed=1)
    assert again.train_dataset.to_dict() == task.train_dataset.to_dict()
    assert again.test_dataset.to_dict() == task.test_dataset.to_dict()
    assert set(other.test_dataset["prompt"]) != set(task.test_dataset["prompt"])


def test_reward_is_one_for_the_exact_answer_and_zero_for_all_else(task):
    completions = ["95", "095", "9", "95 ", "", "59"]
    rewards = task.reward_func(completions=completions, answer=["95"] * 6, prompts=["37+58="] * 6, trainer_state=None)
    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert task.reward_func(completions=[], answer=[]) == []


# --- warm start ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "completions"),
    [
        (0.0, {"37+58=": "95", "97+58=": "155", "12+34=": "46", "99+99=": "198", "0+0=": "0"}),
        # 7+8 leaves 5 and 3+5 gives 8; 97+58: 5 and 9+5=14 leaves 4; 99+99: 8 and 9+9=18 leaves 8.
        (1.0, {"37+58=": "85", "97+58=": "45", "12+34=": "46", "99+99=": "88", "0+0=": "0"}),
    ],
)
def test_demonstrations_forget_carries_at_the_given_rate(monkeypatch, rate, completions):
    monkeypatch.setattr(sums, "FORGOTTEN_CARRY_RATE", rate)
    assert {prompt: sums.demonstrate(prompt, random.Random(0)) for prompt in completions} == completions


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


def test_second_call_reuses_the_folder_and_it_loads(quick_builds, tokenizer, capfd):
    path = tasks.warm_start_path(seed=0)
    assert capfd.readouterr().out.count("\n") == 2
    built_at = (path / "model.safetensors").stat().st_mtime_ns
    assert tasks.warm_start_path(seed=0) == path
    assert capfd.readouterr().out == ""
    assert (path / "model.safetensors").stat().st_mtime_ns == built_at
    assert list(quick_builds.iterdir()) == [path]

    loaded = AutoTokenizer.from_pretrained(path, padding_side="left")
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.decode(loaded("37 + 58 =")["input_ids"]) == "37 + 58 ="
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.config.vocab_size == len(loaded)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id) == (loaded.pad_token_id, loaded.eos_token_id)
        assert config.bos_token_id is None


def test_built_weights_depend_on_the_seed_alone(quick_builds, tmp_path, monkeypatch):
    state = torch.get_rng_state()
    first = (tasks.warm_start_path(seed=0) / "model.safetensors").read_bytes()
    other = (tasks.warm_start_path(seed=1) / "model.safetensors").read_bytes()
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setenv("BAPO_TRL_CACHE", str(tmp_path / "elsewhere"))
    torch.rand(1)
    assert (tasks.warm_start_path(seed=0) / "model.safetensors").read_bytes() == first
    assert other != first


@pytest.mark.parametrize("cache", ["", "taken/cache"])
def test_a_user_without_a_home_is_told_of_the_variable(tmp_path, monkeypatch, cache):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path / "taken"))
    monkeypatch.setenv("BAPO_TRL_CACHE", cache and str(tmp_path / cache))
    with pytest.raises(InputError, match="Set the environment variable BAPO_TRL_CACHE to a folder"):
        tasks.warm_start_path()


def test_a_cache_that_cannot_be_written_to_serves_what_is_there(quick_builds, monkeypatch):
    def refuse(**kwargs):
        raise PermissionError("read-only")

    built = tasks.warm_start_path(seed=0)
    monkeypatch.setattr("bapo_trl.tasks.cache.tempfile.mkdtemp", refuse)
    assert tasks.warm_start_path(seed=0) == built
    with pytest.raises(InputError, match=r"read-only\. Set the environment variable BAPO_TRL_CACHE to a folder"):
        tasks.warm_start_path(seed=1)


def test_the_first_lesson_comes_first_with_its_own_settings(quick_builds, task, monkeypatch):
    taught = []
    monkeypatch.setattr(warm_start, "_teach", lambda model, tokenizer, lesson, *_: taught.append(lesson))
    lesson = tasks.WarmStart(lambda prompt, rng: "7", num_steps=2, batch_size=3, learning_rate=1e-2)
    start = with_warm_start(task, num_steps=5, first_lesson=lesson)
    tasks.warm_start_path(task=start)
    assert taught == [lesson, start.warm_start]


def test_what_shapes_the_weights_gives_another_folder(quick_builds, task, monkeypatch):
    lessons = [tasks.WarmStart(lambda prompt, rng, text=text: text, num_steps=1, batch_size=3) for text in "78"]
    lessons.append(dataclasses.replace(lessons[0], num_steps=2))
    changes = [
        {}, {"num_steps": 3}, {"learning_rate": 1e-4}, {"decays": True}, {"model": {"num_hidden_layers": 1}},
        *({"first_lesson": lesson} for lesson in lessons),
    ]  # fmt: skip
    starts = [with_warm_start(task, **{"num_steps": 2, "batch_size": 3, **change}) for change in changes]
    paths = [tasks.warm_start_path(task=start) for start in starts]
    monkeypatch.setattr(sums, "FORGOTTEN_CARRY_RATE", 0.5)  # other demonstrations
    paths.append(tasks.warm_start_path(task=starts[0]))
    assert len(set(paths)) == len(paths)


def test_interrupted_build_is_not_taken_as_complete(quick_builds, monkeypatch):
    path = tasks.warm_start_path()
    left_over = path.rename(quick_builds / f"{path.name}.unfinished-killed")
    (left_over / "model.safetensors").unlink()
    assert tasks.warm_start_path() == path
    assert (path / "model.safetensors").is_file()


def test_failed_build_leaves_nothing_behind(quick_builds, monkeypatch):
    def save_half(folder, seed, task):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(warm_start, "_build", save_half)
    with pytest.raises(KeyboardInterrupt):
        tasks.warm_start_path()
    assert list(quick_builds.iterdir()) == []


def test_build_that_finishes_second_takes_what_the_first_one_left(quick_builds, monkeypatch):
    build = warm_start._build

    def build_while_another_process_finishes(folder, seed, task):
        monkeypatch.setattr(warm_start, "_build", build)
        finished_first.append(tasks.warm_start_path(seed))
        build(folder, seed, task)

    finished_first = []
    monkeypatch.setattr(warm_start, "_build", build_while_another_process_finishes)
    path = tasks.warm_start_path()
    assert finished_first == [path]
    assert list(quick_builds.iterdir()) == [path]
