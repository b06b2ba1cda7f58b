"""`BAPOTrainer`: TRL's `GRPOTrainer` with clip bounds that are searched for each optimizer update."""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

from transformers import PreTrainedModel
from trl import GRPOTrainer

from .bapo_config import BAPOConfig, check_copied, copied_settings
from .batch.injected import InjectedRollouts
from .batch.log_values import add_values, reduce_window
from .batch.micro_batches import MicroBatches
from .batch.policy_loss import known_old_logps, mask_values, without_masked_values
from .batch.samples import attach_version, mark_fillers, pad_logps
from .batch.staleness import staleness_line
from .batch.updates import BatchUpdates
from .checkpoints.curves import CarriedCurves
from .checkpoints.ref_model import ReferenceModel
from .checkpoints.resumable import ResumableParts
from .clip_bounds import ClipBounds
from .clip_bounds.paper import PAPER
from .inputs import checks
from .inputs.generation_config import settings_of_model
from .inputs.prompt_checks import check_end_of_stream, check_images, check_number_of_prompts
from .inputs.reward_checks import CheckedRewards, distinct_names
from .inputs.setting_warnings import setting_warnings
from .parts import Clock, Part
from .replay.mixer import ReplayMixer
from .rollouts.overlap import Overlap
from .rollouts.partial import NoPartialRollouts, PartialRollouts
from .upstream import fixes, trl_compat
from .upstream.forward_passes import without_gradient_checkpointing
from .upstream.trl_compat import get_config_model_id, shuffle_sequence_dict, split_tensor_dict, uses_vllm_server
from .upstream.vllm_weights import forget_sent_weights, has_sent_weights
from .vllm_server.comparison import SamplerComparison
from .vllm_server.merged_adapters import send_merged_copies
from .vllm_server.mismatch import sampler_for
from .vllm_server.quantized import prepare_quantized
from .vllm_server.server_weights import ServerWeights


class BAPOTrainer(ResumableParts):
    """
    Trainer for Balanced Policy Optimization with Adaptive Clipping (BAPO).

    For each optimizer update, BAPO (https://huggingface.co/papers/2510.18927) chooses clip bounds with which
    positive-advantage tokens contribute a target fraction of the policy loss.

    The trainer adds a replay buffer, partial rollouts, overlapped generation, checks of a vLLM server's weights and
    atomic checkpoints to [`~trl.GRPOTrainer`].

    Args:
        model, reward_funcs, train_dataset, eval_dataset, *rest, **kwargs:
            As in [`~trl.GRPOTrainer`]. `train_dataset` must have enough prompts for one generation step.
        args ([`BAPOConfig`], *optional*):
            Configuration of the trainer. A [`~trl.GRPOConfig`] is converted, with the default search. If `None`, a
            default configuration is used.

    Attributes:
        clip_bounds ([`ClipBounds`]):
            Result of the latest search; the start bounds before the first one. After an update, its shares are
            measured on the update's own tokens. For a loss without clip bounds (`cispo`, `sapo`, `vespo`), both bounds
            are 1 and unused.
        parts (`list[Part]`):
            Features of the trainer, in the order of their collectives; see [`Part`].

    Raises:
        ValueError: If settings contradict each other, or a dataset has too few prompts for one generation step. During
            training, if no parameter is trainable, a streamed dataset ends before one generation step, or a reward is
            infinite or missing. Errors of TRL, transformers and reward functions are passed on unchanged.
        RuntimeError: During training, if a log-probability, an advantage or the gradient is NaN or infinite.
    """

    args: BAPOConfig
    model: PreTrainedModel
    _buffered_inputs: Any
    epsilon_low: Any  # a tensor here
    epsilon_high: Any
    _kinds: tuple[bool, ...] = ()  # of the parts

    _tag_names = ["trl", "bapo"]
    _name = "BAPO"
    _paper = PAPER

    def __init__(self, model, reward_funcs=None, args=None, train_dataset=None, eval_dataset=None, *rest, **kwargs):
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = BAPOConfig(f"{model_name.split('/')[-1]}-BAPO")
        elif not isinstance(args, BAPOConfig):
            args = BAPOConfig.from_grpo_config(args)
        # With an evaluation during training, transformers sets `do_eval`
        trains = args.do_train or not args.do_eval or args.eval_strategy != "no"
        if trains:
            check_number_of_prompts(train_dataset, args)

        with sampler_for(args):
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, *rest, **kwargs)

        zero = self.args.deepspeed_plugin
        prepare_quantized(self.model, self.is_fsdp_enabled or (zero is not None and zero.zero_stage == 3))
        self._copied_settings = copied_settings(self)
        if args.log_completions:
            fixes.replace_what_stdout_cannot_encode()
        self.reward_func_names = distinct_names(self.reward_func_names)
        self._loss_inputs = None  # the micro-batch whose loss is being computed, else `None`
        self._known_logps: list[list[float | None]] | None = None  # set from a generation until TRL scores it
        self._injected: InjectedRollouts | None = None  # set while TRL uses them in place of its own completions
        self.server_retries = None
        self.weight_check_options = None  # of a call of `check_server_weights`; else by the configuration
        if self.use_vllm:
            send_merged_copies(self)
        if uses_vllm_server(self):
            from .vllm_server.retries import ServerRetries  # needs requests, which only a server does

            self.server_retries = ServerRetries(self)
        self._reset_run_state()
        if trains and self.accelerator.is_main_process:
            of_model = settings_of_model(args, self.model.generation_config, self.processing_class)
            for message in setting_warnings(args, of_model):
                warnings.warn(message, stacklevel=2)

    def _make_parts(self) -> list[Part]:
        """Return the parts of the trainer, in the order of their collectives."""
        args, weights = self.args, ServerWeights()
        return [
            CheckedRewards(),
            ReferenceModel(),
            PartialRollouts() if args.uses_partial_rollouts else NoPartialRollouts(),
            *([Overlap(weights.refresh)] if args.overlap_generation else []),
            SamplerComparison(),  # adds behaviour log-probabilities, which replay needs
            weights,
            *([ReplayMixer()] if args.uses_replay else []),
            CarriedCurves(),
            self.data_place,
        ]

    @property
    def clip_bounds(self) -> ClipBounds:
        return self.bounds_controller.current

    # The run

    def train(self, *args, **kwargs):
        check_copied(self, self._copied_settings)
        # A second call starts at policy version 0 again, where samples of the first call would look new
        self._reset_run_state()
        # Printed as transformers prints its logs: a library's logger would hide it where nothing is set up
        self.accelerator.print(staleness_line(self.args))
        result = super().train(*args, **kwargs)
        if self.args.load_best_model_at_end:  # vLLM has the weights of the last update
            forget_sent_weights(self)
        if self._step == self.state.global_step == 0:
            check_end_of_stream(self.train_dataset, self.args)
        return result

    def create_optimizer(self, model=None, *args, **kwargs):
        optimizer = super().create_optimizer(model, *args, **kwargs)
        checks.check_optimizer(self.model if model is None else model, optimizer)
        return optimizer

    def _reset_run_state(self) -> None:
        fixes.reset_grpo_state(self)
        kinds = self.args.uses_partial_rollouts, self.args.overlap_generation, self.args.uses_replay
        if kinds != self._kinds:  # at first, and where they were changed between two runs
            self._kinds, self.parts = kinds, self._make_parts()
        self.sampled_by: int | None = None  # policy version that sampled the buffer, on all ranks; `None` if several
        self.update_began = Clock(version=-1)
        if self.server_retries is not None:  # before the rounds, which need its context window
            self.server_retries.begin_run()
        forget_sent_weights(self)
        for part in self.parts:
            part.reset(self)
        self._micro_batches = MicroBatches(self)
        self._updates = BatchUpdates(self, self._micro_batches)
        self.bounds_controller = self._updates.bounds
        self._clip_with(self.bounds_controller.current)

    def log(self, logs, *args, **kwargs):
        if self.model.training:
            add_values(self._metrics["train"], self.phase_clock.rates())
        reduce_window(self._metrics["train" if self.model.training else "eval"])
        super().log(logs, *args, **kwargs)

    # Prompts

    def _get_train_sampler(self, dataset=None, *args, **kwargs):  # type: ignore[override]
        check_number_of_prompts(self.train_dataset if dataset is None else dataset, self.args)
        self.prompt_sampler = super()._get_train_sampler(dataset, *args, **kwargs)
        return self.prompt_sampler

    def get_batch_samples(self, epoch_iterator, num_batches, *args, **kwargs):
        self.update_began = self.now()
        for part in self.parts:
            epoch_iterator = part.batches(epoch_iterator, num_batches, self.update_began)
        return super().get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)

    # A generation

    def _prepare_inputs(self, generation_batch, *args, **kwargs):  # type: ignore[override]
        if not self.model.training:
            return super()._prepare_inputs(generation_batch, *args, **kwargs)
        with self.phase_clock.phase("other"):
            check_copied(self, self._copied_settings)
            clock = self.now()
            if clock.place and clock.begins_pass and self._buffered_inputs:
                self._begin_later_pass(clock)
            super()._prepare_inputs(generation_batch, *args, **kwargs)
            began, count = self.update_began.micro_batch, self.current_gradient_accumulation_steps
            self._micro_batches.lay_out(self._buffered_inputs, self._step, began, count)
            return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _begin_later_pass(self, clock: Clock) -> None:
        batch = self._mix(None, clock)
        if batch is not None:
            shuffled: Any = shuffle_sequence_dict(batch)  # declared to hold any sequences
            self._buffered_inputs = split_tensor_dict(shuffled, self.args.steps_per_generation)

    def _generate_and_score_completions(self, inputs, *args, **kwargs):
        if not self.tools and self.rollout_func is None:  # which may give images of their own
            check_images(inputs)
        inputs, clock = fixes.without_missing_images(inputs), self.now()
        if self.model.training:
            given = (part.sample(inputs, clock) for part in self.parts)
            self._injected = next((each for each in given if each is not None), None)
        rollouts = self._injected
        with fixes.keeping_frozen(self.model), without_gradient_checkpointing(self.model):
            try:
                rows = inputs if rollouts is None else rollouts.inputs
                batch = super()._generate_and_score_completions(rows, *args, **kwargs)
            finally:
                self._injected = self._known_logps = None
        if not self.model.training:
            return batch
        num_rows = self.args.rows_per_generation
        batch = attach_version(batch, clock.version) if rollouts is None else rollouts.attach_to(batch, num_rows)
        self._set_sampled_by(clock, rollouts is None)
        for part in self.parts:
            add_values(self._metrics["train"], part.check(batch, rollouts))
        if rollouts is not None and len(rollouts) < num_rows:
            batch = mark_fillers(batch, num_rows - len(rollouts))
        return self._mix(batch, clock)

    def _mix(self, batch, clock: Clock):
        for part in self.parts:
            batch = part.mix(batch, clock)
            if part.is_fresh is not None:
                self._set_sampled_by(clock, part.is_fresh)
        return batch

    def _set_sampled_by(self, clock: Clock, is_fresh: bool) -> None:
        has_ratios_of_1 = is_fresh and not self.args.use_sampler_logps
        self.sampled_by = clock.version if has_ratios_of_1 else None

    def _tokenize_prompts(self, prompts, *args, **kwargs):
        if self._injected is not None:  # a chat template that shows the date may give other token ids by now
            return self._injected.prompt_ids, None, {}
        return super()._tokenize_prompts(prompts, *args, **kwargs)

    def _generate(self, *args, **kwargs):
        with self.phase_clock.phase("generation"):
            output = super()._generate(*args, **kwargs)
        if not self.model.training:
            return output
        num_samples = len(output[1]) * self.accelerator.num_processes
        self.phase_clock.count(generated=round(self._metrics["train"]["completions/mean_length"][-1] * num_samples))
        if self.args.scores_samples:
            if self._injected is not None:
                self._known_logps = self._injected.behavior_logps
            elif self.args.use_sampler_logps:
                self._known_logps = output[4]
        return output

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._injected is not None:
            return self._injected.token_ids, self._injected.sampler_logps
        generate = super()._generate_single_turn

        def sample():
            with self.phase_clock.phase("generation"), fixes.keeping_modes(self.model):
                return generate(prompt_ids, *args, **kwargs)

        if self.server_retries is None:
            return sample()
        return self.server_retries.generate(sample, not has_sent_weights(self))

    # An update

    @property
    def is_within_update(self) -> bool:
        return self.bounds_controller.is_open

    def _compute_loss(self, model, inputs, *args, **kwargs):
        is_training = self.model.training
        if is_training and not self.is_within_update:
            are_fresh = self.sampled_by == self.state.global_step
            count, buffer = self.current_gradient_accumulation_steps, self._buffered_inputs
            self._clip_with(self._updates.begin(buffer, self._step, count, are_fresh))
        policy, whole = self._micro_batches.take(self._step, inputs) if is_training else (1.0, 1.0)
        # A copy, as its advantages are scaled: those in the buffer are needed again in the next pass
        self._loss_inputs = without_masked_values(inputs)
        beta, self.beta = self.beta, self.beta * policy
        try:
            loss = super()._compute_loss(model, self._loss_inputs, *args, **kwargs) * whole
        finally:
            self._loss_inputs, self.beta = None, beta
        if is_training and self.accelerator.sync_gradients:
            self.phase_clock.count(trained=self._micro_batches.num_tokens)
            add_values(self._metrics["train"], self._updates.close(self._metrics["train"]))
            if self.beta and self.state.global_step == 0 and self.accelerator.is_main_process:
                checks.warn_if_reference_differs(self)
        return loss

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if self._known_logps is not None:  # TRL's first scoring after a generation; later ones are of the reference
            known, self._known_logps = self._known_logps, None
            num_tokens = kwargs["logits_to_keep"] if "logits_to_keep" in kwargs else args[2]
            return pad_logps(known, num_tokens).to(self.accelerator.device), None, None
        score, inputs = super()._get_per_token_logps_and_entropies, self._loss_inputs
        with nullcontext() if inputs is not None else self.phase_clock.phase("scoring"):
            if self.model.training and self._micro_batches.divides(kwargs):
                return self._micro_batches.score(partial(score, model), *args, **kwargs)
            output = score(model, *args, **kwargs)
        if inputs is None:
            return output
        logps, entropies = (mask_values(inputs, values) for values in output[:2])
        if "old_per_token_logps" in inputs:  # TRL reads them after this
            inputs["old_per_token_logps"] = known_old_logps(inputs, logps.detach())
        if self.model.training:  # evaluation keeps the latest bounds
            version, is_last = self.state.global_step, self.accelerator.sync_gradients
            self._clip_with(self._updates.observe(inputs, logps.detach(), entropies, version, is_last))
        return logps, entropies, *output[2:]

    def _clip_with(self, bounds: ClipBounds) -> None:
        if self.args.has_clip_bounds:
            # TRL clips with these two, and logs their clip ratios. As tensors, they need no transfer to the host.
            self.epsilon_low = 1 - bounds.low
            self.epsilon_high = bounds.high - 1

    def _get_grad_norm(self, *args, **kwargs):
        grad_norm: Any = super()._get_grad_norm(*args, **kwargs)
        if hasattr(grad_norm, "full_tensor"):  # sharded over ranks under FSDP2
            grad_norm = grad_norm.full_tensor()
        checks.check_gradient(self, grad_norm)
        return grad_norm

    def evaluation_loop(self, dataloader, *args, **kwargs):
        with self.phase_clock.pause():
            for part in self.parts:
                part.before_evaluation(dataloader)
            return super().evaluation_loop(dataloader, *args, **kwargs)


trl_compat.check_trl([*trl_compat.missing_overrides(BAPOTrainer, GRPOTrainer), *trl_compat.missing_calls()])
