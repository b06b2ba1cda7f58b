"""Toy parts that many tests share: a model of a few thousand weights, prompts, a reward, trainers on them."""

import os
import signal

import torch
from datasets import Dataset
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    TrainerCallback,
)

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import character_tokenizer


# On the GPU under `make test-gpu`, else on the CPU. Gradient checkpointing stays on, as TRL has it
ON_GPU = os.environ.get("TEST_DEVICE") == "cuda"
CPU = {
    "use_cpu": not ON_GPU, "bf16": False, "dataloader_pin_memory": False, "report_to": "none", "save_strategy": "no",
    "disable_tqdm": True,
}  # fmt: skip

OVER_SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_importance_sampling_mode": "token_truncate"}

# By itself it would take half of the machine's memory for its cache
CONTINUOUS_BATCHING = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "block_size": 64, "max_batch_tokens": 256},
}

# Sizes all differ: 6 rows a micro-batch, 3 generations a prompt, up to 7 tokens, 2 micro-batches an update, 2 updates
# on the samples of a generation, twice over.
OFF_POLICY = {
    "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2,
    "num_generations": 3, "max_completion_length": 7, "learning_rate": 2e-2, "lr_scheduler_type": "constant",
    "logging_steps": 1, "max_steps": 4,
}  # fmt: skip


def toy_model(seed: int = 0, **overrides) -> Qwen2ForCausalLM:
    tokenizer = character_tokenizer()
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
    }  # fmt: skip
    return Qwen2ForCausalLM(Qwen2Config(**{**settings, **overrides}))


def ending_model(seed: int = 0, eos_logit: float = 2.2, **overrides):
    """A toy model whose completions end at any length: EOS has a logit that hardly depends on the context."""
    model = toy_model(seed, **overrides)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 2.0  # carried along by the residual stream
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[model.config.eos_token_id] = 0.0
        model.lm_head.weight[model.config.eos_token_id, 0] = eos_logit
    return model


def opt_model(seed: int = 0, **overrides) -> OPTForCausalLM:
    """OPT drops out in functional calls, with rates that no module named Dropout holds."""
    tokenizer = character_tokenizer()
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "init_std": 0.3,
        "dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    return OPTForCausalLM(OPTConfig(**{**settings, **overrides}))


def reward_model(name: str) -> Qwen2ForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, num_labels=1, _name_or_path=name)
    return Qwen2ForSequenceClassification(config)


def toy_dataset(size: int = 40) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{i}+{i + 1}=" for i in range(size)]})


def digits_reward(completions, **kwargs) -> list[float]:
    """Reward digits, with a bit of spread so that groups seldom tie."""
    return [sum(c.isdigit() for c in text) - 0.1 * len(text) + 0.01 * (len(text) % 3) for text in completions]


def brevity(completions, **kwargs) -> list[float]:
    """A reward of chat completions that differs within a group, so that the weights move."""
    return [-float(len(message["content"])) for (message,) in completions]


def part_of(trainer, kind):
    """Return the part of a trainer that is of a class."""
    return next(part for part in trainer.parts if isinstance(part, kind))


def toy_trainer(
    output_dir, model=None, trainer_class=BAPOTrainer, config_class=BAPOConfig, trainer_args=None,
    reward_funcs=digits_reward, **args,
):  # fmt: skip
    return trainer_class(
        model if model is not None else toy_model(),
        reward_funcs=reward_funcs,
        args=config_class(str(output_dir), **{**CPU, **OFF_POLICY, **args}),
        **{"train_dataset": toy_dataset(), "processing_class": character_tokenizer(), **(trainer_args or {})},
    )


def toy_run(*args, resume=None, **settings):
    """Make a toy trainer, train it, from a checkpoint if there is one to resume from, and return it."""
    trainer = toy_trainer(*args, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class InUpdate(TrainerCallback):
    """Calls a function with the model as an update begins, counted from 1."""

    def __init__(self, update: int, action):
        self.update, self.action = update, action

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.update - 1:
            self.action(model)


def terminate(model=None) -> None:
    signal.raise_signal(signal.SIGTERM)


def training_logs(trainer) -> list[dict]:
    """Logs of the updates, without those of evaluation and the closing summary."""
    return [log for log in trainer.state.log_history if "loss" in log]
