"""Trainer that samples completions for an evaluation, with its own generation backend and reward functions."""

import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from trl.data_utils import prepare_multimodal_messages

from ..bapo_trainer import BAPOTrainer
from ..upstream.forward_passes import forked_random_state, without_gradient_checkpointing
from .answers import completion_text


class Completion(NamedTuple):
    text: str  # without special tokens
    num_tokens: int  # including the end token
    is_cut_off: bool  # reached the maximum length
    rewards: list[float | None]  # one per reward function; `None` if the function returned none


class EvaluatedTrainer(BAPOTrainer):
    """[`BAPOTrainer`] that can also sample and score completions of a dataset, for [`evaluate`]."""

    _row_of: Callable[[int], Mapping[str, Any]] | None = None  # set during `sample_completions`, which logs nothing
    _sampled: dict[int, Completion] = {}  # completions by index, on the main process

    def prompt_of(self, row: Mapping[str, Any]) -> Any:
        """Return the prompt of a row, including its images if the model takes images, as TRL does."""
        images = row.get("images") or ([row["image"]] if row.get("image") is not None else [])
        if not (self._is_vlm and images and isinstance(row["prompt"], list)):
            return row["prompt"]
        return prepare_multimodal_messages(row["prompt"], images=images)

    def sample_completions(self, rows: Sequence[Mapping[str, Any]], num_completions: int = 1) -> list[Completion]:
        """
        Sample and score completions for each row, `per_device_eval_batch_size` at a time on each process.

        A row has a `prompt` and the columns that the reward functions need. Rows are read batch by batch. The main
        process returns all completions in the order of the rows, the other processes an empty list. Sampling is seeded
        with the trainer's seed and does not change the random states. Call this method on all processes.
        """
        places: Any = range(len(rows) * num_completions)  # indices: accelerate prefetches a batch, rows can be large
        loader: DataLoader = DataLoader(places, batch_size=self.args.eval_batch_size, collate_fn=list)
        # Processes that share a colocated engine must sample the same tokens
        sharing = self.args.vllm_tensor_parallel_size if self.use_vllm and self.vllm_mode == "colocate" else 1
        own_seed = zlib.crc32(f"{self.args.seed} {self.accelerator.process_index // sharing}".encode())
        num_generations, numpy_state = self.num_generations_eval, np.random.get_state()
        self._row_of, self._sampled = lambda place: rows[place // num_completions], {}
        self.num_generations_eval = 1  # batches are not made of groups
        try:
            with forked_random_state(self.accelerator.device, self.model):
                torch.manual_seed(own_seed)
                np.random.seed(own_seed)  # a colocated vLLM draws the seeds of its requests from it
                self.evaluation_loop(self.accelerator.prepare_data_loader(loader), "Evaluation", True)
            return [completion for _, completion in sorted(self._sampled.items())]
        finally:
            self._row_of, self._sampled = None, {}
            self.num_generations_eval = num_generations
            np.random.set_state(numpy_state)
            self._metrics["eval"].clear()

    def _log_groups(self, rewards_per_func):
        if self._row_of is not None:
            return
        super()._log_groups(rewards_per_func)
        count = self.num_generations_eval
        first = rewards_per_func[:, 0].view(-1, count)
        right = first[~first.isnan().all(dim=1)].ge(1).float()  # excludes prompts without a first reward
        for average, best in zip(right.mean(dim=1).tolist(), right.amax(dim=1).tolist(), strict=True):
            self._log_values({f"avg@{count}": average, f"pass@{count}": best}, "eval")  # TRL logs their mean

    def _log_completion_extra(self, *args, **kwargs):
        if self._row_of is None:  # TRL would add it to the next generation's
            super()._log_completion_extra(*args, **kwargs)

    def _log_metric(self, *args, **kwargs):
        if self._row_of is None:
            super()._log_metric(*args, **kwargs)

    def prediction_step(self, model, inputs, *args, **kwargs):
        if self._row_of is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        rows = [copy.deepcopy(self._row_of(place)) for place in inputs]  # a reward may change what it gets
        prompts = [row["prompt"] for row in rows]
        with without_gradient_checkpointing(self.model):
            _, completion_ids, _, completions, *_ = self._generate([self.prompt_of(row) for row in rows])
        rewards = self._calculate_rewards(rows, prompts, completions, completion_ids).tolist()  # of all processes
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        sampled = [
            (place, completion_text(completion), len(ids), ids[-1] not in ends)
            for place, completion, ids in zip(inputs, completions, completion_ids, strict=True)
        ]
        for (place, text, length, is_cut_off), given in zip(gather_object(sampled), rewards, strict=True):
            if self.accelerator.is_main_process:  # the last batch may repeat samples as filler
                kept = [None if reward != reward else reward for reward in given]
                self._sampled.setdefault(place, Completion(text, length, is_cut_off, kept))
        return None, None, None
