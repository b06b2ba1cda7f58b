"""
Measure how far vLLM's policy is from the trainer's with LoRA on bfloat16 weights, for different ways to merge.

    python -m benchmarks.lora_transfer
    python -m benchmarks.lora_transfer --in_4_bits

Adapters are trained on `chat_sums` (settings of `recipes/smollm2_sums.yaml`, 4 updates per generation) at two learning
rates and read at several updates. On samples of the trainer's policy (adapter not merged), log-probabilities of the
sampled tokens are compared with those of the base model, of peft's merge (round to nearest), and of the weights that
`bapo_trl` sends: computed in float32, and in bfloat16 on both sides, as over vLLM. One thread. With `--in_4_bits`, the
base weights are nf4: the trainer's policy is compared with that of full weights in bfloat16, computed in bfloat16.
"""

import argparse
import copy
import tempfile
from collections.abc import Sequence

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import load_chat_sums, smollm2_path
from bapo_trl.upstream import cpu_speed
from bapo_trl.vllm_server.merged_adapters import Types, named_merged
from bapo_trl.vllm_server.quantized import prepare_quantized
from benchmarks.common import save_result


UPDATES = {5e-4: (4, 8, 16, 32), 2e-5: (8, 32)}  # by learning rate
UPDATES_IN_4_BITS = {5e-4: (1, 2, 4, 8)}
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
LOADING = {"dtype": "bfloat16", "attn_implementation": "eager"}
RANK, ALPHA = 16, 32
LORA = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
PROMPTS, COMPLETION_TOKENS = 64, 16
ROUNDINGS = 4  # random ones of the same weights


class AdapterReader(TrainerCallback):
    """Callback that copies the adapter's weights after some updates."""

    def __init__(self, updates: Sequence[int]):
        self.updates = updates
        self.adapters: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step in self.updates:
            named = model.named_parameters()
            self.adapters[state.global_step] = {
                name: weight.detach().clone() for name, weight in named if "lora_" in name
            }


def train_adapters(
    learning_rate: float, updates: Sequence[int], quantization: BitsAndBytesConfig | None = None
) -> dict[int, dict[str, torch.Tensor]]:
    """Return the weights of an adapter in training, by update."""
    task, reader = load_chat_sums(), AdapterReader(updates)
    with tempfile.TemporaryDirectory() as folder:
        args = BAPOConfig(
            folder, use_cpu=True, bf16=True, model_init_kwargs=LOADING,
            gradient_checkpointing=False, dataloader_pin_memory=False, per_device_train_batch_size=32,
            gradient_accumulation_steps=1, steps_per_generation=4, num_generations=8, max_steps=max(reader.updates),
            max_completion_length=COMPLETION_TOKENS, learning_rate=learning_rate, lr_scheduler_type="constant",
            logging_steps=4, save_strategy="no", report_to="none",
        )  # fmt: skip
        trainer = BAPOTrainer(
            str(smollm2_path()), task.reward_func, args, train_dataset=task.train_dataset, peft_config=LORA,
            callbacks=[reader], quantization_config=quantization,
        )  # fmt: skip
        cpu_speed.make_head_input_contiguous(trainer.model)
        trainer.train()
    return reader.adapters


@torch.no_grad()
def log_probs(
    model: torch.nn.Module, samples: torch.Tensor, mask: torch.Tensor, start: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the log-probabilities of the samples' unmasked tokens from `start` on, computed in `dtype`."""
    computes_in_float32 = dtype == torch.float32
    model = copy.deepcopy(model).float() if computes_in_float32 else model
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not computes_in_float32):
        logits = model(input_ids=samples, attention_mask=mask).logits[:, start - 1 : -1]
    logps = logits.float().log_softmax(-1).gather(2, samples[:, start:, None]).squeeze(2)
    return logps[mask[:, start:].bool()]


def sample(model: torch.nn.Module, prompts: dict[str, torch.Tensor], end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts with completions, and the mask of the tokens."""
    torch.manual_seed(0)
    samples = model.generate(
        **prompts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=COMPLETION_TOKENS
    )
    is_end = samples[:, prompts["input_ids"].shape[1] :] == end
    after_end = is_end.cumsum(dim=1) - is_end.int() > 0
    return samples, torch.cat([prompts["attention_mask"], (~after_end).long()], dim=1)


@torch.no_grad()
def send(
    model: torch.nn.Module, base: torch.nn.Module, version: int = 0, dtype: torch.dtype | None = None
) -> torch.nn.Module:
    """Return the base model with the weights that are sent for a model with an adapter."""
    served = copy.deepcopy(base)
    for name, weight in named_merged(model, version, Types(dtype)):
        own = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if "lora_" not in own:
            served.get_parameter(own).copy_(weight)
    return served


def measure(model: torch.nn.Module, base: torch.nn.Module, prompts: dict[str, torch.Tensor], end: int) -> dict:
    """Return the mean absolute differences in nats per token, by the arithmetic's type."""
    start = prompts["input_ids"].shape[1]
    samples, mask = sample(model, prompts, end)
    others = {
        "base": base, "nearest": copy.deepcopy(model).merge_and_unload(), "stochastic": send(model, base),
    }  # fmt: skip
    row: dict = {"tokens": int(mask[:, start:].sum())}
    for dtype in (torch.float32, torch.bfloat16):
        policy = log_probs(model, samples, mask, start, dtype)
        row[str(dtype).removeprefix("torch.")] = {
            name: round((log_probs(other, samples, mask, start, dtype) - policy).abs().mean().item(), 4)
            for name, other in others.items()
        }
    return row


@torch.no_grad()
def measure_in_4_bits(model: torch.nn.Module, base: torch.nn.Module, prompts: dict, end: int) -> dict:
    """Return the mean absolute differences in nats per token from the policy of a model in 4 bits."""
    start = prompts["input_ids"].shape[1]
    samples, mask = sample(model, prompts, end)

    def logps(other: torch.nn.Module) -> torch.Tensor:
        return log_probs(other, samples, mask, start, torch.bfloat16)

    def off(one: torch.Tensor, other: torch.Tensor) -> float:
        return round((one - other).abs().mean().item(), 4)

    policy = logps(model)
    with model.disable_adapter():
        without = logps(model)
    return {
        "tokens": int(mask[:, start:].sum()),
        "no adapter": off(without, policy),
        "nearest": off(logps(send(model, base, dtype=torch.float32)), policy),  # rounded when it is copied
        "stochastic": [off(logps(send(model, base, version)), policy) for version in range(ROUNDINGS)],
        "merged into the unquantized base": off(logps(merge(model, base)), policy),
    }


def merge(model: torch.nn.Module, base: torch.nn.Module) -> torch.nn.Module:
    """Return the base model with the adapter merged into its own weights."""
    merged = get_peft_model(copy.deepcopy(base), LORA)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            merged.get_parameter(name).data.copy_(weight)
    return merged.merge_and_unload().eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in_4_bits", action="store_true", help="quantize the base weights")
    in_4_bits = parser.parse_args().in_4_bits
    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=torch.bfloat16, attn_implementation="eager")
    loading = {**LOADING, "quantization_config": NF4} if in_4_bits else LOADING
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(smollm2_path(), **loading), LORA).eval()
    prepare_quantized(model, is_sharded=False)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path())
    texts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        for row in load_chat_sums().test_dataset.select(range(PROMPTS))
    ]
    prompts = dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left"))
    results = []
    for learning_rate, updates in (UPDATES_IN_4_BITS if in_4_bits else UPDATES).items():
        for update, adapter in train_adapters(learning_rate, updates, NF4 if in_4_bits else None).items():
            for name, weight in adapter.items():
                model.get_parameter(name).data.copy_(weight)
            found = (measure_in_4_bits if in_4_bits else measure)(model, base, prompts, tokenizer.eos_token_id)
            results.append({"learning_rate": learning_rate, "updates": update, **found})
            print(results[-1], flush=True)
    settings = {
        "model": "SmolLM2-135M-Instruct", "r": RANK, "alpha": ALPHA, "prompts": PROMPTS, "threads": 1,
    }  # fmt: skip
    command = f"python -m benchmarks.lora_transfer{' --in_4_bits' if in_4_bits else ''}"
    save_result("qlora_transfer" if in_4_bits else "lora_transfer", settings, results, command=command)


if __name__ == "__main__":
    main()
