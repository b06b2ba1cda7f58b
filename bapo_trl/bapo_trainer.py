"""`BAPOTrainer`: TRL's `GRPOTrainer` with clip bounds that are searched for each optimizer update."""

import sys
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from transformers.trainer_utils import SaveStrategy, has_length

from .bapo_config import BAPOConfig, check_copied, check_unchanged, copied_settings, own_settings
from .batch.filler_rows import LossScale, mark_fillers
from .batch.micro_batches import MicroBatches
from .batch.policy_loss import PolicyLoss, forward_arguments, known_old_logps, mask_values, without_masked_values
from .batch.reward_sums import best_of_k, zero_advantage_rows
from .batch.sampler import behavior_logps, drop_sampler_logps, has_sampler_logps, read_sampler_logps
from .batch.samples import attach_version, mask_zero_advantages, pad_completions, pad_logps
from .batch.staleness import staleness_line
from .batch.updates import BatchUpdates, Generation
from .checkpoints.atomic import AtomicCheckpoints
from .checkpoints.curves import CURVES_FILE, load_curves, save_curves
from .checkpoints.data_place import DataPlace
from .checkpoints.log_window import LogWindow, reduce_window
from .checkpoints.rank_errors import raising_on_all_ranks
from .checkpoints.ref_model import load_ref_model, save_ref_model
from .checkpoints.stop_signals import is_stopped
from .clip_bounds import ClipBounds
from .inputs import checks
from .inputs.generation_config import check_can_be_saved, settings_of_model
from .inputs.prompt_checks import check_end_of_stream, check_images, check_number_of_prompts
from .inputs.reward_checks import check_rewards, checking_rewards, distinct_names
from .inputs.setting_warnings import setting_warnings
from .phase_clock import PhaseClock
from .replay.buffer import FILES as BUFFER_FILES
from .replay.mixer import make_mixer
from .rollouts.injected import InjectedRollouts
from .rollouts.overlap import FILES as REQUEST_FILES
from .rollouts.overlap import SIGNAL_WAIT_S, make_overlap
from .rollouts.read_ahead import ReadAhead
from .rollouts.rounds import check_no_pool, make_rounds, token_cap
from .upstream import fixes, trl_compat
from .upstream.forward_passes import forked_random_state, has_random_forward, without_gradient_checkpointing
from .upstream.model_card import PAPER, rewrite_card
from .upstream.trl_compat import get_config_model_id, shuffle_sequence_dict, split_tensor_dict, uses_vllm_server
from .vllm_server.merged_adapters import send_merged_copies
from .vllm_server.mismatch import DifferenceCheck, client_for, compare_with_sampler
from .vllm_server.quantized import has_quantized_layers, prepare_quantized, unquantized_engine
from .vllm_server.stale_server import make_server_check


trl_compat.check_trl()


class BAPOTrainer(AtomicCheckpoints):
    """
    Trainer for Balanced Policy Optimization with Adaptive Clipping (BAPO).

    BAPO (https://huggingface.co/papers/2510.18927) keeps off-policy training stable: for each optimizer update, it
    chooses clip bounds with which positive-advantage tokens contribute a target fraction of the policy loss.

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
        dataset_title (`str` or `None`):
            Name of the data in the model card; set it if the dataset has no name of its own.

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
    dataset_title: str | None = None
    _eval_rows_left = sys.maxsize  # of an evaluation, over all ranks

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

        backend: Any = nullcontext()
        if args.use_vllm:
            uses_server = args.vllm_mode == "server"
            backend = client_for(args.device, args.vllm_request_timeout) if uses_server else unquantized_engine()
        with backend:
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, *rest, **kwargs)

        zero = self.args.deepspeed_plugin
        prepare_quantized(self.model, self.is_fsdp_enabled or (zero is not None and zero.zero_stage == 3))
        self._copied_settings = copied_settings(self)
        if args.log_completions:
            fixes.replace_what_stdout_cannot_encode()
        self.reward_func_names = distinct_names(self.reward_func_names)
        vars(self)["_calculate_rewards"] = self._take_rewards  # which TRL calls, whatever a subclass overrides
        self._loss_inputs = None  # the micro-batch whose loss is being computed, else `None`
        self._known_logps: list[list[float | None]] | None = None  # set from a generation until TRL scores it
        self._injected: InjectedRollouts | None = None  # set while TRL uses them in place of its own completions
        if self.use_vllm:
            send_merged_copies(self)
            self._time_transfers()
        self._server = None
        if uses_vllm_server(self):
            from .vllm_server.retries import ServerRetries  # needs requests, which only a server does

            self._server = ServerRetries(self, self._forget_sent_weights, self._end_without_server)
        self._reset_run_state()
        if trains and self.accelerator.is_main_process:
            from_model = settings_of_model(args, self.model.generation_config, self.processing_class)
            for message in setting_warnings(args, from_model):
                warnings.warn(message, stacklevel=2)

    @property
    def clip_bounds(self) -> ClipBounds:
        return self._bounds.current

    # The run

    def train(self, *args, **kwargs):
        check_copied(self, self._copied_settings)
        if self.args.save_strategy != SaveStrategy.NO and not is_peft_model(self.model):
            check_can_be_saved(self.model.generation_config)
        # A second call starts at policy version 0 again, where samples of the first call would look new
        self._reset_run_state()
        # Printed as transformers prints its logs: a library's logger would hide it where nothing is set up
        self.accelerator.print(staleness_line(self.args))
        result = super().train(*args, **kwargs)
        if self.args.load_best_model_at_end:  # vLLM has the weights of the last update
            self._forget_sent_weights()
        if self._step == self.state.global_step == 0:
            check_end_of_stream(self.train_dataset, self.args)
        return result

    def create_optimizer(self, model=None, *args, **kwargs):
        optimizer = super().create_optimizer(model, *args, **kwargs)
        checks.check_optimizer(self.model if model is None else model, optimizer)
        return optimizer

    def _reset_run_state(self) -> None:
        fixes.reset_grpo_state(self)
        self._log_window = LogWindow(self)
        self._data_place = DataPlace(self)
        self._clock = PhaseClock(self._log_values)
        self._clock.put_last(self)
        self._settings = own_settings(self.args)
        trains_as_padded = self.args.micro_batch_layout == "padded" and not (
            self.args.uses_replay or self.args.uses_partial_rollouts
        )
        self._probes_padding = not (trains_as_padded or self._is_vlm)
        self._generation = Generation()
        if self._server is not None:  # before the rounds, which need its context window
            self._server.begin_run()
        self._forget_sent_weights()
        self._rounds = make_rounds(self) if self.args.uses_partial_rollouts else None
        self._overlap = make_overlap(self) if self.args.overlap_generation else None
        self._read_ahead: ReadAhead | None = None
        self._check_difference = DifferenceCheck(
            self.args.vllm_logp_tolerance,
            self.args.biased_settings,
            warns=self.accelerator.is_main_process,
            is_quantized=has_quantized_layers(self.model),
        )
        self._server_check = make_server_check(self)
        self._replay = make_mixer(self) if self.args.uses_replay else None
        policy_loss = PolicyLoss(
            self.args,
            score_ahead=self._score_ahead,
            off_policy_mask=self.get_off_policy_mask,
            entropy_mask=self.get_high_entropy_mask,
            is_random=has_random_forward(self.model, self.neftune_noise_alpha),
        )
        self._micro_batches = MicroBatches(self.args, self.accelerator, self._parts_of_loss(), self.accelerator.print)
        self._scale = LossScale()  # of the micro-batch whose loss is being computed
        # The first micro-batch of the current update, and the policy version before it
        self._update_start, self._version_before = 0, -1
        self._updates = BatchUpdates(self.args, self.accelerator, policy_loss, lambda: self.state.global_step + 1)
        self._bounds = self._updates.bounds
        self._clip_with(self._bounds.current)

    def _time_transfers(self) -> None:
        sync_weights = self.vllm_generation.sync_weights
        vars(self.vllm_generation)["sync_weights"] = lambda: self._clock.timed(sync_weights, "weights")()

    def _parts_of_loss(self) -> list[str]:
        """Return the parts of the loss besides the policy loss."""
        parts = {
            "kl": self.beta != 0,
            "entropy": self._entropy_bonus_enabled or self.top_entropy_quantile < 1,
            "router": self.aux_loss_enabled,
        }
        return [name for name, is_there in parts.items() if is_there]

    def _forget_sent_weights(self) -> None:
        self._last_loaded_step = -1  # of TRL, which then sends the weights before the next generation

    def _end_without_server(self, reason: str) -> NoReturn:
        checkpoint = self.save_for_resume()
        kept = "No checkpoint was saved." if checkpoint is None else f"The last checkpoint is {checkpoint}."
        raise RuntimeError(f"{reason} This was after update {self.state.global_step}. {kept}")

    def _log_values(self, values: Mapping[str, float], mode: str = "train") -> None:
        for name, value in values.items():
            self._metrics[mode][name].append(value)

    def log(self, logs, *args, **kwargs):
        if self.model.training:
            self._log_values(self._clock.rates())
        reduce_window(self._metrics["train" if self.model.training else "eval"])
        super().log(logs, *args, **kwargs)

    # Prompts

    def _get_train_sampler(self, dataset=None, *args, **kwargs):  # type: ignore[override]
        check_number_of_prompts(self.train_dataset if dataset is None else dataset, self.args)
        sampler: Any = super()._get_train_sampler(dataset, *args, **kwargs)
        fixes.EpochShuffleCallback(self, sampler)
        return sampler

    def set_initial_training_values(self, *args, **kwargs):
        values = super().set_initial_training_values(*args, **kwargs)
        return values if self._last_checkpoint is None else self._data_place.resume(values, self._last_checkpoint)

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, *args, **kwargs
    ):
        sizes = max_steps, num_update_steps_per_epoch, num_train_epochs
        super()._init_training_state(*sizes, resume_from_checkpoint, *args, **kwargs)
        if resume_from_checkpoint is not None:
            fixes.restore_callbacks(self)
        epochs, skipped = self._data_place.passes, 0 if self.args.ignore_data_skip else self._data_place.skipped
        if self.state.global_step >= max_steps:  # within an epoch, transformers would run one more update
            epochs, skipped = num_train_epochs, 0
        # TRL's sampler repeats the prompts of a generation step for each of its micro-batches. If TRL's count started
        # at 0 here, generation steps would not align with these blocks, and the next resume would lose prompts.
        self._step = skipped
        self._first_epoch, self._read_ahead = epochs, None
        return epochs, skipped

    def get_batch_samples(self, epoch_iterator, num_batches, *args, **kwargs):
        self._update_start, self._version_before = self._step, self.state.global_step
        if self._overlap is not None:
            if self._read_ahead is None:
                loader, size = self.callback_handler.train_dataloader, self.args.micro_batches_per_generation
                epochs = self._first_epoch, self.state.num_train_epochs
                self._read_ahead = ReadAhead(loader, size, self._step, *epochs)
            updates_left = self.state.max_steps - self.state.global_step - 1
            num_left = updates_left * self.args.gradient_accumulation_steps
            epoch_iterator = iter(self._read_ahead.take(epoch_iterator, self._step, num_batches, num_left))
            if self._read_ahead.has_skipped:
                self._overlap.drop()
        return super().get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)

    # A generation

    def _prepare_inputs(self, generation_batch, *args, **kwargs):  # type: ignore[override]
        if not self.model.training:
            return super()._prepare_inputs(generation_batch, *args, **kwargs)
        with self._clock.phase("other"):
            check_copied(self, self._copied_settings)
            check_unchanged(self.args, self._settings)
            step = self._step % self.args.micro_batches_per_generation
            starts_later_pass = step > 0 and step % self.args.steps_per_generation == 0
            if self._replay is not None and starts_later_pass and self._buffered_inputs:
                batch = self._take_batch(self._replay.draw_later_pass(self.state.global_step))
                shuffled: Any = shuffle_sequence_dict(batch)  # declared to hold any sequences
                self._buffered_inputs = split_tensor_dict(shuffled, self.args.steps_per_generation)
            super()._prepare_inputs(generation_batch, *args, **kwargs)
            buffer = self._buffered_inputs
            if not self._micro_batches.is_laid_out(buffer):
                count = self.current_gradient_accumulation_steps
                self._micro_batches.lay_out(buffer, self._step, self._update_start, count)
            return buffer[self._step % self.args.steps_per_generation]

    def _generate_and_score_completions(self, inputs, *args, **kwargs):
        if not self.tools and self.rollout_func is None:  # which may give images of their own
            check_images(inputs)
        inputs, version = fixes.without_missing_images(inputs), self.state.global_step
        if self.model.training:
            self._generation = Generation(version, self._step)
            if self._rounds is not None:
                self._injected = self._finish_groups(inputs)
            elif self._overlap is not None:
                size = self.args.micro_batches_per_generation
                place = self._step % size
                next_inputs = self._read_ahead.at(self._step - place + size)
                with self._clock.phase("waiting"):
                    self._injected = self._overlap.take(inputs, next_inputs, version, is_next=place == 0)
        elif self._overlap is not None:
            self._overlap.collect()  # before the evaluation sends the weights
        rollouts = self._injected
        with fixes.keeping_frozen(self.model), without_gradient_checkpointing(self.model):
            try:
                rows = inputs if rollouts is None else rollouts.inputs
                batch = super()._generate_and_score_completions(rows, *args, **kwargs)
            finally:
                self._injected = self._known_logps = None
        if not self.model.training:
            return batch
        num_padding = 0
        if rollouts is None:
            versions = attach_version(batch, version)
            self._generation.sampled_by = None if self.args.use_sampler_logps else version  # ratios are not 1
        else:
            num_padding = self.args.rows_per_generation - len(rollouts)
            if self._rounds is not None:
                self._log_values({"partial/masked": num_padding * self.accelerator.num_processes})
            batch, versions = rollouts.attach_to(batch, self.args.rows_per_generation)
        was_requested = self._overlap is not None and rollouts.versions[0][0] < version
        self._compare_with_sampler(batch, was_requested)
        with self._clock.phase("weights"):
            if self._overlap is None:
                self._ask_server(batch)
            if self._server_check is not None:
                self._log_values(self._server_check(self.model))
        if self._replay is not None:
            return self._draw_first_pass(batch, versions, num_padding)
        return mark_fillers(batch, num_padding) if num_padding else batch

    def _finish_groups(self, inputs) -> InjectedRollouts:
        """Add the prompts of a generation step to the rollout pool, and return groups once they are complete."""
        version, prompts = self.state.global_step, inputs[:: self.num_generations]
        prompt_ids, *_ = self._tokenize_prompts([row["prompt"] for row in prompts])
        limit = self.args.partial_rollout_max_staleness
        with self._clock.phase("generation"), without_gradient_checkpointing(self.model):
            rollouts, metrics = self._rounds.generate(
                list(zip(prompts, prompt_ids, strict=True)),
                version,
                None if limit is None else version + self.args.staleness_if_paused - limit,
                self._continue_completions,
                self._score_completions,
                self._bounds.is_open,
            )
        self._log_values(metrics)
        return rollouts

    def _refresh_server(self, rollouts: InjectedRollouts) -> None:
        """Send the weights to the server if it lacks them, and check that it has loaded them."""
        samples = rollouts.prompt_ids, rollouts.token_ids
        with self._clock.phase("weights"):
            if self._last_loaded_step != self.state.global_step:
                self._server.generate(self._send_weights, is_first_request=True)
                if self._server_check is not None and not self._server_check.is_due():
                    return  # the next request waits
            self._ask_server(pad_completions(*samples, self._tokenizer.pad_token_id, self.accelerator.device))

    def _send_weights(self) -> None:
        self.vllm_generation.sync_weights()
        self._last_loaded_step = self.state.global_step

    def _ask_server(self, batch) -> None:
        # A restarted server is expected to lack the weights: it gets them before the next generation
        if self._server_check is not None and self._server.has_same_server():
            self._server_check.ask_server(batch)

    def _compare_with_sampler(self, batch, was_requested: bool) -> None:
        """Add behaviour log-probabilities where needed; compare the sampler's log-probabilities with the trainer's."""
        # TRL uses those of a `rollout_func` only to correct for vLLM. Else they may be placeholders of any length
        are_of_sampler = self.rollout_func is None or (self.use_vllm and self.vllm_importance_sampling_correction)
        if not are_of_sampler and self.off_policy_mask_threshold is None:
            drop_sampler_logps(batch)
        compares = are_of_sampler and has_sampler_logps(batch)
        if not (self.args.uses_replay or compares):
            return
        if not (self.args.takes_sampler_logps and compares):
            logps = behavior_logps(batch, self._score_all, keeps=self.args.uses_replay)
        else:  # the behaviour log-probabilities are the sampler's, and comparing a part is enough
            batch.setdefault("old_per_token_logps", batch["sampling_per_token_logps"])
            compares_part = was_requested or (self.args.use_sampler_logps and not self._is_vlm)
            batch = split_tensor_dict(batch, self.args.steps_per_generation)[0] if compares_part else batch
            logps = self._score_all(batch)
        if compares:
            is_per_sequence = self.args.vllm_importance_sampling_mode.startswith("sequence")
            of_both = read_sampler_logps(batch, logps)
            metrics, difference = compare_with_sampler(of_both, is_per_sequence, self.accelerator.gather)
            self._log_values(metrics)
            if not was_requested:
                self._check_difference(difference)

    def _tokenize_prompts(self, prompts, *args, **kwargs):
        if self._injected is not None:  # a chat template that shows the date may give other token ids by now
            return self._injected.prompt_ids, None, {}
        return super()._tokenize_prompts(prompts, *args, **kwargs)

    def _generate(self, *args, **kwargs):
        with self._clock.phase("generation"):
            output = super()._generate(*args, **kwargs)
        if self.model.training:
            num_samples = len(output[1]) * self.accelerator.num_processes
            self._clock.count(generated=round(self._metrics["train"]["completions/mean_length"][-1] * num_samples))
        if self.model.training and self._probes_padding:
            self._probe_padding()  # once the weights are sent: a forward pass leaves some that FSDP2 cannot send
        if self.model.training and self.args.scores_samples:
            if self._injected is not None:
                self._known_logps = self._injected.behavior_logps
            elif self.args.use_sampler_logps:
                self._known_logps = output[4]
        return output

    def _probe_padding(self) -> None:
        """Find out, once a run, whether padding before a prompt changes what the model computes."""
        self._probes_padding = False
        counts = checks.padding_counts(self._score_all, self.model, self._tokenizer, self.accelerator)
        self._micro_batches.keeps_prompt_padding = counts
        if counts and self.accelerator.is_main_process:
            checks.warn_of_padding(self.model, self.args)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._injected is not None:
            return self._injected.token_ids, self._injected.sampler_logps
        generate = super()._generate_single_turn

        def sample():
            with self._clock.phase("generation"), fixes.keeping_modes(self.model):
                return generate(prompt_ids, *args, **kwargs)

        if self._server is None:
            return sample()
        return self._server.generate(sample, self._last_loaded_step != self.state.global_step)

    def _continue_completions(self, prompts, cap):
        with token_cap(self, cap):
            return self._generate_single_turn(prompts, None, {}, num_generations=1)

    def _calculate_rewards(self, inputs, prompts, completions, *args, **kwargs):
        with checking_rewards(self, len(prompts)):
            return super()._calculate_rewards(inputs, prompts, completions, *args, **kwargs)

    def _take_rewards(self, inputs, prompts, completions, *args, **kwargs) -> torch.Tensor:
        """Return the rewards of all ranks, of this class or a subclass, once they are checked and logged."""
        with self._clock.phase("rewards"):
            rewards_per_func = type(self)._calculate_rewards(self, inputs, prompts, completions, *args, **kwargs)
        check_rewards(self, rewards_per_func, prompts, completions)
        if not self.model.training:
            counted = rewards_per_func[: self._eval_rows_left]
            self._eval_rows_left -= len(counted)
            self._log_groups(counted)
        elif self.args.replay_zero_advantage:
            weights = self.reward_weights.to(rewards_per_func.device)
            sums_first = self.args.sums_rewards_first
            self._has_zero_advantage = zero_advantage_rows(rewards_per_func, weights, self.num_generations, sums_first)
        return rewards_per_func

    def _log_groups(self, rewards_per_func: torch.Tensor) -> None:
        """Log the best reward of each evaluated group, without the repeats that fill a batch on several ranks."""
        count = self.num_generations_eval
        if count > 1:
            for best in best_of_k(rewards_per_func, self.reward_weights, count).tolist():
                self._log_values({f"reward_best_of_{count}": best}, "eval")  # TRL logs their mean

    @torch.no_grad()
    def _score(self, batch, compute_entropy=False, batch_size=None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities and entropies, `(B, T)` each, of a batch under the current policy."""
        with without_gradient_checkpointing(self.model):
            arguments, named = forward_arguments(batch)
            named |= {"batch_size": batch_size, "compute_entropy": compute_entropy}
            logps, entropies, *_ = self._get_per_token_logps_and_entropies(self.model, *arguments, **named)
        return logps, entropies

    def _score_all(self, batch) -> torch.Tensor:
        return self._score(batch, batch_size=self.args.per_device_train_batch_size)[0]

    def _score_completions(self, prompts, completions):
        batch = pad_completions(prompts, completions, self._tokenizer.pad_token_id, self.accelerator.device)
        return self._score_all(batch).tolist()

    def _score_ahead(self, micro_batches, compute_entropy):
        # The loss runs its forward passes in the same order: from the same random state, dropout is the same.
        with forked_random_state(self.accelerator.device, self.model):
            return [self._score(inputs, compute_entropy) for inputs in micro_batches]

    def _draw_first_pass(self, batch, versions, num_padding):
        if self.args.replay_zero_advantage:
            of_ranks = self._has_zero_advantage.view(self.accelerator.num_processes, -1)
            mask_zero_advantages(batch, of_ranks[self.accelerator.process_index])
            if self.args.sums_rewards_first and self.scale_rewards != "batch":  # rounding hides some groups from TRL
                self._metrics["train"]["frac_reward_zero_std"][-1] = self._has_zero_advantage.float().mean().item()
        is_within = self._step % self.args.micro_batches_per_generation != 0
        drawn = self._replay.draw_first_pass(batch, versions, self.state.global_step, num_padding, is_within)
        return self._take_batch(drawn)

    def _take_batch(self, batch_and_whether_fresh):
        batch, is_fresh = batch_and_whether_fresh
        self._log_values(self._replay.metrics)
        has_ratios_of_1 = is_fresh and not self.args.use_sampler_logps
        self._generation.sampled_by = self.state.global_step if has_ratios_of_1 else None
        return batch

    # An update

    def _compute_loss(self, model, inputs, *args, **kwargs):
        is_training = self.model.training
        if is_training and not self._bounds.is_open:
            are_fresh = self._generation.sampled_by == self.state.global_step
            count, buffer = self.current_gradient_accumulation_steps, self._buffered_inputs
            self._clip_with(self._updates.begin(buffer, self._step, count, are_fresh))
            self._micro_batches.begin_update(self._step, count)
        self._scale = scale = self._micro_batches.take(self._step) if is_training else LossScale()
        # A copy, as its advantages are scaled: those in the buffer are needed again in the next pass
        self._loss_inputs = without_masked_values(inputs)
        beta, self.beta = self.beta, self.beta * scale.policy
        try:
            loss = super()._compute_loss(model, self._loss_inputs, *args, **kwargs) * scale.of_whole(inputs)
        finally:
            self._loss_inputs, self.beta = None, beta
        if is_training and self.accelerator.sync_gradients:
            self._clock.count(trained=self._micro_batches.num_tokens)
            self._log_values(self._micro_batches.close(self._metrics["train"], self._bounds.close()))
            if self.beta and self.state.global_step == 0 and self.accelerator.is_main_process:
                checks.warn_if_reference_differs(self)
        return loss

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if self._known_logps is not None:  # TRL's first scoring after a generation; later ones are of the reference
            known, self._known_logps = self._known_logps, None
            num_tokens = kwargs["logits_to_keep"] if "logits_to_keep" in kwargs else args[2]
            return pad_logps(known, num_tokens).to(self.accelerator.device), None, None
        score, inputs = super()._get_per_token_logps_and_entropies, self._loss_inputs
        with nullcontext() if inputs is not None else self._clock.phase("scoring"):
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
            factor = self._scale.policy
            self._clip_with(self._updates.observe(inputs, logps.detach(), entropies, version, is_last, factor))
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
        data = dataloader.dataset
        self._eval_rows_left = len(data) * self.num_generations_eval if has_length(data) else sys.maxsize
        with self._clock.pause():
            return super().evaluation_loop(dataloader, *args, **kwargs)

    # Checkpoints

    def _save_checkpoint(self, *args, **kwargs):
        with self._clock.pause():
            super()._save_checkpoint(*args, **kwargs)

    def _is_dispensable(self, file):
        is_of_buffer = BUFFER_FILES.num_ranks_of(file) is not None
        is_requested = REQUEST_FILES.num_ranks_of(file) is not None
        return file == CURVES_FILE or is_requested or (self.args.replay_discard_saved and is_of_buffer)

    def _save_optimizer_and_scheduler(self, output_dir, *args, **kwargs):
        super()._save_optimizer_and_scheduler(output_dir, *args, **kwargs)
        self._log_window.save(output_dir)
        if self.args.sync_ref_model:
            save_ref_model(self, output_dir)
        if self._rounds is not None:
            update = self.state.global_step
            is_boundary = self._generation.is_trained(update, self._step, self.args)
            self._rounds.save(output_dir, is_boundary, update)
        if self._overlap is not None:
            rank, num_ranks = self.accelerator.process_index, self.accelerator.num_processes
            self._overlap.save(output_dir, rank, num_ranks, lambda: SIGNAL_WAIT_S if is_stopped(self) else None)
        if self._replay is not None:
            self._replay.save(output_dir)
        if self.args.should_save:
            self._data_place.save(output_dir)
            save_curves(self._bounds, output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, *args, **kwargs):
        with fixes.keeping_frozen(self.model), fixes.keeping_types(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
            fixes.load_trained_adapter(self, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint, *args, **kwargs):
        fixes.load_onto_numbered_cpus()
        with fixes.rejecting_another_optimizer(self, checkpoint), fixes.warning_if_rate_differs(self):
            super()._load_optimizer_and_scheduler(checkpoint, *args, **kwargs)
        if checkpoint is None:
            return
        if self.ref_model is not None:
            load_ref_model(self, checkpoint)
        with raising_on_all_ranks():  # each rank reads its own files
            self._log_window.load(checkpoint)
            if self._rounds is not None:
                self._rounds.load(checkpoint, reports_logps=self.use_vllm)
            else:
                check_no_pool(checkpoint)
            if self._overlap is not None:
                self._overlap.load(checkpoint, self.accelerator.process_index, self.accelerator.num_processes)
            if self._replay is not None and not self.args.replay_discard_saved:
                self._replay.load(checkpoint)
        if self._overlap is not None:
            self._overlap.keep_if_all_have_them()
        load_curves(self._bounds, checkpoint)

    def create_model_card(self, model_name=None, dataset_name=None, *args, **kwargs):  # type: ignore[override]
        super().create_model_card(model_name, dataset_name, *args, **kwargs)
        if self.is_world_process_zero():
            rewrite_card(self, model_name, dataset_name)
