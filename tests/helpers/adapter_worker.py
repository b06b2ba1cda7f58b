"""Trains an adapter over the stand-in for vLLM on several ranks; says what the engine has, and which base drifted."""

import hashlib
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers.ranks import finish, read_ranks
from tests.helpers.scripted_llm import ScriptedLLM, colocate_trainer
from tests.helpers.toy import toy_model


class Whole(ScriptedLLM):
    """Has all of its weights, also where transformers would shard them."""

    def __init__(self, *args, **kwargs):
        with patch("transformers.modeling_utils.is_deepspeed_zero3_enabled", lambda: False):
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
def read_weights(trainer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the base weights, and what the engine is to have in float32, each by the engine's names."""
    generation, base, merged = trainer.vllm_generation, {}, {}
    model = generation.model
    with generation._dist.gather_params(list(model.parameters())):
        weights = {name: whole(weight).clone() for name, weight in model.named_parameters()}
    for name in [name for name in weights if "lora_" not in name]:
        own = name.removeprefix("base_model.model.").replace(".base_layer", "")
        base[own], merged[own] = weights[name], weights[name].float()
        if name.endswith("base_layer.weight"):
            path = name.removesuffix(".base_layer.weight")
            left, right = (weights[f"{path}.lora_{part}.default.weight"].float() for part in "BA")
            merged[own] = merged[own] + model.get_submodule(path).scaling["default"] * left @ right
    return base, merged


def main(folder: str, how: str = "") -> None:
    out = Path(folder, f"rank-{os.environ['RANK']}")  # each writes a model
    trainer, llm = colocate_trainer(
        pytest.MonkeyPatch(), out, Whole, model=toy_model(num_hidden_layers=2).bfloat16(), bf16=True, max_steps=8,
        vllm_logp_tolerance=None, trainer_args={"peft_config": LoraConfig(r=4, target_modules="all-linear")},
    )  # fmt: skip
    if how == "fsdp2":
        shard(trainer)
    else:
        trainer.train()
    for version in range(8, 24):
        trainer.state.global_step = version
        trainer.vllm_generation.sync_weights()

    base, merged = read_weights(trainer)
    served = {name: weight.detach() for name, weight in llm.model.named_parameters()}
    steps = {name: 2.0**-7 * 2.0 ** exact.abs().log2().floor().clamp(min=-126) for name, exact in merged.items()}
    finish(
        trainer,
        folder,
        drifted=[
            name
            for name, weight in load_file(f"{out}-model/model.safetensors").items()
            if not torch.equal(base[name], weight)
        ],
        steps_off=max(((served[name] - exact).abs() / steps[name]).max().item() for name, exact in merged.items()),
        served=hashlib.sha256(
            b"".join(weight.view(torch.int16).numpy().tobytes() for weight in served.values())
        ).hexdigest(),
    )


def assert_all_sent(folder: Path, **expected) -> None:
    """See that no base weight of any rank changed, and that all engines have the same, a rounding off at most."""
    ranks = read_ranks(folder, **expected)
    assert [rank["drifted"] for rank in ranks] == [[], []]
    assert len({rank["served"] for rank in ranks}) == 1
    assert 0.5 < ranks[0]["steps_off"] < 1  # not to the nearest


if __name__ == "__main__":
    main(*sys.argv[1:])
