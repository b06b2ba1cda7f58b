"""The comparison of the sampler's log-probabilities with the trainer's as a part of the trainer."""

from ..batch.sampler import behavior_logps, drop_sampler_logps, has_sampler_logps, read_sampler_logps
from ..batch.scoring import score_generation
from ..parts import Part
from ..upstream.trl_compat import split_tensor_dict
from .mismatch import DifferenceCheck, compare_with_sampler
from .quantized import has_quantized_layers


class SamplerComparison(Part):
    """Add behaviour log-probabilities where they are needed, and compare the sampler's with the trainer's."""

    def reset(self, run):
        self._run, args = run, run.args
        self._check_difference = DifferenceCheck(
            args.vllm_logp_tolerance,
            args.biased_settings,
            warns=run.accelerator.is_main_process,
            is_quantized=has_quantized_layers(run.model),
        )

    def check(self, batch, rollouts):
        run, args = self._run, self._run.args
        was_requested = rollouts is not None and rollouts.is_ahead
        # TRL uses those of a `rollout_func` only to correct for vLLM. Else they may be placeholders of any length
        are_of_sampler = run.rollout_func is None or (run.use_vllm and run.vllm_importance_sampling_correction)
        if not are_of_sampler and run.off_policy_mask_threshold is None:
            drop_sampler_logps(batch)
        compares = are_of_sampler and has_sampler_logps(batch)
        if not (args.uses_replay or compares):
            return {}
        if not (args.takes_sampler_logps and compares):
            logps = behavior_logps(batch, lambda rows: score_generation(run, rows), keeps=args.uses_replay)
        else:  # the behaviour log-probabilities are the sampler's, and comparing a part is enough
            batch.setdefault("old_per_token_logps", batch["sampling_per_token_logps"])
            compares_part = was_requested or (args.use_sampler_logps and not run._is_vlm)
            batch = split_tensor_dict(batch, args.steps_per_generation)[0] if compares_part else batch
            logps = score_generation(run, batch)
        if not compares:
            return {}
        is_per_sequence = args.vllm_importance_sampling_mode.startswith("sequence")
        of_both = read_sampler_logps(batch, logps)
        metrics, difference = compare_with_sampler(of_both, is_per_sequence, run.accelerator.gather)
        if not was_requested:
            self._check_difference(difference)
        return metrics
