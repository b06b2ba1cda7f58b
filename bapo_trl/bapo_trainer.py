"""`BAPOTrainer`: TRL's `GRPOTrainer` with clip bounds that are searched for each optimizer update."""

import functools
import operator
import textwrap
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from datasets import IterableDataset
from trl import GRPOTrainer

from .advice import staleness_line
from .bapo_config import BAPOConfig, check_unchanged, own_settings
from .behavior_policy import KnownBehaviorPolicy
from .checkpoints.hub_pushes import LeavesSamplesOut
from .checkpoints.whole import WholeCheckpoints
from .clip_bounds import ClipBounds, Contributions
from .clip_bounds.carried_curves import CURVES_FILE
from .clip_bounds.grid import SINGLE_POINT
from .clip_bounds.run_search import BoundSearch
from .clip_bounds.update_log import UpdateLog, measure_tokens
from .config_checks import check_values_of_trl
from .errors import InputError
from .inputs.checks import CheckedInputs, check_model_name, explained, raising_on_all_ranks
from .inputs.prompt_checks import check_number_of_prompts
from .inputs.reward_checks import check_reward_funcs
from .inputs.reward_sums import best_of_k
from .replay.mixer import ReplayMixer, ReplayQueue, is_queue_file
from .rollouts.partial_trainer import PartialRollouts
from .scoring import Scoring
from .upstream import trl_compat
from .upstream.fixes import ResumeFixes
from .upstream.trl_compat import get_config_model_id, shuffle_sequence_dict, split_tensor_dict
from .vllm_server.mismatch import client_for
from .vllm_server.restart import ServerRestarts


trl_compat.check_trl()


class BAPOTrainer(
    WholeCheckpoints,
    LeavesSamplesOut,
    KnownBehaviorPolicy,
    PartialRollouts,
    ServerRestarts,
    Scoring,
    ResumeFixes,
    CheckedInputs,
    GRPOTrainer,
):
    """
    Trainer for Balanced Policy Optimization with Adaptive Clipping (BAPO).

    BAPO (https://huggingface.co/papers/2510.18927) keeps off-policy training stable by choosing the clip bounds anew
    for every optimizer update, such that positive-advantage tokens contribute a set share of the policy loss.

    What differs from [`~trl.GRPOTrainer`], each time around a call to the parent's method:

    - `train`: starts over when it is called again.
    - `_compute_loss`: where the optimizer step has several micro-batches, searches the bounds over all of them before
      the first (`"batch"` scope); at the last, logs the update, or stops if a log-probability is NaN or infinite.
    - `_get_per_token_logps_and_entropies`: inside the loss, shows the log-probabilities to the search and to the log
      before TRL clips with `epsilon_low` and `epsilon_high`; scales the advantages of negative tokens, which TRL reads
      afterwards.
    - `_generate_and_score_completions`, `_prepare_inputs`: trade fresh rows for queued ones.
    - `_save_optimizer_and_scheduler`, `_load_optimizer_and_scheduler`: keep the replay queue and the carried curves in
      the checkpoint.
    - `_get_train_sampler`: refuses too few prompts.
    - `_calculate_rewards`: logs the best of k rollouts in evaluation; with `replay_zero_advantage`, looks for ties.

    The bases before it do the rest: [`~checkpoints.whole.WholeCheckpoints`],
    [`~checkpoints.hub_pushes.LeavesSamplesOut`], [`~behavior_policy.KnownBehaviorPolicy`],
    [`~rollouts.partial_trainer.PartialRollouts`], [`~scoring.Scoring`], [`~upstream.fixes.ResumeFixes`],
    [`~inputs.checks.CheckedInputs`].

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

    Raises:
        ValueError: If the settings contradict one another, or a dataset has fewer prompts than one generation takes.
            During training, if a stream ends before one generation, or a reward is infinite. What TRL, transformers or
            a reward function raises comes through, with a note of what was wrong where that can be told.
        RuntimeError: During training, if a log-probability, an advantage or the gradient is NaN or infinite.
    """

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
        server = client_for(args.device, args.vllm_request_timeout) if uses_server else nullcontext()
        rewards = partial(check_reward_funcs, reward_funcs, args.reward_weights)
        with explained(partial(check_model_name, model), partial(check_values_of_trl, args), rewards), server:
            super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, *rest, **kwargs)

        self._inputs_in_loss = None  # the micro-batch whose loss is being computed, else `None`
        self._reset_run_state()
        self._set_clip_bounds(self._search.start_bounds())
        if trains and self.accelerator.is_main_process:
            for message in args.warnings():
                warnings.warn(message, stacklevel=2)

    def _make_replay(self) -> ReplayMixer:
        if self._is_vlm:
            raise InputError(
                f"A replay queue keeps text only, but the model is multimodal: set {self.args.without_replay}."
            )
        args = self.args
        queue = ReplayQueue(
            args.replay_capacity,
            max_staleness=args.replay_max_staleness,
            min_staleness=args.replay_min_staleness,
            max_reuse=args.replay_max_reuse,
            order=args.replay_order,
            seed=args.seed + self.accelerator.process_index,
        )
        return ReplayMixer(
            queue,
            fraction=args.replay_fraction,
            replaces_zero_advantage=args.replay_zero_advantage,
            updates_per_pass=args.updates_per_pass,
            pad_token_id=self._tokenizer.pad_token_id,
            pad_to_multiple_of=args.pad_to_multiple_of,
            accelerator=self.accelerator,
            log=self._log_values,
        )

    # Data and generation

    def _get_train_sampler(self, dataset=None):
        check_number_of_prompts(self.train_dataset if dataset is None else dataset, self.args)
        return super()._get_train_sampler(dataset)

    def _generate_and_score_completions(self, inputs):
        trains_past_samples = self._replay is not None or self.args.uses_partial_rollouts
        if self.model.training and trains_past_samples and not self._has_probed_padding:
            self._warn_if_padding_counts()
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training or self._replay is None:
            return output
        if self.args.replay_zero_advantage:
            share = self._replay.clear_ties(output["advantages"])
            if self.multi_objective_aggregation == "sum_then_normalize" and self.scale_rewards != "batch":
                self._metrics["train"]["frac_reward_zero_std"][-1] = share  # TRL's misses some by rounding
        num_padding = self._num_padding_rows if self.args.uses_partial_rollouts else 0
        # The queue of a checkpoint within a generation has seen the first half of it
        is_made_again = self._has_loaded_queue and self._step % self.args.micro_batches_per_generation != 0
        return self._take_batch(
            self._replay.draw_first_pass(output, self.state.global_step, num_padding, is_made_again)
        )

    def _prepare_inputs(self, generation_batch):
        if self.model.training:
            check_unchanged(self.args, self._settings)
        step = self._step % self.args.micro_batches_per_generation
        starts_later_pass = step > 0 and step % self.args.steps_per_generation == 0
        if self._replay is not None and self.model.training and starts_later_pass and self._buffered_inputs:
            batch = self._take_batch(self._replay.draw_later_pass(self.state.global_step))
            shuffled: Any = shuffle_sequence_dict(batch)  # declared to hold any sequences
            self._buffered_inputs = split_tensor_dict(shuffled, self.args.steps_per_generation)
        return super()._prepare_inputs(generation_batch)

    def _take_batch(self, batch_and_whether_fresh):
        batch, is_fresh = batch_and_whether_fresh
        self._buffer_version = self.state.global_step if is_fresh else None
        return batch

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if not self.model.training and self.num_generations_eval > 1:
            best = best_of_k(rewards_per_func, self.reward_weights, self.num_generations_eval)
            self._log_values({f"reward_best_of_{self.num_generations_eval}": best}, "eval")
        if self.model.training and self.args.replay_zero_advantage:
            summed_first = self.multi_objective_aggregation == "sum_then_normalize"
            self._replay.observe_rewards(rewards_per_func, self.reward_weights, self.num_generations, summed_first)
        return rewards_per_func

    # Training

    def train(self, *args, **kwargs):
        # A second call starts over at version 0: samples and measurements of the first one would be taken for new.
        self._reset_run_state()
        # Printed as transformers prints its logs: a library's logger would hide it where nothing is set up
        self.accelerator.print(staleness_line(self.args))
        result = super().train(*args, **kwargs)
        # A stream does not know its length before it ends
        if self._step == self.state.global_step == 0 and isinstance(self.train_dataset, IterableDataset):
            raise InputError(
                f"No update was made: the data ended before the {self.args.generation_batch_size} samples of one "
                "generation (`generation_batch_size`) were there. Give more prompts, or lower `steps_per_generation` "
                "or `per_device_train_batch_size`."
            )
        return result

    def _reset_run_state(self):
        super()._reset_run_state()
        self._settings = own_settings(self.args)
        self._replay = self._make_replay() if self.args.uses_replay else None
        self._has_loaded_queue = False
        self._update_log = UpdateLog(self.args.has_clip_bounds, has_target=not self.args.has_constant_weight)
        self._masses_of_buffer: list[Contributions] = []  # of each micro-batch, of all ranks
        self._buffer_of_masses = None
        self._masses_of_update: Contributions | None = None
        self._search = BoundSearch(
            self.args.bound_grid,
            measure=self.args.contribution_measure,
            target=self.args.positive_contribution_target,
            order=self.args.search_order,
            delta=self.args.delta,
            negative_weight_min=self.args.negative_weight_min,
            has_constant_weight=self.args.has_constant_weight,
            negative_ratio_cap=self.args.negative_ratio_cap,
            device=self.accelerator.device,
            sum_over_ranks=partial(self.accelerator.reduce, reduction="sum"),
        )

    def _compute_loss(self, model, inputs):
        if not self.model.training:  # evaluation keeps the latest bounds
            return super()._compute_loss(model, inputs)
        if self._searches_ahead and not self._update_log.is_open:
            self._choose_bounds_ahead()
        # A copy: the advantages are scaled in it, and the buffer's own are read again at the next pass
        self._inputs_in_loss = dict(inputs)
        try:
            loss = super()._compute_loss(model, self._inputs_in_loss)
        finally:
            self._inputs_in_loss = None
        if self.accelerator.sync_gradients:
            self._log_values(self._update_log.close(self.accelerator.gather, update=self.state.global_step + 1))
        return loss

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._inputs_in_loss is not None:
            per_token_logps, entropies, *_ = output
            self._observe_logps(self._inputs_in_loss, per_token_logps.detach(), entropies)
        return output

    @torch.no_grad()
    def _observe_logps(self, inputs, per_token_logps, entropies):
        tokens = self._policy_tokens(inputs, per_token_logps, entropies)
        is_last = self.accelerator.sync_gradients
        if not self._searches_ahead:
            self._search.add(tokens)
            if self.args.search_scope == "micro_batch" or is_last:
                self._use(self._search.choose())
        elif self._carries_over:
            self._search.add(tokens)
            if is_last:
                curves = self._search.carry(self._masses_of_update)
                self._use(self._search.judge(self.clip_bounds, curves))
        if self.args.negative_weight_min < 1 or self.args.negative_ratio_cap is not None:
            inputs["advantages"] = tokens.balanced_advantages(
                self.clip_bounds.negative_weight, self.args.negative_ratio_cap
            )

        guarded = {name: inputs.get(name) for name in ("old_per_token_logps", "ref_per_token_logps")}
        guarded["per_token_logps"] = per_token_logps
        staleness = self.state.global_step - inputs.get("token_versions", inputs["policy_version"])
        self._update_log.add(
            measure_tokens(
                tokens,
                staleness,
                guarded,
                inputs["completion_mask"],
                self.clip_bounds,
                self.args.delta,
                self.args.negative_ratio_cap,
            )
        )

    # Checkpoints

    def _is_dispensable(self, file):
        return file == CURVES_FILE or (self.args.replay_discard_saved and is_queue_file(file))

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self._replay is not None:
            self._replay.save(output_dir)
        if self._carries_over and self.args.should_save:
            self._search.carried.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._carries_over and checkpoint is not None and not self._search.carried.load(checkpoint):
            warnings.warn(
                f"The checkpoint {checkpoint} holds no carried curves on these candidate bounds: a sign of advantages "
                "that the first update lacks counts as in fresh samples."
            )
        if self._replay is None or checkpoint is None or self.args.replay_discard_saved:
            return
        with raising_on_all_ranks():  # each reads a file of its own
            self._load_replay(checkpoint)

    def _load_replay(self, checkpoint):
        self._has_loaded_queue = self._replay.load(checkpoint, self.state.global_step)
        if not self._has_loaded_queue:
            warnings.warn(f"The checkpoint {checkpoint} holds no replay queue: starting with an empty one.")
        rows, _ = self._replay.queue.state()
        if self.args.uses_partial_rollouts and any("token_versions" not in chunk.columns for chunk in rows):
            raise InputError(
                f"`partial_rollout_oversampling` is {self.args.partial_rollout_oversampling}, but the replay queue of "
                f"the checkpoint {checkpoint} is of a run without partial rollouts: set it back to 1.0, or set "
                "`replay_discard_saved` to start with an empty queue."
            )

    # Bound search

    @property
    def _carries_over(self) -> bool:
        return self.args.search_scope == "carried_over" and self.args.is_adaptive

    @property
    def _searches_ahead(self) -> bool:
        """Whether the bounds are due before the log-probabilities of all tokens they depend on are known."""
        several_micro_batches = self.current_gradient_accumulation_steps > 1
        searches_batch = self.args.search_scope == "batch" and several_micro_batches and self.args.is_adaptive
        return searches_batch or self._carries_over

    def _choose_bounds_ahead(self):
        is_first = self._buffer_of_masses is not self._buffered_inputs  # update on these samples
        if is_first or not self._carries_over:
            for tokens in self._tokens_ahead(are_fresh=self._buffer_version == self.state.global_step):
                self._search.add(tokens)
        if not self._carries_over:
            self._use(self._search.choose())
            return
        if is_first:
            self._take_masses()
        self._masses_of_update = _total([self._masses_of_buffer[position] for position in self._window])
        if is_first:  # nothing to carry over: the curves of the update itself
            self._search.carry(self._masses_of_update)
        bounds = self._search.choose_carried(self._masses_of_update)
        self._set_clip_bounds(bounds)  # logged with the shares of its own tokens

    def _take_masses(self):
        masses = torch.stack([self._masses(inputs).as_vector() for inputs in self._buffered_inputs])
        totals = self.accelerator.reduce(masses, reduction="sum")
        self._masses_of_buffer = [Contributions.from_vector(total, SINGLE_POINT) for total in totals]
        self._buffer_of_masses = self._buffered_inputs

    def _use(self, bounds: ClipBounds):
        self._update_log.searches.append(bounds)
        self._set_clip_bounds(bounds)

    def _set_clip_bounds(self, bounds: ClipBounds):
        self.clip_bounds = bounds
        if self.args.has_clip_bounds:
            # TRL clips with, and logs the clip ratios of, these two. As tensors, they keep the host out of the search.
            self.epsilon_low = 1 - bounds.low
            self.epsilon_high = bounds.high - 1


def _total(masses: Sequence[Contributions]) -> Contributions:
    return functools.reduce(operator.add, masses)
