"""The check of vLLM's weights as a part of the trainer."""

from functools import partial

from ..batch.injected import InjectedRollouts
from ..batch.scoring import pad_tokens
from ..parts import Part
from ..upstream.trl_compat import uses_vllm_server
from ..upstream.vllm_weights import has_sent_weights, send_weights
from .quantized import has_quantized_layers
from .weight_check import WeightCheck, WeightCheckOptions, choose_sequence, make_check
from .weight_readings import WeightLimits


class ServerWeights(Part):
    """Check vLLM's weights in the generation steps of a `BAPOTrainer`; see [`WeightCheck`]."""

    def reset(self, run):
        self._run = run
        options = run.weight_check_options or self._options()
        self._check: WeightCheck | None = None if options is None else make_check(run, options)

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
        run = self._run
        if self._check is None:
            return {}
        with run.phase_clock.phase("weights"):
            if not run.args.overlap_generation and self._check.is_due():
                self._ask(batch)
            return self._check(run.model)

    def _ask(self, batch) -> None:
        # A restarted server is expected to lack the weights: it gets them before the next generation
        retries = self._run.server_retries
        if self._check is not None and (retries is None or retries.has_same_server()):
            self._check.ask(partial(choose_sequence, batch))

    def _options(self) -> WeightCheckOptions | None:
        run, tolerance = self._run, self._run.args.vllm_logp_tolerance
        if tolerance is None or not uses_vllm_server(run) or run._is_vlm:
            return None
        return WeightCheckOptions(WeightLimits(tolerance * (1 + has_quantized_layers(run.model))))
