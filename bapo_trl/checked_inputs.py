"""Stops a run at data and numbers that cannot be trained on, before an update is made of them."""

import math
from collections.abc import Sequence
from typing import Any

from accelerate.utils import DistributedType, gather_object
from torch import nn

from .errors import InputError
from .prompts import TokenLimits, check_batch_prompts, check_batch_tokens, check_prompt_lengths
from .reward_checks import RewardChecks
from .trainer_mixin import TrainerMixin


class CheckedInputs(TrainerMixin):
    """
    Checks what a [`~trl.GRPOTrainer`], which comes after it in the bases, is given and what it computes.

    - `_tokenize_prompts`: prompts of every batch, streams among them, before and after the tokenizer.
    - `_generate_single_turn`, `_generate`: logits that nothing can be sampled from, completions without a token.
    - `_calculate_rewards`: what the reward functions raise and return.
    - `_get_grad_norm`: the gradient before the optimizer step.

    What only one process can see is raised on all of them: the others would wait for it.
    """

    _limits: TokenLimits | None = None

    def _check_inputs(self, eval_dataset) -> None:
        """Refuse a tokenizer that does not go with the model, and prompts that are too long for it."""
        text_config = self.model.config.get_text_config()
        vocabulary = getattr(text_config, "vocab_size", None)
        check_tokenizer(self._tokenizer, vocabulary)
        window = context_window(text_config)
        self._limits = TokenLimits(window, self.max_completion_length or 0, vocabulary)
        if window is not None and window <= self._limits.completion:
            raise InputError(
                f"`max_completion_length` is {self.max_completion_length}, but the model's window "
                f"(`max_position_embeddings`) is {window} with the prompt: lower `max_completion_length`."
            )
        if window is not None and self._makes_prompts and not self._is_vlm:
            check_prompt_lengths(
                self.train_dataset, eval_dataset, lambda prompts: self._tokenize(prompts)[0], self._limits
            )

    @property
    def _makes_prompts(self) -> bool:
        """Whether the prompts are those of the dataset."""
        return self.environment_factories is None and self.rollout_func is None

    def _tokenize(self, prompts):
        return super()._tokenize_prompts(prompts)

    def _tokenize_prompts(self, prompts):
        output, error = None, None
        try:
            check_batch_prompts(prompts)
            output = super()._tokenize_prompts(prompts)
            if not self._is_vlm:
                check_batch_tokens(prompts, output[0], self._limits)
        except Exception as caught:
            error = caught
        raise_on_all_ranks(error)
        return output

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        try:
            output = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        except RuntimeError as error:
            if "probability tensor contains" not in str(error):
                raise
            raise RuntimeError(
                f"NaN or infinity in the logits while sampling, after update {self.state.global_step}: the model's "
                "weights are broken, or half precision overflows. Look at the weights that the run started from, for "
                "a learning rate that is too high, and resume from a checkpoint."
            ) from error
        if not self.tools:  # else a turn after that of a tool may have no room left
            raise_on_all_ranks(_empty_completion(output[0], "The sampler"))
        return output

    def _generate(self, prompts):
        function = self.rollout_func
        if function is None:
            return super()._generate(prompts)

        def checked(*args: Any) -> Any:
            output: Any = None
            error: Exception | None = None
            try:
                output = function(*args)
                error = _empty_completion(output.get("completion_ids", ()), "The `rollout_func`")
            except Exception as caught:
                error = caught
            raise_on_all_ranks(error)
            return output

        self.rollout_func = checked
        try:
            return super()._generate(prompts)
        finally:
            self.rollout_func = function

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        functions: Any = self.reward_funcs
        names, checks = self.reward_func_names, RewardChecks()
        is_model = [isinstance(function, nn.Module) for function in functions]
        self.reward_funcs = [
            function if is_one else checks.wrap(function, name)
            for function, name, is_one in zip(functions, names, is_model, strict=True)
        ]
        try:
            rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = functions
        first = self.accelerator.process_index * len(prompts)
        for column, name in enumerate(names):
            if is_model[column]:
                checks.check_model(rewards_per_func[first : first + len(prompts), column], name, prompts, completions)
        raise_on_all_ranks(checks.error)
        return rewards_per_func

    def _get_grad_norm(self, model, grad_norm=None):
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        # A loss scaler leaves out such an update itself. The norm is that of all ranks, so that all of them stop.
        if grad_norm is None or self.accelerator.mixed_precision == "fp16" or math.isfinite(grad_norm):
            return grad_norm
        is_late = self.accelerator.distributed_type == DistributedType.DEEPSPEED  # which has made its step
        raise RuntimeError(
            f"NaN or infinity in the gradient (its norm is {float(grad_norm)}) at update "
            f"{self.state.global_step + 1}, {'in' if is_late else 'before'} its optimizer step: nothing of this "
            "update was saved. Look for a learning rate or a `beta` that is too high, or a loss that overflows, and "
            "resume from a checkpoint."
        )


def context_window(config: Any) -> int | None:
    """
    Return the largest number of tokens of a prompt and its completion, by the configuration of a model.

    Rotary embeddings that are scaled reach `factor` times as far as the model was trained for.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            Configuration of the text model.

    Returns:
        `int`, or `None` where the configuration tells none.
    """
    window = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if window is None or any(isinstance(value, dict) for value in rope.values()):  # those of each kind of layer
        return window
    trained = rope.get("original_max_position_embeddings") or window
    return max(window, int(trained * (rope.get("factor") or 1)))


def check_tokenizer(tokenizer: Any, vocabulary: int | None = None) -> None:
    """
    Refuse a tokenizer without an end token, or with more tokens than the model has.

    Tokens that were added to the tokenizer may go beyond the model's: prompts with such a token are refused.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Of text.
        vocabulary (`int`, *optional*):
            Number of tokens of the model, if it is known.

    Raises:
        ValueError: With the fix.
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


def check_reward_funcs(reward_funcs: Any, weights: Sequence[float] | None = None) -> None:
    """
    Refuse what is no reward function, and weights for another number of them.

    Args:
        reward_funcs:
            Argument of the trainer.
        weights (sequence of `float`, *optional*):
            Setting `reward_weights`.

    Raises:
        TypeError: If one is neither a function, nor a model or the name of one.
        ValueError: If there are more or fewer weights.
    """
    functions = reward_funcs if isinstance(reward_funcs, list) else [] if reward_funcs is None else [reward_funcs]
    for function in functions:
        if not (isinstance(function, str) or callable(function)):
            raise TypeError(
                f"`reward_funcs` has {function!r}, a {type(function).__name__}: give functions of `completions`, "
                "reward models or their names."
            )
    if weights is not None and len(weights) != len(functions):
        raise InputError(
            f"`reward_weights` is {list(weights)}, for {len(functions)} reward functions: give as many weights."
        )


def raise_on_all_ranks(error: Exception | None) -> None:
    """
    Raise the error of a rank on all of them. All ranks make this call together.

    Args:
        error (`Exception`, *optional*):
            That of this rank.

    Raises:
        Exception: The error of this rank; on the others a `RuntimeError` that quotes the first.
    """
    texts = gather_object([None if error is None else "\n".join([str(error), *getattr(error, "__notes__", ())])])
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"On rank {rank}: {text}")


def _empty_completion(completion_ids: Any, source: str) -> ValueError | None:
    empty = [position for position, ids in enumerate(completion_ids) if not len(ids)]
    if not empty:
        return None
    return ValueError(
        f"{source} returned a completion without a token for {len(empty)} of {len(completion_ids)} samples, the "
        f"first of them sample {empty[0]}: a completion has at least its end token."
    )
