"""Check whether a vLLM server has loaded the trainer's latest weights.

After the weights are sent in a generation step, server and trainer compute the log-probabilities of a fixed token
sequence. The check compares their changes since an earlier reading, not their difference: a server with the new
weights changes like the trainer, a server with old weights does not, and the difference in arithmetic cancels out.

Invariant: the earlier reading is replaced only once the server has provably loaded new weights. Changes that are too
small to decide accumulate until they are large enough.
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
from ..upstream.trl_compat import VLLMClient


NUM_SAMPLES, MAX_TOKENS = 8, 512  # of the sequence, which consists of the ends of some samples
NUM_REPEATS = 3  # identical answers in a row, while the trainer changes, after which a server is considered stale
NUM_FOLLOWED, INTERVAL = 10, 10  # checks in a row that held, and then transfers from one check to the next
ROUNDING = 1e-6  # nats, for float32; lower precision shows as a larger difference between server and trainer

SERVER_METRICS = ("sampling/server_followed",)
"""Metric of the generation steps in which the server was checked, defined in docs/metrics.md."""


class Reading(NamedTuple):
    """Log-probabilities of the same `N` tokens at one time, each `(N,)` in float64 on the CPU."""

    trainer: torch.Tensor
    server: torch.Tensor

    @property
    def rounding(self) -> torch.Tensor:
        """Rounding error of each token, `(N,)` in nats: the difference between the two with the same weights."""
        return (self.server - self.trainer).abs().clamp(min=ROUNDING)


def share_followed(before: Reading, now: Reading) -> float:
    """
    Return the fraction of the trainer's change that the server followed.

    With `d` the trainer's change of each token's log-probability and `e` the server's, the fraction is
    `sum(sign(d) * e) / sum(|d|)`: 1 if the server follows, 0 if it does not change. If the mean of `|d|` is 8 times
    the mean rounding error, which enters twice (before and now), rounding changes the fraction by at most 1/4. For
    smaller changes, the result is NaN. At `before`, the server had the trainer's weights.
    """
    change = now.trainer - before.trainer
    if not change.abs().mean() >= 8 * before.rounding.mean():
        return math.nan
    return ((change.sign() * (now.server - before.server)).sum() / change.abs().sum()).item()


def stands_still(before: Reading, now: Reading) -> bool:
    """
    Return whether the server's answer is identical to the last bit although the trainer changed.

    In bfloat16, steps far below the rounding error still change the server's answer for nearly all tokens: a median
    change of 1/100 of the median rounding error is enough. An answer can repeat after a step that changes almost no
    weight, but not several times in a row.
    """
    change = (now.trainer - before.trainer).abs().median()
    has_moved = change >= max(before.rounding.median().item() / 100, 10 * ROUNDING)
    return torch.equal(now.server, before.server) and bool(has_moved)


def choose_sequence(batch: dict[str, torch.Tensor], length: int) -> list[int]:
    """Return the ends of some samples of TRL's batch, concatenated, with at most `length` tokens."""
    samples = sampled_sequences(batch, NUM_SAMPLES)
    return [token for ids in samples for token in ids[-MAX_TOKENS // NUM_SAMPLES :].tolist()][:length]


class StaleServerCheck:
    """Stop training if the server does not load the trainer's weights."""

    def __init__(self, accelerator: Accelerator, client: VLLMClient | None, score: Callable[..., Any]):
        self._accelerator, self._client, self._score = accelerator, client, score
        self._sequence: list[int] | None = None  # the same on all ranks
        self._answer: torch.Tensor | None = None  # of the server, until it is compared; the same on all ranks
        # Of the main process: the last reading at which the server had followed; the last one at which its answer had
        # changed at all, or repeated although the trainer changed; and how often in a row it has repeated
        self._followed: Reading | None = None
        self._moved: Reading | None = None
        self._repeats = 0
        # Checks in a row at which the server had followed, and transfers since the latest check; the same on all ranks
        self._num_followed = self._num_unchecked = 0

    def is_due(self) -> bool:
        """
        Return whether to query the server after a transfer, if a request waits for it. Call this once a transfer.

        It is due after each transfer until the server has followed at [`NUM_FOLLOWED`] checks in a row, then after
        each [`INTERVAL`]-th one.
        """
        self._num_unchecked += 1
        return self._num_followed < NUM_FOLLOWED or self._num_unchecked >= INTERVAL

    def ask_server(self, batch: dict[str, torch.Tensor]) -> None:
        """Query the server after a generation; the first one provides the sequence. The server must be idle."""
        if self._sequence is None:
            self._sequence = on_main_process(lambda: self._choose_sequence(batch))
        if self._sequence is not None:
            self._answer, self._num_unchecked = on_main_process(self._ask_server), 0

    def __call__(self, model: torch.nn.Module) -> dict[str, float]:
        """
        Compare the changes of server and trainer, if the server has answered; return the metrics.

        The metrics are empty while the changes are too small to decide, or if the server did not answer.
        """
        server, self._answer = self._answer, None
        if server is None:
            return {}
        trainer = self._ask_trainer(model)  # on all ranks: each may hold a part of the weights
        share = on_main_process(lambda: self.compare(Reading(trainer, server)))
        if share < 0.5:
            raise RuntimeError(
                "The vLLM server does not load the trainer's weights: since the last transfer that worked, its "
                f"log-probabilities of fixed tokens made only {share:.2f} of the trainer's change. Check the server's "
                "log for an error of the weight transfer, and restart it with `bapo-trl serve --model MODEL`. To turn "
                "this check off, set `vllm_logp_tolerance` to None."
            )
        self._num_followed = 0 if math.isnan(share) else self._num_followed + 1
        return {} if math.isnan(share) else {"sampling/server_followed": share}

    def _choose_sequence(self, batch: dict[str, torch.Tensor]) -> list[int] | None:
        try:
            longest = self._client.get_server_info()["model_config"]["max_model_len"]
        except OSError:  # as below
            return None
        return choose_sequence(batch, min(MAX_TOKENS, longest - 1))  # the server must generate one token more

    def compare(self, now: Reading) -> float:
        """Return the fraction of the trainer's change that the server followed; NaN if it cannot be determined."""
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
            # After two forward passes in a row that call the head's module, DeepSpeed prefetches its weight, which
            # makes TRL's fused head fail. A forward pass by TRL between them prevents the prefetch
            self._score([self._sequence[:1]], [self._sequence[1:]])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        return -cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none").cpu().double()

    def _ask_server(self) -> torch.Tensor | None:
        """Return the log-probabilities of all tokens but the first, at temperature 1; `None` without an answer."""
        # Alone in its request, the sequence is computed in the same way each time. At temperature 0, the one token
        # that must be generated does not change the server's random state.
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        body = {"model": self._client.model, "prompt": self._sequence, **sampling}
        try:
            (choice,) = self._client._post(f"{self._client.base_url}/v1/completions", json=body)["choices"]
        except OSError:  # the server is gone, which the next generation handles
            return None
        places = zip(self._sequence[1:], choice["prompt_logprobs"][1:], strict=True)
        return torch.tensor([place[str(token)]["logprob"] for token, place in places], dtype=torch.float64)
