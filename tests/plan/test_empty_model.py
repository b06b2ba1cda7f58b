"""Models without weights, by their configurations."""

import json
import sys

import pytest

from bapo_trl.plan.empty_model import empty_model
from tests.helpers.toy import toy_model


def shapes(model):
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def test_the_shape_needs_no_weights(tmp_path):
    model = toy_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    empty = empty_model(str(tmp_path))
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    assert shapes(empty) == shapes(model)


def test_a_model_with_code_of_its_own_is_built_if_that_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # where transformers adds that folder
    folder = tmp_path / "model"
    toy_model().config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n\n"
        "class OwnConfig(Qwen2Config):\n    model_type = 'own'\n\n"
        "class OwnForCausalLM(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    for _ in range(2):  # for the targets, and for the sizes
        built = empty_model(str(folder), trust_remote_code=True)
        assert type(built).__name__ == "OwnForCausalLM"
    assert shapes(built) == shapes(toy_model())
    with pytest.raises(ValueError, match="trust_remote_code"):
        empty_model(str(folder))
