"""The proof that a vLLM server samples from the trainer's weights as a part of the trainer."""

from functools import partial

from ..batch.injected import InjectedRollouts
from ..batch.scoring import pad_tokens, score_completions
from ..parts import Part
from ..upstream.trl_compat import uses_vllm_server
from ..upstream.vllm_weights import has_sent_weights, send_weights
from .stale_server import StaleServerCheck


class ServerWeights(Part):
    """Ask the server in each generation step for a check of its weights; see [`StaleServerCheck`]."""

    def reset(self, run):
        self._run = run
        self._check: StaleServerCheck | None = None
        if uses_vllm_server(run) and not run._is_vlm and run.args.vllm_logp_tolerance is not None:
            client = run.vllm_generation.vllm_client if run.accelerator.is_main_process else None
            self._check = StaleServerCheck(run.accelerator, client, partial(score_completions, run))

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
