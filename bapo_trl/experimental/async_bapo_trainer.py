"""`AsyncBAPOTrainer`: TRL's `AsyncGRPOTrainer` with clip bounds that are searched for each optimizer update."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import is_peft_model
from trl.experimental.async_grpo import AsyncGRPOTrainer

from ..bapo_config import check_copied, copied_settings
from ..batch.log_values import add_values
from ..checkpoints.curves import CarriedCurves
from ..clip_bounds import ClipBounds, Contributions, size_contributions
from ..clip_bounds.controller import ClipBoundController
from ..clip_bounds.grid import SINGLE_POINT
from ..clip_bounds.paper import PAPER
from ..clip_bounds.tokens import PolicyTokens, policy_tokens
from ..errors import InputError
from ..parts import Clock
from ..phase_clock import TimedTrainer
from ..vllm_server.merged_adapters import AUTOCAST, Types, merging_copies, needs_copies
from .async_bapo_config import AsyncBAPOConfig


_UNKNOWN = {"staleness/mean", "staleness/max"}  # unknown here: TRL logs `sample/staleness_*`


class LossTerms(NamedTuple):
    """The loss terms of a rank's micro-batch: `M` sampled tokens, on `N` packed positions."""

    positions: torch.Tensor  # `(M,)`, of the log-probabilities; several samples may share a position
    old_logps: torch.Tensor  # `(1, M)`, the sampler's
    advantages: torch.Tensor  # `(1, M)`
    weight: torch.Tensor  # of each token in TRL's loss, up to a factor common to the update


def loss_terms(inputs: Mapping[str, torch.Tensor]) -> LossTerms:
    """Return the loss terms of one of TRL's micro-batches."""
    selected = inputs["token_index"] >= 0
    old_logps, advantages = (inputs[name][selected].unsqueeze(0) for name in ("old_log_probs", "advantages"))
    weight = 1 / inputs["global_n_tokens"][0].clamp(min=1)
    return LossTerms(inputs["token_index"][selected], old_logps, advantages, weight)


class AsyncBAPOTrainer(TimedTrainer, AsyncGRPOTrainer):
    """
    Experimental trainer for BAPO with asynchronous generation: rollouts continue while the policy is trained.

    The trainer takes the arguments of `trl.experimental.async_grpo.AsyncGRPOTrainer` and adds clip bounds that are
    searched for each update; see [`BAPOTrainer`] for the method. Generation, rewards, staleness and packing are those
    of TRL. A resumed run restores the curves that forecast the next update, but, as in TRL, rollouts in progress are
    lost.

    Args:
        args ([`AsyncBAPOConfig`], *optional*):
            Configuration of the trainer. If `None`, a default configuration is used.

    Attributes:
        clip_bounds ([`ClipBounds`]):
            Result of the latest search; the start bounds before the first one.

    Raises:
        ValueError: If `args` are of another class, or the adapter has `trainable_token_indices`.
        RuntimeError: During training, if a log-probability or an advantage is NaN or infinite.
    """

    args: AsyncBAPOConfig
    epsilon_low: Any  # a tensor here
    epsilon_high: Any

    _tag_names = ["trl", "async-bapo"]
    _name = "AsyncBAPO"
    _paper = PAPER

    def __init__(self, model, reward_funcs=None, args=None, *rest, **kwargs):
        if args is None:
            args = AsyncBAPOConfig(f"{model.split('/')[-1]}-AsyncBAPO")
        if not isinstance(args, AsyncBAPOConfig):
            raise InputError(f"`args` is an {type(args).__name__}: make it an AsyncBAPOConfig, which takes the same.")
        super().__init__(model, reward_funcs, args, *rest, **kwargs)
        adapters: Any = self.model.peft_config if is_peft_model(self.model) else {}
        if any(getattr(config, "trainable_token_indices", None) for config in adapters.values()):
            raise InputError(
                "The adapter has `trainable_token_indices`, which TRL's asynchronous trainer cannot send to vLLM: "
                "remove it from the `peft_config`, or use `BAPOTrainer`."
            )
        self._copied_settings = copied_settings(self)
        self._sends_merged_copies = not self._lora_sync and needs_copies(self.model)
        self._curves = CarriedCurves()
        self._curves.reset(self)
        self._start_search()

    @property
    def clip_bounds(self) -> ClipBounds:
        return self.bounds_controller.current

    def train(self, *args, **kwargs):
        check_copied(self, self._copied_settings)
        self._start_search()
        return super().train(*args, **kwargs)

    def _start_search(self) -> None:
        self._sum_ranks = partial(self.accelerator.reduce, reduction="sum")
        self.bounds_controller = ClipBoundController(
            self.args,
            self.accelerator.device,
            reduce=self._sum_ranks,
            gather=self.accelerator.gather,
            update=lambda: self.state.global_step + 1,
        )
        self._clip_with(self.bounds_controller.current)

    def _clip_with(self, bounds: ClipBounds) -> None:
        # TRL clips with these two, and logs their clip ratios. As tensors, they need no transfer to the host.
        self.epsilon_low = 1 - bounds.low
        self.epsilon_high = bounds.high - 1

    def get_batch_samples(self, *args, **kwargs):
        check_copied(self, self._copied_settings)
        with self.phase_clock.phase("waiting"):  # for the rollout worker's samples
            batches, num_items = super().get_batch_samples(*args, **kwargs)
        if batches:
            totals = self._total_absolute_advantages(batches) if self.bounds_controller.carries_over else None
            self._clip_with(self.bounds_controller.begin(totals))
        return batches, num_items

    def _total_absolute_advantages(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> Contributions:
        """Return the sum of w |A| of each sign over an update's tokens on all ranks, without a forward pass."""
        total = None
        for inputs in batches:
            terms = loss_terms(inputs)
            tokens = self._tokens(terms, terms.old_logps)
            of_batch = size_contributions(torch.ones_like(tokens.ratio), tokens.advantages, tokens.weights)
            total = of_batch if total is None else total + of_batch
        return Contributions.from_vector(self._sum_ranks(total.as_vector()), SINGLE_POINT)

    def _tokens(self, terms: LossTerms, logps: torch.Tensor) -> PolicyTokens:
        """Return the tokens of a micro-batch with these log-probabilities, `(1, M)`, and the weights of the loss."""
        tokens = policy_tokens(
            logps,
            terms.old_logps,
            terms.advantages,
            torch.ones_like(terms.old_logps),
            weighting=self.args.contribution_weighting,
            factors=[terms.weight],
        )
        return replace(tokens, log_probs={"per_token_logps": logps, "old_per_token_logps": terms.old_logps})

    def compute_loss(self, model, inputs, *args, **kwargs):
        # Before the forward pass, because the selection synchronizes with the host
        terms, is_last = loss_terms(inputs), self.accelerator.sync_gradients

        def forward(**arguments):
            outputs = model(**arguments)
            logps = outputs.log_probs.detach().flatten()[terms.positions].unsqueeze(0)
            # TRL reads the bounds after this
            self._clip_with(self.bounds_controller.observe(self._tokens(terms, logps), None, is_last))
            return outputs

        loss = super().compute_loss(forward, inputs, *args, **kwargs)
        if is_last:
            metrics = self.bounds_controller.close()
            add_values(self._metrics["train"], {name: metrics[name] for name in metrics.keys() - _UNKNOWN})
        return loss

    def _sync_weight(self, *args, **kwargs):
        with self.phase_clock.phase("weights"):
            return super()._sync_weight(*args, **kwargs)

    def _sync_weight_merged(self, *args, **kwargs):
        copies: Any = nullcontext()
        if self._sends_merged_copies:
            model = self.accelerator.unwrap_model(self.model)
            copies = merging_copies(
                model, self.state.global_step, Types(forward=AUTOCAST.get(self.accelerator.mixed_precision))
            )
        with copies:
            return super()._sync_weight_merged(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir, *args, **kwargs):
        super()._save_optimizer_and_scheduler(output_dir, *args, **kwargs)
        self._curves.save(output_dir, Clock(self.state.global_step))

    def _load_optimizer_and_scheduler(self, checkpoint, *args, **kwargs):
        super()._load_optimizer_and_scheduler(checkpoint, *args, **kwargs)
        if checkpoint is not None:
            self._curves.load_together(checkpoint)
