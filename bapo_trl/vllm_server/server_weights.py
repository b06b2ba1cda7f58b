"""The proof that a vLLM server samples from the trainer's weights as a part of the trainer."""

from ..batch.injected import InjectedRollouts
from ..batch.scoring import pad_tokens
from ..parts import Part
from ..upstream.vllm_weights import has_sent_weights, send_weights
from .stale_server import StaleServerCheck, make_server_check


class ServerWeights(Part):
    """Ask the server in each generation step for a check of its weights; see [`StaleServerCheck`]."""

    def reset(self, run):
        self._run = run
        self._check: StaleServerCheck | None = make_server_check(run)

    def refresh(self, rollouts: InjectedRollouts) -> None:
        """Send the weights to the server if it lacks them, and ask it, with overlapped generation."""
        run = self._run
        with run.phase_clock.phase("weights"):
            if not has_sent_weights(run):
                run.server_retries.generate(lambda: send_weights(run), is_first_request=True)
                if self._check is not None and not self._check.is_due():
                    return  # the next request waits
            self._ask(pad_tokens(run, rollouts.prompt_ids, rollouts.token_ids))

    def check(self, batch, rollouts):
        with self._run.phase_clock.phase("weights"):
            if not self._run.args.overlap_generation:
                self._ask(batch)
            return {} if self._check is None else self._check(self._run.model)

    def _ask(self, batch) -> None:
        # A restarted server is expected to lack the weights: it gets them before the next generation
        if self._check is not None and self._run.server_retries.has_same_server():
            self._check.ask_server(batch)
