"""Trains an adapter over the stand-in for vLLM on several ranks; says what the engine has, and which base drifted."""

import hashlib
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.helpers.fake_vllm import ScriptedLLM, colocate_trainer
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.toy import toy_model


IN_4_BITS = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "bfloat16",
}  # fmt: skip
IDS = torch.arange(24).reshape(2, 12)


def unsharded():
    """Have transformers load all weights of a model on each rank."""
    return patch("transformers.modeling_utils.is_deepspeed_zero3_enabled", lambda: False)


class Whole(ScriptedLLM):
    """Has all of its weights, also where transformers would shard them."""

    def __init__(self, *args, **kwargs):
        with unsharded():
            super().__init__(*args, **kwargs)


def shard(trainer) -> None:
    """Change the adapter, and shard the model as accelerate does with FSDP2, which it leaves out on a CPU."""
    generation = trainer.vllm_generation
    model, mesh = generation.model, init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape)
    for layer in (*model.base_model.model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    generation._dist.fsdp_version = 2


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@torch.no_grad()
def read_weights(trainer, base) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """Return a base model's weights in float32, what the adapter adds to them, and the names of those that drifted."""
    generation, full, added, drifted = trainer.vllm_generation, {}, {}, []
    model = generation.model
    with generation._dist.gather_params(list(model.parameters())):
        weights = {name: whole(weight).clone() for name, weight in model.named_parameters()}
    for name in [name for name in weights if "lora_" not in name]:
        own = name.removeprefix("base_model.model.").replace(".base_layer", "")
        loaded = base.get_parameter(own)
        if not torch.equal(weights[name].view(torch.int16), loaded.view(torch.int16)):  # NaN are equal, too
            drifted.append(own)
        if state := getattr(loaded, "quant_state", None):
            from bitsandbytes.functional import dequantize_4bit

            loaded = dequantize_4bit(loaded.data, state)
        full[own] = loaded.float()
        if name.endswith("base_layer.weight"):
            path = name.removesuffix(".base_layer.weight")
            left, right = (weights[f"{path}.lora_{part}.default.weight"].float() for part in "BA")
            added[own] = model.get_submodule(path).scaling["default"] * left @ right
    return full, added, drifted


def slopes(trainer) -> list[float]:
    """Return the largest gradient of each layer's adapter, in a pass through the sharded model."""
    model = trainer.vllm_generation.model
    model(IDS).logits.float().square().mean().backward()
    return [whole(weight.grad).abs().max().item() for name, weight in model.named_parameters() if "lora_B" in name]


def send_an_adapter(folder: str, how: str = "", bits: str = "16") -> None:
    out = Path(folder, f"rank-{os.environ['RANK']}")  # each writes a model
    loading = {"quantization_config": BitsAndBytesConfig(**IN_4_BITS), "dtype": "bfloat16"} if bits == "4" else {}
    model = toy_model(num_hidden_layers=2, **({"hidden_size": 64, "intermediate_size": 128} if bits == "4" else {}))
    trainer, llm = colocate_trainer(
        pytest.MonkeyPatch(), out, Whole, model=model.bfloat16(), loading=loading, bf16=True, max_steps=8,
        vllm_logp_tolerance=None, trainer_args={"peft_config": LoraConfig(r=4, target_modules="all-linear")},
    )  # fmt: skip
    found = {}
    if how == "fsdp2":
        shard(trainer)
        found["slopes"] = slopes(trainer)
    else:
        trainer.train()
    for version in range(8, 24):
        trainer.state.global_step = version
        trainer.vllm_generation.sync_weights()

    with unsharded():
        base = AutoModelForCausalLM.from_pretrained(f"{out}-model", **loading)
    full, added, drifted = read_weights(trainer, base)
    served = {name: weight.detach() for name, weight in llm.model.named_parameters()}
    off = {name: served[name].float() - full[name] - added.get(name, 0) for name in full}
    excess, adapter = (sum((other[name] * ba).sum().item() for name, ba in added.items()) for other in (off, added))
    steps = {name: 2.0**-7 * 2.0 ** (full[name] + added.get(name, 0)).abs().log2().floor() for name in full}
    finish(
        trainer,
        folder,
        drifted=drifted,
        steps_off=max((off[name].abs() / steps[name].clamp(min=2.0**-133)).max().item() for name in off),
        share=1 + excess / adapter,
        served=hashlib.sha256(
            b"".join(weight.view(torch.int16).numpy().tobytes() for weight in served.values())
        ).hexdigest(),
        **found,
    )


def assert_all_sent(folder: Path, **expected) -> None:
    """See that no base weight of any rank changed, and that all engines have the same, a rounding off at most."""
    ranks = read_ranks(folder, **expected)
    assert [rank["drifted"] for rank in ranks] == [[], []]
    assert len({rank["served"] for rank in ranks}) == 1
    assert 0.5 < ranks[0]["steps_off"] < 1  # not to the nearest
    assert ranks[0]["share"] == pytest.approx(1, abs=0.01)
    assert all(slope > 0 for rank in ranks for slope in rank.get("slopes", ()))
