"""What partial rollouts take from a trainer: its sizes, prompts, sampler and scores."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..upstream.trl_compat import pad
from .pool import RolloutPool
from .rounds import RolloutBatch, RolloutRounds, Sampler, check_supported
from .sampler_limits import sampler_window


def make_rounds(trainer: Any) -> RolloutRounds:
    """
    Return the rounds of a run, with an empty pool. All ranks make this call together, and their server is there.

    Raises:
        ValueError: If the trainer's completions cannot be parked, see [`~rollouts.rounds.check_supported`].
    """
    check_supported(trainer)
    args, accelerator = trainer.args, trainer.accelerator
    pool = RolloutPool(
        trainer.num_generations,
        trainer.max_completion_length,
        trainer.eos_token_ids,
        accelerator.process_index,
        accelerator.num_processes,
        window=sampler_window(trainer),
    )
    return RolloutRounds(
        pool,
        num_groups=args.groups_per_generation,
        num_held=args.groups_held,
        chunk_length=args.partial_rollout_chunk_length,
        gather=lambda numbers: accelerator.gather(torch.tensor([numbers], device=accelerator.device)).tolist(),
    )


def finish_groups(
    trainer: Any,
    rounds: RolloutRounds,
    inputs: Sequence[dict[str, Any]],
    sample: Sampler,
    score: Callable[[dict[str, torch.Tensor]], torch.Tensor],
) -> tuple[RolloutBatch, dict[str, float]]:
    """
    Let the prompts of a generation in; return the groups that go to training, and the metrics of the rounds.

    Args:
        trainer ([`~trl.GRPOTrainer`]): In training.
        rounds ([`~rollouts.rounds.RolloutRounds`]): Of the run.
        inputs (sequence of `dict`): Rows of the dataset, those of a group one after the other.
        sample (`Callable`): Continues token ids under the current policy, see [`~rollouts.rounds.Sampler`].
        score (`Callable`): Returns the log-probabilities of a batch, `(B, T)`, under the current policy.
    """
    args, version = trainer.args, trainer.state.global_step
    prompts = inputs[:: trainer.num_generations]
    prompt_ids, _, _ = trainer._tokenize_prompts([row["prompt"] for row in prompts])
    limit = args.partial_rollout_max_staleness
    staleness_if_parked = args.updates_per_generation + args.largest_staleness

    return rounds.generate(
        list(zip(prompts, prompt_ids, strict=True)),
        version,
        None if limit is None else version + staleness_if_parked - limit,
        sample,
        lambda prompts, completions: _score_completions(trainer, score, prompts, completions),
    )


def is_trained_to_its_end(trainer: Any, generated_at: tuple[int, int]) -> bool:
    """
    Return whether the updates on the latest generation are made; a save may come before the step of the last one.

    Args:
        trainer ([`~trl.GRPOTrainer`]): In training.
        generated_at (pair of `int`): Policy version and micro-batch of the generation.
    """
    (version, first), step = generated_at, trainer._step
    updates = math.ceil((step - first) / trainer.args.gradient_accumulation_steps)
    return step % trainer.args.micro_batches_per_generation == 0 and trainer.state.global_step - version >= updates


def _score_completions(trainer: Any, score, prompts, completions) -> list[list[float]]:
    batch = {}
    for name, rows, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
        ids = [torch.tensor(row) for row in rows]
        masks = [torch.ones_like(row) for row in ids]
        padded = pad(ids, padding_value=trainer._tokenizer.pad_token_id, padding_side=side)
        batch[f"{name}_ids"] = padded.to(trainer.accelerator.device)
        batch[f"{name}_mask"] = pad(masks, padding_value=0, padding_side=side).to(trainer.accelerator.device)
    return [row[: len(tokens)] for row, tokens in zip(score(batch).tolist(), completions, strict=True)]
