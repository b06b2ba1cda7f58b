"""What vLLM gets of an adapter: base weight plus adapter, rounded without bias, and the trainer's weights untouched."""

import pytest
import torch
from peft import LoraConfig

from tests.helpers.scripted_llm import colocate_trainer
from tests.helpers.toy import toy_model


@pytest.mark.trainings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_over_vllm_leaves_the_base_weights(tmp_path, monkeypatch, dtype):
    trainer, llm = colocate_trainer(
        monkeypatch, tmp_path / "run", model=toy_model().to(dtype), max_steps=8, vllm_logp_tolerance=None,
        trainer_args={"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")},
    )  # fmt: skip
    base = {name: weight.clone() for name, weight in trainer.model.named_parameters() if "lora" not in name}
    trainer.train()
    for name, weight in trainer.model.named_parameters():
        assert name not in base or torch.equal(base[name], weight), name
    assert llm.events.count("load") == 2
