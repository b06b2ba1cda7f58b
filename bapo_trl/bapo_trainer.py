"""`BAPOTrainer`: TRL's `GRPOTrainer` with clip bounds that are searched for each optimizer update."""

import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.trainer_utils import has_length

from .advice import advice_line
from .bapo_config import BAPOConfig, check_unchanged, own_settings
from .checkpoints.log_window import make_log_window
from .checkpoints.rank_errors import raising_on_all_ranks
from .checkpoints.ref_model import load_ref_model, save_ref_model
from .checkpoints.whole import WholeCheckpoints
from .clip_bounds import ClipBounds
from .clip_bounds.carried_curves import CURVES_FILE
from .clip_bounds.tokens import mask_values, without_masked_values
from .clip_bounds.update_bounds import UpdateBounds
from .inputs import checks
from .inputs.prompt_checks import check_end_of_stream, check_number_of_prompts
from .inputs.reward_checks import distinct_names
from .inputs.setting_warnings import setting_warnings
from .log_window import leave_out_empty, reduce_window
from .model_card import rewrite_card
from .policy.filler_rows import LossScale, mark_fillers, scale_without_fillers
from .policy.scoring import read_masses, read_tokens, read_tokens_ahead, score, stamp, warn_if_padding_counts
from .policy.staleness import staleness_line
from .replay.checkpoint import is_queue_file
from .replay.mixer import make_replay
from .reward_sums import best_of_k
from .rollouts.checkpoint import check_no_pool
from .rollouts.handover import finish_groups, is_trained_to_its_end, make_rounds, token_cap
from .rollouts.rounds import RolloutBatch
from .upstream import fixes, trl_compat
from .upstream.forward_passes import has_random_forward, without_gradient_checkpointing
from .upstream.trl_compat import get_config_model_id, shuffle_sequence_dict, split_tensor_dict
from .vllm_server.merged_adapters import send_merged_copies
from .vllm_server.mismatch import client_for, make_difference_check
from .vllm_server.retries import make_retries
from .vllm_server.stale_server import make_server_check


trl_compat.check_trl()


class BAPOTrainer(WholeCheckpoints):
    """
    Trainer for Balanced Policy Optimization with Adaptive Clipping (BAPO).

    BAPO (https://huggingface.co/papers/2510.18927) keeps off-policy training stable by choosing the clip bounds anew
    for every optimizer update, such that positive-advantage tokens contribute a set share of the policy loss.

    A [`~trl.GRPOTrainer`] whose checkpoints are whole or not there. Each of TRL's hooks is overridden once, around a
    call to the parent's method, and the file has them in the order in which a sample travels:

    - `train` runs; we start over when it is called again, and say how stale its samples will be.
    - `create_optimizer` makes the optimizer; we refuse one that trains no parameter of the model.
    - `log` averages what was measured since the last line; we take the largest of maxima, the smallest of minima, and
      leave out what is undefined.
    - `_get_train_sampler`, `_init_training_state` choose the prompts; we refuse too few, and resume their order.
    - `_prepare_inputs` generates where the buffer is used up, or hands out a micro-batch; at later passes over a
      generation, we trade rows with the replay queue.
    - `_generate_and_score_completions` makes a batch of prompts; we finish partial rollouts before it, and after it
      stamp the samples with their policy, check the sampler, and trade rows with the replay queue.
    - `_tokenize_prompts`, `_generate_single_turn`, `_generate` are its way to the completions; we hand over complete
      groups, bring it through failures of a vLLM server, and explain broken logits.
    - `_calculate_rewards` rewards them; we stop at what is no reward or infinite, and look for ties.
    - `_get_per_token_logps_and_entropies` scores; for complete groups, we hand over what they were sampled with, and
      inside the loss we show the log-probabilities to the search before TRL clips.
    - `_compute_loss` clips with `epsilon_low` and `epsilon_high`; we choose these, ahead of the first micro-batch
      where several share them, leave out masked tokens and filler rows, and log the update at the last.
    - `_get_grad_norm` clips the gradient; we stop at one that is not finite.
    - `evaluation_loop` samples and rewards; we count each prompt once.
    - `_save_optimizer_and_scheduler`, `_load_optimizer_and_scheduler`, `_load_from_checkpoint` write and read a
      checkpoint; we add pools, queue, carried curves, the values of the next log line and a reference model that is
      synchronized, and read an adapter that has a copy as its reference.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train, as in [`~trl.GRPOTrainer`].
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            Reward functions, as in [`~trl.GRPOTrainer`].
        args ([`BAPOConfig`], *optional*):
            Configuration of the trainer. A [`~trl.GRPOConfig`] is taken with the default search. If `None`, a default
            configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            Prompts to train on, as in [`~trl.GRPOTrainer`]; enough for one generation.
        eval_dataset (*optional*):
            Prompts to evaluate on, as in [`~trl.GRPOTrainer`].
        *rest, **kwargs:
            All other arguments of [`~trl.GRPOTrainer`], unchanged: `processing_class`, `peft_config`, ...

    Attributes:
        clip_bounds ([`ClipBounds`]):
            Outcome of the latest search; before the first one, the start bounds. After an update, its shares are those
            of the update's own tokens. Under a loss without clip bounds (`cispo`, `sapo`, `vespo`) both bounds are 1,
            and nothing reads them.
        dataset_title (`str` or `None`):
            What the model card calls the data; set it if the dataset does not tell its name.

    Raises:
        ValueError: If the settings contradict one another, or a dataset has fewer prompts than one generation takes.
            During training, if no parameter would be trained, a stream ends before one generation, or a reward is
            infinite or none. What TRL, transformers or a reward function raises comes through as it is.
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
    _paper = {
        "title": "BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy Optimization with "
        "Adaptive Clipping",
        "id": "2510.18927",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{xi2025bapo,
                title        = {{BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy
                                Optimization with Adaptive Clipping}},
                author       = {Zhiheng Xi and Xin Guo and Yang Nan and Enyu Zhou and Junrui Shen and Wenxiang Chen and
                                Jiaqi Liu and Jixuan Huang and Zhihao Zhang and Honglin Guo and Xun Deng and Zhikai Lei
                                and Miao Zheng and Guoteng Wang and Shuo Zhang and Peng Sun and Rui Zheng and Hang Yan
                                and Tao Gui and Qi Zhang and Xuanjing Huang},
                year         = 2025,
                eprint       = {arXiv:2510.18927},
            }"""),
    }

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

        uses_server = args.use_vllm and args.vllm_mode == "server"
        client = client_for(args.device, args.vllm_request_timeout) if uses_server else nullcontext()
        with client:
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, *rest, **kwargs)

        self.reward_func_names = distinct_names(self.reward_func_names)
        self._inputs_in_loss = None  # the micro-batch whose loss is being computed, else `None`
        self._handed_over: RolloutBatch | None = None  # complete groups while TRL takes them for its own generation
        if self.use_vllm:
            send_merged_copies(self)
        self._server = make_retries(self, self._forget_sent_weights, self._end_without_server)
        self._reset_run_state()
        if trains and self.accelerator.is_main_process:
            for message in setting_warnings(args):
                warnings.warn(message, stacklevel=2)

    @property
    def clip_bounds(self) -> ClipBounds:
        """Outcome of the latest search."""
        return self._bounds.current

    # The run

    def train(self, *args, **kwargs):
        # A second call starts over at version 0: samples and measurements of the first one would be taken for new.
        self._reset_run_state()
        # Printed as transformers prints its logs: a library's logger would hide it where nothing is set up
        self.accelerator.print(f"{staleness_line(self.args)} {advice_line(self.args)}".rstrip())
        result = super().train(*args, **kwargs)
        if self.args.load_best_model_at_end:  # vLLM has the weights of the last update
            self._forget_sent_weights()
        left = None if self._rounds is None else self._rounds.describe_left(self._has_saved)
        if left is not None and self.accelerator.is_main_process:
            warnings.warn(left)
        if self._step == self.state.global_step == 0:
            check_end_of_stream(self.train_dataset, self.args)
        return result

    def create_optimizer(self, model=None, *args, **kwargs):
        optimizer = super().create_optimizer(model, *args, **kwargs)
        checks.check_optimizer(self.model if model is None else model, optimizer)
        return optimizer

    def _reset_run_state(self) -> None:
        """Forget what belongs to a run."""
        fixes.reset_grpo_state(self)
        self._log_window = make_log_window(self)
        self._settings = own_settings(self.args)
        self._has_random_forward = has_random_forward(self.model, self.args.neftune_noise_alpha)
        self._has_saved = self._has_loaded_queue = False
        self._probes_padding = self.args.uses_replay or self.args.uses_partial_rollouts
        # The version that sampled all rows of the buffer, on all ranks; `None` if they differ
        self._buffer_version: int | None = None
        self._generated_at = (0, 0)  # policy version and micro-batch of the latest generation
        if self._server is not None:  # before the rounds, which ask it for its window
            self._server.begin_run()
        self._forget_sent_weights()
        self._rounds = make_rounds(self) if self.args.uses_partial_rollouts else None
        self._check_difference = make_difference_check(self)
        self._server_check = make_server_check(self)
        self._replay = make_replay(self, self._log_values) if self.args.uses_replay else None
        self._bounds = UpdateBounds(
            self.args, self.accelerator, read_tokens=partial(read_tokens, self), read_masses=partial(read_masses, self)
        )
        self._clip_with(self._bounds.current)

    def _forget_sent_weights(self) -> None:
        self._last_loaded_step = -1  # TRL's: vLLM gets the weights before the next generation

    def _end_without_server(self, reason: str) -> NoReturn:
        checkpoint = self.save_for_resume()
        kept = "No checkpoint was saved." if checkpoint is None else f"The last checkpoint is {checkpoint}."
        raise RuntimeError(f"{reason} This was after update {self.state.global_step}. {kept}")

    def _log_values(self, values: Mapping[str, float], mode: str = "train") -> None:
        """Add values by name to what TRL averages and logs next."""
        for name, value in values.items():
            self._metrics[mode][name].append(value)

    def log(self, logs, *args, **kwargs):
        reduce_window(self._metrics["train" if self.model.training else "eval"])
        super().log(logs, *args, **kwargs)

    # Prompts

    def _get_train_sampler(self, dataset=None, *args, **kwargs):  # type: ignore[override]
        check_number_of_prompts(self.train_dataset if dataset is None else dataset, self.args)
        sampler: Any = super()._get_train_sampler(dataset, *args, **kwargs)
        fixes.continue_shuffles(self, sampler)
        return sampler

    def _init_training_state(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, *args, **kwargs
    ):
        sizes = max_steps, num_update_steps_per_epoch, num_train_epochs
        place = super()._init_training_state(*sizes, resume_from_checkpoint, *args, **kwargs)
        if resume_from_checkpoint is not None:
            fixes.restore_callbacks(self)
        epochs, skipped = fixes.place_to_resume(self, place, max_steps, num_train_epochs, resume_from_checkpoint)
        # TRL's sampler repeats the prompts of a generation for each of its micro-batches, and goes on among them.
        # TRL's count would start at 0: generations would lie across these blocks, and a next resume lose prompts.
        self._step = skipped
        return epochs, skipped

    # A generation

    def _prepare_inputs(self, generation_batch, *args, **kwargs):  # type: ignore[override]
        if self.model.training:
            check_unchanged(self.args, self._settings)
        step = self._step % self.args.micro_batches_per_generation
        starts_later_pass = step > 0 and step % self.args.steps_per_generation == 0
        if self._replay is not None and self.model.training and starts_later_pass and self._buffered_inputs:
            batch = self._take_batch(self._replay.draw_later_pass(self.state.global_step))
            shuffled: Any = shuffle_sequence_dict(batch)  # declared to hold any sequences
            self._buffered_inputs = split_tensor_dict(shuffled, self.args.steps_per_generation)
        return super()._prepare_inputs(generation_batch, *args, **kwargs)

    def _generate_and_score_completions(self, inputs, *args, **kwargs):
        inputs = fixes.without_missing_images(inputs)
        rollouts = self._finish_groups(inputs) if self._rounds is not None and self.model.training else None
        with (
            fixes.keeping_frozen(self.model),
            without_gradient_checkpointing(self.model),
            self._handing_over(rollouts),
        ):
            rows = inputs if rollouts is None else rollouts.inputs
            batch = super()._generate_and_score_completions(rows, *args, **kwargs)
        if not self.model.training:
            return batch
        if self._probes_padding:
            self._probes_padding = False  # once a run
            warn_if_padding_counts(self)
        num_padding = 0
        if rollouts is not None:
            num_padding = self.args.rows_per_generation - len(rollouts)
            self._log_values({"partial/masked": num_padding * self.accelerator.num_processes})
            batch = rollouts.complete(batch, self.args.rows_per_generation)
        # TRL reads those of a `rollout_func` to correct for vLLM alone. Else they may be placeholders of any length
        are_of_sampler = self.rollout_func is None or (self.use_vllm and self.vllm_importance_sampling_correction)
        if not are_of_sampler and self.off_policy_mask_threshold is None:
            batch.pop("sampling_per_token_logps", None)
        is_sampled_now = stamp(self, batch, are_of_sampler)
        self._buffer_version = self.state.global_step if is_sampled_now else None
        # A server that was started anew meanwhile has old weights for a good reason; the next generation sees to it
        if self._server_check is not None and self._server.has_same_server():
            self._log_values(self._server_check(self.model, batch))
        if self._replay is not None:
            return self._draw_first_pass(batch, num_padding)
        return mark_fillers(batch, num_padding) if num_padding else batch

    def _finish_groups(self, inputs) -> RolloutBatch:
        self._generated_at = self.state.global_step, self._step
        with without_gradient_checkpointing(self.model):
            rollouts, metrics = finish_groups(self, self._rounds, inputs, self._continue_completions, self._score_all)
        self._log_values(metrics)
        return rollouts

    @contextmanager
    def _handing_over(self, rollouts: RolloutBatch | None) -> Iterator[None]:
        """Let TRL take complete groups for what it generates and scores within."""
        self._handed_over = rollouts
        self._awaits_behavior_logps = rollouts is not None and self.args.scores_samples
        try:
            yield
        finally:
            self._handed_over = None

    def _tokenize_prompts(self, prompts, *args, **kwargs):
        if self._handed_over is not None:  # a template that shows the date gives others by now
            return self._handed_over.prompt_ids, None, {}
        return super()._tokenize_prompts(prompts, *args, **kwargs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._handed_over is not None:
            return self._handed_over.tokens, self._handed_over.sampler_logps
        generate = super()._generate_single_turn

        def sample():
            with fixes.keeping_mode(self.model), checks.explaining_broken_logits(self.state.global_step):
                return generate(prompt_ids, *args, **kwargs)

        if self._server is None:
            return sample()
        return self._server.generate(sample, self._last_loaded_step != self.state.global_step)

    def _continue_completions(self, prompts, cap):
        with token_cap(self, cap):
            return self._generate_single_turn(prompts, None, {}, num_generations=1)

    def _generate(self, prompts, *args, **kwargs):
        generated = super()._generate(prompts, *args, **kwargs)
        if self.rollout_func is not None:
            checks.check_rollouts(prompts, *generated[:2])
        return generated

    def _calculate_rewards(self, inputs, prompts, completions, *args, **kwargs):
        with checks.checking_rewards(self, prompts, completions):
            rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, *args, **kwargs)
        checks.check_rewards(self, rewards_per_func, prompts, completions)
        if not self.model.training:
            counted = rewards_per_func[: self._eval_rows_left]
            self._eval_rows_left -= len(counted)
            self._log_groups(counted)
        elif self.args.replay_zero_advantage:
            self._replay.observe_rewards(rewards_per_func)
        return rewards_per_func

    def _log_groups(self, rewards_per_func: torch.Tensor) -> None:
        """Log what an evaluation says of its groups. Repeats, with which several ranks fill a batch, are left out."""
        if self.num_generations_eval > 1:
            count = self.num_generations_eval
            for best in best_of_k(rewards_per_func, self.reward_weights, count).tolist():
                self._log_values({f"reward_best_of_{count}": best}, "eval")  # TRL logs their mean

    def _score_all(self, batch) -> torch.Tensor:
        return score(self, batch, batch_size=self.args.per_device_train_batch_size)[0]

    def _draw_first_pass(self, batch, num_padding):
        if self.args.replay_zero_advantage:
            share = self._replay.clear_ties(batch["advantages"])
            if self.args.sums_rewards_first and self.scale_rewards != "batch":
                self._metrics["train"]["frac_reward_zero_std"][-1] = share  # TRL's misses some by rounding
        # The queue of a checkpoint within a generation has seen the first half of it
        is_made_again = self._has_loaded_queue and self._step % self.args.micro_batches_per_generation != 0
        drawn = self._replay.draw_first_pass(batch, self.state.global_step, num_padding, is_made_again)
        return self._take_batch(drawn)

    def _take_batch(self, batch_and_whether_fresh):
        batch, is_fresh = batch_and_whether_fresh
        self._buffer_version = self.state.global_step if is_fresh else None
        return batch

    # An update

    def _compute_loss(self, model, inputs, *args, **kwargs):
        is_training = self.model.training
        if is_training and not self._bounds.is_open:
            self._begin_update()
        scale = self._scale if is_training else LossScale()
        # A copy: the advantages are scaled in it, and the buffer's own are read again at the next pass
        self._inputs_in_loss = without_masked_values(inputs)
        beta, self.beta = self.beta, self.beta * scale.policy
        try:
            loss = super()._compute_loss(model, self._inputs_in_loss, *args, **kwargs) * scale.of_whole(inputs)
        finally:
            self._inputs_in_loss, self.beta = None, beta
        if is_training and self.accelerator.sync_gradients:
            metrics, have_tokens = self._bounds.close(update=self.state.global_step + 1)
            leave_out_empty(self._metrics["train"], have_tokens)
            self._log_values(metrics)
        return loss

    def _begin_update(self) -> None:
        count = self.current_gradient_accumulation_steps
        window = [(self._step + i) % self.args.steps_per_generation for i in range(count)]
        are_fresh = self._buffer_version == self.state.global_step
        read_ahead = partial(read_tokens_ahead, self, window, are_fresh, self._has_random_forward)
        self._clip_with(self._bounds.begin(self._buffered_inputs, window, read_ahead))
        self._scale = scale_without_fillers(self, window)

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if self._handed_over is not None and self._awaits_behavior_logps:
            self._awaits_behavior_logps = False  # the calls that follow are of the reference
            num_tokens = kwargs["logits_to_keep"] if "logits_to_keep" in kwargs else args[2]
            return self._handed_over.behavior_logps(num_tokens).to(self.accelerator.device), None, None
        output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._inputs_in_loss is None:
            return output
        logps, entropies = (mask_values(self._inputs_in_loss, values) for values in output[:2])
        if self.model.training:  # evaluation keeps the latest bounds
            is_last, version = self.accelerator.sync_gradients, self.state.global_step
            self._clip_with(self._bounds.observe(self._inputs_in_loss, logps.detach(), entropies, version, is_last))
            self._inputs_in_loss["advantages"] = self._inputs_in_loss["advantages"] * self._scale.policy
        return logps, entropies, *output[2:]

    def _clip_with(self, bounds: ClipBounds) -> None:
        if self.args.has_clip_bounds:
            # TRL clips with, and logs the clip ratios of, these two. As tensors, they keep the host out of the search.
            self.epsilon_low = 1 - bounds.low
            self.epsilon_high = bounds.high - 1

    def _get_grad_norm(self, *args, **kwargs):
        grad_norm: Any = super()._get_grad_norm(*args, **kwargs)
        if hasattr(grad_norm, "full_tensor"):  # FSDP2's, of which each rank has its part
            grad_norm = grad_norm.full_tensor()
        checks.check_gradient(self, grad_norm)
        return grad_norm

    def evaluation_loop(self, dataloader, *args, **kwargs):
        data = dataloader.dataset
        self._eval_rows_left = len(data) * self.num_generations_eval if has_length(data) else sys.maxsize
        return super().evaluation_loop(dataloader, *args, **kwargs)

    # Checkpoints

    def _is_dispensable(self, file):
        return file == CURVES_FILE or (self.args.replay_discard_saved and is_queue_file(file))

    def _save_optimizer_and_scheduler(self, output_dir, *args, **kwargs):
        super()._save_optimizer_and_scheduler(output_dir, *args, **kwargs)
        self._log_window.save(output_dir)
        if self.args.sync_ref_model:
            save_ref_model(self, output_dir)
        if self._rounds is not None:
            self._has_saved = True
            self._rounds.save(output_dir, is_trained_to_its_end(self, self._generated_at), self.state.global_step)
        if self._replay is not None:
            self._replay.save(output_dir)
        if self.args.should_save:
            self._bounds.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, *args, **kwargs):
        with fixes.keeping_frozen(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
            fixes.load_trained_adapter(self, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint, *args, **kwargs):
        fixes.load_onto_numbered_cpus()
        with fixes.saying_which_rate(self):
            super()._load_optimizer_and_scheduler(checkpoint, *args, **kwargs)
        if checkpoint is None:
            return
        if self.ref_model is not None:
            load_ref_model(self, checkpoint)
        with raising_on_all_ranks():  # each reads files of its own
            self._log_window.load(checkpoint)
            if self._rounds is not None:
                self._rounds.load(checkpoint, reports_logps=self.use_vllm)
            else:
                check_no_pool(checkpoint)
        self._bounds.load(checkpoint)
        if self._replay is not None and not self.args.replay_discard_saved:
            with raising_on_all_ranks():
                step, oversampling = self.state.global_step, self.args.partial_rollout_oversampling
                self._has_loaded_queue = self._replay.load(checkpoint, step, oversampling)

    def _rewrite_model_card(self, model_name, dataset_name):
        rewrite_card(self, model_name, dataset_name)
