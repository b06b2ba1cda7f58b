"""What `train_bapo.py` refuses before it trains: packages and LoRA targets that are not there, prompts too long."""

import importlib.util
import re
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from trl import ModelConfig

from ..bapo_trainer import BAPOTrainer
from ..errors import InputError
from ..inputs.checks import check_tokenizer, has_rotary_positions, token_limits
from ..inputs.prompt_checks import check_window
from ..plan.shape import empty_model


def check_packages(model_args: ModelConfig) -> None:
    """
    Refuse flags whose package is not installed.

    Raises:
        ValueError: With the flag and the command that installs it.
    """
    for flag, is_set, module, requirement in (
        ("use_peft", model_args.use_peft, "peft", "'bapo-trl[peft]'"),
        ("load_in_4bit", model_args.load_in_4bit, "bitsandbytes", "bitsandbytes"),
        ("load_in_8bit", model_args.load_in_8bit, "bitsandbytes", "bitsandbytes"),
    ):
        if is_set and importlib.util.find_spec(module) is None:
            raise InputError(
                f"`{flag}` needs the package {module}, which is not installed: run `pip install {requirement}`, or "
                f"leave `{flag}` out."
            )


def settle_lora_targets(model: str, model_args: ModelConfig, trust_remote_code: bool = False) -> None:
    """
    Refuse LoRA targets that the model does not have: peft lets them pass where at least one other is there.

    A single name stays a name. TRL makes a pattern for whole module paths of it, which `q_proj` alone does not match.
    Nothing is done for a model whose structure cannot be built from its configuration alone.

    Args:
        model (`str`): A folder or an id on the Hub.
        model_args ([`~trl.ModelConfig`]): Flags of the model; nothing is checked without `use_peft`.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Whether code in the model's folder may run.

    Raises:
        ValueError: With the targets that are not there, and the linear layers that are.
    """
    if not model_args.use_peft or not model_args.lora_target_modules:
        return
    layers, targets = _layers(model, model_args.model_revision, trust_remote_code), model_args.lora_target_modules
    missing = missing_targets(targets, layers) if layers else []
    if missing and not missing_targets(missing, layers):  # a name that no path is
        model_args.lora_target_modules = missing
    elif missing:
        linear = sorted({name.rpartition(".")[2] for name, is_linear in layers.items() if is_linear})
        raise InputError(
            f"`lora_target_modules` has {', '.join(missing)}, which the model does not have: its linear layers are "
            f"{', '.join(linear)}; `all-linear` takes all but the head."
        )


def missing_targets(targets: str | Iterable[str], names: Iterable[str]) -> list[str]:
    """
    Return the targets that match none of the modules, as peft matches them.

    Args:
        targets (`str` or iterable of `str`): A regular expression for whole names, `all-linear`, or the last parts of
            names.
        names (iterable of `str`): Dotted names of all modules.

    Example:

    ```python
    >>> missing_targets(["q_proj", "query"], ["layers.0.attn.q_proj", "lm_head"])
    ['query']

    ```
    """
    names = list(names)
    if isinstance(targets, str):
        found = targets == "all-linear" or any(re.fullmatch(targets, name) for name in names)
        return [] if found else [targets]
    return [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]


def check_prompts_fit(trainer: BAPOTrainer, eval_dataset: Any = None) -> None:
    """
    Refuse a tokenizer with more tokens than the model, and prompts that are too long for it.

    Rotary positions go on beyond the window that the model was trained for, worse and worse: there, this only warns.

    Args:
        trainer ([`BAPOTrainer`]): With the model, the tokenizer and the prompts to train on.
        eval_dataset (*optional*): Prompts to evaluate on, as the trainer was given them.

    Raises:
        InputError: With the number of such prompts, the longest of them and the fix.
    """
    config = trainer.model.config.get_text_config()
    limits = token_limits(config, trainer.max_completion_length)
    check_tokenizer(trainer._tokenizer, limits.vocabulary)
    if limits.longest_prompt is None or trainer._is_vlm:
        return
    try:
        check_window(
            trainer.train_dataset, eval_dataset, lambda prompts: trainer._tokenize_prompts(prompts)[0], limits
        )
    except InputError as refusal:
        if not has_rotary_positions(config):
            raise
        if trainer.accelerator.is_main_process:
            warnings.warn(str(refusal), stacklevel=2)


def _layers(model: str, revision: str | None, trust_remote_code: bool) -> dict[str, bool]:
    """Return for each module of the model, by name, whether it is linear; nothing where that cannot be told."""
    try:
        built = empty_model(model, revision, trust_remote_code)
    except Exception:  # said where it is loaded
        return {}
    return {name: isinstance(module, nn.Linear) for name, module in built.named_modules()}
