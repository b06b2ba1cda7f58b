"""Brings runs through failures of their vLLM server, or to an end on all ranks: see [`ServerRetries`]."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..checkpoints.rank_errors import on_main_process
from ..upstream.trl_compat import uses_vllm_server


if TYPE_CHECKING:
    from .link import Verdict


class ServerRetries:
    """
    Goes on when the vLLM server fails and comes back. All ranks make the same calls.

    A failure in the main process is held by its client until all ranks are past TRL's collectives, see
    [`~vllm_server.client.ServerClient`]. Then the main process waits for the server and joins it, and all ranks send
    it the weights and repeat the generation. A server that was started anew is noticed by its name: it has its first
    weights, and no group to get others. What it sampled before it had the weights is sampled again.

    In the main process, `client` is that of the server. `forget_sent_weights` has the trainer send the weights before
    the next request. `end_run` gets the reason, saves a checkpoint of the state before the generation, and raises, on
    all ranks.
    """

    def __init__(
        self,
        client: Any | None,
        device: torch.device,
        timeout_s: float,
        *,
        forget_sent_weights: Callable[[], None],
        end_run: Callable[[str], NoReturn],
    ):
        self._link = None if client is None else _tie(client, device, timeout_s)
        self._forget_sent_weights, self._end_run = forget_sent_weights, end_run
        self._has_met = False

    def begin_run(self) -> None:
        """Meet the server before the first run; before a later one, see that it is there."""
        if not self._has_met:
            self._agree(lambda: self._link.meet())
        else:
            if self._link is not None:
                self._link.begin()
            self._agree(lambda: self._link.settle())
        self._has_met = True

    def generate(self, attempt: Callable[[], Any], is_first_request: bool) -> Any:
        """
        Return what an attempt of all ranks returned by which the server did all it was asked for.

        An attempt sends the weights, if they were not yet, and requests samples. The first request does send them:
        over NCCL, a transfer to nobody would not end.
        """
        if self._link is not None:
            self._link.begin()
        if is_first_request:
            self._joins_server()
        while True:
            if self._link is not None:
                self._link.hold_failures()
            output = attempt()
            if not self._joins_server():
                return output

    def has_same_server(self) -> bool:
        """Return whether the server is the one that got the weights."""
        return on_main_process(lambda: self._link.is_same())

    def _joins_server(self) -> bool:
        has_joined = self._agree(lambda: self._link.settle())
        if has_joined:
            self._forget_sent_weights()
        return has_joined

    def _agree(self, find: "Callable[[], Verdict]") -> bool:
        """Follow what the main process, which alone has the link, finds."""
        agreed = on_main_process(find)
        if agreed.end is not None:
            self._end_run(agreed.end)
        return agreed.has_joined


def _tie(client: Any, device: torch.device, timeout_s: float) -> Any:
    from .link import ServerLink  # needs requests, which only a server does

    return ServerLink(client, device, timeout_s)


def make_retries(
    trainer: Any, forget_sent_weights: Callable[[], None], end_run: Callable[[str], NoReturn]
) -> ServerRetries | None:
    """Return the retries of a trainer, see [`ServerRetries`]; `None` if it does not sample from vLLM's server."""
    if not uses_vllm_server(trainer):
        return None
    return ServerRetries(
        trainer.vllm_generation.vllm_client if trainer.accelerator.is_main_process else None,
        trainer.accelerator.device,
        trainer.args.vllm_server_timeout,
        forget_sent_weights=forget_sent_weights,
        end_run=end_run,
    )
