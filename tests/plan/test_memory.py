"""Bytes of a dry run, against tensors that torch holds and against the formula of docs/distributed.md."""

import json
import sys

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command
from accelerate.utils import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from peft import LoraConfig, get_peft_model

from bapo_trl.plan.memory import Layout, empty_model, layout_of_launch, layout_of_process, memory_of, shape_of
from bapo_trl.script.launcher import read_arguments
from tests.helpers.commands import ROOT
from tests.helpers.toy import toy_model
from tests.test_launch_files import LAUNCHES


ADAM = "adamw_torch_fused"


def held(model):
    """Return the bytes of weights, gradients and states of an optimizer after a step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()

    def size(tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return size(model.parameters()), size(parameter.grad for parameter in trained), size(states)


def numbers(shape):
    return shape.parameters, shape.trained, shape.cache_numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", [None, LoraConfig(r=3, target_modules="all-linear")], ids=["full", "LoRA"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_one_process_holds_what_is_said(dtype, adapter, is_tied):
    model = toy_model(tie_word_embeddings=is_tied).to(dtype)
    shape = shape_of(model, adapter)
    model = model if adapter is None else get_peft_model(model, adapter)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    memory = memory_of(
        shape.parameters, shape.trained, dtype.itemsize, Layout(), is_mixed=False, has_reference=False, optim=ADAM
    )
    if dtype == torch.bfloat16 and adapter is None:
        memory = (memory.weights, memory.gradients, memory.optimizer / 2)  # our Adam is of float32
    else:
        memory = (memory.weights, memory.gradients, memory.optimizer)
    assert memory == held(model)


def test_the_shape_needs_no_weights_and_leaves_the_model_alone(tmp_path):
    model = toy_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    empty = empty_model(str(tmp_path))
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    adapter = LoraConfig(r=3, target_modules="all-linear")
    assert numbers(shape_of(empty, adapter)) == numbers(shape_of(model, adapter))
    assert before.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert shape_of(model).cache_numbers == 2 * 1 * 1 * 8  # layers, heads of keys, head size


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
    built = empty_model(str(folder), trust_remote_code=True)
    assert type(built).__name__ == "OwnForCausalLM"
    assert numbers(shape_of(built)) == numbers(shape_of(toy_model()))
    with pytest.raises(ValueError, match="trust_remote_code"):
        empty_model(str(folder))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [  # of 10 parameters: weights, gradients, optimizer, reference
        (Layout(4), (40, 40, 80, 40)),
        (Layout(4, "zero1"), (20, 20, 30, 20)),
        (Layout(4, "zero2"), (20, 5, 30, 20)),
        (Layout(4, "zero3"), (5, 5, 30, 5)),
        (Layout(4, "fsdp2"), (10, 10, 20, 10)),
        (Layout(4, "zero3", frozenset({"weights", "optimizer"})), (0, 5, 0, 5)),
    ],
)
def test_shards(layout, expected):
    memory = memory_of(10, 10, 4, layout, is_mixed=True, has_reference=True, optim=ADAM)
    assert (memory.weights, memory.gradients, memory.optimizer, memory.reference) == expected
    assert memory.total == sum(expected)
    if layout == Layout(4, "zero3"):  # the formula of the page: 16 P / N
        assert memory.total - memory.reference == 16 * 10 / 4


def test_a_quantized_model_is_not_guessed():
    memory = memory_of(10, 2, None, Layout(), is_mixed=True, has_reference=True, optim=ADAM)
    assert (memory.weights, memory.gradients, memory.optimizer, memory.reference) == (None, 8, 16, None)
    assert memory.total == 24
    assert memory_of(10, 2, None, Layout(), is_mixed=True, has_reference=False, optim=ADAM).reference == 0


def test_an_optimizer_that_is_not_known_is_not_guessed():
    assert memory_of(10, 10, 4, Layout(), is_mixed=True, has_reference=False, optim="lion_32bit").optimizer is None
    eight_bits = memory_of(10, 10, 4, Layout(), is_mixed=True, has_reference=False, optim="adamw_8bit")
    assert eight_bits.optimizer == 20


@pytest.mark.parametrize(("name", "expected"), LAUNCHES.items(), ids=str)
def test_layouts_of_the_shipped_configurations(name, expected):
    launch, _, _ = _validate_launch_command(read_arguments(["--accelerate", name, "train"]))
    assert layout_of_launch(launch) == expected
    environment = _environment(launch)
    assert layout_of_process({**environment, "WORLD_SIZE": str(expected.processes)}) == expected


def _environment(launch):
    """Return what accelerate's launcher sets for its ranks."""
    if launch.use_deepspeed:
        launch.num_machines, launch.deepspeed_fields_from_accelerate_config = 1, ""
        _, environment = prepare_deepspeed_cmd_env(launch)
        return environment
    return prepare_multi_gpu_env(launch) if launch.multi_gpu or launch.use_fsdp else {}


@pytest.mark.parametrize(
    ("flags", "engine"),
    [
        (["--use_deepspeed", "--zero_stage", "1"], "zero1"),
        (["--use_fsdp", "--fsdp_version", "1"], "fsdp1"),
        (["--use_fsdp", "--fsdp_version", "1", "--fsdp_sharding_strategy", "NO_SHARD"], "none"),
        (["--use_fsdp", "--fsdp_version", "2"], "fsdp2"),
    ],
)
def test_layouts_by_flags_of_the_launcher(flags, engine):
    launch, _, _ = _validate_launch_command(read_arguments([*flags, "--num_processes", "3", "train"]))
    assert layout_of_launch(launch) == Layout(3, engine)
    assert layout_of_process({**_environment(launch), "WORLD_SIZE": "3"}) == Layout(3, engine)


def test_what_lies_in_cpu_memory_is_left_out():
    offload = ROOT / "deepspeed_configs" / "zero3_offload.json"
    layout = Layout(1, "zero3", frozenset({"weights", "optimizer"}))
    assert layout_of_process({}, deepspeed=str(offload)) == layout
    assert layout_of_process({}, deepspeed=json.loads(offload.read_text())) == layout
