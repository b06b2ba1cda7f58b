"""Completions of given rows, sampled with whatever the trainer samples with, and scored by its reward functions."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader

from ..forward_passes import forked_random_state, without_gradient_checkpointing
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
        num_tokens (`int`):
            Tokens, the end token included.
        is_cut_off (`bool`):
            Whether it ended for its length.
    """

    position: int
    text: str
    rewards: list[float | None]
    num_tokens: int
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
        num_generations = self.num_generations_eval
        self._take = take
        self.num_generations_eval = 1  # the rows of a batch are no groups
        try:
            with forked_random_state(self.accelerator.device):
                torch.manual_seed(zlib.crc32(own_seed.encode()))
                self.evaluation_loop(self.accelerator.prepare_data_loader(loader), "Evaluation", True)
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
                (part["position"], completion_text(completion), len(ids), ids[-1] not in ends)
                for part, completion, ids in zip(inputs, completions, completion_ids, strict=True)
            ]
        )
        if self.accelerator.is_main_process:
            self._take(
                [
                    Completion(position, text, [None if reward != reward else reward for reward in given], *end)
                    for (position, text, *end), given in zip(sampled, rewards, strict=True)
                ]
            )
        return None, None, None
