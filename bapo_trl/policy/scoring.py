"""
Log-probabilities of a trainer's batches, the version that sampled them, and how the loss weighs each token.

Plain functions that read TRL's attributes when they are called: the model may be another one once `train()` has begun.
Legend: `B` rows, `T` completion tokens.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..clip_bounds import Contributions, size_contributions
from ..clip_bounds.tokens import (
    PolicyTokens,
    cispo_gradient_size,
    mask_values,
    policy_mask,
    policy_tokens,
    sapo_gradient_size,
    without_masked_values,
)
from ..upstream.forward_passes import forked_random_state, in_eval_mode, without_gradient_checkpointing
from ..upstream.trl_compat import FORWARD_KEYS
from ..vllm_server.mismatch import compare_with_sampler


@torch.no_grad()
def score(
    trainer: Any, inputs: Mapping[str, Any], compute_entropy: bool = False, batch_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities and entropies, `(B, T)` each, of a batch under the current policy."""
    with without_gradient_checkpointing(trainer.model):
        per_token_logps, entropies, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            **{key: inputs.get(key) for key in FORWARD_KEYS},
        )
    return per_token_logps, entropies


def stamp(trainer: Any, batch: dict[str, torch.Tensor], reports_logps: bool) -> bool:
    """
    Add what a generation lacks of policy versions, and of log-probabilities where they will be needed; compare those
    of a sampler that is not the trainer.

    In TRL's batch, there is a `policy_version` already if not all of it was sampled now. `reports_logps` tells whether
    `sampling_per_token_logps`, if they are there, are those of the sampler: a difference above the tolerance is a
    `RuntimeError`. Returns whether the current policy sampled it all.
    """
    is_sampled_now = "policy_version" not in batch
    if is_sampled_now:
        # On the CPU: the staleness of rows is counted on the host, without waiting for the device.
        batch["policy_version"] = torch.full((len(batch["prompt_ids"]),), trainer.state.global_step)
    compares = reports_logps and "sampling_per_token_logps" in batch
    scored = batch
    if "old_per_token_logps" not in batch and (trainer.args.uses_replay or compares):
        # TRL leaves them out where it sees an on-policy run, and takes all ratios to be 1
        scored = {**batch, "old_per_token_logps": trainer._score_all(batch)}
        if trainer.args.uses_replay:
            batch["old_per_token_logps"] = scored["old_per_token_logps"]
    if compares:
        is_per_sequence = trainer.args.vllm_importance_sampling_mode.startswith("sequence")
        metrics, difference = compare_with_sampler(scored, is_per_sequence, trainer.accelerator.gather)
        trainer._log_values(metrics)
        trainer._check_difference(difference)
    return is_sampled_now


def read_tokens(
    trainer: Any, inputs: Mapping[str, Any], per_token_logps: torch.Tensor, entropies: torch.Tensor | None
) -> PolicyTokens:
    """Read off TRL's batch the tokens of the policy loss, weighed as `_compute_loss` weighs them."""
    mask = policy_mask(inputs)
    advantages = inputs["advantages"]
    old_per_token_logps = inputs.get("old_per_token_logps", per_token_logps)  # absent: sampled by this policy
    factors = []
    if trainer.off_policy_mask_threshold is not None:
        off_policy_mask = trainer.get_off_policy_mask(
            advantages=advantages if advantages.dim() == 2 else advantages.unsqueeze(1),
            per_token_logps=per_token_logps,
            sampling_per_token_logps=inputs.get("sampling_per_token_logps", old_per_token_logps),
            mask=mask,
            off_policy_threshold=trainer.off_policy_mask_threshold,
        )
        factors.append(off_policy_mask)
    if trainer.top_entropy_quantile < 1:
        factors.append(trainer.get_high_entropy_mask(entropies, mask, 1 - trainer.top_entropy_quantile))
    tokens = _weighed_tokens(trainer, inputs, per_token_logps, old_per_token_logps, factors)
    return replace(tokens, gradient_size=_gradient_size(trainer, inputs, tokens))


def read_masses(trainer: Any, inputs: Mapping[str, Any]) -> Contributions:
    """Return the sum of w |A| of each sign, of a micro-batch, without what only a forward pass can tell."""
    inputs = without_masked_values(inputs)
    logps = _any_logps(inputs)
    tokens = _weighed_tokens(trainer, inputs, logps, inputs.get("old_per_token_logps", logps), ())
    return size_contributions(torch.ones_like(tokens.ratio), tokens.advantages, tokens.weights)


@torch.no_grad()
def read_tokens_ahead(trainer: Any, window: Sequence[int], are_fresh: bool, is_random: bool) -> list[PolicyTokens]:
    """
    Return the tokens of the micro-batches of the coming update, as their losses will see them.

    `window` has their positions in the trainer's buffer, at least one. Where the current policy sampled all rows
    (`are_fresh`), their ratios are 1, unless two forward passes may differ (`is_random`).
    """
    micro_batches = [without_masked_values(trainer._buffered_inputs[position]) for position in window]
    if not (is_random or _needs_forward_pass(trainer, micro_batches[0], are_fresh)):
        return [read_tokens(trainer, inputs, _any_logps(inputs), None) for inputs in micro_batches]
    # The forward passes of the loss come in the same order: from the same random state they drop out the same.
    with forked_random_state(trainer.accelerator.device, trainer.model):
        return [
            read_tokens(trainer, inputs, mask_values(inputs, logps), entropies)
            for inputs in micro_batches
            for logps, entropies in [score(trainer, inputs, trainer.top_entropy_quantile < 1)]
        ]


# Tokens that a language model finds likely: half precision rounds the logits of others by more than any padding does
PROBE = "1+2=3, 2+3=5, 3+4=7, 4+5=9"


def warn_if_padding_counts(trainer: Any) -> None:
    """Warn of a model whose log-probabilities of a row change with the padding before it."""
    tokens = trainer._tokenizer(PROBE)["input_ids"][:17]  # a window may be small
    if len(tokens) < 9:  # a vocabulary without digits
        tokens = [token % len(trainer._tokenizer) for token in range(17)]
    ids = torch.tensor([tokens], device=trainer.accelerator.device)
    padding = torch.full_like(ids[:, :8], trainer._tokenizer.pad_token_id)
    ones = torch.ones_like(ids)
    row = {"prompt_ids": ids[:, :1], "prompt_mask": ones[:, :1]}
    row |= {"completion_ids": ids[:, 1:], "completion_mask": ones[:, 1:]}
    padded = row | {
        "prompt_ids": torch.cat([padding, row["prompt_ids"]], dim=1),
        "prompt_mask": torch.cat([torch.zeros_like(padding), row["prompt_mask"]], dim=1),
    }
    with in_eval_mode(trainer.model):  # without dropout
        (alone, _), (beside, _) = score(trainer, row), score(trainer, padded)
    is_float32 = trainer.model.dtype == torch.float32 and trainer.accelerator.mixed_precision == "no"
    rounding = 0.01 if is_float32 else 0.1  # nats a token; half precision rounds logits to about a tenth
    if (alone - beside).abs().mean() > rounding and trainer.accelerator.is_main_process:
        warnings.warn(
            f"The model ({trainer.model.config.model_type}) does not take positions from the attention mask: the "
            "log-probabilities of a sample change with the padding before it. Samples of a replay queue and of "
            "partial rollouts are trained with other padding than they were scored with, so that their "
            "importance ratios are wrong. Take a model with relative positions, or prompts of equal length."
        )


def _weighed_tokens(trainer: Any, inputs, per_token_logps, old_per_token_logps, factors) -> PolicyTokens:
    # VESPO takes the correction into its own weight of a sequence
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction and trainer.loss_type != "vespo":
        factors = [*factors, inputs["importance_sampling_ratio"]]
    return policy_tokens(
        per_token_logps,
        old_per_token_logps,
        inputs["advantages"],
        policy_mask(inputs),
        loss_type=trainer.loss_type,
        # VESPO makes sequence ratios of its own from those of the tokens
        importance_sampling_level="token" if trainer.loss_type == "vespo" else trainer.importance_sampling_level,
        weighting=trainer.args.contribution_weighting,
        factors=factors,
    )


def _gradient_size(trainer: Any, inputs, tokens: PolicyTokens) -> torch.Tensor | None:
    """Return the size of each token's gradient under a loss without clip bounds, else `None`."""
    advantages, args = tokens.column_advantages, trainer.args
    if trainer.loss_type == "cispo":
        return cispo_gradient_size(tokens.ratio, trainer.epsilon_high)
    if trainer.loss_type == "sapo":
        return sapo_gradient_size(tokens.ratio, advantages, args.sapo_temperature_pos, args.sapo_temperature_neg)
    if trainer.loss_type == "vespo":
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        return trainer.get_gamma_weights(
            advantages=advantages,
            log_ratio_per_token=tokens.log_ratio,
            mask=tokens.mask,
            importance_sampling_ratio=inputs.get("importance_sampling_ratio"),
            **{name: getattr(args, f"vespo_{name}") for name in names},
        )
    return None


def _needs_forward_pass(trainer: Any, batch: Mapping[str, Any], are_fresh: bool) -> bool:
    """Return whether only a forward pass can tell what the losses of the coming update will see."""
    # The mask compares them with the sampler's
    masks = trainer.off_policy_mask_threshold is not None and "sampling_per_token_logps" in batch
    reads_logps = masks or trainer.args.contribution_weighting == "behavior_prob"
    return not are_fresh or trainer.top_entropy_quantile < 1 or (reads_logps and "old_per_token_logps" not in batch)


def _any_logps(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return log-probabilities of rows that the current policy sampled: only their difference to these counts."""
    logps = inputs.get("old_per_token_logps")
    return torch.zeros_like(inputs["completion_mask"], dtype=torch.float32) if logps is None else logps
