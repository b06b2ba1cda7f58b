"""
Partial rollouts: decode in rounds until every rank has enough complete groups, and carry the others over.

All ranks make the same calls in the same order, whatever their completions are. Each round begins with a gather, from
which all ranks decide whether to decode another round. The scoring at the end begins with a gather, too.
"""

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..batch.injected import InjectedRollouts, check_token_ids_suffice
from ..batch.scoring import score_completions
from ..checkpoints.rank_errors import on_main_process, raising_on_all_ranks
from ..errors import InputError
from ..inputs.generation_config import check_for_partial_rollouts, settings_of_model
from ..inputs.written_values import to_json
from ..parts import Clock, Part
from ..upstream.forward_passes import without_gradient_checkpointing
from .pool import FILES, Group, RolloutPool, deal_out


class PartialRollouts(Part):
    """
    Train on complete groups, and keep the others in a pool until a later policy has completed them.

    A server must be up when a run begins. A run raises an `InputError` if the trainer's completions consist
    of more than token ids, or if the model's `generation_config` has settings that do not work over several calls.
    """

    def reset(self, run):
        check_token_ids_suffice(run, "partial rollouts", "`partial_rollout_oversampling` to 1.0")
        check_for_partial_rollouts(settings_of_model(run.args, run.model.generation_config, run.processing_class))
        self._run, ranks = run, (run.accelerator.process_index, run.accelerator.num_processes)
        limits = run.num_generations, run.max_completion_length, run.eos_token_ids
        self.pool = RolloutPool(*limits, *ranks, window=sampler_window(run))
        self._begun = Clock()  # the latest generation
        # The pool before the prompts of the latest generation step were added, and before earlier steps of its update;
        # each with the policy version if that update had begun
        self._before: list[tuple[int | None, dict[str, Any]]] = [(None, self.pool.state_dict())]
        self._metrics: dict[str, float] = {}

    def sample(self, rows, clock) -> InjectedRollouts:
        run, limit = self._run, self._run.args.partial_rollout_max_staleness
        prompts = rows[:: run.num_generations]
        prompt_ids, *_ = run._tokenize_prompts([row["prompt"] for row in prompts])
        self._begun = clock
        oldest = None if limit is None else clock.version + run.args.staleness_if_paused - limit
        with run.phase_clock.phase("generation"), without_gradient_checkpointing(run.model):
            return self._generate(list(zip(prompts, prompt_ids, strict=True)), clock.version, oldest)

    def _generate(
        self, prompts: Sequence[tuple[dict[str, Any], list[int]]], version: int, oldest_version: int | None
    ) -> InjectedRollouts:
        """
        Add the prompts of a generation step, decode until every rank has enough complete groups, and return them.

        A prompt is its example in the dataset and its token ids. Groups with a token older than `oldest_version` are
        decoded to their end and returned; `None` is no limit. Each rank returns the same number of groups.
        """
        args, is_within_update = self._run.args, self._run.is_within_update
        earlier = self._before if is_within_update else []
        self._before = [*earlier, (version if is_within_update else None, self.pool.state_dict())]
        with raising_on_all_ranks():
            for inputs, prompt_ids in prompts:
                _check_row(inputs)
                self.pool.admit(inputs, prompt_ids)
        # Fewer while not enough groups are in progress: at first, and after a resume with other settings
        smallest = int(min(size for (size,) in self._gather([len(self.pool)])))
        wanted = min(args.groups_per_generation, smallest - args.groups_carried_over)

        waited, rounds = len(self.pool.overdue(oldest_version)), 0
        dummy = prompts[0][1][:1]  # as short as possible, to fit with any cap
        while self._decode_round(wanted, version, oldest_version, dummy):
            rounds += 1
        self._score_new(dummy)
        groups = self.pool.emit(wanted, oldest_version)
        self._metrics = self._measure(groups, waited, rounds)
        return inject(groups)

    def _decode_round(self, wanted: int, version: int, oldest_version: int | None, dummy: list[int]) -> bool:
        """Continue unfinished completions by a chunk; return `False`, on all ranks, if each has enough groups."""
        args, continuations = self._run.args, self.pool.unfinished()
        # One cap for all completions. A server rejects prompts that could exceed the model's context window, so no
        # completion may exceed `max_completion_length`.
        cap = min([args.partial_rollout_chunk_length, *(continuation.num_left for continuation in continuations)])
        ranks = self._gather([self.pool.has_enough(wanted, oldest_version), cap, len(continuations)])
        if all(has_enough for has_enough, _, _ in ranks):
            return False
        cap, most = int(min(cap for _, cap, _ in ranks)), int(max(number for _, _, number in ranks))
        # TRL's server mode splits the answer into equal parts, and all ranks call sharded models together: each rank
        # continues the same number of prompts.
        missing = most - len(continuations)
        prompts = [continuation.prompt_ids for continuation in continuations] + [dummy] * missing
        tokens, sampler_logps = self._continue(prompts, cap)
        kept = slice(len(continuations))
        sampler_logps = None if sampler_logps is None else sampler_logps[kept]
        self.pool.take(continuations, tokens[kept], version, cap, sampler_logps, args.use_sampler_logps)
        return True

    def _score_new(self, dummy: list[int]) -> None:
        """Score all tokens sampled in this generation step, including carried-over ones: the next policy differs."""
        rows = self.pool.unscored()
        most = int(max(count for (count,) in self._gather([len(rows)])))
        missing = most - len(rows)  # all ranks call sharded models together, with the same number of completions
        prompts = [group.prompt_ids for group, _ in rows] + [dummy] * missing
        completions = [completion.tokens for _, completion in rows] + [dummy[-1:]] * missing
        logps = self._score(prompts, completions) if most else []
        for (_, completion), values in zip(rows, logps, strict=False):  # the dummies come last and are ignored
            completion.logps += values[len(completion.logps) : len(completion.tokens)]

    def _measure(self, groups: Sequence[Group], waited: int, rounds: int) -> dict[str, float]:
        segments = [len(each.segments) for group in groups for each in group.completions]
        here = {
            "in_flight": sum(len(group.completions) for group in self.pool),  # including ended ones
            "parked_tokens": sum(len(each.tokens) for group in self.pool for each in group.completions),
            "segments": sum(segments),
            "rows": len(segments),
            "waited": waited,
            **self.pool.counts,
        }
        ranks = self._gather([*here.values(), max(segments)])
        total = dict(zip([*here, "longest"], map(sum, zip(*ranks, strict=True)), strict=True))
        trained_length, ended_length = (total[f"{name}_tokens"] / total[name] for name in ("emitted", "ended"))
        return {
            "partial/in_flight": total["in_flight"],
            "partial/parked_tokens": total["parked_tokens"],
            "partial/segments_mean": total["segments"] / total["rows"],
            "partial/segments_max": max(numbers[-1] for numbers in ranks),
            "partial/rounds": rounds,
            "partial/waited": total["waited"],
            "partial/trained_length_ratio": trained_length / ended_length,
        }

    def _continue(self, prompts: list[list[int]], cap: int) -> Any:
        """Return up to `cap` new tokens for each prompt, and their log-probabilities if the sampler reports them."""
        with token_cap(self._run, cap):
            return self._run._generate_single_turn(prompts, None, {}, num_generations=1)

    def _score(self, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
        return score_completions(self._run, prompts, completions)

    def _gather(self, numbers: list[float]) -> list[list[float]]:
        """Return the numbers of each rank."""
        accelerator = self._run.accelerator
        return accelerator.gather(torch.tensor([numbers], device=accelerator.device)).tolist()

    def check(self, batch, rollouts):
        missing = self._run.args.rows_per_generation - len(rollouts)
        return {**self._metrics, "partial/masked": missing * self._run.accelerator.num_processes}

    def save(self, folder, clock):
        """
        Write the pool into a checkpoint folder.

        Unless all updates on the latest generation step are done, a resumed run regenerates this step and earlier ones
        that the current update began with. The pool is saved as before their prompts were added.
        """
        # A save may come before the last optimizer step, and within a generation
        micro_batches = clock.micro_batch - self._begun.micro_batch
        updates = math.ceil(micro_batches / self._run.args.gradient_accumulation_steps)
        if clock.place == 0 and micro_batches > 0 and clock.version - self._begun.version >= updates:
            state = self.pool.state_dict()
        else:
            state = next(state for version, state in reversed(self._before) if version != clock.version)
        FILES.write(folder, self.pool.rank, self.pool.num_ranks, state)

    def load(self, folder):
        """Restore the pool from a checkpoint folder. Without one there, it starts empty, with a warning."""
        if not FILES.load(folder, self.pool.rank, self.pool.num_ranks, self.pool.load_state_dict, deal_out):
            warnings.warn(f"The checkpoint {folder} has no unfinished rollouts: starting without any.")
        begun = [each for group in self.pool for each in group.completions if each.tokens]
        reports_logps = self._run.use_vllm
        if any(bool(each.sampler_logps) != reports_logps for each in begun):
            raise InputError(
                f"`use_vllm` is {reports_logps}, but the unfinished completions of the checkpoint {folder} were begun "
                f"{'without' if reports_logps else 'with'} vLLM: set it to {not reports_logps}."
            )
        self._before = [(None, self.pool.state_dict())]


class NoPartialRollouts(Part):
    """A run without partial rollouts, which must not resume from a checkpoint that has unfinished groups."""

    def load(self, folder):
        groups = sum(len(FILES.read(path)["groups"]) for path in FILES.find(folder))
        if groups:
            raise InputError(
                f"`partial_rollout_oversampling` is 1.0, but the checkpoint {folder} has {groups} unfinished groups, "
                "which would be lost: set it to its value in the run that saved the checkpoint."
            )


def inject(groups: Iterable[Group]) -> InjectedRollouts:
    """Return the completions of one or more complete groups."""
    samples = [(group, completion) for group in groups for completion in group.completions]
    reports_logps = bool(samples[0][1].sampler_logps)
    return InjectedRollouts(
        [copy.deepcopy(group.inputs) for group, _ in samples],
        [list(group.prompt_ids) for group, _ in samples],
        [list(each.tokens) for _, each in samples],
        behavior_logps=[each.logps for _, each in samples],
        versions=[each.versions for _, each in samples],
        sampler_logps=[list(each.sampler_logps) for _, each in samples] if reports_logps else None,
    )


@contextmanager
def token_cap(trainer: Any, num_tokens: int) -> Iterator[None]:
    """Limit the trainer's sampler to `num_tokens` per call inside this context."""
    if trainer.use_vllm:
        name, settings = "max_completion_length", [vars(trainer.vllm_generation)]
    else:  # transformers uses the first, and TRL copies the second into the model's generation config
        name, settings = "max_new_tokens", [vars(trainer.generation_config), trainer.generation_kwargs]
    before = [values[name] for values in settings]
    for values in settings:
        values[name] = num_tokens
    try:
        yield
    finally:
        for values, value in zip(settings, before, strict=True):
            values[name] = value


def sampler_window(trainer: Any) -> int | None:
    """Return the largest length of a prompt with its completion in vLLM, the same on all ranks; else `None`."""
    if not trainer.use_vllm:
        return None
    if trainer.vllm_mode == "colocate":
        return trainer.vllm_generation.llm.llm_engine.model_config.max_model_len
    return on_main_process(
        lambda: trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["max_model_len"]
    )


def _check_row(row: dict[str, Any]) -> None:
    """Raise an `InputError` that names the column if an example cannot be stored in a checkpoint as JSON."""
    for name, value in row.items():
        try:
            to_json(value)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"The column `{name}` has a {type(value).__name__}, which a checkpoint of partial rollouts cannot "
                f"store ({error}): convert it to strings, numbers, lists and dictionaries (without `with_format`), "
                "remove it, or set `partial_rollout_oversampling` to 1.0."
            ) from error
