"""Partial rollouts as a part of the trainer: complete groups are trained, the others are carried over."""

import math
from typing import Any

from ..batch.injected import InjectedRollouts
from ..batch.scoring import score_completions
from ..parts import Clock, Part
from ..upstream.forward_passes import without_gradient_checkpointing
from .rounds import check_no_pool, make_rounds, token_cap


class PartialRollouts(Part):
    """The rounds of a run, see [`RolloutRounds`], over the trainer's sampler and policy."""

    def reset(self, run):
        self._run, self.rounds = run, make_rounds(run)
        self._begun = Clock()  # the latest generation
        self._metrics: dict[str, float] = {}

    def sample(self, rows, clock) -> InjectedRollouts:
        run, limit = self._run, self._run.args.partial_rollout_max_staleness
        prompts = rows[:: run.num_generations]
        prompt_ids, *_ = run._tokenize_prompts([row["prompt"] for row in prompts])
        self._begun = clock
        with run.phase_clock.phase("generation"), without_gradient_checkpointing(run.model):
            rollouts, self._metrics = self.rounds.generate(
                list(zip(prompts, prompt_ids, strict=True)),
                clock.version,
                None if limit is None else clock.version + run.args.staleness_if_paused - limit,
                self._continue,
                lambda *sampled: score_completions(run, *sampled),
                run.is_within_update,
            )
        return rollouts

    def _continue(self, prompts: list[list[int]], cap: int) -> Any:
        with token_cap(self._run, cap):
            return self._run._generate_single_turn(prompts, None, {}, num_generations=1)

    def check(self, batch, rollouts):
        missing = self._run.args.rows_per_generation - len(rollouts)
        return {**self._metrics, "partial/masked": missing * self._run.accelerator.num_processes}

    def save(self, folder, clock):
        # A save may come before the last optimizer step
        args = self._run.args
        updates = math.ceil((clock.micro_batch - self._begun.micro_batch) / args.gradient_accumulation_steps)
        is_boundary = clock.place == 0 and clock.version - self._begun.version >= updates
        self.rounds.save(folder, is_boundary, clock.version)

    def load(self, folder):
        self.rounds.load(folder, reports_logps=self._run.use_vllm)


class NoPartialRollouts(Part):
    """A run without partial rollouts, which must not resume from a checkpoint that has some."""

    def load(self, folder):
        check_no_pool(folder)
