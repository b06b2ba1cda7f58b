"""The trainers of the studies: `GRPOTrainer` and `BAPOTrainer`, which also count what their logs leave out."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from trl import GRPOTrainer

from bapo_trl import BAPOTrainer
from bapo_trl.clip_bounds import ClipBounds
from bapo_trl.clip_bounds.tokens import policy_mask


class MeasuredGRPOTrainer(GRPOTrainer):
    """
    A `GRPOTrainer` that counts decode steps and versions. It trains as its parent does.

    Attributes:
        decode_steps (`list[int]`):
            For each generation, the tokens of the longest new completion of each call of the sampler, summed.
        lengths (`list[list[int]]`):
            For each generation, the tokens of the completions that went to training.
        num_trained (`int`):
            Rows of all updates that have a token of the loss; a row of several passes counts as often.
        num_trained_of_several_versions (`int`):
            Those of them whose tokens were sampled by two policy versions or more.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.decode_steps: list[int] = []
        self.lengths: list[list[int]] = []
        self.num_trained = self.num_trained_of_several_versions = 0
        self._steps_of_generation = 0

    # With partial rollouts, this is the call of each round. TRL's own call, for complete groups, does not come here.
    def _generate_single_turn(self, *args, **kwargs):
        output = super()._generate_single_turn(*args, **kwargs)
        self._steps_of_generation += max(map(len, output[0]))
        return output

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.decode_steps.append(self._steps_of_generation)
        self._steps_of_generation = 0
        self.lengths.append(output["completion_mask"].sum(dim=1).tolist())
        return output

    def _compute_loss(self, model, inputs):
        mask = policy_mask(inputs).bool()
        self.num_trained += int(mask.any(dim=1).sum())
        if "token_versions" in inputs:
            versions, limits = inputs["token_versions"], torch.iinfo(torch.int64)
            first = versions.masked_fill(~mask.cpu(), limits.max).amin(dim=1)
            last = versions.masked_fill(~mask.cpu(), limits.min).amax(dim=1)
            self.num_trained_of_several_versions += int((first < last).sum())  # in a row without a token: first > last
        return super()._compute_loss(model, inputs)


class MeasuredBAPOTrainer(BAPOTrainer, MeasuredGRPOTrainer):
    """A `BAPOTrainer` that counts what [`MeasuredGRPOTrainer`] counts, right above TRL's own methods."""


class GivenWeightsTrainer(MeasuredBAPOTrainer):
    """
    A `BAPOTrainer` that does not choose the weights of negative tokens: they are given.

    Attributes:
        given_weights (sequence of `float`):
            The weight of each update. `negative_weight_min` must be below 1.
    """

    given_weights: Sequence[float] = ()

    def _reset_run_state(self):
        super()._reset_run_state()
        use = self._bounds._use
        self._bounds._use = lambda bounds: use(with_weight(bounds, self.given_weights[self.state.global_step]))


class WeighedUpTrainer(MeasuredBAPOTrainer):
    """A `BAPOTrainer` that weighs positive tokens up where it would weigh the negative ones down."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        inputs = self._inputs_in_loss
        if inputs is not None:
            inputs["advantages"] = inputs["advantages"] / self.clip_bounds.negative_weight
        return output


def with_weight(bounds: ClipBounds, weight: float) -> ClipBounds:
    """Return bounds with another weight of the negative tokens, and the share that it gives."""
    positive, negative = bounds.positive_share, (1 - bounds.positive_share) / bounds.negative_weight
    return replace(
        bounds,
        negative_weight=torch.full_like(bounds.negative_weight, weight),
        positive_share=positive / (positive + weight * negative),
    )
