"""`--dry_run true` of `train` and `evaluate`: print what the run would do. No weights are loaded."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import whoami
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers import training_args as of_transformers
from transformers.integrations import get_reporting_integration_callbacks
from trl import get_peft_config

from ..errors import InputError
from ..inputs.setting_warnings import setting_warnings
from ..plan.dry_run import arithmetic_of, check_fit, dry_run, processes_of_launcher
from ..plan.memory import Sharding
from ..report.facts import method_name
from .command_line import Settings, parse_arguments
from .commands import TRAIN, Command
from .earlier_run import check_checkpoint, check_start
from .models import Parts, load_processing_class, merged_folder, merges_alone, parts_of
from .preparation import Inputs, gather_inputs, init_kwargs_of, load_data_and_rewards, quantization_of


_DRY_RUN = "dry run, no weights are loaded, nothing is written."


def print_plan(
    arguments: Sequence[str],
    command: Command = TRAIN,
    processes: int | None = None,
    sharding: Sharding | None = None,
) -> None:
    """
    Print what a run with these flags would do, then raise the errors that it would raise.

    Parts that need data or a model that cannot be loaded are left out. `processes` and `sharding` are by default those
    of the launcher that started this process.

    Raises:
        InputError: At the end, for everything that would stop the run, or OSError where it is one. At once, for
            settings that cannot be read.
        SystemExit: For flags that cannot be read, as in [`~command_line.parse_arguments`].
    """
    problems: list[Exception] = []
    processes = processes or processes_of_launcher()
    with as_in_processes(processes):
        try:
            settings = parse_arguments(arguments, command)
        except InputError as rejection:  # where there is no GPU, the settings are read as on one
            with as_in_processes(processes, on_gpus=True):
                settings = parse_arguments(arguments, command)
            problems.append(rejection)
        with _collecting(problems):
            check_checkpoint(settings.training)
        parts: Parts = []
        with _collecting(problems):
            parts = parts_of(settings.model.model_name_or_path, settings.model.model_revision)
            check_start(settings, parts)
        if not merges_alone(settings):
            _print_run(settings, parts, processes, sharding, problems)
        elif len(parts) > 1:
            with _collecting(problems):
                load_processing_class(parts, settings.training.trust_remote_code)
                into = merged_folder(settings.training)
                print(f"Merge of the adapter {parts[0][0]} into its base {parts[1][0]}, in {into}: {_DRY_RUN}")
    if len(problems) == 1:
        raise problems[0]
    if problems:
        numbered = " ".join(f"({number}) {problem}" for number, problem in enumerate(problems, start=1))
        raise InputError(f"{len(problems)} problems. {numbered}")


def _print_run(
    settings: Settings, parts: Parts, processes: int, sharding: Sharding | None, problems: list[Exception]
) -> None:
    """Print what a training or an evaluation would do, and add what would stop it to the problems."""
    script_args, training_args, model_args, _ = settings
    title, prompts, inputs = script_args.dataset_name or script_args.eval_dataset or "no data", None, None
    with _collecting(problems):
        found = load_data_and_rewards(settings)
        data, prompts = found[0], found[0].prompts
        title = data.title if training_args.do_train else data.test_title or data.title
        if parts:  # else they were rejected
            inputs = gather_inputs(settings, parts, *found)
            prompts = inputs.data.prompts
    plan, mean_length = arithmetic_of(training_args, prompts, processes), None
    with _collecting(problems):
        mean_length = _mean_length(settings)
    with _collecting(problems):
        if inputs is not None:
            name, revision = inputs.parts[-1]  # an adapter has the configuration of its base
            training_args.model_init_kwargs = init_kwargs_of(training_args, model_args, revision)
            plan = dry_run(
                training_args,
                name,
                inputs.reward_funcs,
                prompts,
                inputs.processing_class,
                processes,
                peft_config=_adapter(settings, inputs.parts),
                quantization_config=quantization_of(training_args, model_args),
                mean_length=mean_length,
                sharding=sharding,
            )
            problems += map(InputError, plan.problems)
            _check_as_the_trainer(settings, inputs, problems)
    if training_args.distributed_state.is_main_process:
        method = method_name(training_args) if training_args.do_train else "Evaluation"
        print(f"{method} on {title}: {_DRY_RUN}\n\n{plan.tables()}")
        of_model = {} if inputs is None else inputs.settings_of_model
        for message in setting_warnings(training_args, of_model) if training_args.do_train else ():
            print(f"\nWarning: {message}")
        sys.stdout.flush()


def _mean_length(settings: Settings) -> int | None:
    """Return the mean length to estimate the memory for; raise an `InputError` if completions can't have it."""
    mean, limit = settings.script.dry_run_mean_length, settings.training.max_completion_length
    if mean is not None and not 1 <= mean <= (limit or mean):
        raise InputError(
            f"`dry_run_mean_length` is {mean}, but completions have 1 to {limit} tokens (`max_completion_length`): "
            "set it to a number of these, or leave it out."
        )
    return mean


def _adapter(settings: Settings, parts: Parts) -> Any:
    """Return the configuration of the adapter that is trained, if one is."""
    if len(parts) == 1:
        return get_peft_config(settings.model)
    from peft import PeftConfig

    adapter, revision = parts[0]
    return PeftConfig.from_pretrained(adapter, revision=revision)


def _check_as_the_trainer(settings: Settings, inputs: Inputs, problems: list[Exception]) -> None:
    """Add to the problems what TRL and transformers reject when a trainer is made and when training begins."""
    _, args, model_args, _ = settings
    name, revision = inputs.parts[-1]
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    is_adapter, weights, functions = len(inputs.parts) > 1, args.reward_weights, inputs.reward_funcs
    rejected = {
        f"`reward_weights` is {weights}, for {len(functions)} reward functions: give a number for each.":
            weights is not None and len(weights) != len(functions),
        f"`use_peft` asks for a new adapter, but {model_args.model_name_or_path} is one: leave `use_peft` out to "
        "train it on, or merge it first (--do_train false --merge_adapter true).":
            model_args.use_peft and is_adapter,
        "`sync_ref_model` is true, but there is no reference model: set `beta` above 0 and train no adapter, or leave "
        "`sync_ref_model` out.":
            args.sync_ref_model and (args.beta == 0 or model_args.use_peft or is_adapter),
        "`save_strategy` is 'best', but `metric_for_best_model` is not set: set it, e.g. reward.":
            args.save_strategy == "best" and args.metric_for_best_model is None,
    }  # fmt: skip
    problems += [InputError(message) for message, is_rejected in rejected.items() if is_rejected]
    with _collecting(problems):
        if inputs.data.train is not None and args.do_eval:
            check_fit(config, inputs.processing_class, args, [("eval", inputs.data.test)])
    for tracker in args.report_to:
        with _collecting(problems, f"`report_to` is '{tracker}': "):
            get_reporting_integration_callbacks([tracker])[0]()
    with _collecting(problems, f"`attn_implementation` is '{model_args.attn_implementation}': "), torch.device("meta"):
        if model_args.attn_implementation is not None:
            AutoModelForCausalLM.from_config(config, attn_implementation=model_args.attn_implementation)
    if not args.do_train:
        return
    with _collecting(problems, f"`optim` is '{args.optim}': "):
        Trainer.get_optimizer_cls_and_kwargs(args, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with _collecting(problems, "`push_to_hub` is set, but the Hub cannot be pushed to: "):
        if args.push_to_hub:
            whoami(args.hub_token)
    folder = Path(args.output_dir).absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        problems.append(
            InputError(f"`output_dir` is {args.output_dir}, but {above} is no folder that can be written to.")
        )


@contextmanager
def _collecting(problems: list[Exception], setting: str = "") -> Iterator[None]:
    """
    Add an error that the block raises to the problems, and continue after the block.

    With `setting`, the first words of the message, other errors of a library are added too.
    """
    try:
        yield
    except (HfHubHTTPError, ImportError, OSError, RuntimeError, ValueError) as error:
        if setting:
            problems.append(InputError(f"{setting}{str(error).splitlines()[0]}"))
        elif isinstance(error, InputError | OSError):
            problems.append(error)
        else:
            raise


@contextmanager
def as_in_processes(processes: int, on_gpus: bool = False) -> Iterator[None]:
    """
    Let settings be checked as if they were read in this number of processes.

    With `on_gpus`, as if on a machine with GPUs that compute in bfloat16.
    """
    world_size, has_bf16 = TrainingArguments.world_size, of_transformers.is_torch_bf16_gpu_available
    TrainingArguments.world_size = property(lambda self: processes)  # type: ignore[assignment,method-assign]
    if on_gpus:
        of_transformers.is_torch_bf16_gpu_available = lambda: True
    try:
        yield
    finally:
        TrainingArguments.world_size = world_size  # type: ignore[method-assign]
        of_transformers.is_torch_bf16_gpu_available = has_bf16
