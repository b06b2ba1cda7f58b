"""Trainer that samples completions for an evaluation, with its own generation backend and reward functions."""

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.data_utils import prepare_multimodal_messages

from ..bapo_trainer import BAPOTrainer
from ..checkpoints.atomic import AtomicCheckpoints
from ..checkpoints.rank_errors import from_main_process
from ..parts import Part
from ..phase_clock import TimedTrainer
from ..upstream.forward_passes import forked_random_state, without_gradient_checkpointing
from ..vllm_server.mismatch import trl_sampler_for
from .answers import completion_text


SOURCE_COLUMN = "data_source"
Record = dict[str, Any]
"""A completion as a line of the file has it: prompt, text, messages of a chat, token ids, and rewards once scored."""


class SamplesCompletions(GRPOTrainer):
    """Mixin for a trainer that can also sample and score completions of a dataset, for [`evaluate`]."""

    args: Any  # a GRPOConfig
    model: PreTrainedModel

    _row_of: Callable[[int], Mapping[str, Any]] | None = None  # set during `sample_completions`, which logs nothing
    _kept: Mapping[int, Record] = {}  # of the completions that are only scored
    _save_batch: Callable[[dict[int, Record]], None] | None = None
    _scored: dict[int, Record] = {}  # by index, on the main process

    def prompt_of(self, row: Mapping[str, Any]) -> Any:
        """Return the prompt of a row, including its images if the model takes images, as TRL does."""
        images = row.get("images") or ([row["image"]] if row.get("image") is not None else [])
        if not (self._is_vlm and images and isinstance(row["prompt"], list)):
            return row["prompt"]
        return prepare_multimodal_messages(row["prompt"], images=images)

    def sample_completions(
        self,
        rows: Sequence[Mapping[str, Any]],
        num_completions: int = 1,
        kept: Mapping[int, Record] | None = None,
        save: Callable[[dict[int, Record]], None] | None = None,
    ) -> list[Record]:
        """
        Sample and score completions for each row, `per_device_eval_batch_size` at a time on each process.

        A row has a `prompt` and the columns that the reward functions need. Rows are read batch by batch. The main
        process returns all completions in the order of the rows, the other processes an empty list. Sampling is seeded
        with the trainer's seed and the batch, and does not change the random states. Call this method on all
        processes.

        The completions that are `kept` from an earlier call, by index, are only scored. The main process calls `save`
        with the completions of each batch, by index, before they are scored.
        """
        kept, every = kept or {}, range(len(rows) * num_completions)
        num_generations, numpy_state = self.num_generations_eval, np.random.get_state()
        self._row_of, self._scored = lambda place: rows[place // num_completions], {}
        self._save_batch = save and from_main_process(save)
        self.num_generations_eval = 1  # batches are not made of groups
        try:
            with forked_random_state(self.accelerator.device, self.model):
                for self._kept in (kept, {}) if kept else ({},):
                    # Indices: accelerate prefetches a batch, rows can be large
                    places: Any = [place for place in every if (place in kept) == bool(self._kept)]
                    if places:
                        loader: DataLoader = DataLoader(places, self.args.eval_batch_size, collate_fn=list)
                        self.evaluation_loop(self.accelerator.prepare_data_loader(loader), "Evaluation", True)
            return [record for _, record in sorted(self._scored.items())]
        finally:
            self._row_of, self._kept, self._save_batch, self._scored = None, {}, None, {}
            self.num_generations_eval = num_generations
            np.random.set_state(numpy_state)
            for logged in (self._metrics["eval"], self._pending_metrics, self._pending_extra_logs):
                logged.clear()  # TRL would add it to the next generation's

    def _log_accuracies(self, rewards_per_func: torch.Tensor) -> None:
        """Log avg@k and pass@k of the groups of an evaluation during training."""
        if self._row_of is not None:
            return
        count = self.num_generations_eval
        first = rewards_per_func[:, 0].view(-1, count)
        right = first[~first.isnan().all(dim=1)].ge(1).float()  # excludes prompts without a first reward
        for average, best in zip(right.mean(dim=1).tolist(), right.amax(dim=1).tolist(), strict=True):
            self._metrics["eval"][f"avg@{count}"].append(average)  # TRL logs their mean
            self._metrics["eval"][f"pass@{count}"].append(best)

    def prediction_step(self, model, inputs, *args, **kwargs):
        if self._row_of is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        rows = [copy.deepcopy(self._row_of(place)) for place in inputs]  # a reward may change what it gets
        found = [self._kept[place] for place in inputs] if self._kept else self._sample(inputs, rows)
        of_all = gather_object(list(zip(inputs, found, strict=True)))  # the last batch may repeat samples as filler
        if self._save_batch is not None and not self._kept:
            self._save_batch({place: each for place, each in of_all if place not in self._scored})
        completions = copy.deepcopy([each.get("messages", each["completion"]) for each in found])
        ids = [list(each["completion_ids"]) for each in found]
        rewards = self._calculate_rewards(rows, [row["prompt"] for row in rows], completions, ids).tolist()  # of all
        for (place, record), values in zip(of_all, rewards, strict=True):
            if self.accelerator.is_main_process:
                numbers = [None if value != value else value for value in values]
                is_right = numbers[0] is not None and numbers[0] >= 1
                named = dict(zip(self.reward_func_names, numbers, strict=True))
                self._scored.setdefault(place, {**record, "rewards": named, "correct": is_right})
        return None, None, None

    def _sample(self, places: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> list[Record]:
        """Return a completion for each row, the same whether or not the batches before are sampled in this call."""
        # Processes that share a colocated engine must sample the same tokens
        sharing = self.args.vllm_tensor_parallel_size if self.use_vllm and self.vllm_mode == "colocate" else 1
        batch = max(gather_object(list(places)))
        seed = zlib.crc32(f"{self.args.seed} {self.accelerator.process_index // sharing} {batch}".encode())
        torch.manual_seed(seed)
        np.random.seed(seed)  # a colocated vLLM draws the seeds of its requests from it
        with without_gradient_checkpointing(self.model):
            _, completion_ids, _, completions, *_ = self._generate([self.prompt_of(row) for row in rows])
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        return [
            {
                **({} if row.get(SOURCE_COLUMN) is None else {SOURCE_COLUMN: row[SOURCE_COLUMN]}),
                "prompt": row["prompt"],
                "completion": completion_text(completion),
                **({} if isinstance(completion, str) else {"messages": completion}),
                "tokens": len(ids),
                "cut_off": ids[-1] not in ends,
                "completion_ids": list(ids),
            }
            for row, completion, ids in zip(rows, completions, completion_ids, strict=True)
        ]


class Accuracies(Part):
    """Accuracies of an evaluation during training."""

    def reset(self, run):
        self._run = run

    def take_rewards(self, rewards_per_func, is_evaluation):
        if is_evaluation:
            self._run._log_accuracies(rewards_per_func)


class EvaluatedTrainer(SamplesCompletions, BAPOTrainer):
    """[`BAPOTrainer`] with what an evaluation needs."""

    def _make_parts(self):
        return [*super()._make_parts(), Accuracies()]


class EvaluatedGRPOTrainer(SamplesCompletions, TimedTrainer, AtomicCheckpoints):
    """TRL's [`~trl.GRPOTrainer`] with what an evaluation needs, the `time/*` metrics, and atomic checkpoints."""

    def __init__(self, model, reward_funcs, args, *others, **kwargs):
        with trl_sampler_for(args):
            super().__init__(model, reward_funcs, args, *others, **kwargs)
        parts = {"_prepare_inputs": "other", "_generate": "generation", "_calculate_rewards": "rewards"}
        for name, phase in parts.items():
            vars(self)[name] = self.phase_clock.timed(getattr(self, name), phase)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        with self.phase_clock.phase("training" if torch.is_grad_enabled() else "scoring"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        rewards_per_func = super()._calculate_rewards(*args, **kwargs)
        if not self.model.training:
            self._log_accuracies(rewards_per_func)
        return rewards_per_func
