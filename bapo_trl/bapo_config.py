"""Configuration of `BAPOTrainer`: TRL's `GRPOConfig` with the settings of this package."""

import inspect
import math
import textwrap
from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, get_args

from transformers.trainer_utils import HubStrategy
from trl import GRPOConfig

from .clip_bounds import BoundGrid
from .clip_bounds.config import BoundSearchConfig, setting
from .clip_bounds.grid import SINGLE_POINT
from .config_rules import check_rules
from .errors import InputError
from .inputs.setting_checks import check_device, check_fields, check_numbers
from .losses import LOSSES
from .rollouts.sampling_settings import biased_settings
from .upstream.cpu_speed import has_bfloat16


@dataclass
class BAPOConfig(BoundSearchConfig, GRPOConfig):
    """
    Configuration class for [`BAPOTrainer`].

    Takes all parameters of [`~trl.GRPOConfig`] and those below. `epsilon` and `epsilon_high` have no effect under
    BAPO and must be left alone: the search chooses the clip bounds. (`loss_type: cispo` alone has its cap from them.)

    Parameters:
        {parameters}

    Raises:
        ValueError: If a value is out of its range or does not go with another; the message names the parameter, the
            value and the fix.
    """

    loss_was_chosen = False  # no field: set by the command line, for `--loss_type` and `--method`

    epsilon: float | None = field(
        default=None, metadata={"help": "Not used: BAPO searches the clip bounds. See `ratio_lower_start`."}
    )
    epsilon_high: float | None = field(
        default=None,
        metadata={
            "help": "Cap on the ratio for `loss_type: cispo`, as in TRL, e.g. 5.0. Else not used: see "
            "`ratio_upper_start`."
        },
    )

    # Parameters of the replay queue
    replay_fraction: float = setting(
        0.0,
        "[0, 1]",
        "Share of each batch taken from the queue of past samples, in [0, 1]. With 0, and without "
        "`replay_zero_advantage`, there is no queue. With a queue, each later pass over a generation "
        "(`num_iterations`) draws its whole batch from it.",
    )
    replay_zero_advantage: bool = field(
        default=False,
        metadata={
            "help": "Whether fresh samples with advantage 0 (all completions of a group right, or all wrong) give "
            "their place to queued samples."
        },
    )
    replay_capacity: int = setting(
        4096, "[1, inf)", "Largest number of samples in the queue of each rank. Beyond it, the first to enter leave."
    )
    replay_max_staleness: int | None = setting(
        None,
        "[0, inf)",
        "Largest staleness of a queued sample when it is trained, in policy versions. `None` for no limit. With "
        "partial rollouts it goes by the oldest token of a sample; that of fresh ones is bound by "
        "`partial_rollout_max_staleness` alone.",
    )
    replay_min_staleness: int = setting(
        0,
        "[0, inf)",
        "Smallest staleness of a sample when it is drawn from the queue, in policy versions. With "
        "`replay_fraction` 1.0, all samples are at least this stale once the queue is filled.",
    )
    replay_max_reuse: int | None = setting(
        None, "[1, inf)", "Number of times a sample may be trained, the first included. `None` for no limit."
    )
    replay_discard_saved: bool = field(
        default=False,
        metadata={"help": "Whether a resumed run starts with an empty queue, whatever the checkpoint holds."},
    )

    # Parameters of the partial rollouts
    partial_rollout_oversampling: float = setting(
        1.0,
        "[1, 2)",
        "Groups of completions in flight over groups of a generation, in [1, 2). Above 1, a generation ends as "
        "soon as it has enough complete groups. The others are parked, and a later policy continues them. With 1, "
        "every generation waits for its longest completion.",
    )
    partial_rollout_chunk_length: int = setting(
        256, "[1, inf)", "Tokens decoded between two looks at which completions have ended."
    )
    partial_rollout_max_staleness: int | None = setting(
        None,
        "[0, inf)",
        "Largest number of policy versions between a completion's first token and the last update on it. A group "
        "that would exceed it is decoded to its end. `None` for no limit.",
    )

    # Parameters of the sampler
    overlap_generation: bool = field(
        default=False,
        metadata={
            "help": "Whether a vLLM server samples the next rollout batch while the trainer trains on this one. "
            "Samples are one generation step's updates staler. Needs `vllm_mode: server`."
        },
    )
    vllm_logp_tolerance: float | None = setting(
        0.1,
        "(0, inf]",
        "Largest mean absolute difference between the log-probabilities of vLLM and of the trainer on the samples "
        "of a generation, in nats a token. Beyond it the training stops: vLLM does not sample from the trainer's "
        "weights. (With settings that bias the samples, such as `top_p`, it warns, once.) `None` for no check, nor "
        "of whether a server takes the weights it is sent.",
    )
    vllm_request_timeout: float = setting(
        1500.0,
        "(0, inf]",
        "Seconds that the vLLM server may take to answer one request: the samples of a generation, or a transfer "
        "of the weights. After that, and after any other failure that may pass, the trainer waits for the server "
        "for `vllm_server_timeout`, joins it again, and repeats the generation, three times at most.",
    )

    if TYPE_CHECKING:  # what the parents' `__post_init__` leaves of fields that they declare more widely
        generation_kwargs: dict[str, Any] | None = None
        hub_strategy: HubStrategy = HubStrategy.EVERY_SAVE
        pad_to_multiple_of: int | None = None

    def __post_init__(self):
        self._has_fixed_samples = self.generation_batch_size is not None and self.steps_per_generation is None
        if self.use_cpu and self.bf16 is None:  # TRL would set it whatever the processor
            self.bf16 = not self.fp16 and has_bfloat16()
        try:
            super().__post_init__()
        except ValueError:
            check_device(self)
            raise
        self._validate()

    @classmethod
    def from_grpo_config(cls, args: GRPOConfig) -> "BAPOConfig":
        """
        Return `args` with the search's parameters at their defaults.

        Raises:
            ValueError: If a value does not go with BAPO, e.g. an `epsilon` other than TRL's default.
        """
        config = cls.__new__(cls)  # `args` went through `__post_init__` already: a second pass would refuse it
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
        """Candidate clip bounds of the search; under a loss without clip bounds, a single point that nothing reads."""
        return super().bound_grid if self.has_clip_bounds else SINGLE_POINT

    @property
    def has_clip_bounds(self) -> bool:
        """Whether the loss type clips ratios, so that there are bounds to search."""
        return LOSSES[self.loss_type].has_clip_bounds

    @property
    def has_ratio_cap(self) -> bool:
        """Whether the loss type caps ratios at `epsilon_high`."""
        return self.loss_type in LOSSES and LOSSES[self.loss_type].has_ratio_cap

    @property
    def has_fixed_samples(self) -> bool:
        """Whether a generation has as many samples on any number of processes: `generation_batch_size` was given."""
        return getattr(self, "_has_fixed_samples", False)

    @property
    def micro_batches_per_generation(self) -> int:
        """Number of micro-batches (backward passes) that a rank trains on between two generations."""
        return self.steps_per_generation * self.num_iterations

    @property
    def uses_replay(self) -> bool:
        """Whether there is a replay queue."""
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
    def sums_rewards_first(self) -> bool:
        """Whether the rewards of several functions are summed before they are compared within a group."""
        return self.multi_objective_aggregation == "sum_then_normalize"

    @property
    def uses_partial_rollouts(self) -> bool:
        """Whether unfinished completions are parked and continued by a later policy."""
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
        held = round((self.partial_rollout_oversampling - 1) * self.groups_per_generation)
        return min(held, self.groups_per_generation - 1)

    @property
    def updates_per_generation(self) -> int:
        """Number of optimizer updates between two generations, rounded up."""
        return math.ceil(self.micro_batches_per_generation / self.gradient_accumulation_steps)

    @property
    def largest_staleness(self) -> int:
        """Largest staleness of a fresh sample at its last update, in policy versions."""
        generation, window = self.micro_batches_per_generation, self.gradient_accumulation_steps
        # With overlapped generation, samples are trained on in the generation step after the one that requests them
        span = 2 * generation if self.overlap_generation else generation
        # A generation starts at most `window - gcd` micro-batches into an update, and ends that much further on.
        return math.ceil((span + window - math.gcd(generation, window)) / window) - 1

    @property
    def staleness_if_paused(self) -> int:
        """Staleness of a completion that is paused for one generation at its last update, in policy versions."""
        return self.updates_per_generation + self.largest_staleness

    @property
    def biased_settings(self) -> list[str]:
        """Settings, with their values, that draw samples from another policy than the ratios compare."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        settings = {name: getattr(self, name) for name in names} | (self.generation_kwargs or {})  # these override
        biased = biased_settings(settings, self.temperature)
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


def own_settings(config: BAPOConfig) -> dict[str, Any]:
    """Return the values of the fields that `BAPOConfig` adds, and of TRL's that the search depends on, by name."""
    return {name: getattr(config, name) for name in (*(f.name for f in own_fields()), "loss_type", "delta")}


def check_unchanged(config: BAPOConfig, settings: dict[str, Any]) -> None:
    """Refuse a change of settings since a run began, which reads each of them once; name what has changed."""
    for name, value in own_settings(config).items():
        if value != settings[name]:
            raise InputError(
                f"`{name}` was changed from {settings[name]!r} to {value!r} during a run, which reads it once, when "
                "`train()` begins: set it before."
            )


# As they are declared: parsers of command lines take `None` out of them
_TYPES = {f.name: get_args(f.type) or (f.type,) for f in fields(BAPOConfig)}


def _describe(f: Field) -> str:
    types = " or ".join(f"`{name}`" for name in getattr(f.type, "__name__", str(f.type)).split(" | "))
    default = f'"{f.default}"' if isinstance(f.default, str) else f.default
    text = textwrap.fill(f.metadata["help"], 119, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return f"{f.name} ({types}, *optional*, defaults to `{default}`):\n{text}"


# A help text is the one home of what a field means: `--help`, the docstring and docs/settings.md show it.
if BAPOConfig.__doc__:  # `python -OO` has none
    # Without the indentation of the class, which the compiler takes off by itself from Python 3.13 on
    BAPOConfig.__doc__ = inspect.cleandoc(BAPOConfig.__doc__).replace(
        "{parameters}", "\n    ".join(_describe(f) for f in own_fields())
    )
