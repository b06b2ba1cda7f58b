"""Warn of a model whose log-probabilities of a sample change with the padding before it."""

import warnings
from collections.abc import Callable, Mapping

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..batch.samples import pad_completions
from ..upstream.forward_passes import in_eval_mode


# Tokens that a language model finds likely: half precision rounds the logits of others by more than any padding does
PROBE = "1+2=3, 2+3=5, 3+4=7, 4+5=9"


def warn_if_padding_counts(
    score: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
) -> None:
    """Warn, in the main process. `score` returns log-probabilities of a batch; all ranks make this call together."""
    tokens = tokenizer(PROBE)["input_ids"][:17]  # a window may be small
    if len(tokens) < 9:  # a vocabulary without digits
        tokens = [token % len(tokenizer) for token in range(17)]
    row = pad_completions([tokens[:1]], [tokens[1:]], tokenizer.pad_token_id, accelerator.device)
    padding = torch.full_like(row["completion_ids"][:, :8], tokenizer.pad_token_id)
    padded = row | {
        "prompt_ids": torch.cat([padding, row["prompt_ids"]], dim=1),
        "prompt_mask": torch.cat([torch.zeros_like(padding), row["prompt_mask"]], dim=1),
    }
    with in_eval_mode(model):  # without dropout
        alone, beside = score(row), score(padded)
    is_float32 = model.dtype == torch.float32 and accelerator.mixed_precision == "no"
    rounding = 0.01 if is_float32 else 0.1  # nats a token; half precision rounds logits to about a tenth
    if (alone - beside).abs().mean() > rounding and accelerator.is_main_process:
        warnings.warn(
            f"The model ({model.config.model_type}) does not take positions from the attention mask: the "
            "log-probabilities of a sample change with the padding before it. Samples of a replay queue and of "
            "partial rollouts are trained with other padding than they were scored with, so that their "
            "importance ratios are wrong. Take a model with relative positions, or prompts of equal length."
        )
