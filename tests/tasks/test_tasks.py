"""The sums of the demo, their tokenizer, and the model that training on them starts from."""

import re
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo_trl import tasks
from benchmarks.tiny_model import tiny_model


@pytest.fixture(scope="module")
def tokenizer():
    return tasks.character_tokenizer()


@pytest.fixture(scope="module")
def task():
    return tasks.load_task(seed=0)


@given(text=st.text(alphabet=string.printable.replace("<", "")))  # no spelled-out special tokens
def test_tokenizer_gives_one_token_a_character_and_the_text_back(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_tokenizers_of_bytes_and_of_an_alphabet(tokenizer):
    ids = tokenizer("é+1=")["input_ids"]
    assert len(ids) == 5  # é is two bytes in UTF-8
    assert tokenizer.decode(ids) == "é+1="
    assert tokenizer.bos_token is None
    assert len(tokenizer) == 256 + 2
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id}) == 2
    assert tokenizer("5" + tokenizer.eos_token)["input_ids"] == [*tokenizer("5")["input_ids"], tokenizer.eos_token_id]
    digits = tasks.character_tokenizer("01=")
    assert len(digits) == 3 + 2
    assert digits.decode(digits("120=0")["input_ids"]) == "10=0"


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
    task, again = tasks.load_task(seed), tasks.load_task(seed)
    assert again.train_dataset.to_dict() == task.train_dataset.to_dict()
    assert again.test_dataset.to_dict() == task.test_dataset.to_dict()
    assert set(tasks.load_task(seed + 1).test_dataset["prompt"]) != set(task.test_dataset["prompt"])
    assert len(task.test_dataset) in (512, 513)
    train = set(task.train_dataset["prompt"])
    for prompt in task.test_dataset["prompt"]:
        a, b = prompt.rstrip("=").split("+")
        assert f"{a}+{b}=" not in train
        assert f"{b}+{a}=" not in train


def test_the_model_of_the_package_forgets_carries_and_is_small(tokenizer, task):
    path = tasks.sums_model_path()
    assert (path / "model.safetensors").stat().st_size < 700_000
    loaded = AutoTokenizer.from_pretrained(path, padding_side="left")
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.decode(loaded("37 + 58 =")["input_ids"]) == "37 + 58 ="
    model = AutoModelForCausalLM.from_pretrained(path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    made = tiny_model(tokenizer, seed=0)
    assert {name: weight.shape for name, weight in model.named_parameters()} == {
        name: weight.shape for name, weight in made.named_parameters()
    }
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id) == (loaded.pad_token_id, loaded.eos_token_id)
        assert config.bos_token_id is None

    def answers(prompts):
        batch = loaded(prompts, padding=True, return_tensors="pt")
        output = model.generate(**batch, max_new_tokens=4, do_sample=False)
        return loaded.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)

    assert answers(["12+34=", "50+27=", "37+58=", "46+29="]) == ["46", "77", "85", "65"]
