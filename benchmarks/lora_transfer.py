"""
Measure how far vLLM's policy is from the trainer's with LoRA on bfloat16 weights, for different ways to merge.

    python -m benchmarks.lora_transfer

An adapter trained for 32 updates on `chat_sums` (settings of `recipes/smollm2_sums.yaml`) is scaled down, to imitate
earlier stages of training. On samples of the trainer's policy (adapter not merged), log-probabilities of the sampled
tokens are compared with those of the base model, of peft's merge (round to nearest), and of the weights that
`bapo_trl` sends. All forward passes compute in float32, on unchanged weights, with one thread.
"""

import argparse
import copy
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import load_chat_sums, smollm2_path
from bapo_trl.upstream import cpu_speed
from bapo_trl.vllm_server.merged_adapters import Types, named_merged
from benchmarks.common import save_result


SHARES = (0.05, 0.125, 0.25, 0.5, 1.0)
UPDATES, LEARNING_RATE, RANK, ALPHA = 32, 5e-4, 16, 32
LORA = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
PROMPTS, COMPLETION_TOKENS = 64, 16


def train_adapter() -> BAPOTrainer:
    """Return a trainer after training the adapter."""
    task = load_chat_sums()
    with tempfile.TemporaryDirectory() as folder:
        args = BAPOConfig(
            folder, use_cpu=True, bf16=True, model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "eager"},
            gradient_checkpointing=False, dataloader_pin_memory=False, per_device_train_batch_size=32,
            gradient_accumulation_steps=1, steps_per_generation=4, num_generations=8, max_steps=UPDATES,
            max_completion_length=COMPLETION_TOKENS, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
            logging_steps=4, save_strategy="no", report_to="none",
        )  # fmt: skip
        trainer = BAPOTrainer(
            str(smollm2_path()), task.reward_func, args, train_dataset=task.train_dataset, peft_config=LORA
        )
        cpu_speed.make_head_input_contiguous(trainer.model)
        trainer.train()
    return trainer


@torch.no_grad()
def log_probs(model: torch.nn.Module, samples: torch.Tensor, mask: torch.Tensor, start: int) -> torch.Tensor:
    """
    Return the log-probabilities of the samples' unmasked tokens from `start` on.

    Computes in float32: the rounding of a bfloat16 forward pass is larger than the effect of the weights' differences.
    """
    logits = copy.deepcopy(model).float()(input_ids=samples, attention_mask=mask).logits[:, start - 1 : -1]
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
def send(model: torch.nn.Module, base: torch.nn.Module) -> torch.nn.Module:
    """Return the base model with the weights that are sent for a model with an adapter."""
    served = copy.deepcopy(base)
    for name, weight in named_merged(model, version=UPDATES, types=Types()):
        if name.endswith("base_layer.weight"):
            own = name.removeprefix("base_model.model.").replace(".base_layer", "")
            served.get_parameter(own).copy_(weight)
    return served


def measure(model: torch.nn.Module, base: torch.nn.Module, prompts: dict[str, torch.Tensor], end: int) -> dict:
    """Return the mean absolute differences in nats per token."""
    start = prompts["input_ids"].shape[1]
    samples, mask = sample(model, prompts, end)
    policy = log_probs(model, samples, mask, start)

    def difference(other):
        return round((log_probs(other, samples, mask, start) - policy).abs().mean().item(), 4)

    return {
        "base": difference(base),
        "nearest": difference(copy.deepcopy(model).merge_and_unload()),
        "stochastic": difference(send(model, base)),
        "tokens": len(policy),
    }


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    trainer = train_adapter()
    base = AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=torch.bfloat16, attn_implementation="eager")
    model = get_peft_model(copy.deepcopy(base), LORA).eval()
    tokenizer, trained = trainer.processing_class, dict(trainer.model.named_parameters())
    texts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        for row in load_chat_sums().test_dataset.select(range(PROMPTS))
    ]
    prompts = dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left"))
    results = []
    for share in SHARES:
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data.copy_(trained[name] * (share if "lora_B" in name else 1))
        results.append({"share": share, **measure(model, base, prompts, tokenizer.eos_token_id)})
        print(results[-1], flush=True)
    settings = {
        "model": "SmolLM2-135M-Instruct", "updates": UPDATES, "learning_rate": LEARNING_RATE, "r": RANK,
        "alpha": ALPHA, "prompts": PROMPTS, "threads": 1,
    }  # fmt: skip
    save_result("lora_transfer", settings, results)


if __name__ == "__main__":
    main()
