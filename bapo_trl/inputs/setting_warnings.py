"""What a run warns of: settings that go together, but may not do what they are meant to."""

from typing import Any

from transformers.trainer_utils import HubStrategy


_WITH_CHECKPOINTS = (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)


def setting_warnings(config: Any) -> list[str]:
    """Return what a user should know of a [`BAPOConfig`] before a run, in whole sentences."""
    messages = []
    if config.learning_rate == 0:
        messages.append("`learning_rate` is 0: the weights will stay as they are. Raise it to train, e.g. to 1e-6.")
    if config.biased_settings:
        messages.append(
            f"Samples are drawn with {', '.join(config.biased_settings)}: not from the policy whose probabilities "
            "the importance ratios compare, so that these are biased. Leave them neutral for off-policy training."
        )
    if config.has_ratio_cap and config.epsilon_high is None:
        messages.append(
            f"`epsilon_high` is not set: `loss_type` '{config.loss_type}' caps every ratio at `epsilon` "
            f"({config.epsilon}), as TRL does. Set it to a cap above 1, e.g. 5.0."
        )
    if config.is_always_on_policy and config.has_clip_bounds and config.negative_weight_min == 1:
        messages.append(
            "All samples will be trained on by the policy that sampled them: the importance ratio is always 1 and "
            f"no clip bound has any effect. To train off-policy, raise `num_iterations` ({config.num_iterations}), or "
            f"make `steps_per_generation` ({config.steps_per_generation}) a multiple of `gradient_accumulation_steps` "
            f"({config.gradient_accumulation_steps})."
        )
    saves_samples = (config.uses_replay or config.uses_partial_rollouts) and not config.save_only_model
    if saves_samples and config.push_to_hub and config.hub_strategy in _WITH_CHECKPOINTS:
        messages.append(
            f"`hub_strategy` is '{config.hub_strategy.value}', which uploads whole checkpoints, with the prompts and "
            "completions of the replay queue and of unfinished rollouts. To keep them, set it to 'every_save'."
        )
    return messages
