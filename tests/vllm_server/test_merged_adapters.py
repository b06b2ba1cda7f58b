"""What vLLM gets of an adapter: the policy that is trained, rounded without bias; the trainer's weights stay."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bapo_trl.tasks import character_tokenizer
from tests.helpers.adapter_worker import assert_all_sent, send_an_adapter
from tests.helpers.alike import assert_same_tensors, weights_of
from tests.helpers.commands import succeeded
from tests.helpers.fake_vllm import ScriptedLLM, colocate_trainer
from tests.helpers.forked import run_function
from tests.helpers.toy import toy_model


IDS = torch.randint(250, (4, 24), generator=torch.Generator().manual_seed(0))
VERSIONS = 32


def small(config_class, model_class, **settings):
    tokenizer = character_tokenizer()
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    return model_class(config_class(vocab_size=len(tokenizer), initializer_range=0.3, **ends, **settings))


def gpt2():
    return small(GPT2Config, GPT2LMHeadModel, n_positions=64, n_embd=16, n_layer=1, n_head=2)


def experts():
    return small(
        Qwen3MoeConfig, Qwen3MoeForCausalLM, hidden_size=16, intermediate_size=32, moe_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=3, num_experts_per_tok=2,
        head_dim=8,
    )  # fmt: skip


def lora(*targets, **settings):
    return LoraConfig(r=4, lora_alpha=6, target_modules=list(targets) or "all-linear", **settings)


KINDS = {
    "linear": (toy_model, lora()),
    "embeddings": (toy_model, lora("embed_tokens", "q_proj")),
    "conv1d": (gpt2, lora("c_attn", "c_proj", fan_in_fan_out=True)),
    "dora": (toy_model, lora("q_proj", "embed_tokens", "down_proj", use_dora=True)),
    "modules_to_save": (toy_model, lora("q_proj", modules_to_save=["lm_head"])),
    "tokens": (toy_model, lora("q_proj", trainable_token_indices=[1, 5])),
    "tied": (
        lambda: toy_model(tie_word_embeddings=True),
        lora("q_proj", modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
    "experts": (experts, lora("q_proj", target_parameters=["experts.gate_up_proj", "experts.down_proj"])),
}


def trainer_with(monkeypatch, folder, model, config):
    """Return a trainer with an adapter that is trained a little, as it were, and its engine."""
    trainer, llm = colocate_trainer(monkeypatch, folder / "run", model=model, trainer_args={"peft_config": config})
    torch.manual_seed(1)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape).to(parameter.device)
    return trainer, llm


def send(trainer, version: int = 0) -> None:
    trainer.state.global_step = version
    trainer.vllm_generation.sync_weights()


@torch.no_grad()
def logps(model) -> torch.Tensor:
    """Return what a model says of each next token of `IDS`, in float32 arithmetic."""
    return copy.deepcopy(model).float().eval().cpu()(IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_the_engine_has_the_policy(monkeypatch, tmp_path, kind):
    make_model, config = KINDS[kind]
    trainer, llm = trainer_with(monkeypatch, tmp_path, make_model(), config)
    before = weights_of(trainer.model)
    send(trainer)
    torch.testing.assert_close(logps(llm.model), logps(trainer.model), rtol=0, atol=2e-5)
    with trainer.model.disable_adapter():
        assert (logps(llm.model) - logps(trainer.model)).abs().max() > 0.01
    assert_same_tensors(weights_of(trainer.model), before)


ROUNDED = [(kind, torch.bfloat16) for kind in KINDS if kind not in ("tied", "experts")] + [("linear", torch.float16)]


@pytest.mark.parametrize(("kind", "dtype"), ROUNDED, ids=str)
def test_rounded_weights_are_right_on_average(monkeypatch, tmp_path, kind, dtype):
    make_model, config = KINDS[kind]
    trainer, llm = trainer_with(monkeypatch, tmp_path, make_model().to(dtype), config)
    before = weights_of(trainer.model)
    merged = copy.deepcopy(trainer.model).cpu().float().merge_and_unload()  # peft's own, in float32
    sent = []
    for version in range(VERSIONS):
        send(trainer, version)
        sent.append({name: weight.float().cpu() for name, weight in llm.model.named_parameters()})
    assert_same_tensors(weights_of(trainer.model), before)
    for name, exact in merged.named_parameters():
        draws = torch.stack([weights[name] for weights in sent])
        step = torch.finfo(dtype).eps * 2.0 ** exact.abs().log2().floor().clamp(min=-14)
        assert ((draws - exact).abs() < step).all(), name
        # Of a value a share f between two neighbors, the mean of 32 draws is off by sqrt(f (1 - f) / 32) steps: 0.07
        # on average over f. The nearest neighbor is off by 0.25.
        assert ((draws.mean(0) - exact).abs() / step).mean() < 0.1, name


@pytest.mark.trainings
def test_the_engine_gets_adapters_that_rounding_to_the_nearest_loses(monkeypatch, tmp_path):
    """An adapter after 12 updates, in shares: its products are small beside weights in bfloat16."""
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    wide = toy_model(
        hidden_size=512, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1
    ).bfloat16()
    trainer, llm = colocate_trainer(monkeypatch, tmp_path / "run", model=wide, trainer_args={"peft_config": config})
    base = logps(llm.model)
    model = get_peft_model(copy.deepcopy(llm.model), config)
    adapter = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer = torch.optim.Adam(adapter.values(), lr=1e-4)
    for _ in range(12):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = {name: weight.clone() for name, weight in adapter.items()}
    for share in (0.05, 0.125, 0.25, 0.5, 1.0):
        for name, weight in adapter.items():
            weight.data.copy_(trained[name] * share if "lora_B" in name else trained[name])
            trainer.model.get_parameter(name).data.copy_(weight)
        policy = logps(model)  # the adapter beside the weights
        nearest = logps(copy.deepcopy(model).merge_and_unload())
        send(trainer)
        base_is_off, nearest_is_off, sent_is_off = (
            (each - policy)[:, :-1].gather(2, IDS[:, 1:, None]).abs().mean()
            for each in (base, nearest, logps(llm.model))
        )
        assert sent_is_off < min(base_is_off, nearest_is_off) / 2.5


def engine_in(dtype: torch.dtype) -> type[ScriptedLLM]:
    class Engine(ScriptedLLM):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model.to(dtype)
            self.llm_engine.model_config.dtype = dtype

    return Engine


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_weights_are_rounded_for_the_engine(monkeypatch, tmp_path, autocast):
    """A trainer in float32 over an engine in bfloat16, as by TRL's defaults."""
    trainer, llm = colocate_trainer(
        monkeypatch, tmp_path / "run", engine_in(torch.bfloat16), bf16=autocast, trainer_args={"peft_config": lora()},
    )  # fmt: skip
    base, down = trainer.model.base_model.model.model.layers[0].mlp.down_proj, "model.layers.0.mlp.down_proj.weight"
    base.lora_B.default.weight.data.fill_(5e-4)
    weight, product = base.base_layer.weight, base.get_delta_weight("default")
    # Under autocast, the forward pass of the trainer rounds the base weight alone
    exact = ((weight.bfloat16().float() if autocast else weight) + product).cpu()
    draws = []
    for version in range(VERSIONS):
        send(trainer, version)
        draws.append(llm.model.get_parameter(down).float().cpu())
    off = (torch.stack(draws).mean(0) - exact) / (2.0**-7 * 2.0 ** exact.abs().log2().floor())
    assert off.abs().mean() < 0.1


# Trainings


@pytest.mark.trainings
def test_a_resumed_run_sends_the_same_bits(monkeypatch, tmp_path):
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "vllm_logp_tolerance": None}

    def run(folder, checkpoint=None):
        trainer, llm = colocate_trainer(
            monkeypatch, folder, model=toy_model().bfloat16(), trainer_args={"peft_config": lora()}, **settings
        )
        base = {name: weight.clone() for name, weight in trainer.model.named_parameters() if "lora" not in name}
        trainer.train(resume_from_checkpoint=checkpoint)
        assert_same_tensors({name: trainer.model.get_parameter(name) for name in base}, base)
        return trainer, [weights for _, weights in llm.requests]

    straight, sent = run(tmp_path / "run")
    resumed, sent_again = run(tmp_path / "again", str(tmp_path / "run" / "checkpoint-4"))
    (_, weights), (weights_again,) = sent, sent_again
    assert_same_tensors(weights, weights_again)
    assert_same_tensors(weights_of(straight.model), weights_of(resumed.model))


class Full(ScriptedLLM):
    """Runs out of memory at the fifth tensor of the second transfer."""

    tensors = 0

    def _load_weights(self, weights):
        self.tensors += 1
        if self.tensors == 15 + 5:
            raise RuntimeError("out of memory")
        super()._load_weights(weights)


@pytest.mark.trainings
def test_a_transfer_that_fails_leaves_nothing_merged(monkeypatch, tmp_path):
    trainer, _ = colocate_trainer(
        monkeypatch, tmp_path / "run", Full, max_steps=8, trainer_args={"peft_config": lora()},
    )  # fmt: skip
    start = weights_of(trainer.model)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert_same_tensors(
        *({name: weight for name, weight in weights.items() if "lora" not in name}
          for weights in (weights_of(trainer.model), start))
    )  # fmt: skip
    policy = logps(trainer.model)
    with trainer.model.disable_adapter():
        assert (logps(trainer.model) - policy).abs().max() > 0  # the adapter is beside the weights, not in them
    trainer.model.merge_adapter()  # the user's own
    torch.testing.assert_close(logps(trainer.model), policy, rtol=0, atol=2e-5)


@pytest.mark.processes
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("bits", ["16", "4"])
def test_ranks_send_the_same_and_keep_their_base_weights(tmp_path, how, bits):
    if bits == "4":
        pytest.importorskip("bitsandbytes")
    succeeded(run_function(send_an_adapter, tmp_path, how, bits, ranks=2))
    assert_all_sent(tmp_path)


# What is not sent this way
