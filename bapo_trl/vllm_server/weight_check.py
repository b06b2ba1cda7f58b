"""Check that vLLM samples from the trainer's weights."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from accelerate.utils import gather_object
from torch.nn.functional import cross_entropy

from ..batch.sampler import sampled_sequences
from ..batch.scoring import score_completions
from ..checkpoints.rank_errors import on_main_process, raising_on_all_ranks
from ..upstream.forward_passes import in_eval_mode
from .engines import ColocatedEngine, Engine, ServerEngine
from .weight_readings import Answer, Finding, WeightHistory, WeightLimits


NUM_SAMPLES, MAX_TOKENS = 8, 512  # of the sequence
MAX_PROMPT = 16  # tokens of the prompt before a completion
NUM_PASSED, INTERVAL = 10, 10  # checks in a row that passed, and then transfers from one check to the next

SERVER_METRICS = ("sampling/server_followed",)
"""Metric of the generation steps in which vLLM's weights were checked, defined in docs/metrics.md."""


class StaleServerError(RuntimeError):
    """Error for a vLLM engine that does not sample from the trainer's weights."""


@dataclass(frozen=True)
class WeightCheckOptions:
    """Arguments of [`check_server_weights`]."""

    limits: WeightLimits
    on_failure: Literal["raise", "warn"] = "raise"


class Sequence(NamedTuple):
    """Tokens whose log-probabilities are compared."""

    ids: list[int]
    are_compared: list[bool]  # not those of prompts, which may be unlikely under the policy and round more


def choose_sequence(batch: Mapping[str, torch.Tensor], length: int) -> Sequence | None:
    """
    Return the beginnings of some completions of TRL's batch, each after the end of its prompt, concatenated.

    At most `length` tokens; `None` without a completion, as where all are truncated and masked.
    """
    ids: list[int] = []
    written: list[bool] = []
    for sample, is_written in sampled_sequences(batch, NUM_SAMPLES):
        begin = max(0, len(sample) - int(is_written.sum()) - MAX_PROMPT)
        part = slice(begin, begin + MAX_TOKENS // NUM_SAMPLES)
        ids += sample[part].tolist()
        written += is_written[part].tolist()
    return Sequence(ids[:length], written[:length]) if any(written[1:length]) else None


class WeightCheck:
    """
    Compare vLLM's engines with the trainer. All ranks make the same calls.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.
        engine ([`Engine`], *optional*):
            Engine that this rank asks. `None` on the ranks beside the main process if there is one server.
        options ([`WeightCheckOptions`]):
            What is checked.
        compute_logits (`Callable`):
            Function that returns the logits of token ids, `(1, N)`, by a forward pass of the model: `(1, N, V)`.
    """

    def __init__(
        self,
        accelerator: Any,
        engine: Engine | None,
        options: WeightCheckOptions,
        compute_logits: Callable[[Any, torch.Tensor], torch.Tensor],
    ):
        self._accelerator, self._engine, self._compute_logits = accelerator, engine, compute_logits
        self._options, self._history = options, WeightHistory(options.limits)
        self._sequence: Sequence | None = None  # the same on all ranks
        self._has_asked = False  # since the latest comparison; the same on all ranks
        self._answer: Answer | None = None  # of this rank's engine, until it is compared
        self._warns = True  # of the next failure; the same on all ranks
        # Checks in a row that passed, and transfers since the latest check; the same on all ranks
        self._num_passed = self._num_unchecked = 0

    def is_due(self) -> bool:
        """
        Return whether to ask the engine after a transfer. Call this once a transfer.

        It is due after each transfer until [`NUM_PASSED`] checks in a row found nothing suspicious, then after each
        [`INTERVAL`]-th one.
        """
        self._num_unchecked += 1
        return self._num_passed < NUM_PASSED or self._num_unchecked >= INTERVAL

    def ask(self, choose: Callable[[int], Sequence | None]) -> None:
        """
        Ask the engine after a transfer. It must be idle.

        The first time, `choose` returns the sequence, with at most the given number of tokens, in the main process.
        """
        if self._sequence is None:
            self._sequence = on_main_process(lambda: self._choose(choose))
        if self._sequence is not None:
            in_process = self._engine is not None and self._engine.is_in_process  # makes collectives
            with raising_on_all_ranks(at_once=in_process):
                self._answer = None if self._engine is None else self._engine.answer(self._sequence.ids)
            self._has_asked, self._num_unchecked = True, 0

    def __call__(self, model: torch.nn.Module) -> dict[str, float]:
        """
        Compare the engines with the trainer, if they were asked; return the metrics.

        The metrics are empty while the changes are too small to decide, or if no engine answered.

        Raises:
            StaleServerError: If an engine does not have the trainer's weights, unless `on_failure` is `"warn"`.
        """
        if not self._has_asked:
            return {}
        answer, self._answer, self._has_asked = self._answer, None, False
        trainer = self._ask_trainer(model)  # on all ranks: each may hold a part of the weights
        finding = None if answer is None else self._compare(trainer, answer)
        found = [each for each in gather_object([finding]) if each is not None]
        fault = next((each.fault for each in found if each.fault), None)
        if any(each.fault or each.is_suspect for each in found):
            self._num_passed = 0
        elif found:
            self._num_passed += 1
        if fault is not None:
            self._report(fault)
        elif found:
            self._warns = True
        shares = [each.share for each in found if not math.isnan(each.share)]
        return {"sampling/server_followed": min(shares)} if shares else {}

    def _choose(self, choose: Callable[[int], Sequence | None]) -> Sequence | None:
        longest = self._engine.max_length() if self._engine is not None else None
        return None if longest is None else choose(min(MAX_TOKENS, longest - 1))  # vLLM must generate one token more

    def _compare(self, trainer: torch.Tensor, answer: Answer) -> Finding:
        compared = torch.tensor(self._sequence.are_compared[1:])
        return self._history.compare(trainer[compared], answer._replace(logps=answer.logps[compared]))

    def _report(self, fault: str) -> None:
        message = (
            f"vLLM {fault}. Check vLLM's log for an error of the weight transfer, and restart a server with the model "
            "that is trained. To continue with a warning: `check_server_weights(trainer, on_failure='warn')`."
        )
        if self._options.on_failure == "raise":
            raise StaleServerError(message)
        if self._warns and self._accelerator.is_main_process:
            warnings.warn(message, stacklevel=2)
        self._warns = False

    @torch.no_grad()
    def _ask_trainer(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the log-probabilities of all tokens but the first, at temperature 1."""
        ids = torch.tensor([self._sequence.ids], device=self._accelerator.device)
        with in_eval_mode(model), self._accelerator.autocast():
            logits = self._compute_logits(model, ids)
        return -cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none").cpu().double()


def make_check(trainer: Any, options: WeightCheckOptions) -> WeightCheck:
    """Return a check of the engine that a trainer samples from through TRL's `VLLMGeneration`."""
    engine: Engine | None = None
    generation = trainer.vllm_generation
    if generation.mode == "colocate":
        engine = ColocatedEngine(generation)
    elif trainer.accelerator.is_main_process:
        client = generation.vllm_client
        engine = ServerEngine(
            lambda path, body: client._post(f"{client.base_url}{path}", json=body),
            lambda: client.model,
            client.get_server_info,
        )

    def compute_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
        # After two forward passes in a row that call the head's module, DeepSpeed prefetches its weight, which makes
        # TRL's fused head fail. A forward pass by TRL between them prevents the prefetch
        if trainer.is_deepspeed_enabled:
            first, *rest = ids[0].tolist()
            score_completions(trainer, [[first]], [rest])
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits

    return WeightCheck(trainer.accelerator, engine, options, compute_logits)
