"""The TRL versions known to work, and the private TRL names the trainer relies on, checked at import.

`BAPOTrainer` hooks into `GRPOTrainer` instead of copying it. What the hooks touch is listed here, so that a TRL
release that renames one of them fails at import with the name, not in the middle of a training run.
"""

import inspect
from inspect import isfunction

import trl
from trl import GRPOTrainer


TESTED_VERSIONS = ("1.14.2", "1.16.0")
"""TRL versions that the tests pass with (docs/versions.md). Later releases of the same minor count as well."""


def _missing(names: str, version: str = trl.__version__) -> ImportError:
    return ImportError(
        f"bapo_trl relies on names that trl {version} does not have: {names}. Install a version it is tested with "
        f'({", ".join(TESTED_VERSIONS)}), e.g. pip install "trl~={TESTED_VERSIONS[-1]}".'
    )


try:  # helpers of TRL that the package uses, from here
    from trl.generation.vllm_generation import VLLMClient, VLLMGeneration
    from trl.trainer.utils import (  # noqa: F401
        RepeatSampler,
        create_model_from_path,
        get_config_model_id,
        is_async_callable,
        pad,
        shuffle_sequence_dict,
        split_tensor_dict,
    )
except ImportError as error:
    raise _missing(str(error)) from error


HAS_OPENAI_CLIENT = hasattr(VLLMClient, "get_server_info")
"""Whether TRL's client talks to vLLM's own server, from 1.16 on; before, to one of TRL's, which scores no prompts."""


def uses_vllm_server(trainer: GRPOTrainer) -> bool:
    """Return whether the trainer samples from vLLM's own server."""
    return trainer.use_vllm and trainer.vllm_mode == "server" and HAS_OPENAI_CLIENT


CLIENT_ATTRIBUTES = ("_post", "base_url", "model")
"""Attributes of that client that the package relies on; its `generate` must use them too."""

TRANSFER_NAMES = ("merge_adapter", "named_parameters", "sync_weights", "unmerge_adapter")
"""Methods by which `VLLMGeneration` sends a model with an adapter, its own and those of the model."""

OVERRIDDEN_METHODS = (
    "_calculate_rewards", "_compute_loss", "_finalize_training", "_finish_current_push", "_generate",
    "_generate_and_score_completions", "_generate_single_turn", "_get_grad_norm", "_get_output_dir",
    "_get_per_token_logps_and_entropies", "_get_train_sampler", "_init_training_state", "_load_from_checkpoint",
    "_load_optimizer_and_scheduler", "_maybe_log_save_evaluate", "_prepare_inputs", "_push_from_checkpoint",
    "_save_checkpoint", "_save_optimizer_and_scheduler", "_tokenize_prompts", "create_model_card",
    "create_optimizer", "evaluate", "evaluation_loop", "log", "train",
)  # fmt: skip
"""Methods of `GRPOTrainer` that the trainer overrides and calls through `super()`."""

CALLED_METHODS = ("get_gamma_weights", "get_high_entropy_mask", "get_off_policy_mask")
"""Methods of `GRPOTrainer` that the trainer calls."""

CLASS_ATTRIBUTES = ("_name", "_paper", "_tag_names")
"""Class attributes that the trainer sets for TRL's model card."""

ATTRIBUTES = {
    "__init__": (
        "_is_vlm", "eos_token_ids", "generation_config", "generation_kwargs", "rollout_func", "tools",
        "vllm_generation", "vllm_mode",
    ),
    "_compute_loss": (
        "_get_per_token_logps_and_entropies", "beta", "current_gradient_accumulation_steps", "epsilon_low",
        "epsilon_high", "importance_sampling_level", "loss_type", "off_policy_mask_threshold", "top_entropy_quantile",
        "use_vllm", "vllm_importance_sampling_correction", "_metrics",
    ),
    "_inner_training_loop": ("_globalstep_last_logged", "_tr_loss"),
    "_save_checkpoint": ("_get_output_dir",),
    "_push_from_checkpoint": ("push_in_progress",),
    "_generate": ("_generate_single_turn", "_tokenize_prompts", "rollout_func"),
    "_calculate_rewards": ("reward_func_names", "reward_funcs"),
    "log": ("_metrics",),
    "_generate_single_turn": ("_last_loaded_step", "eos_token_ids", "generation_config", "generation_kwargs"),
    "_prepare_inputs": ("_buffered_inputs", "_generate_and_score_completions", "_step", "num_iterations"),
    "_generate_and_score_completions": (
        "_calculate_rewards", "_metrics", "environment_factories", "reward_weights", "scale_rewards",
    ),
}  # fmt: skip
"""Attributes of the trainer that the trainer relies on, by the `GRPOTrainer` method that must use them too."""

FORWARD_KEYS = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
"""Keys of TRL's batch that go into the model's forward as they are."""


def missing_names(trainer_class: type = GRPOTrainer) -> list[str]:
    """Return the relied-on names that `trainer_class` lacks, as dotted names; empty if all is well."""
    missing = [
        name for name in (*OVERRIDDEN_METHODS, *CALLED_METHODS) if not callable(getattr(trainer_class, name, None))
    ]
    missing += [name for name in CLASS_ATTRIBUTES if not hasattr(trainer_class, name)]
    for method_name, attributes in ATTRIBUTES.items():
        method = getattr(trainer_class, method_name, None)
        if method is None:
            missing.append(method_name)
            continue
        used = _names_used(inspect.unwrap(method).__code__)
        missing += [f"{method_name}: self.{attribute}" for attribute in attributes if attribute not in used]
    if HAS_OPENAI_CLIENT:
        used = _names_used(inspect.unwrap(VLLMClient.generate).__code__)
        missing += [f"VLLMClient.{name}" for name in CLIENT_ATTRIBUTES if name not in used]
    used = set().union(*(_names_used(each.__code__) for each in vars(VLLMGeneration).values() if isfunction(each)))
    missing += [f"VLLMGeneration: {name}" for name in TRANSFER_NAMES if name not in used]
    return sorted(set(missing))


def check_trl(trainer_class: type = GRPOTrainer, version: str = trl.__version__) -> None:
    """Check that `trainer_class` has everything [`BAPOTrainer`] relies on (`ImportError`)."""
    missing = missing_names(trainer_class)
    if missing:
        raise _missing(", ".join(missing), version)


def _names_used(code) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if inspect.iscode(constant):
            names |= _names_used(constant)
    return names
