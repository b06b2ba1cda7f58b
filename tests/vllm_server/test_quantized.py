"""A base model that bitsandbytes quantized: what vLLM gets of it, and where it cannot work."""

from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from bapo_trl.errors import InputError
from bapo_trl.vllm_server.merged_adapters import send_merged_copies
from bapo_trl.vllm_server.quantized import check_engine, check_engine_memory, prepare_quantized
from tests.helpers.alike import assert_same_tensors
from tests.helpers.fake_vllm import ScriptedLLM, colocate_trainer
from tests.helpers.toy import toy_model, training_logs


pytest.importorskip("bitsandbytes")

IDS = torch.randint(250, (4, 24), generator=torch.Generator().manual_seed(0))
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
NESTED_FP4 = {**NF4, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}
INT8 = {"load_in_8bit": True}
LORA = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")
KINDS = {
    "nf4": (NF4, LORA),
    "nested_fp4": (NESTED_FP4, LORA),
    "stored_as_bfloat16": ({**NF4, "bnb_4bit_quant_storage": "bfloat16"}, LORA),
    "int8": (INT8, LORA),
    "quantized_layers_without_adapter": (NF4, LoraConfig(r=4, target_modules=["q_proj"])),
    "dora": (NF4, LoraConfig(r=4, target_modules="all-linear", use_dora=True)),
    "ia3": (NF4, IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])),
}


def base_model():
    return toy_model(hidden_size=64, intermediate_size=128)


def loading(quantization: dict, **settings) -> dict:
    return {"quantization_config": BitsAndBytesConfig(**quantization, **settings), "dtype": "float32"}


def trainer_with(monkeypatch, folder, quantization, config=LORA, **settings):
    """Return a trainer with an adapter that is trained a little, as it were, and its engine, both in float32."""
    trainer, llm = colocate_trainer(
        monkeypatch, folder / "run", model=base_model(), loading=loading(quantization),
        trainer_args={"peft_config": config}, **settings,
    )  # fmt: skip
    torch.manual_seed(1)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float() + 0.05 * torch.randn(parameter.shape).to(parameter.device)
    return trainer, llm


def packed_weights(model) -> dict[str, torch.Tensor]:
    named = [(name, weight.detach()) for name, weight in model.named_parameters() if not weight.requires_grad]
    return {name: weight.clone().view(torch.uint8) for name, weight in named}  # bfloat16 has NaN there


@torch.no_grad()
def logps(model) -> torch.Tensor:
    return model(IDS.to(model.device)).logits.log_softmax(-1).cpu()


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_has_the_policy_in_full_weights(monkeypatch, tmp_path, kind):
    quantization, config = KINDS[kind]
    trainer, llm = trainer_with(monkeypatch, tmp_path, quantization, config)
    model = trainer.model.eval()
    before, policy = packed_weights(model), logps(model)
    trainer.vllm_generation.sync_weights()
    assert_same_tensors(packed_weights(model), before)
    torch.testing.assert_close(logps(model), policy, rtol=0, atol=0)
    # In 8 bits, the forward pass rounds its inputs to 8 bits, too
    difference = (logps(llm.model) - policy).abs()
    assert difference.mean() < 0.1 if quantization == INT8 else difference.max() < 1e-4
    with model.disable_adapter():
        assert (logps(llm.model) - logps(model)).abs().mean() > (0.2 if quantization == INT8 else 0.01)


def test_a_forward_pass_in_evaluation_mode_leaves_the_layers_trainable(monkeypatch, tmp_path):
    """By itself, bitsandbytes repacks them on CPUs with AVX512-BF16, without a gradient afterwards."""
    trainer, _ = trainer_with(monkeypatch, tmp_path, NF4)
    before = packed_weights(trainer.model)
    evaluated = logps(trainer.model.eval())
    assert_same_tensors(packed_weights(trainer.model), before)
    model = trainer.model.train()
    logits = model(IDS.to(model.device)).logits
    torch.testing.assert_close(logits.log_softmax(-1).cpu(), evaluated)
    logits.square().mean().backward()
    down = model.base_model.model.model.layers[0].mlp.down_proj
    assert down.lora_A.default.weight.grad.abs().max() > 0


# What cannot work


def test_a_tied_head_that_is_quantized(monkeypatch, tmp_path):
    tied = toy_model(hidden_size=64, tie_word_embeddings=True)
    with pytest.raises(InputError, match=r"lm_head is quantized, .* add 'lm_head' to `llm_int8_skip_modules`"):
        colocate_trainer(
            monkeypatch, tmp_path / "run", model=tied, loading=loading(NF4, llm_int8_skip_modules=["none"]),
            trainer_args={"peft_config": LORA},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "advice"),
    [(NF4, "stored as uint8, .* set `bnb_4bit_quant_storage`"), (INT8, "stored as int8, .* use `load_in_4bit`")],
)
def test_packed_weights_that_cannot_be_divided_over_ranks(monkeypatch, tmp_path, quantization, advice):
    trainer, _ = trainer_with(monkeypatch, tmp_path, quantization)
    prepare_quantized(trainer.model, is_sharded=False)
    with pytest.raises(InputError, match=advice):
        prepare_quantized(trainer.model, is_sharded=True)
    stored, _ = trainer_with(monkeypatch, tmp_path, {**NF4, "bnb_4bit_quant_storage": "bfloat16"})
    prepare_quantized(stored.model, is_sharded=True)


def test_a_base_that_is_stored_in_4_bits(monkeypatch, tmp_path):
    base_model().save_pretrained(tmp_path / "full")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "full", **loading(NF4))
    with pytest.raises(InputError, match=r"\('bitsandbytes'\), .*: train the unquantized model with `load_in_4bit`"):
        colocate_trainer(monkeypatch, tmp_path / "run", model=stored, trainer_args={"peft_config": LORA})
    assert not ScriptedLLM.made  # which takes minutes


@pytest.mark.trainings
def test_the_limit_of_the_difference_from_the_sampler_is_doubled(monkeypatch, tmp_path):
    def trained(tolerance):
        trainer, _ = trainer_with(monkeypatch, tmp_path, NF4, max_steps=1, vllm_logp_tolerance=tolerance)
        trainer.train()
        return training_logs(trainer)[0]["sampling/sampling_logp_difference/mean"]

    difference = trained(10.0)
    assert difference > 0
    trained(0.6 * difference)
    with pytest.raises(RuntimeError, match="doubled for a quantized model"):
        trained(0.4 * difference)


def packed(weight: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight.detach().to(dtype), requires_grad=False)


class WeightInBuffers(torch.nn.Linear):
    """As GPTQ's and AWQ's layers."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("qweight", self.weight.detach().to(torch.int32))
        self.weight = None


class PackedWeight(torch.nn.Linear):
    """As HQQ's, EETQ's and AQLM's."""

    def __init__(self, *args):
        super().__init__(*args)
        self.weight_scales, self.weight = self.weight, packed(self.weight)


class Int8Tensor(torch.Tensor):
    """Says that it is of the type that it stands for, as torchao's."""


class LinearOfTorchao(torch.nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.weight = torch.nn.Parameter(self.weight.detach().as_subclass(Int8Tensor))


def test_an_engine_without_memory_for_the_full_weights(monkeypatch, tmp_path):
    trainer, _ = trainer_with(monkeypatch, tmp_path, NF4)
    full = 2 * (sum(weight.numel() for weight in base_model().parameters()))  # bytes in bfloat16
    generation = SimpleNamespace(model=trainer.model, tensor_parallel_size=1, gpu_memory_utilization=0.3)
    check_engine_memory(generation, 5 * full)
    with pytest.raises(InputError, match=r"`vllm_gpu_memory_utilization` is 0\.3, but .* take 0\.53 of the"):
        check_engine_memory(generation, 2 * full)
    generation.model = toy_model()  # which is loaded as it is stored, as TRL has it
    check_engine_memory(generation, 1)


def test_an_engine_that_holds_the_model_quantized(monkeypatch, tmp_path):
    trainer, _ = trainer_with(monkeypatch, tmp_path, NF4)
    check_engine(toy_model(), {"quantization": "fp8"})  # which vLLM makes of full weights
    with pytest.raises(InputError, match=r"vLLM holds the model quantized \('bitsandbytes'\)"):
        check_engine(trainer.model, {"quantization": "bitsandbytes"})


@pytest.mark.parametrize(
    ("layer_type", "name"),
    [
        (WeightInBuffers, "WeightInBuffers"),
        (PackedWeight, "PackedWeight"),
        (LinearOfTorchao, "LinearOfTorchao with weights of type Int8Tensor"),
    ],
)
def test_an_adapter_on_another_type_of_quantized_layer(monkeypatch, tmp_path, layer_type, name):
    trainer, _ = colocate_trainer(
        monkeypatch, tmp_path / "run", trainer_args={"peft_config": LoraConfig(target_modules=["q_proj"])}
    )
    layer = trainer.model.base_model.model.model.layers[0].self_attn.q_proj
    layer.base_layer = layer_type(16, 16)
    with pytest.raises(InputError, match=rf"on layers of type {name}, .* `load_in_4bit`"):
        send_merged_copies(SimpleNamespace(model=trainer.model))
