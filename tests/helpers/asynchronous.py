"""Parts for the asynchronous trainer on a CPU: attention in place of FlashAttention 3, a worker with a script."""

import queue
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from bapo_trl.experimental import AsyncBAPOConfig, AsyncBAPOTrainer
from bapo_trl.tasks import character_tokenizer
from tests.helpers.toy import CPU, toy_dataset, toy_model


SIZES = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "token_budget": 0,
    "max_staleness": 10**6, "learning_rate": 1e-2, "max_steps": 4, "logging_steps": 1,
}  # fmt: skip


def flash_attn_varlen_func(query, key, value, starts, key_starts, *sizes, softmax_scale, causal, window_size):
    """Attend within each segment, the last query to the last key. Shapes are `(tokens, heads, size)`."""
    assert causal
    assert window_size == (-1, -1)
    segment, place = _places(starts)
    key_segment, key_place = _places(key_starts)
    more_keys = (key_starts.diff() - starts.diff())[segment]  # than queries, those of earlier segments of the path
    mask = (segment[:, None] == key_segment) & (key_place <= (place + more_keys)[:, None])
    of_heads = (each.transpose(0, 1) for each in (query, key, value))
    attended = scaled_dot_product_attention(*of_heads, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
    return attended.transpose(0, 1)


def _places(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the segment of each token, and its place in it."""
    lengths = starts.diff().long()
    segment = torch.arange(len(lengths)).repeat_interleave(lengths)
    return segment, torch.arange(int(starts[-1])) - starts[segment]


@contextmanager
def on_cpu():
    """Let TRL's asynchronous trainer run on a CPU."""
    attention = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    with (
        patch.object(packing, "_flash_attn", lambda: attention),
        patch.object(async_grpo_trainer, "get_peak_flops_per_device", lambda *args: None),
    ):
        yield


class ScriptedWorker:
    """Gives samples of a list, one after the other. All are of version 0."""

    def __init__(self, samples):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        for sample in samples:
            self.rollout_buffer.put(sample)
        self.is_running = False

    def start(self):
        self.is_running = True

    def stop(self):
        self.is_running = False

    def update_model_version(self, model_version):
        pass

    def check_health(self, stale_after_s):
        raise RuntimeError("The script has no sample left.")


class NoTransfer:
    """Sends no weights, and counts how often it was asked to."""

    def __init__(self):
        self.sent = []

    def init_weight_transfer(self):
        pass

    def pause(self):
        pass

    def resume(self):
        pass

    def destroy(self):
        pass

    def send_weights(self, iterator):
        self.sent.append({name: weight.clone() for name, weight in iterator})


def scripted_samples(model, count: int, group_size: int = 4, spread: float = 0.4, seed: int = 0, tokens: int = 90):
    """
    Samples in groups that share a prompt, some a part of their completion, too; a few tokens come from a tool.

    Their log-probabilities are the model's with a random difference, so that ratios are spread about 1.
    """
    random = np.random.default_rng(seed)
    samples = []
    for number in range(count):
        if number % group_size == 0:
            prompt = random.integers(3, tokens, random.integers(2, 6)).tolist()
            start = random.integers(3, tokens, 3).tolist()
            advantages = random.normal(size=group_size)
            advantages -= advantages.mean() + random.uniform(-0.2, 0.3)  # so that the bounds move, now and then
        begins = start if number % 2 else []
        completion = [*begins, *random.integers(3, tokens, random.integers(2, 9)).tolist()]
        mask = np.array([0] * len(prompt) + [1] * len(completion))
        if len(completion) > 4:
            mask[len(prompt) + 2] = 0
        ids = np.array(prompt + completion)
        logps = token_logps(model, ids).numpy() + random.normal(size=len(ids)) * spread
        samples.append(
            RolloutSample(
                [{"role": "user", "content": "?"}], [{"role": "assistant", "content": "!"}], ids, mask,
                (logps * mask).astype(np.float32), float(advantages[number % group_size]), 0, number // group_size,
                {"reward": float(number % 3)},
            )
        )  # fmt: skip
    return samples


@torch.no_grad()
def token_logps(model, ids) -> torch.Tensor:
    """Log-probability of each token of one sequence, alone in its forward pass; 0 for the first."""
    ids = torch.as_tensor(ids).unsqueeze(0)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1].float()
    logps = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logps])


def save_toy(folder):
    """Save the toy model with its tokenizer, if it is not there; return where."""
    path = folder / "toy"
    if not path.exists():
        toy_model().save_pretrained(path)
        character_tokenizer().save_pretrained(path)
    return path


def async_trainer(
    folder, samples, trainer_class=AsyncBAPOTrainer, config_class=AsyncBAPOConfig, peft_config=None, **settings
):
    """Make a trainer of the toy model on scripted samples; within `on_cpu`."""
    return trainer_class(
        str(save_toy(folder)), [len], config_class(str(folder / "run"), **{**CPU, **SIZES, **settings}), toy_dataset(),
        processing_class=character_tokenizer(), rollout_worker=ScriptedWorker(samples), weight_transfer=NoTransfer(),
        peft_config=peft_config,
    )  # fmt: skip
