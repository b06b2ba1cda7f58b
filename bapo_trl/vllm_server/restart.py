"""Brings a run through failures of its vLLM server, or to an end on all ranks: see [`ServerRestarts`]."""

from collections.abc import Callable

from accelerate.utils import broadcast_object_list

from ..scoring import Scoring
from ..upstream import trl_compat
from .link import ServerLink, Verdict


class ServerRestarts(Scoring):
    """
    Goes on when the vLLM server fails and comes back. To be put before [`~trl.GRPOTrainer`] among the bases of a
    trainer, and before [`~scoring.Scoring`].

    A failure in the main process is held by its client until all ranks are past TRL's collectives, see
    [`~server_client.ServerClient`]. Then the main process waits for the server and joins it, and all ranks send it the
    weights and repeat the generation. A server that was started anew is noticed by its name: it has its first weights,
    and no group to get others. What it sampled before it had the weights is sampled again.

    If the server does not come back, all ranks save a checkpoint of the state before the generation, and raise.
    """

    _link: ServerLink | None = None  # of the main process

    def _reset_run_state(self):
        super()._reset_run_state()
        if not trl_compat.uses_vllm_server(self):
            return
        if not self.accelerator.is_main_process:
            self._agree(Verdict)
        elif self._link is None:
            client = self.vllm_generation.vllm_client
            self._link = ServerLink(client, self.accelerator.device, self.args.vllm_server_timeout)
            self._agree(self._link.meet)
        else:
            self._link.begin()
            self._agree(self._link.settle)

    def _generate_single_turn(self, *args, **kwargs):
        if not trl_compat.uses_vllm_server(self):
            return super()._generate_single_turn(*args, **kwargs)
        if self._link is not None:
            self._link.begin()
        if self._last_loaded_step != self.state.global_step:  # over NCCL, a transfer to nobody would not end
            self._joins_server()
        while True:
            if self._link is not None:
                self._link.hold_failures()
            output = super()._generate_single_turn(*args, **kwargs)
            if not self._joins_server():
                return output

    def _joins_server(self) -> bool:
        """
        Join the server if it failed or was started anew, and have it get the weights before the next request; return
        whether it was joined. All ranks make this call together.

        Raises:
            RuntimeError: On all ranks, if the server cannot be used any more.
        """
        has_joined = self._agree(self._link.settle if self._link is not None else Verdict)
        if has_joined:
            self._last_loaded_step = -1  # TRL's
        return has_joined

    def _has_same_server(self) -> bool:
        """Return whether the server is the one that got the weights. All ranks make this call together."""
        return broadcast_object_list([self._link is not None and self._link.is_same()])[0]

    def _agree(self, find_out: Callable[[], Verdict]) -> bool:
        (verdict,) = broadcast_object_list([find_out()])
        if verdict.end is not None:
            checkpoint = self.save_for_resume()
            kept = "No checkpoint was saved." if checkpoint is None else f"The last checkpoint is {checkpoint}."
            raise RuntimeError(f"{verdict.end} This was after update {self.state.global_step}. {kept}")
        return verdict.has_joined
