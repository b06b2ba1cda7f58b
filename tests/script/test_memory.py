"""The memory that a dry run estimates, against peaks that were measured on GPUs and tensors that torch keeps."""

import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from bapo_trl import BAPOConfig
from bapo_trl.script.memory import (
    BatchShape,
    Precision,
    Sharding,
    activations,
    model_states,
    plan_memory,
    shape_of,
)
from bapo_trl.script.plan import as_in_processes
from benchmarks.gpu_first_run.shapes import QWEN_05B, QWEN_7B, lora
from benchmarks.gpu_first_run.trainers import PROMPT_TOKENS, Setup, settings_for
from tests.helpers.commands import ROOT


BF16, MIXED = Precision(weight=2, compute=2), Precision(weight=4, compute=2)
KINDS = ("grpo", "batch", "micro_batch", "carried_over")
LOADS = {"0.5B, all weights, 2k": (QWEN_05B, 4, False), "7B, LoRA, 2k, one row": (QWEN_7B, 1, True)}


def on_gpu(folder, **settings):
    with as_in_processes(1, on_gpus=True):
        try:
            return BAPOConfig(folder, **settings)
        except ValueError:  # without a GPU
            return BAPOConfig(folder, use_cpu=True, bf16=True, **settings)


def measured():
    """Yield the load and the peak of each measurement of an update's memory."""
    for card in ("h100", "h200"):
        results = json.loads((ROOT / f"benchmarks/results/gpu_{card}.json").read_text())
        for name, row in results["parts"]["memory"]["cases"].items():
            yield from (pytest.param(name, row[kind]["peak_bytes"], id=f"{card}-{name}-{kind}") for kind in KINDS)


@pytest.mark.parametrize(("name", "peak"), measured())
def test_the_peak_of_an_update_is_that_of_a_gpu(name, peak, tmp_path):
    shape, rows, uses_lora = LOADS[name]
    args = on_gpu(tmp_path, **settings_for(Setup("cuda", "full", 0), rows, 2048))
    args.use_cpu = False  # as it was there
    adapter = lora() if uses_lora else None
    dtype = torch.bfloat16 if uses_lora else torch.float32
    (found,) = plan_memory(args, shape.config(), dtype, PROMPT_TOKENS, adapter).values()
    assert found.update == pytest.approx(peak, rel=0.05)
    kept = found.weights + found.gradients + found.optimizer
    assert found.activations == pytest.approx(peak - kept, rel=0.15)


def kept_bytes(model, num_rows, width):
    """Return the bytes that autograd keeps of a forward pass of the layers in bfloat16, less weights."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor, so that its storage is not used again
        return tensor

    ids = torch.randint(0, 100, (num_rows, width))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        model.model(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(("precision", "uses_lora"), [(MIXED, False), (BF16, True)])
def test_without_checkpointing_a_layer_keeps_what_autograd_keeps(precision, uses_lora):
    sizes, config, rows, width = [], None, 2, 100
    for num_layers in (1, 3):
        config = Qwen2Config(
            vocab_size=100, hidden_size=256, intermediate_size=1024, num_hidden_layers=num_layers,
            num_attention_heads=8, num_key_value_heads=2,
        )  # fmt: skip
        model = Qwen2ForCausalLM(config).to(torch.float32 if precision.weight == 4 else torch.bfloat16)
        if uses_lora:
            get_peft_model(model, LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM"))
        sizes.append(kept_bytes(model, rows, width))
    adapter = LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM") if uses_lora else None
    shape, batch = shape_of(config, adapter), BatchShape(rows, 0, width)
    more = [activations(replace(shape, num_layers=layers), precision, batch, False) for layers in (1, 3)]
    assert (more[1] - more[0]) / 2 == pytest.approx((sizes[1] - sizes[0]) / 2, rel=0.1)


def test_lora_keeps_no_gradients_of_the_frozen_weights():
    config, adapter = QWEN_05B.config(), lora()
    full, tuned = shape_of(config), shape_of(config, adapter)
    assert adapter.target_modules == "all-linear"  # as it was given
    assert full.trained == full.weights == tuned.weights == 494_032_768
    assert tuned.trained == tuned.adapter == 8_798_208
    states = model_states("adamw_torch_fused", full, MIXED, Sharding())
    assert (states.gradients, states.optimizer) == (4 * full.trained, 8 * full.trained)
    of_lora = model_states("adamw_torch_fused", tuned, BF16, Sharding())  # an adapter is float32
    assert of_lora.weights == 2 * tuned.weights + 4 * tuned.adapter
    assert (of_lora.gradients, of_lora.optimizer) == (4 * tuned.adapter, 8 * tuned.adapter)


def test_zero_divides_the_states_and_ddp_copies_the_gradients():
    shape = shape_of(QWEN_05B.config())

    def states(*sharding):
        found = model_states("adamw_torch_fused", shape, BF16, Sharding(*sharding))
        return [each / shape.weights for each in (found.weights, found.gradients, found.optimizer)]

    assert states(1, 3, True) == [2, 2, 12]
    assert states(8, 3, True) == [0.25, 0.25, 1.5]
    assert states(8, 2, True) == [2, 0.25, 1.5]
    assert states(8, 3, True, ("optimizer", "param")) == [0, 0.25, 0]
    assert states(8) == [2, 4, 4]
    assert Sharding.of_zero({"stage": 3, "offload_param": {"device": "cpu"}}, 8) == Sharding(8, 3, True, ("param",))


def test_the_reference_model_and_sampling(tmp_path):
    args = BAPOConfig(tmp_path, use_cpu=True, bf16=False, num_generations=2, per_device_train_batch_size=2)
    args.max_completion_length, args.steps_per_generation = 900, 32

    def planned(adapter=None):
        (found,) = plan_memory(args, QWEN_05B.config(), torch.float32, 100, adapter).values()
        return found

    alone = planned()
    cache = 64 * 1000 * 2 * 24 * 128 * 4  # samples, tokens, keys and values, layers, width, bytes
    assert alone.sampling > alone.weights + alone.optimizer + cache
    args.beta = 0.1
    assert planned().update == alone.update + alone.weights
    assert planned(lora()).reference == 0
    args.use_vllm = True
    assert planned().sampling == 0
