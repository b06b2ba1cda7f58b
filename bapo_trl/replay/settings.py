"""What the replay queue refuses: values of its settings, and those under which it would hold nothing to draw."""

from typing import Any

from ..errors import InputError
from .queue import smallest_capacity


def check_replay(config: Any) -> None:
    """Refuse values of the replay queue, and those under which it would hold nothing to draw."""
    if not 0 <= config.replay_fraction <= 1:
        raise InputError(f"`replay_fraction` is {config.replay_fraction}: set it to a share in [0, 1].")
    for name, smallest in (("replay_capacity", 1), ("replay_max_reuse", 1), ("replay_max_staleness", 0)):
        value = getattr(config, name)
        if value is not None and value < smallest:
            raise InputError(f"`{name}` is {value}: set it to at least {smallest}.")
    if config.replay_min_staleness < 0:
        raise InputError(f"`replay_min_staleness` is {config.replay_min_staleness}: set it to at least 0.")
    if not config.uses_replay:
        return
    if config.sync_ref_model:
        raise InputError(
            "`sync_ref_model` is True, but queued samples keep the log-probabilities of the reference model that "
            "scored them: the KL term would hold the policy to references that no longer exist. Set "
            f"`sync_ref_model` to False, or, for no replay queue, {config.without_replay}."
        )
    if config.enable_jit_checkpoint:
        raise InputError(
            "`enable_jit_checkpoint` is True, which saves before an optimizer step, when the queue has given and got "
            "the samples of that step: leave it out. `bapo-trl train` saves after the update on SIGTERM, and so does "
            f"`StopSignals` in Python. Or, for no replay queue, {config.without_replay}."
        )
    if config.steps_per_generation % config.gradient_accumulation_steps != 0:
        raise InputError(
            f"`steps_per_generation` is {config.steps_per_generation}: with a replay queue it must be a multiple of "
            f"`gradient_accumulation_steps` ({config.gradient_accumulation_steps}), so that each optimizer step is "
            "drawn at once."
        )
    rows = config.rows_per_generation
    if config.replay_capacity < rows:
        raise InputError(
            f"`replay_capacity` is {config.replay_capacity}, less than the {rows} samples of a generation on each "
            f"rank: set it to at least {rows}."
        )
    if 0 < config.replay_fraction <= 0.5 / rows:
        raise InputError(
            f"`replay_fraction` is {config.replay_fraction}, less than one of the {rows} samples of a batch on each "
            f"rank: set it to at least {1 / rows:.3g}, or to 0."
        )
    updates = config.updates_per_pass
    needed = smallest_capacity(
        rows,
        rows if config.replay_zero_advantage else round(config.replay_fraction * rows),
        updates,
        config.num_iterations,
        config.replay_min_staleness,
    )
    if config.replay_capacity < needed:
        raise InputError(
            f"`replay_min_staleness` is {config.replay_min_staleness}, but a queue with a `replay_capacity` of "
            f"{config.replay_capacity} lets samples go before enough of them are that old, at {rows} samples a "
            f"generation on each rank and {updates * config.num_iterations} updates on them: set `replay_capacity` "
            f"to at least {needed}, or lower `replay_min_staleness`."
        )
    # Rows are drawn at the start of a pass, and grow older until its last update. Without a share of the first
    # pass to fill, it is enough that a later one draws.
    passes = max(1, -(-config.replay_min_staleness // updates), config.num_iterations - 1)
    oldest = config.smallest_max_staleness if config.replay_fraction > 0 else passes * updates + updates - 1
    if config.uses_partial_rollouts:  # rows are up to a generation old when they enter
        oldest += config.updates_per_generation
    if config.replay_max_staleness is not None and config.replay_max_staleness < oldest:
        raise InputError(
            f"`replay_max_staleness` is {config.replay_max_staleness}, but with {updates} updates in a pass, "
            f"`num_iterations` {config.num_iterations} and `replay_min_staleness` {config.replay_min_staleness} a "
            f"queued sample is {oldest} versions old before "
            f"{'the first pass over a generation' if config.replay_fraction > 0 else 'a pass'} has trained it: set "
            f"it to at least {oldest}."
        )
    if config.replay_max_reuse is not None and config.replay_max_reuse < config.num_iterations:
        raise InputError(
            f"`replay_max_reuse` is {config.replay_max_reuse}, but `num_iterations` ({config.num_iterations}) passes "
            f"train each sample that many times on average: set it to at least {config.num_iterations}."
        )
    # From an empty queue, the passes over a generation use up all that it brings.
    draws_its_own = config.num_iterations > 1 and config.replay_min_staleness <= updates * (config.num_iterations - 1)
    if config.replay_max_reuse == config.num_iterations and (config.replay_fraction > 0 or not draws_its_own):
        raise InputError(
            f"`replay_max_reuse` is {config.replay_max_reuse}: the {config.num_iterations} passes over a generation "
            "(`num_iterations`) use its samples up, and the first pass over the next one finds none in the "
            f"queue. Set `replay_max_reuse` to at least {config.num_iterations + 1}."
        )
