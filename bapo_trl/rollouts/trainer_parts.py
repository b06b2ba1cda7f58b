"""What partial rollouts take from a trainer: its sizes, prompts, sampler and scores."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..bapo_config import BAPOConfig
from ..batch.samples import pad_completions
from ..checkpoints.rank_errors import on_main_process
from ..upstream.trl_compat import HAS_OPENAI_CLIENT
from .checks import check_trainer
from .injected import InjectedRollouts
from .pool import RolloutPool
from .rounds import RolloutRounds, Sampler


def make_rounds(trainer: Any) -> RolloutRounds:
    """Return the rounds of a run, with an empty pool. All ranks make this call together, and their server is there."""
    check_trainer(trainer)
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
) -> tuple[InjectedRollouts, dict[str, float]]:
    """
    Let the prompts of a generation in; return the groups that go to training, and the metrics of the rounds.

    The inputs are rows of the dataset, those of a group one after the other. `score` returns the log-probabilities of
    a batch, `(B, T)`, under the current policy.
    """
    args, version, device = trainer.args, trainer.state.global_step, trainer.accelerator.device
    prompts = inputs[:: trainer.num_generations]
    prompt_ids, *_ = trainer._tokenize_prompts([row["prompt"] for row in prompts])
    limit = args.partial_rollout_max_staleness
    staleness_if_parked = args.updates_per_generation + args.largest_staleness

    return rounds.generate(
        list(zip(prompts, prompt_ids, strict=True)),
        version,
        None if limit is None else version + staleness_if_parked - limit,
        sample,
        lambda prompts, completions: [
            row[: len(tokens)]
            for row, tokens in zip(
                score(pad_completions(prompts, completions, trainer._tokenizer.pad_token_id, device)).tolist(),
                completions,
                strict=True,
            )
        ],
        trainer._bounds.is_open,
    )


@dataclass
class Generation:
    """The samples in a trainer's buffer: when they were generated, and by which policy."""

    update: int = 0
    micro_batch: int = 0
    sampled_by: int | None = None  # the policy version that sampled them all, on all ranks; `None` for several

    def is_trained(self, update: int, micro_batch: int, args: BAPOConfig) -> bool:
        """
        Return whether the updates on them are made, at this update and micro-batch.

        A save may come before the step of the last one.
        """
        updates = math.ceil((micro_batch - self.micro_batch) / args.gradient_accumulation_steps)
        return micro_batch % args.micro_batches_per_generation == 0 and update - self.update >= updates


@contextmanager
def token_cap(trainer: Any, num_tokens: int) -> Iterator[None]:
    """Let the trainer's sampler decode at most `num_tokens` a call; afterwards, what it did before."""
    if trainer.use_vllm:
        vllm = trainer.vllm_generation
        before, vllm.max_completion_length = vllm.max_completion_length, num_tokens
        try:
            yield
        finally:
            vllm.max_completion_length = before
        return
    # transformers reads one, and TRL copies the other into the model's own generation config
    config, kwargs = trainer.generation_config, trainer.generation_kwargs
    both_before = config.max_new_tokens, kwargs["max_new_tokens"]
    config.max_new_tokens = kwargs["max_new_tokens"] = num_tokens
    try:
        yield
    finally:
        config.max_new_tokens, kwargs["max_new_tokens"] = both_before


def sampler_window(trainer: Any) -> int | None:
    """
    Return the largest number of tokens of a prompt and its completion that vLLM takes, the same on all ranks.

    `None` for transformers, which sets no limit, and for the server of TRL up to 1.14, which does not tell it.
    """
    if not trainer.use_vllm:
        return None
    if trainer.vllm_mode == "colocate":
        return trainer.vllm_generation.llm.llm_engine.model_config.max_model_len
    if not HAS_OPENAI_CLIENT:
        return None
    return on_main_process(
        lambda: trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["max_model_len"]
    )
