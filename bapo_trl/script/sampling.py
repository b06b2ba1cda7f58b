"""Completions of given rows, sampled with whatever the trainer samples with, and scored by its reward functions."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader

from ..forward_passes import forked_random_state, in_eval_mode, without_gradient_checkpointing
from ..tasks.answers import completion_text
from ..trainer_mixin import TrainerMixin


@dataclass(frozen=True)
class Completion:
    """
    A completion as it was sampled and scored.

    Attributes:
        position (`int`):
            Its row's place among the rows that were given.
        text (`str`):
            What the model wrote, without special tokens.
        rewards (`list[float | None]`):
            Rewards by function; `None` where a function gave none.
        completion (`str` or `list[dict]`):
            The same as reward functions get it: text, or messages.
        token_ids (`list[int]`):
            Its tokens, the end token included.
        is_cut_off (`bool`):
            Whether it ended for its length.
    """

    position: int
    text: str
    rewards: list[float | None]
    completion: str | list[dict[str, Any]]
    token_ids: list[int]
    is_cut_off: bool


class SamplesCompletions(TrainerMixin):
    """Samples one completion of each of given rows. To be put before the trainer among the bases."""

    _take: Callable[[list[Completion]], None] | None = None

    def sample_completions(
        self, rows: Sequence[Mapping[str, Any]], take: Callable[[list[Completion]], None], seed: str = ""
    ) -> None:
        """
        Sample and score a completion of each row, `per_device_eval_batch_size` rows at a time on each process.

        All processes make this call together. The random state of torch is afterwards what it was before.

        Args:
            rows (sequence of mappings):
                Rows with a `prompt`, and what the reward functions read.
            take (`Callable[[list[Completion]], None]`):
                Gets the completions of each batch, of all processes, as soon as they are scored. It is called on the
                main process alone. To fill the last batch, some may come twice.
            seed (`str`, *optional*, defaults to `""`):
                What the samples are drawn from, besides the trainer's `seed`.
        """
        placed: Any = [{"position": position, "row": row} for position, row in enumerate(rows)]
        loader: DataLoader = DataLoader(
            placed,
            batch_size=self.args.eval_batch_size,
            collate_fn=list,
        )
        own_seed = f"{self.args.seed} {self.accelerator.process_index} {seed}"
        with self._outside_of_training(take), forked_random_state(self.accelerator.device):
            torch.manual_seed(zlib.crc32(own_seed.encode()))
            self.evaluation_loop(self.accelerator.prepare_data_loader(loader), "Evaluation", True)

    def score_completions(
        self,
        rows: Sequence[Mapping[str, Any]],
        completions: Sequence[str | list[dict[str, Any]]],
        token_ids: Sequence[list[int]],
    ) -> list[list[float | None]]:
        """
        Score completions that were sampled before. All processes make this call together.

        Args:
            rows (sequence of mappings):
                Row of each completion.
            completions, token_ids (sequences):
                As [`Completion`] has them.

        Returns:
            `list`: Rewards of each by function; `None` where a function gave none.
        """
        here, size = self.accelerator.process_index, self.args.eval_batch_size
        rewards: list[list[float]] = []
        with self._outside_of_training(lambda sampled: None), in_eval_mode(self.model), torch.no_grad():
            for start in range(0, len(rows), size * self.accelerator.num_processes):
                # The last batch is filled with its last row
                places = [min(start + here * size + place, len(rows) - 1) for place in range(size)]
                rewards += self._calculate_rewards(
                    [rows[i] for i in places],
                    [rows[i]["prompt"] for i in places],
                    [completions[i] for i in places],
                    [token_ids[i] for i in places],
                ).tolist()
        return [_without_nan(given) for given in rewards[: len(rows)]]

    @contextmanager
    def _outside_of_training(self, take: Callable[[list[Completion]], None]) -> Iterator[None]:
        num_generations = self.num_generations_eval
        self._take = take
        self.num_generations_eval = 1  # the rows of a batch are no groups
        try:
            yield
        finally:
            self._take = None
            self.num_generations_eval = num_generations
            self._metrics["eval"].clear()

    def _log_completion_extra(self, *args):
        if self._take is None:  # TRL would add it to the next generation's
            super()._log_completion_extra(*args)

    def _log_metric(self, *args):
        if self._take is None:
            super()._log_metric(*args)

    def prediction_step(self, model, inputs, *args, **kwargs):
        if self._take is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        rows = [part["row"] for part in inputs]
        prompts = [row["prompt"] for row in rows]
        with without_gradient_checkpointing(self.model):
            _, completion_ids, _, completions, *_ = self._generate(prompts)
        rewards = self._calculate_rewards(rows, prompts, completions, completion_ids).tolist()  # of all processes
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        sampled = gather_object(
            [
                (part["position"], completion, list(map(int, ids)), ids[-1] not in ends)
                for part, completion, ids in zip(inputs, completions, completion_ids, strict=True)
            ]
        )
        if self.accelerator.is_main_process:
            self._take(
                [
                    Completion(position, completion_text(completion), _without_nan(given), completion, *end)
                    for (position, completion, *end), given in zip(sampled, rewards, strict=True)
                ]
            )
        return None, None, None


def _without_nan(rewards: list[float]) -> list[float | None]:
    return [None if reward != reward else reward for reward in rewards]
