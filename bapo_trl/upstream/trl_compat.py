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


def check_trl(missing: Sequence[str], version: str = trl.__version__) -> None:
    """Raise an `ImportError` that names what TRL lacks, if anything."""
    if missing:
        names = ", ".join(sorted({*missing}))
        raise ImportError(
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
        pad,
        shuffle_sequence_dict,
        split_tensor_dict,
    )
except ImportError as error:
    check_trl([str(error)])


def uses_vllm_server(trainer: GRPOTrainer) -> bool:
    """Return whether the trainer samples from vLLM's own server."""
    return trainer.use_vllm and trainer.vllm_mode == "server"


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


def overridden_methods(own: type, parent: type) -> dict[str, list[str]]:
    """Return the methods of a parent that a class overrides or calls by `super()`, and the parameters it reads."""
    methods: dict[str, list[str]] = {}
    for base in own.__mro__[: own.__mro__.index(parent)]:
        for name, method in vars(base).items():
            if not inspect.isfunction(method):
                continue
            if hasattr(parent, name) or {"super", name} <= {*inspect.unwrap(method).__code__.co_names}:
                parameters = inspect.signature(method).parameters.values()
                read = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
                methods[name] = max(read, methods.get(name, []), key=len)
    return methods


def missing_overrides(own: type, parent: type, among: type | None = None) -> list[str]:
    """Return the [`overridden_methods`] that a version of the parent, `among`, lacks or whose parameters differ."""
    missing = []
    for name, read in overridden_methods(own, parent).items():
        method = getattr(among or parent, name, None)
        if not callable(method):
            missing.append(name)
        elif list(inspect.signature(method).parameters)[: len(read)] != read:
            missing.append(f"{name}({', '.join(read)}, ...)")
    return missing


def missing_calls(trainer_class: type = GRPOTrainer) -> list[str]:
    """Return the called methods that `trainer_class` lacks, or that do not accept the arguments."""
    missing = []
    for name, (number, keywords) in CALLED_METHODS.items():
        method = getattr(trainer_class, name, None)
        if not callable(method):
            missing.append(name)
            continue
        try:
            inspect.signature(method).bind(*range(number), **dict.fromkeys(keywords))
        except TypeError as error:
            missing.append(f"{name}, as it is called here ({error})")
    return missing
