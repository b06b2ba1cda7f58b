"""
What the trainer stops at, and what it adds to the errors of TRL, transformers and a user's functions.

Nothing of this communicates: an error of one rank ends that rank, and the launcher the others, as under TRL.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from ..errors import InputError
from ..reward_sums import overflowing_groups
from .prompt_checks import TokenLimits, check_batch_tokens, check_columns
from .reward_checks import KeptRewards, check_size_of_rewards


def check_row(trainer: Any, row: Mapping[str, Any]) -> None:
    """Refuse a row of a dataset without a `prompt`, where no environment gives one, or of no columns for rewards."""
    check_columns(row, trainer.reward_funcs)
    if trainer.environment_factories is None and "prompt" not in row:
        raise InputError(f"A row of the dataset has no `prompt`, only {sorted(row)}: rename the column.")


def check_tokens_of_batch(trainer: Any, prompt_ids: Sequence[Sequence[int]]) -> None:
    """Refuse prompts that the model cannot take, and a tokenizer that does not go with it (`InputError`)."""
    config = trainer.model.config.get_text_config()
    limits = token_limits(config, trainer.max_completion_length)
    if has_rotary_positions(config) and not trainer.use_vllm:  # they go on beyond the window
        limits = TokenLimits(None, limits.completion, limits.vocabulary)
    check_batch_tokens(trainer._tokenizer.batch_decode(prompt_ids), prompt_ids, limits)
    check_tokenizer(trainer._tokenizer, limits.vocabulary)


@contextmanager
def explaining_broken_logits(update: int) -> Iterator[None]:
    """Say what to look for where torch finds no probabilities to sample from, after this update."""
    try:
        yield
    except RuntimeError as error:
        if not any(text in str(error) for text in ("probability tensor contains", "device-side assert")):  # CPU, CUDA
            raise
        raise RuntimeError(
            f"NaN or infinity in the logits while sampling, after update {update}: the model's weights are broken, or "
            "half precision overflows. Look at the weights that the run started from, for a learning rate that is too "
            "high, and resume from a checkpoint, or, for another rate, start from its folder as the model."
        ) from error


@contextmanager
def explaining_empty_completions(made_by: str) -> Iterator[None]:
    """Add to TRL's error, which looks at the last token of each completion, a note of those that have none."""
    try:
        yield
    except IndexError as error:
        for frame, _ in walk_tb(error.__traceback__):
            is_of_trl = frame.f_code.co_name == "_generate"
            completion_ids = frame.f_locals.get("completion_ids", ()) if is_of_trl else ()
            empty = [position for position, ids in enumerate(completion_ids) if not len(ids)]
            if empty:
                error.add_note(
                    f"The {made_by} returned a completion without a token for {len(empty)} of {len(completion_ids)} "
                    f"samples, the first of them sample {empty[0]}: a completion has at least its end token."
                )
        raise


def check_rollouts(prompts: Sequence[Any], prompt_ids: Sequence[Any], completion_ids: Sequence[Any]) -> None:
    """Refuse more or fewer prompts or completions of a `rollout_func` than it was given prompts (`InputError`)."""
    if not len(prompts) == len(prompt_ids) == len(completion_ids):
        raise InputError(
            f"The `rollout_func` returned {len(prompt_ids)} `prompt_ids` and {len(completion_ids)} `completion_ids` "
            f"for {len(prompts)} prompts: return one for each."
        )


@contextmanager
def explaining_rewards(trainer: Any, prompts: Sequence[Any], completions: Sequence[Any]) -> Iterator[None]:
    """Note on errors of the trainer's reward functions, and of what they return, which it was and for what sample."""
    functions = trainer.reward_funcs
    kept = KeptRewards(prompts, completions)
    trainer.reward_funcs = [
        function if isinstance(function, nn.Module) else kept.wrap(function, name)
        for function, name in zip(functions, trainer.reward_func_names, strict=True)
    ]
    try:
        with explained(kept.check):
            yield
    finally:
        trainer.reward_funcs = functions


def check_rewards(trainer: Any, rewards_per_func: torch.Tensor, prompts: Sequence[Any], completions: Sequence[Any]):
    """Refuse rewards of all ranks, `(B, F)`, of which TRL would make undefined or no advantages (`InputError`)."""

    def overflows(rewards: torch.Tensor) -> torch.Tensor:
        weights, count = trainer.reward_weights.to(rewards.device), trainer.num_generations
        summed_first = trainer.args.sums_rewards_first
        return overflowing_groups(rewards, weights, count, trainer.scale_rewards, summed_first)

    check_size_of_rewards(
        rewards_per_func,
        overflows if trainer.model.training else None,  # an evaluation makes no advantages
        trainer.reward_func_names,
        prompts,
        completions,
        trainer.accelerator.process_index,
    )


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """
    Refuse an optimizer that trains no parameter of the model, before it is wrapped (`InputError`).

    Nothing else would notice: rewards, losses and often the norm of the gradient look as in any run.
    """
    parameters = list(model.parameters())
    trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
    if not trained:
        fix = "Call `model.requires_grad_(True)`, or give a `peft_config` to train an adapter."
        if is_peft_model(model):
            fix = "Load the adapter with `is_trainable=True` in `PeftModel.from_pretrained`, or make it with a "
            fix += "configuration without `inference_mode`."
        raise InputError(
            f"Nothing would be trained: 0 of {len(parameters)} parameters of the model have `requires_grad`. {fix}"
        )
    if isinstance(optimizer, LayerWiseDummyOptimizer):  # has one for each parameter, which it does not show
        return
    groups = getattr(optimizer, "param_groups", None) or [{"params": optimizer.params}]  # DeepSpeed's own
    if not any(id(parameter) in trained for group in groups for parameter in group["params"]):
        raise InputError(
            f"Nothing would be trained: the optimizer has 0 of the {len(trained)} parameters of the model that have "
            "`requires_grad`. Make it from the parameters of the very model that is given to the trainer (for an "
            "adapter, wrap that with `peft.get_peft_model` first, and give no `peft_config`), or leave `optimizers` "
            "out."
        )


def check_gradient(trainer: Any, grad_norm: Any) -> None:
    """
    Stop at a gradient that is not finite (`RuntimeError`). The norm is that of all ranks: all of them stop.

    Reads a number from the device. The vector of the update's log is read before it, ahead of the backward pass: in
    that, DeepSpeed makes its step.
    """
    # A loss scaler leaves out such an update itself
    if grad_norm is None or trainer.accelerator.mixed_precision == "fp16" or math.isfinite(grad_norm):
        return
    is_late = trainer.accelerator.distributed_type == DistributedType.DEEPSPEED  # which has made its step
    raise RuntimeError(
        f"NaN or infinity in the gradient (its norm is {float(grad_norm)}) at update "
        f"{trainer.state.global_step + 1}, {'in' if is_late else 'before'} its optimizer step: nothing of this "
        "update was saved. Look for a learning rate or a `beta` that is too high, or a loss that overflows, and "
        "resume from a checkpoint, or, for another rate, start from its folder as the model."
    )


@contextmanager
def explained(*checks: Callable[[], None]) -> Iterator[None]:
    """
    Add to an error of the block what these checks refuse, as notes. It stays the error that it is.

    Each raises [`InputError`] for what it finds, and is called when there is an error, and only then.
    """
    try:
        yield
    except InputError:  # says it all
        raise
    except Exception as error:
        for check in checks:
            try:
                check()
            except Exception as found:  # a check that fails itself must not hide the error
                if isinstance(found, InputError):
                    error.add_note(str(found))
        raise


def context_window(config: Any) -> int | None:
    """
    Return the tokens that prompt and completion may have, by a text model's configuration; `None` if it tells none.

    Rotary embeddings that are scaled reach `factor` times as far as the model was trained for.
    """
    window = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if window is None or any(isinstance(value, dict) for value in rope.values()):  # those of each kind of layer
        return window
    trained = rope.get("original_max_position_embeddings") or window
    return max(window, int(trained * (rope.get("factor") or 1)))


def has_rotary_positions(config: Any) -> bool:
    """Return whether a text model goes on beyond its window, worse and worse; with learned positions, it fails."""
    return getattr(config, "rope_parameters", None) is not None


def token_limits(config: Any, max_completion_length: int | None) -> TokenLimits:
    """Return what a model takes, by the configuration of its text model."""
    return TokenLimits(context_window(config), max_completion_length or 0, getattr(config, "vocab_size", None))


def check_tokenizer(tokenizer: Any, vocabulary: int | None = None) -> None:
    """
    Refuse a tokenizer without an end token, or with more tokens than the model has (`InputError`).

    Tokens that were added to the tokenizer may go beyond the model's: prompts with such a token are refused.
    """
    if tokenizer.eos_token_id is None:
        raise InputError(
            "The tokenizer has no `eos_token`, so that no completion would end: set `tokenizer.eos_token` to the "
            "token that ends one (`eos_token` in the model's tokenizer_config.json)."
        )
    if vocabulary is None:
        return
    last = max(tokenizer.vocab_size - 1, tokenizer.eos_token_id, tokenizer.pad_token_id or 0)
    if last >= vocabulary:
        raise InputError(
            f"The tokenizer has tokens up to {last}, but the model has {vocabulary} (`vocab_size`): take the "
            "tokenizer that belongs to the model, or make room with `model.resize_token_embeddings(len(tokenizer))`."
        )


def check_model_name(model: Any) -> None:
    """Refuse a model of the package by the name that it has on the command line (`InputError`)."""
    functions = {"embedded": "sums_model_path", "smollm2": "smollm2_path"}
    if isinstance(model, str) and model in functions:
        raise InputError(
            f"`model` is '{model}', a name of the command line: in Python, give "
            f"`str(bapo_trl.tasks.{functions[model]}())`."
        )
