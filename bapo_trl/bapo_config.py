"""Configuration of `BAPOTrainer`: TRL's `GRPOConfig` plus the settings of this package."""

import inspect
import math
import textwrap
from dataclasses import Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, get_args

from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy
from trl import GRPOConfig

from .batch.layout import LAYOUTS
from .batch.losses import LOSSES
from .clip_bounds import BoundGrid
from .clip_bounds.config import BoundSearchConfig, help_of, setting
from .clip_bounds.grid import SINGLE_POINT
from .errors import InputError
from .inputs.sampling_settings import biased_settings
from .inputs.setting_checks import check_device, check_fields, check_numbers
from .inputs.setting_rules import check_rules
from .upstream.cpu_speed import has_bfloat16


@dataclass
class BAPOConfig(BoundSearchConfig, GRPOConfig):
    """
    Configuration of [`BAPOTrainer`].

    Takes all parameters of [`~trl.GRPOConfig`] and the parameters below. Leave `epsilon` and `epsilon_high` unset:
    BAPO chooses the clip bounds. (Exception: with `loss_type="cispo"`, `epsilon_high` is the cap on the ratio, as in
    TRL.)

    Parameters:
        {parameters}

    Raises:
        ValueError: If a value is out of range or conflicts with another one. The message names the parameter, its
            value and a fix.
    """

    epsilon: float | None = field(
        default=None,
        metadata={
            "help": "Not used: BAPO chooses the clip bounds. To fix the lower bound, set `ratio_lower_start` and "
            "`ratio_lower_max` to the same value."
        },
    )
    epsilon_high: float | None = field(
        default=None,
        metadata={
            "help": "With `loss_type: cispo`, the cap on the ratio, as in TRL, e.g. 5.0. Otherwise not used: BAPO "
            "chooses the clip bounds. To fix the upper bound, set `ratio_upper_start` and `ratio_upper_max` to the "
            "same value."
        },
    )

    # Parameters of the micro-batches
    negative_weight: float = setting(
        1.0,
        "(0, 1]",
        "Constant weight on the loss of negative-advantage tokens, such as 0.5. 1: none. Needs fixed clip bounds, or "
        "a loss without any.",
    )
    micro_batch_layout: str = setting(
        "balanced",
        LAYOUTS,
        "How the samples of an update are arranged in micro-batches. `balanced`: sorted by length, so that each "
        "micro-batch has little padding, and samples times length are similar in all. Short samples then share a "
        "micro-batch with more samples than `per_device_train_batch_size`, long ones with fewer. `trimmed`: TRL's "
        "micro-batches, each cut to its longest sample. `padded`: as in TRL, as wide as the longest sample of the "
        "generation. The gradient is the same. Losses over the tokens of a micro-batch (such as `bnpo`) are `trimmed` "
        "instead of `balanced`.",
    )
    skip_zero_advantage: bool = field(
        default=True,
        metadata={
            "help": "Whether samples whose advantage is 0 are left out of the loss's forward and backward passes, "
            "where they have no gradient. They are kept with `beta` above 0, an entropy bonus, "
            "`top_entropy_quantile`, a router's loss, images, and with `micro_batch_layout` `padded`."
        },
    )

    # Parameters of the replay buffer
    replay_fraction: float = setting(
        0.0,
        "[0, 1]",
        "Fraction of each batch that is drawn from the replay buffer. The buffer is on if this is above 0 or "
        "`replay_zero_advantage` is set. With the buffer on, each later pass over a generation (`num_iterations`) "
        "draws its whole batch from the buffer.",
    )
    replay_zero_advantage: bool = field(
        default=False,
        metadata={
            "help": "Whether to replace fresh samples whose advantage is 0 (all completions of the group right, or "
            "all wrong) with samples from the replay buffer."
        },
    )
    replay_capacity: int = setting(
        4096,
        "[1, inf)",
        "Maximum number of samples in the replay buffer of each rank. When the buffer is full, its oldest entries "
        "are dropped (FIFO).",
    )
    replay_max_staleness: int | None = setting(
        None,
        "[0, inf)",
        "Largest staleness, in policy versions, at which a sample from the replay buffer may be trained on. `None`: "
        "no limit. With partial rollouts, the staleness of a buffered sample is that of its oldest token, and fresh "
        "samples are limited by `partial_rollout_max_staleness` only.",
    )
    replay_min_staleness: int = setting(
        0,
        "[0, inf)",
        "Smallest staleness, in policy versions, at which a sample is drawn from the replay buffer. With "
        "`replay_fraction` 1.0, all samples are at least this stale once the buffer has filled up.",
    )
    replay_max_reuse: int | None = setting(
        None,
        "[1, inf)",
        "How often a sample may be trained on, including the first time. `None`: no limit.",
    )
    replay_discard_saved: bool = field(
        default=False,
        metadata={"help": "Whether to start with an empty replay buffer when resuming from a checkpoint."},
    )

    # Parameters of the partial rollouts
    partial_rollout_oversampling: float = setting(
        1.0,
        "[1, 2)",
        "Oversampling factor: how many groups are generated at a time, relative to the number trained per "
        "generation. Above 1, a generation ends as soon as it has enough complete groups; the unfinished "
        "groups are paused, and a later policy continues them. 1 turns partial rollouts off: every generation waits "
        "for its longest completion.",
    )
    partial_rollout_chunk_length: int = setting(
        256, "[1, inf)", "Number of tokens to decode before checking which completions have finished."
    )
    partial_rollout_max_staleness: int | None = setting(
        None,
        "[0, inf)",
        "Largest number of policy versions between a completion's first token and the last update on it. A group "
        "that would exceed it is decoded to its end instead of being paused. `None`: no limit.",
    )

    # Parameters of the sampler
    overlap_generation: bool = field(
        default=False,
        metadata={
            "help": "Whether a vLLM server samples the next rollout batch while the trainer trains on the current "
            "one. Samples are then staler by the number of updates per generation. Needs `vllm_mode: server`."
        },
    )
    use_sampler_logps: bool = field(
        default=False,
        metadata={
            "help": "Whether to take vLLM's log-probabilities as those of the policy that sampled, which saves a "
            "forward pass over the samples of each generation. Importance ratios then include the difference between "
            "vLLM's and the trainer's arithmetic. Needs `use_vllm`."
        },
    )
    vllm_logp_tolerance: float | None = setting(
        0.1,
        "(0, inf]",
        "Largest allowed mean absolute difference between vLLM's and the trainer's log-probabilities of a "
        "generation's samples, in nats per token; doubled for a model in 4 or 8 bits. Training stops if the "
        "difference is larger, because vLLM then does not sample from the trainer's weights. (With settings that bias "
        "the samples, such as `top_p`, the trainer warns once instead.) `None` disables this check, and the check "
        "of the vLLM server's weights (`check_server_weights`), whose limit it is, too.",
    )
    vllm_request_timeout: float = setting(
        1500.0,
        "(0, inf]",
        "Seconds that the vLLM server may take to answer one request (the samples of a generation, or a weight "
        "transfer). After a timeout or another temporary failure, the trainer waits up to `vllm_server_timeout` for "
        "the server, reconnects and repeats the generation, at most three times.",
    )

    if TYPE_CHECKING:  # what the parents' `__post_init__` leaves of fields that they declare more widely
        generation_kwargs: dict[str, Any] | None = None
        hub_strategy: HubStrategy = HubStrategy.EVERY_SAVE
        pad_to_multiple_of: int | None = None

    def __post_init__(self):
        if self.use_cpu and self.bf16 is None:  # TRL would set it whatever the processor
            self.bf16 = not self.fp16 and has_bfloat16()
        try:
            super().__post_init__()
        except ValueError:
            check_device(self)
            raise
        self._validate()
        if self.negative_weight < 1:  # the search's own settings for it
            self.negative_weight_min, self.positive_contribution_target = self.negative_weight, 1.0

    @classmethod
    def from_grpo_config(cls, args: GRPOConfig) -> "BAPOConfig":
        """
        Return a `BAPOConfig` with the values of `args`, and the parameters of BAPO at their defaults.

        Raises:
            ValueError: If a value conflicts with BAPO, e.g. an `epsilon` other than TRL's default.
        """
        config = cls.__new__(cls)  # `args` went through `__post_init__` already: a second pass would reject it
        config.__dict__.update(vars(args))
        trl_defaults = {f.name: f.default for f in fields(GRPOConfig)}
        for f in fields(cls):
            if f.name not in trl_defaults:
                setattr(config, f.name, f.default)
            elif f.name in ("epsilon", "epsilon_high") and getattr(args, f.name) == trl_defaults[f.name]:
                setattr(config, f.name, None)
        config._validate()
        return config

    @property
    def bound_grid(self) -> BoundGrid:
        """Candidate clip bounds, up to `delta`; for a loss without clip bounds, a single point that nothing reads."""
        if not self.has_clip_bounds:
            return SINGLE_POINT
        grid = super().bound_grid
        if self.delta is None or self.delta >= grid.upper_max:
            return grid
        return replace(grid, upper_start=min(grid.upper_start, self.delta), upper_max=self.delta)

    @property
    def has_clip_bounds(self) -> bool:
        """Whether the loss type clips ratios, so that there are bounds to search."""
        return LOSSES[self.loss_type].has_clip_bounds

    @property
    def has_ratio_cap(self) -> bool:
        """Whether the loss type caps ratios at `epsilon_high`."""
        return self.loss_type in LOSSES and LOSSES[self.loss_type].has_ratio_cap

    @property
    def micro_batches_per_generation(self) -> int:
        """Number of micro-batches (backward passes) that a rank trains on between two generations."""
        return self.steps_per_generation * self.num_iterations

    @property
    def uses_replay(self) -> bool:
        """Whether there is a replay buffer."""
        return self.replay_fraction > 0 or self.replay_zero_advantage

    @property
    def updates_per_pass(self) -> int:
        """Number of optimizer updates in one pass over a batch of `steps_per_generation` micro-batches, at least 1."""
        return max(1, self.steps_per_generation // self.gradient_accumulation_steps)

    @property
    def is_always_on_policy(self) -> bool:
        """Whether each sample is trained on by the very policy that sampled it, so that every ratio is 1."""
        trains_past_samples = self.uses_replay or self.uses_partial_rollouts or self.overlap_generation
        return not trains_past_samples and self.gradient_accumulation_steps % self.micro_batches_per_generation == 0

    @property
    def scores_samples(self) -> bool:
        """Whether TRL scores the samples it generates under the policy that sampled them."""
        return self.gradient_accumulation_steps % self.micro_batches_per_generation != 0 or (
            self.use_vllm and self.vllm_importance_sampling_correction
        )

    @property
    def takes_sampler_logps(self) -> bool:
        """Whether the sampler's log-probabilities stand for those of the policy that sampled."""
        return self.overlap_generation or self.use_sampler_logps

    @property
    def uses_partial_rollouts(self) -> bool:
        """Whether unfinished completions are paused and continued by a later policy."""
        return self.partial_rollout_oversampling > 1

    @property
    def rows_per_generation(self) -> int:
        """Number of samples of a generation on each rank."""
        return self.per_device_train_batch_size * self.steps_per_generation

    @property
    def groups_per_generation(self) -> int:
        """Number of groups of a generation on each rank, where a rank has whole groups."""
        return self.rows_per_generation // self.num_generations

    @property
    def groups_carried_over(self) -> int:
        """Number of groups that stay in flight on each rank when a generation ends."""
        carried_over = round((self.partial_rollout_oversampling - 1) * self.groups_per_generation)
        return min(carried_over, self.groups_per_generation - 1)

    @property
    def updates_per_generation(self) -> int:
        """Number of optimizer updates between two generations, rounded up."""
        return math.ceil(self.micro_batches_per_generation / self.gradient_accumulation_steps)

    @property
    def fresh_staleness(self) -> list[int]:
        """
        Staleness of fresh samples in each micro-batch that they are trained in, in policy versions.

        Generation steps may begin within an update. The list covers as many as it takes to begin at the same position
        of an update again.
        """
        generation, window = self.micro_batches_per_generation, self.gradient_accumulation_steps
        # With overlapped generation, samples are trained on in the generation step after the one that requests them
        lead = generation if self.overlap_generation else 0
        places = range(math.lcm(generation, window))
        return [(place + lead) // window - place // generation * generation // window for place in places]

    @property
    def largest_staleness(self) -> int:
        """Largest staleness of a fresh sample at its last update, in policy versions."""
        return max(self.fresh_staleness)

    @property
    def staleness_if_paused(self) -> int:
        """Staleness of a completion that is paused for one generation at its last update, in policy versions."""
        return self.updates_per_generation + self.largest_staleness

    @property
    def sampling_settings(self) -> dict[str, Any]:
        """Settings of a generation by name, without those of the model."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: getattr(self, name) for name in names} | (self.generation_kwargs or {})  # these override

    @property
    def biased_settings(self) -> list[str]:
        """Settings, with their values, that draw samples from another policy than the ratios compare."""
        biased = biased_settings(self.sampling_settings, self.temperature)
        if self.use_vllm and self.vllm_structured_outputs_regex is not None:
            biased.append(f"`vllm_structured_outputs_regex` {self.vllm_structured_outputs_regex}")
        return biased

    def _validate(self):
        if self.has_ratio_cap and self.epsilon is None:  # TRL caps at it where `epsilon_high` is not set
            self.epsilon = GRPOConfig.epsilon
        check_fields(self, own_fields(), _TYPES)
        check_rules(self)
        check_numbers(self)


def own_fields() -> tuple[Field, ...]:
    """Return the fields that `BAPOConfig` adds to those of `GRPOConfig`."""
    inherited = {f.name for f in fields(GRPOConfig)}
    return tuple(f for f in fields(BAPOConfig) if f.name not in inherited)


def copied_settings(trainer: Any) -> dict[str, Any]:
    """Return the values in `args` of the fields that are read when a trainer is created, by name."""
    ours = {f.name for f in fields(trainer.args)} - {f.name for f in fields(TrainingArguments)}
    names = ours & {"epsilon", "vllm_request_timeout", *vars(trainer)}  # the others are copied under the same name
    return {name: getattr(trainer.args, name) for name in sorted(names)}


def check_copied(trainer: Any, settings: dict[str, Any]) -> None:
    """Reject a change of [`copied_settings`]: TRL would train with one value, the search would follow another."""
    for name, value in settings.items():
        for holder in (trainer.args, trainer) if name in _READ_FROM_BOTH else (trainer.args,):
            if getattr(holder, name) != value:
                raise InputError(
                    f"`{name}` was changed from {value!r} to {getattr(holder, name)!r} after the trainer was created, "
                    "which reads it once: set it in the config before you create the trainer."
                )


# TRL reads its copy in the trainer, this package the value in `args`
_READ_FROM_BOTH = (
    "loss_type", "importance_sampling_level", "off_policy_mask_threshold", "top_entropy_quantile", "num_iterations",
)  # fmt: skip

# As they are declared: parsers of command lines take `None` out of them
_TYPES = {f.name: get_args(f.type) or (f.type,) for f in fields(BAPOConfig)}


def _describe(f: Field) -> str:
    types = " or ".join(f"`{name}`" for name in getattr(f.type, "__name__", str(f.type)).split(" | "))
    default = f'"{f.default}"' if isinstance(f.default, str) else f.default
    lines = textwrap.wrap(help_of(f.metadata), 111, break_on_hyphens=False)
    text = textwrap.indent("\n".join(lines), " " * 8)
    return f"{f.name} ({types}, *optional*, defaults to `{default}`):\n{text}"


# A help text is the one home of what a field means: `--help`, the docstring and docs/settings.md show it.
if BAPOConfig.__doc__:  # `python -OO` has none
    # Without the indentation of the class, which the compiler takes off by itself from Python 3.13 on
    BAPOConfig.__doc__ = inspect.cleandoc(BAPOConfig.__doc__).replace(
        "{parameters}", "\n    ".join(_describe(f) for f in own_fields())
    )
