"""What a run would do, by its settings, its prompts and the configuration of its model."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import AutoProcessor, PreTrainedModel

from ..advice import advice_for, oldest_age
from ..bapo_config import BAPOConfig
from ..errors import InputError
from ..inputs.checks import has_rotary_positions, token_limits
from ..inputs.prompt_checks import check_window
from ..inputs.setting_checks import check_values_of_trl
from .counts import Counts, count
from .memory import Layout, layout_of_process, memory_of
from .result import DryRun
from .samples import look_at_prompts, tokenize, try_rewards
from .shape import empty_model, shape_of


SCALES = (1, 8, 32)
"""Numbers of processes whose arithmetic is shown beside that of the run."""


def dry_run(
    args: BAPOConfig,
    model: str | PreTrainedModel | None,
    reward_funcs: Any = None,
    train_dataset: Any = None,
    processing_class: Any = None,
    peft_config: Any = None,
    layout: Layout | None = None,
) -> DryRun:
    """
    Return what can be known of a run before it begins. Nothing is written, and no weight is loaded.

    What TRL's trainer refuses when it is made, it does not see: it makes none.

    Args:
        args ([`BAPOConfig`]): Settings of the run.
        model (`str` or [`~transformers.PreTrainedModel`], *optional*): Model to train, as [`BAPOTrainer`] takes it.
            `None` for one that is not there yet: what depends on it is left out.
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*): Reward functions, as [`BAPOTrainer`] takes them.
            Each is called once.
        train_dataset (`Dataset` or `IterableDataset`): Prompts to train on; with `do_train` false, to evaluate on.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            Tokenizer; by default the model's.
        peft_config ([`~peft.PeftConfig`], *optional*): Adapter to train.
        layout ([`~memory.Layout`], *optional*): Where it trains; by default where this process would.

    Raises:
        ValueError: Without prompts, for a model that cannot be found or built by its name, and for values, weights of
            rewards and prompts that TRL or the model would fail at.

    Example:

    ```python
    print(dry_run(args, "Qwen/Qwen2.5-0.5B-Instruct", reward, train_dataset=dataset))
    ```
    """
    if train_dataset is None:
        raise InputError("`train_dataset` is None: give the prompts.")
    check_values_of_trl(args)
    functions = reward_funcs if isinstance(reward_funcs, Sequence) else [reward_funcs] if reward_funcs else []
    _check_reward_weights(args, functions)
    layout = layout or layout_of_process(deepspeed=args.deepspeed)
    trains = args.do_train or not args.do_eval
    advice = advice_for(oldest_age(args)[0])
    if model is None:
        num_prompts = len(train_dataset) if isinstance(train_dataset, Dataset) else None
        return DryRun(args, layout, _counts(args, layout, num_prompts) if trains else [], advice, num_prompts)
    name = model if isinstance(model, str) else model.config._name_or_path
    if isinstance(model, str):
        init = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
        try:
            model = empty_model(model, init.get("revision"), args.trust_remote_code)
        except (OSError, ValueError) as error:
            raise InputError(
                f"`model` is '{name}', and no model can be built by its configuration: {str(error).splitlines()[0]}"
            ) from error
    if processing_class is None:
        processing_class = AutoProcessor.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    shape = shape_of(model, peft_config)
    limits = token_limits(shape.config, args.max_completion_length)
    if not has_rotary_positions(shape.config):
        check_window(train_dataset, None, partial(tokenize, processing_class, args.chat_template_kwargs), limits)
    prompts = look_at_prompts(train_dataset, processing_class, limits.longest_prompt, args.chat_template_kwargs)
    return DryRun(
        args=args,
        layout=layout,
        counts=_counts(args, layout, prompts.num_prompts) if trains else [],
        advice=advice,
        num_prompts=prompts.num_prompts,
        shape=shape,
        memory=memory_of(
            shape.parameters,
            shape.trained,
            _weight_bytes(args, shape.config),
            layout,
            is_mixed=bool(args.bf16 or args.fp16),
            has_reference=args.beta != 0 and peft_config is None,
            optim=args.optim,
        ),
        prompts=prompts,
        rewards=try_rewards(functions, next(iter(train_dataset)), processing_class),
    )


def _counts(args: BAPOConfig, layout: Layout, num_prompts: int | None) -> list[Counts]:
    return [count(args, processes, num_prompts) for processes in dict.fromkeys((layout.processes, *SCALES))]


def _check_reward_weights(args: BAPOConfig, functions: Sequence[Any]) -> None:
    weights = args.reward_weights
    if weights is not None and functions and len(weights) != len(functions):
        raise InputError(
            f"`reward_weights` is {weights}, for {len(functions)} reward functions: give a number for each."
        )


def _weight_bytes(args: BAPOConfig, config: Any) -> int | None:
    """
    Return the bytes of a weight as TRL loads it: float32 unless `model_init_kwargs` says otherwise.

    `None` for a quantized model: which of its weights are, and with what beside them, depends on the method.
    """
    given = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
    if given.get("quantization_config") is not None or getattr(config, "quantization_config", None) is not None:
        return None
    return 2 if str(given.get("dtype", "float32")).rpartition(".")[2] in ("bfloat16", "float16") else 4
