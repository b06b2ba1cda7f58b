"""Completions of given rows, sampled with whatever the trainer samples with, and scored by its reward functions."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.utils.data import DataLoader
from trl.data_utils import prepare_multimodal_messages

from ..bapo_trainer import BAPOTrainer
from ..checkpoints.rank_errors import raising_on_all_ranks
from ..upstream.forward_passes import forked_random_state, without_gradient_checkpointing
from .answers import completion_text


@dataclass(frozen=True)
class Completion:
    """A completion as it was sampled and scored."""

    position: int  # of its row, among those that were given
    content: Any  # text, or messages to a chat, without special tokens
    token_ids: list[int]  # with the end token
    is_cut_off: bool  # for its length
    rewards: list[float | None] = field(default_factory=list)  # by function; `None` where it gave none

    @property
    def text(self) -> str:
        """What the model wrote, as text."""
        return completion_text(self.content)


class EvaluatedTrainer(BAPOTrainer):
    """[`BAPOTrainer`] that also samples one completion of each of given rows, and scores those that there are."""

    _is_apart = False  # from the trainer's own evaluation, in what it logs
    _take: Callable[[list[Completion]], None] | None = None
    _given: Sequence[Mapping[str, Any]] = ()  # rows to sample completions of

    def prompt_of(self, row: Mapping[str, Any]) -> Any:
        """Return the prompt of a row, for a model of images with those of `images` or `image` in it, as TRL does."""
        images = row.get("images") or ([row["image"]] if row.get("image") is not None else [])
        if not (self._is_vlm and images and isinstance(row["prompt"], list)):
            return row["prompt"]
        return prepare_multimodal_messages(row["prompt"], images=images)

    def sample_completions(
        self, rows: Sequence[Mapping[str, Any]], take: Callable[[list[Completion]], None], seed: str = ""
    ) -> None:
        """
        Sample and score a completion of each row, `per_device_eval_batch_size` rows at a time on each process.

        A row has a `prompt` and what the reward functions read, and is asked for when its batch is sampled. `take`
        gets the completions of each batch, of all processes, as soon as they are scored, on the main process alone; to
        fill the last batch, some may come twice. The samples are drawn from the trainer's seed and this one. All
        processes make this call together. The random states are afterwards what they were before.
        """
        positions: Any = range(len(rows))  # accelerate reads a batch ahead: of these, not of rows with images
        loader: DataLoader = DataLoader(positions, batch_size=self.args.eval_batch_size, collate_fn=list)
        # The processes of one colocated engine sample each token together
        sharing = self.args.vllm_tensor_parallel_size if self.use_vllm and self.vllm_mode == "colocate" else 1
        own_seed = f"{self.args.seed} {self.accelerator.process_index // sharing} {seed}"
        self._take, self._given = take, rows
        try:
            with self._apart():
                torch.manual_seed(zlib.crc32(own_seed.encode()))
                np.random.seed(zlib.crc32(own_seed.encode()))  # from which a colocated vLLM draws its requests' seeds
                self.evaluation_loop(self.accelerator.prepare_data_loader(loader), "Evaluation", True)
        finally:
            self._take, self._given = None, ()

    def score_completions(
        self, rows: Sequence[Mapping[str, Any]], completions: Sequence[Completion]
    ) -> list[Completion]:
        """
        Score completions that were sampled before, in batches as large as those of [`sample_completions`].

        All processes make this call together, with the same rows; the main one alone has the completions. All get them
        with their rewards. The random state of torch is afterwards what it was before.
        """
        (count,) = broadcast_object_list([len(completions)])
        num_processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        size = self.args.eval_batch_size * num_processes
        scored: list[Completion] = []
        with self._apart():
            self.model.eval()
            for start in range(0, count, size):
                batch: list[Completion]
                (batch,) = broadcast_object_list([completions[start : start + size]])
                share = math.ceil(len(batch) / num_processes)  # the last batch is filled up, for equal shares
                own = [batch[place % len(batch)] for place in range(rank * share, (rank + 1) * share)]
                own_rows = [rows[completion.position] for completion in own]
                rewards = self._rewards_of_all(
                    own_rows, [each.content for each in own], [each.token_ids for each in own]
                )
                scored += [replace(each, rewards=given) for each, given in zip(batch, rewards, strict=False)]
        return scored

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Keep the random state and the logs of the trainer as they are."""
        num_generations, numpy_state = self.num_generations_eval, np.random.get_state()
        self._is_apart = True
        self.num_generations_eval = 1  # the rows of a batch are no groups
        try:
            with forked_random_state(self.accelerator.device, self.model):
                yield
        finally:
            self._is_apart = False
            self.num_generations_eval = num_generations
            np.random.set_state(numpy_state)
            self._metrics["eval"].clear()

    def _rewards_of_all(
        self, rows: list[Mapping[str, Any]], completions: list[Any], completion_ids: list[list[int]]
    ) -> list[list[float | None]]:
        """Return the rewards of all processes' completions, in the order of the processes."""
        prompts = [row["prompt"] for row in rows]
        rewards = self._calculate_rewards(rows, prompts, completions, completion_ids).tolist()
        return [[None if reward != reward else reward for reward in given] for given in rewards]

    def _log_groups(self, rewards_per_func):
        if self._is_apart:
            return
        super()._log_groups(rewards_per_func)
        count = self.num_generations_eval
        first = rewards_per_func[:, 0].view(-1, count)
        right = first[~first.isnan().all(dim=1)].ge(1).float()  # prompts without a first reward do not count
        for average, best in zip(right.mean(dim=1).tolist(), right.amax(dim=1).tolist(), strict=True):
            self._log_values({f"avg@{count}": average, f"pass@{count}": best}, "eval")  # TRL logs their mean

    def _log_completion_extra(self, *args, **kwargs):
        if not self._is_apart:  # TRL would add it to the next generation's
            super()._log_completion_extra(*args, **kwargs)

    def _log_metric(self, *args, **kwargs):
        if not self._is_apart:
            super()._log_metric(*args, **kwargs)

    def prediction_step(self, model, inputs, *args, **kwargs):
        if self._take is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        rows = [self._given[position] for position in inputs]
        with without_gradient_checkpointing(self.model):
            _, completion_ids, _, completions, *_ = self._generate([self.prompt_of(row) for row in rows])
        rewards = self._rewards_of_all(rows, completions, completion_ids)
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        sampled = gather_object(
            [
                Completion(position, completion, list(ids), ids[-1] not in ends)
                for position, completion, ids in zip(inputs, completions, completion_ids, strict=True)
            ]
        )
        with raising_on_all_ranks():
            if self.accelerator.is_main_process:
                self._take([replace(each, rewards=given) for each, given in zip(sampled, rewards, strict=True)])
        return None, None, None
