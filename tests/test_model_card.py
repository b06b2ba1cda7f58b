"""The card of a trained model: what it names, and that its example loads the model and samples."""

import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tests.helpers.script_runs import CHAT_TEMPLATE, fill_folder, run
from tests.helpers.toy import toy_dataset, toy_trainer


LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)


def card_of(folder="out") -> ModelCard:
    return ModelCard.load(Path(folder, "README.md"))


def run_example(card: ModelCard):
    """Run the example of a card as a user would, and return its model."""
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert isinstance(names["output"]["generated_text"], str)
    return names["generate"].model


def rows_of(card: ModelCard) -> dict[str, str]:
    """Return the settings of the card's table."""
    return dict(re.findall(r"^\| `?(\w+)`? \| (.*) \|$", card.text, re.MULTILINE))


@pytest.mark.parametrize("chat_template", [None, CHAT_TEMPLATE])
@pytest.mark.parametrize("peft_config", [None, LORA], ids=["model", "adapter"])
def test_the_example_of_the_card_samples_from_what_was_trained(tmp_path, monkeypatch, chat_template, peft_config):
    fill_folder(tmp_path, monkeypatch, chat_template)
    # An adapter's base may be stored in another type than it was trained in
    AutoModelForCausalLM.from_pretrained("model").to(torch.bfloat16).save_pretrained("model")
    parts = {"peft_config": peft_config} if peft_config else {}
    trainer = toy_trainer("out", "model", trainer_args=parts, max_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card("mine")
    card = card_of()
    assert card.text.strip().startswith("# mine\n\n" + ("A LoRA adapter of" if peft_config else "Trained from"))
    assert " `model`, with BAPO, which searches the clip bounds" in card.text
    assert "on 40 prompts." in card.text
    assert card.data.library_name == ("peft" if peft_config else "transformers")
    assert ("pip install peft" in card.text) == bool(peft_config)
    for placeholder in ("None", "licence"):
        assert placeholder not in card.content
    loaded = run_example(card)
    tokens = torch.arange(2, 40)[None]
    with torch.no_grad():
        assert loaded.dtype == torch.float32
        found, expected = (model(tokens.to(model.device)).logits.cpu() for model in (loaded, trainer.model))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("settings", "phrase", "values"),
    [
        ({}, "BAPO, which searches the clip bounds of each update",
         {"loss_type": "dapo", "ratio_lower_start": "0.6", "ratio_upper_max": "3.0", "search_scope": "carried_over"}),
        ({"loss_type": "vespo"}, "the loss VESPO", {"loss_type": "vespo", "vespo_k_pos": "2.0"}),
        ({"loss_type": "vespo", "negative_weight_min": 0.5},
         "the loss VESPO, and a weight on tokens with a negative advantage",
         {"negative_weight_min": "0.5", "positive_contribution_target": "0.5"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "the loss CISPO", {"loss_type": "cispo", "epsilon_high": "5.0"}),
        ({"ratio_lower_start": 0.8, "ratio_lower_max": 0.8, "ratio_upper_start": 1.2, "ratio_upper_max": 1.2,
          "importance_sampling_level": "sequence", "delta": 4.0}, "the loss `dapo` and fixed clip bounds",
         {"importance_sampling_level": "sequence", "ratio_upper_start": "1.2", "delta": "4.0", "learning_rate": "0.02",
          "updates": "0"}),
    ],
)  # fmt: skip
def test_a_card_names_the_loss_with_its_settings(tmp_path, settings, phrase, values):
    trainer = toy_trainer(tmp_path, **settings)
    trainer.create_model_card()
    card = card_of(tmp_path)
    assert f"with {phrase}, on 40 prompts" in card.text
    rows = rows_of(card)
    assert {name: rows.get(name) for name in values} == values
    searches = phrase.startswith("BAPO")
    assert ("ratio_lower_max" in rows) == (settings.get("loss_type") is None)
    assert ("search_scope" in rows) == (searches or "negative_weight_min" in settings)
    assert ("xi2025bapo" in card.text) == searches
    assert ("BAPO" in card.text) == searches


def test_names_of_the_hub_are_links_and_metadata_and_paths_are_neither(tmp_path):
    trainer = toy_trainer(tmp_path)
    trainer.model.config._name_or_path, trainer.hub_model_id = "org/base", "me/mine"
    trainer.create_model_card(dataset_name="org/problems")
    card = card_of(tmp_path)
    assert "[org/base](https://huggingface.co/org/base)" in card.text
    assert "[org/problems](https://huggingface.co/datasets/org/problems) (40 prompts)" in card.text
    assert (card.data.base_model, card.data.datasets) == ("org/base", ["org/problems"])
    assert """model='me/mine', tokenizer='me/mine'""" in card.text
    file = tmp_path / "problems.jsonl"
    toy_dataset(4).to_json(file)
    trainer.model.config._name_or_path, trainer.dataset_title = str(tmp_path), str(file)
    trainer.create_model_card()
    card = card_of(tmp_path)
    assert f"Trained from `{tmp_path.name}`" in card.text
    assert "on `problems.jsonl` (40 prompts)" in card.text
    assert card.data.base_model is None
    assert card.data.datasets is None


@pytest.mark.trainings
def test_a_run_of_the_script_ends_with_a_card_of_its_model(folder):
    lora = {"use_peft": "true", "lora_target_modules": "q_proj|v_proj"}
    run(dataset_name="train.jsonl", save_strategy="steps", save_steps=1, method="vespo", **lora)
    card = card_of()
    assert "A LoRA adapter of `model`, with the loss VESPO, on `train.jsonl` (16 prompts)" in card.text
    assert rows_of(card)["updates"] == "2"
    assert "More Information Needed" not in card.text
    run_example(card)
