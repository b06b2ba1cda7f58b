"""Whether a vLLM server has taken the trainer's latest weights.

At every generation, after the weights were sent, server and trainer give the log-probabilities of one fixed sequence
of tokens. What tells is how far both moved, not how far they are apart: a server with the new weights moved with the
trainer, one with the old weights stands still, and what the two arithmetics differ by drops out.

Invariant: a reading is replaced, as the one that moves are counted from, only by what shows that the server took new
weights. Steps too small to tell add up until they are not.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from ..batch.sampler import sampled_sequences
from ..checkpoints.rank_errors import on_main_process
from ..upstream.forward_passes import in_eval_mode
from ..upstream.trl_compat import VLLMClient, uses_vllm_server


NUM_SAMPLES, MAX_TOKENS = 8, 512  # of the sequence, which is made of the ends of some samples
NUM_REPEATS = 3  # exact, in a row, while the trainer moves, after which a server is taken for a stale one
ROUNDING = 1e-6  # nats of float32; that of lower precision shows in the difference of server and trainer

SERVER_METRICS = ("sampling/server_followed",)
"""Metric of a generation over a server, defined in docs/metrics.md."""


class Reading(NamedTuple):
    """Log-probabilities of the same `N` tokens at one time, each `(N,)` in float64 on the CPU."""

    trainer: torch.Tensor
    server: torch.Tensor

    @property
    def rounding(self) -> torch.Tensor:
        """What arithmetic does to each token, `(N,)` in nats: the difference of the two, with the same weights."""
        return (self.server - self.trainer).abs().clamp(min=ROUNDING)


def share_followed(before: Reading, now: Reading) -> float:
    """
    Return the part of the trainer's change that the server made too.

    With `d` the trainer's change of each token's log-probability and `e` the server's, it is
    `sum(sign(d) * e) / sum(|d|)`: 1 where the server follows, 0 where it stands still. Where the mean of `|d|` is 8
    times that of the rounding, which enters twice, before and now, rounding moves the share by 1/4 at most, whatever
    its kind. Below, the part is NaN. At `before`, the server had the trainer's weights.
    """
    change = now.trainer - before.trainer
    if not change.abs().mean() >= 8 * before.rounding.mean():
        return math.nan
    return ((change.sign() * (now.server - before.server)).sum() / change.abs().sum()).item()


def stands_still(before: Reading, now: Reading) -> bool:
    """
    Return whether the server repeats itself to the last bit, while the trainer moved.

    In bfloat16, steps far below the rounding still change what the server says, of nearly all tokens: a median change
    of 1/100 of the median rounding is enough. A step that changes next to no weight can repeat it, but not in a row.
    """
    change = (now.trainer - before.trainer).abs().median()
    has_moved = change >= max(before.rounding.median().item() / 100, 10 * ROUNDING)
    return torch.equal(now.server, before.server) and bool(has_moved)


def choose_sequence(batch: dict[str, torch.Tensor], length: int) -> list[int]:
    """Return the ends of some samples of TRL's batch, one after another: at most `length` tokens."""
    samples = sampled_sequences(batch, NUM_SAMPLES)
    return [token for ids in samples for token in ids[-MAX_TOKENS // NUM_SAMPLES :].tolist()][:length]


class StaleServerCheck:
    """Stops a training whose server does not take the weights."""

    def __init__(self, accelerator: Accelerator, client: VLLMClient | None, score: Callable[..., Any]):
        self._accelerator, self._client, self._score = accelerator, client, score
        self._sequence: list[int] | None = None  # the same on all ranks
        self._answer: torch.Tensor | None = None  # of the server, until it is compared; the same on all ranks
        # Of the main process: the last reading by which the server had followed; the last one by which the server had
        # moved at all, or had repeated itself although the trainer moved, and how often in a row it did that
        self._followed: Reading | None = None
        self._moved: Reading | None = None
        self._repeats = 0

    def ask_server(self, batch: dict[str, torch.Tensor]) -> None:
        """Ask the server, after a generation; the first one gives the sequence. It must have nothing else to do."""
        if self._sequence is None:
            self._sequence = on_main_process(lambda: self._choose_sequence(batch))
        if self._sequence is not None:
            self._answer = on_main_process(self._ask_server)

    def __call__(self, model: torch.nn.Module) -> dict[str, float]:
        """
        Compare the moves of server and trainer since the first answer, if there is an answer to compare.

        The metrics are empty while the moves are too small to tell, or if the server did not answer.
        """
        server, self._answer = self._answer, None
        if server is None:
            return {}
        trainer = self._ask_trainer(model)  # on all ranks: each may hold a part of the weights
        share = on_main_process(lambda: self.compare(Reading(trainer, server)))
        if share < 0.5:
            raise RuntimeError(
                "The vLLM server does not take the trainer's weights: since they last arrived, the server's "
                f"log-probabilities of fixed tokens made {share:.2f} of the trainer's change. Look for an error of "
                "the weight transfer in the server's log, and start it anew with `bapo-trl serve --model MODEL`. "
                "`vllm_logp_tolerance` None switches this check off."
            )
        return {} if math.isnan(share) else {"sampling/server_followed": share}

    def _choose_sequence(self, batch: dict[str, torch.Tensor]) -> list[int] | None:
        try:
            longest = self._client.get_server_info()["model_config"]["max_model_len"]
        except OSError:  # as below
            return None
        return choose_sequence(batch, min(MAX_TOKENS, longest - 1))  # the server must generate one token more

    def compare(self, now: Reading) -> float:
        """Return the part of the trainer's change that the server made; NaN where it cannot be told."""
        self._followed, self._moved = self._followed or now, self._moved or now
        if stands_still(self._moved, now):
            self._moved, self._repeats = now, self._repeats + 1
        elif not torch.equal(now.server, self._moved.server):
            self._moved, self._repeats = now, 0
        if self._repeats == NUM_REPEATS:
            return 0.0
        share = share_followed(self._followed, now)
        if share >= 0.5:
            self._followed = now
        return share

    @torch.no_grad()
    def _ask_trainer(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the log-probabilities of all tokens but the first, at temperature 1."""
        ids = torch.tensor([self._sequence], device=self._accelerator.device)
        with in_eval_mode(model), self._accelerator.autocast():
            # Two forward passes in a row that call the head's module let DeepSpeed fetch its weight ahead, at which
            # TRL's fused head fails. One by TRL, between them, keeps DeepSpeed from it
            self._score([self._sequence[:1]], [self._sequence[1:]])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        return -cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none").cpu().double()

    def _ask_server(self) -> torch.Tensor | None:
        """Return the log-probabilities of all tokens but the first, at temperature 1; `None` without an answer."""
        # Alone in its request, the sequence is computed in the same way each time. At temperature 0, the one token
        # that must be generated takes nothing from the server's random state.
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        body = {"model": self._client.model, "prompt": self._sequence, **sampling}
        try:
            (choice,) = self._client._post(f"{self._client.base_url}/v1/completions", json=body)["choices"]
        except OSError:  # the server is gone, with which the next generation will deal
            return None
        places = zip(self._sequence[1:], choice["prompt_logprobs"][1:], strict=True)
        return torch.tensor([place[str(token)]["logprob"] for token, place in places], dtype=torch.float64)


def make_server_check(trainer: Any) -> StaleServerCheck | None:
    """Return the check of a run; `None` if it is off, or the trainer does not sample from vLLM's server."""
    if not uses_vllm_server(trainer) or trainer._is_vlm or trainer.args.vllm_logp_tolerance is None:
        return None
    client = trainer.vllm_generation.vllm_client if trainer.accelerator.is_main_process else None
    return StaleServerCheck(trainer.accelerator, client, trainer._score_completions)
