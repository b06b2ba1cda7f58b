"""The tested TRL versions, and the private TRL names and signatures the trainer relies on, checked at import.

If a TRL release renames one of them, the import fails and names it, instead of a training run later. A parameter
that a release adds is no failure: the hooks pass unknown parameters on.
"""

import inspect
from collections.abc import Mapping, Sequence

import trl
from trl import GRPOTrainer

from ..batch.policy_loss import FORWARD_KEYS


TESTED_VERSIONS = ("1.16.0",)
"""TRL versions that the tests pass with (docs/versions.md). Later releases of the same minor count as well."""


def _missing(names: str, version: str = trl.__version__) -> ImportError:
    return ImportError(
        f"bapo_trl relies on names that trl {version} does not have: {names}. Install a version it is tested with "
        f'({", ".join(TESTED_VERSIONS)}), e.g. pip install "trl~={TESTED_VERSIONS[-1]}".'
    )


try:  # helpers of TRL that the package uses, from here
    from trl.generation.vllm_generation import VLLMClient, VLLMGeneration  # noqa: F401
    from trl.trainer.utils import (  # noqa: F401
        RepeatSampler,
        create_model_from_path,
        get_config_model_id,
        is_async_callable,
        shuffle_sequence_dict,
        split_tensor_dict,
    )
except ImportError as error:
    raise _missing(str(error)) from error


def uses_vllm_server(trainer: GRPOTrainer) -> bool:
    """Return whether the trainer samples from vLLM's own server."""
    return trainer.use_vllm and trainer.vllm_mode == "server"


CLIENT_METHODS: Mapping[str, Sequence[str]] = {
    "_post": ("url",),
    "check_server": ("total_timeout",),
    "close_communicator": (),
    "generate": ("prompts", "features", "n"),
    "get_server_info": (),
    "image_features": ("images",),
    "init_communicator": (),
    "reset_prefix_cache": (),
    "update_named_params": ("metadata", "named_params"),
}
"""Methods of vLLM's client that the package overrides or calls, as in [`OVERRIDDEN_METHODS`]."""

OVERRIDDEN_METHODS: Mapping[str, Sequence[str]] = {
    "_calculate_rewards": ("inputs", "prompts", "completions"),
    "_compute_loss": ("model", "inputs"),
    "_generate": ("prompts",),
    "_generate_and_score_completions": ("inputs",),
    "_generate_single_turn": ("prompt_ids",),
    "_get_grad_norm": (),
    "_get_output_dir": (),
    "_get_per_token_logps_and_entropies": ("model",),
    "_get_train_sampler": ("dataset",),
    "_init_training_state": (
        "max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint"
    ),
    "_load_from_checkpoint": ("resume_from_checkpoint",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_prepare_inputs": ("generation_batch",),
    "_push_from_checkpoint": ("checkpoint_folder",),
    "_save_checkpoint": ("model", "trial"),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_tokenize_prompts": ("prompts",),
    "create_optimizer": ("model",),
    "evaluation_loop": ("dataloader",),
    "get_batch_samples": ("epoch_iterator", "num_batches"),
    "log": ("logs",),
    "set_initial_training_values": ("args", "dataloader"),
    "train": ("resume_from_checkpoint",),
}  # fmt: skip
"""Methods of `GRPOTrainer` that the trainer overrides and calls through `super()`, with their first parameters: the
ones that the overrides read."""

CALLED_METHODS: Mapping[str, tuple[int, Sequence[str]]] = {
    "_calculate_rewards": (5, ()),
    "_generate": (2, ()),
    "_generate_single_turn": (4, ("num_generations",)),
    "_get_output_dir": (2, ()),
    "_get_per_token_logps_and_entropies": (5, ("batch_size", "compute_entropy", *FORWARD_KEYS)),
    "_save_checkpoint": (2, ("trial",)),
    "_tokenize_prompts": (2, ()),
    "get_gamma_weights": (
        0, ("advantages", "log_ratio_per_token", "mask", "importance_sampling_ratio", "k_pos", "lambda_pos", "k_neg",
            "lambda_neg"),
    ),
    "get_high_entropy_mask": (4, ()),
    "get_off_policy_mask": (
        0, ("advantages", "per_token_logps", "sampling_per_token_logps", "mask", "off_policy_threshold"),
    ),
}  # fmt: skip
"""Methods of `GRPOTrainer` that the package calls: number of positional arguments, with `self`, and keywords."""


def missing_names(trainer_class: type = GRPOTrainer) -> list[str]:
    """Return the required names and signatures that `trainer_class` lacks; an empty list if there are none."""
    missing = _missing_overrides(trainer_class, OVERRIDDEN_METHODS)
    for name, (number, keywords) in CALLED_METHODS.items():
        missing += _missing_call(trainer_class, name, number, keywords)
    missing += [f"VLLMClient.{each}" for each in _missing_overrides(VLLMClient, CLIENT_METHODS)]
    return sorted(set(missing))


def _missing_overrides(owner: type, methods: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the methods that are missing or whose parameters do not begin with the given ones."""
    missing = []
    for name, read in methods.items():
        method, names = getattr(owner, name, None), ["self", *read]
        if not callable(method):
            missing.append(name)
        elif list(inspect.signature(method).parameters)[: len(names)] != names:
            missing.append(f"{name}({', '.join(names)}, ...)")
    return missing


def _missing_call(owner: type, name: str, number: int, keywords: Sequence[str]) -> list[str]:
    """Return the name of a called method, in a list, if it is missing or does not accept these arguments."""
    method = getattr(owner, name, None)
    if not callable(method):
        return [name]
    try:
        inspect.signature(method).bind(*range(number), **dict.fromkeys(keywords))
    except TypeError as error:
        return [f"{name}, as it is called here ({error})"]
    return []


def check_trl(trainer_class: type = GRPOTrainer, version: str = trl.__version__) -> None:
    """Check that `trainer_class` has everything [`BAPOTrainer`] relies on (`ImportError`)."""
    missing = missing_names(trainer_class)
    if missing:
        raise _missing(", ".join(missing), version)
