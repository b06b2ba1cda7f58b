"""Lets a `GRPOTrainer` train on partial rollouts: TRL takes complete groups as if it had generated them."""

import math
import warnings

import torch

from ..inputs.checks import raising_on_all_ranks
from ..scoring import Scoring
from ..upstream.trl_compat import pad
from .pool import RolloutPool
from .rounds import RolloutBatch, RolloutRounds, check_no_pool, check_supported, pad_with_masked_rows
from .sampler_limits import sampler_window, token_cap


class PartialRollouts(Scoring):
    """
    Generates in rounds, see [`~rollout_rounds.RolloutRounds`]. To be put before [`~trl.GRPOTrainer`] among the bases
    of a trainer, and before [`~scoring.Scoring`].

    While TRL's own generation runs for the groups that are complete,

    - `_tokenize_prompts` and `_generate_single_turn` hand it the prompts and the tokens that were sampled after them;
    - `_get_per_token_logps_and_entropies`, at the call that scores the policy, the log-probabilities under the
      policies that sampled them: whatever TRL forms of these is right;
    - `_generate`, with `partial_rollout_mask_stale`, a mask of the tokens of the latest segments.

    Without partial rollouts, all of them do what the parents do.
    """

    _rollouts: RolloutBatch | None = None  # complete groups while TRL takes them for its own generation
    _awaits_behavior_logps = False
    _has_saved = False  # a checkpoint in this run
    _generated_at = (0, 0)  # policy version and micro-batch of the latest generation

    def train(self, *args, **kwargs):
        self._has_saved = False
        result = super().train(*args, **kwargs)
        if self._rounds is not None:
            left = self._rounds.describe_left(self._has_saved)
            if left is not None and self.accelerator.is_main_process:
                warnings.warn(left)
        return result

    def _reset_run_state(self):
        super()._reset_run_state()
        self._rounds = self._make_rounds() if self.args.uses_partial_rollouts else None

    def _make_rounds(self) -> RolloutRounds:
        check_supported(self)
        pool = RolloutPool(
            self.num_generations,
            self.max_completion_length,
            self.eos_token_ids,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            window=sampler_window(self),
        )
        return RolloutRounds(
            pool,
            num_groups=self.args.groups_per_generation,
            num_held=self.args.groups_held,
            chunk_length=self.args.partial_rollout_chunk_length,
            gather=self._gather_numbers,
        )

    def _gather_numbers(self, numbers: list[float]) -> list[list[float]]:
        return self.accelerator.gather(torch.tensor([numbers], device=self.accelerator.device)).tolist()

    def _generate_and_score_completions(self, inputs):
        if self._rounds is None or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        rollouts = self._finish_groups(inputs)
        self._rollouts, self._awaits_behavior_logps = rollouts, self.args.scores_samples
        try:
            output = super()._generate_and_score_completions(rollouts.inputs)
        finally:
            self._rollouts = None
        num_tokens, num_rows = output["completion_ids"].size(1), self.args.rows_per_generation
        output["old_per_token_logps"] = rollouts.behavior_logps(num_tokens).to(self.accelerator.device)
        output["policy_version"] = rollouts.oldest_versions
        output["token_versions"] = rollouts.token_versions(num_tokens)
        self._num_padding_rows = num_rows - len(rollouts)
        self._log_values({"partial/masked": self._num_padding_rows * self.accelerator.num_processes})
        return pad_with_masked_rows(output, num_rows)

    def _finish_groups(self, inputs) -> RolloutBatch:
        prompts = inputs[:: self.num_generations]  # a group's rows follow one another
        prompt_ids, _, _ = self._tokenize_prompts([row["prompt"] for row in prompts])
        version, limit = self.state.global_step, self.args.partial_rollout_max_staleness
        self._generated_at = version, self._step
        staleness_if_parked = self.args.updates_per_generation + self.args.largest_staleness
        rollouts, metrics = self._rounds.generate(
            list(zip(prompts, prompt_ids, strict=True)),
            version,
            None if limit is None else version + staleness_if_parked - limit,
            self._continue_completions,
            self._score_completions,
        )
        self._log_values(metrics)
        return rollouts

    def _continue_completions(self, prompts, cap):
        with token_cap(self, cap):
            return super()._generate_single_turn(prompts, None, {}, num_generations=1)

    def _score_completions(self, prompts, completions):
        batch = {}
        for name, rows, side in (("prompt", prompts, "left"), ("completion", completions, "right")):
            ids = [torch.tensor(row) for row in rows]
            masks = [torch.ones_like(row) for row in ids]
            padded = pad(ids, padding_value=self._tokenizer.pad_token_id, padding_side=side)
            batch[f"{name}_ids"] = padded.to(self.accelerator.device)
            batch[f"{name}_mask"] = pad(masks, padding_value=0, padding_side=side).to(self.accelerator.device)
        per_token_logps, _ = self._score(batch, batch_size=self.args.per_device_train_batch_size)
        return [row[: len(tokens)] for row, tokens in zip(per_token_logps.tolist(), completions, strict=True)]

    def _tokenize_prompts(self, prompts):
        if self._rollouts is not None:  # a template that shows the date gives others by now
            return self._rollouts.prompt_ids, None, {}
        return super()._tokenize_prompts(prompts)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if self._rollouts is not None:
            return self._rollouts.tokens, self._rollouts.sampler_logps
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _generate(self, prompts):
        output = super()._generate(prompts)
        if self._rollouts is None or not self.args.partial_rollout_mask_stale:
            return output
        prompt_ids, completion_ids, _, *others = output  # the mask of tokens that a tool wrote: there is none
        return prompt_ids, completion_ids, self._rollouts.latest_segment_masks, *others

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if self._rollouts is not None and self._awaits_behavior_logps:
            self._awaits_behavior_logps = False  # the calls that follow are of the reference
            _, _, num_tokens = args
            return self._rollouts.behavior_logps(num_tokens).to(self.accelerator.device), None, None
        return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self._rounds is not None:
            self._has_saved = True
            self._rounds.save(output_dir, self._is_trained_to_its_end)

    @property
    def _is_trained_to_its_end(self) -> bool:
        """Whether the updates on the latest generation are made; a save may come before the step of the last one."""
        version, first = self._generated_at
        updates = math.ceil((self._step - first) / self.args.gradient_accumulation_steps)
        ends_here = self._step % self.args.micro_batches_per_generation == 0
        return ends_here and self.state.global_step - version >= updates

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        with raising_on_all_ranks():  # each reads a file of its own
            if self._rounds is not None:
                self._rounds.load(checkpoint, reports_logps=self.use_vllm)
            else:
                check_no_pool(checkpoint)
