"""`--dry_run true` of `train` and `evaluate`: what the run would do. No weight is loaded, nothing is written."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as LOADERS  # "json", "csv", ...
from huggingface_hub import whoami
from transformers import TrainingArguments
from transformers import training_args as of_transformers
from trl import DatasetMixtureConfig, ModelConfig

from ..bapo_config import BAPOConfig
from ..checkpoints.files import checkpoint_names, find_defect, step_of
from ..errors import InputError
from ..inputs.checks import has_rotary_positions, token_limits
from ..inputs.setting_warnings import setting_warnings
from ..plan.dry_run import DryRun, arithmetic_of, dry_run, processes_of_launcher
from ..plan.samples import check_window
from ..report.facts import method_name
from ..tasks import SMOLLM2, check_smollm2, has_smollm2
from .arguments import BAPOScriptArguments
from .command_line import parse_arguments
from .commands import TRAIN, Command
from .datasets import Data, load_data, make_task
from .earlier_run import check_resume, check_start, merged_folder, resume_argument
from .models import adapter_base, base_dtype, base_revision, check_adapter, check_vllm, merged_dtype
from .preparation import Inputs, explaining_pushes, gather_inputs, only_merges


Settings = tuple[BAPOScriptArguments, BAPOConfig, ModelConfig, DatasetMixtureConfig]

_SEE_END = "Prompts and rewards are not known: the end says why."
_DRY_RUN = "a dry run. No weights are loaded, nothing is written."


def print_plan(arguments: Sequence[str], command: Command = TRAIN, processes: int | None = None) -> None:
    """
    Print what a run with these flags would do, by default on the processes of its launcher; then refuse as it would.

    What cannot be known without the data or the model is left out.

    Raises:
        InputError: At the end, for all that the run would stop at. At once, for settings that cannot be read.
        SystemExit: For flags that cannot be read, as in [`~command_line.parse_arguments`].
    """
    problems: list[InputError] = []
    processes = processes or processes_of_launcher()
    with as_in_processes(processes), throwaway_cache():
        settings = _parse(arguments, command, processes, problems)
        script_args, training_args, model_args, dataset_args = settings
        base = None
        with _noting(problems):
            base = adapter_base(model_args.model_name_or_path, model_args.model_revision)
            check_start(script_args, training_args, model_args.model_name_or_path, base)
            _check_checkpoint(training_args)
        if only_merges(script_args, training_args, dataset_args):
            with _noting(problems):
                _print_merge(model_args, base, training_args)
        else:
            _print_run(settings, base, processes, problems)
    if len(problems) > 1:
        texts = [" ".join([str(problem), *getattr(problem, "__notes__", ())]) for problem in problems]
        numbered = " ".join(f"({number}) {text}" for number, text in enumerate(texts, start=1))
        raise InputError(f"{len(problems)} problems. {numbered}")
    for problem in problems:
        raise problem


def _print_run(settings: Settings, base: str | None, processes: int, problems: list[InputError]) -> None:
    """Print what a training or an evaluation would do, and add what it would stop at to the problems."""
    script_args, training_args, model_args, dataset_args = settings
    name = model_args.model_name_or_path
    revision = model_args.model_revision if base is None else base_revision(name, model_args.model_revision)
    chosen = {"revision": revision, "attn_implementation": model_args.attn_implementation}
    training_args.model_init_kwargs = {**chosen, **(training_args.model_init_kwargs or {})}  # type: ignore[dict-item]
    data = found = None
    with _noting(problems):
        check_vllm(training_args)
    with _noting(problems), explaining_pushes(training_args):
        if training_args.push_to_hub:
            whoami(training_args.hub_token)
    with _noting(problems):
        task = make_task(script_args.dataset_name, script_args.task_args)
        data = load_data(script_args, training_args, dataset_args, task)
    is_built = name != SMOLLM2 or has_smollm2()
    with _noting(problems):
        if not is_built:
            check_smollm2()
        elif data is not None:
            inputs = gather_inputs(script_args, training_args, model_args, dataset_args, base, data)
            found = dry_run(
                training_args,
                inputs.model if base is None else base,
                inputs.reward_funcs,
                _prompts(inputs.data),
                inputs.processing_class,
                processes,
                trains_adapter=base is not None or model_args.use_peft,
            )
            problems += map(InputError, found.problems)
            _check_eval_window(found, inputs, training_args)
    if not training_args.distributed_state.is_main_process:
        return
    if found is None:
        found = arithmetic_of(training_args, None if data is None else _prompts(data), processes)
        found = replace(found, missing=_SEE_END) if is_built else found
    title = script_args.dataset_name if data is None else data.title
    if not training_args.do_train:
        title = script_args.eval_dataset if data is None else data.test_title or title
    method = method_name(training_args) if training_args.do_train else "Evaluation"
    print(f"{method} on {title or 'no data'}: {_DRY_RUN}\n\n{found.tables()}")
    for message in setting_warnings(training_args) if training_args.do_train else ():
        print(f"\nWarning: {message}")
    sys.stdout.flush()


@contextmanager
def _noting(problems: list[InputError]) -> Iterator[None]:
    """Add what the block is refused with to the problems, and go on after it."""
    try:
        yield
    except InputError as problem:
        problems.append(problem)


def _parse(arguments: Sequence[str], command: Command, processes: int, problems: list[InputError]) -> Settings:
    """Return the settings; those that need a GPU, where there is none, as with one, and the refusal as a problem."""
    try:
        return parse_arguments(arguments, command)
    except InputError as refusal:
        with as_in_processes(processes, on_gpus=True):
            settings = parse_arguments(arguments, command)
        problems.append(refusal)
        return settings


def _check_checkpoint(training_args: BAPOConfig) -> None:
    """Refuse to resume where no checkpoint is complete, or the newest leaves nothing to train (`InputError`)."""
    resume, run_dir = resume_argument(training_args.resume_from_checkpoint), training_args.output_dir
    if resume is None:
        return
    newest_first = sorted(checkpoint_names(run_dir), key=step_of, reverse=True) if resume is True else []
    folders = [str(Path(run_dir, name)) for name in newest_first] if resume is True else [str(resume)]
    defects = {folder: find_defect(folder) for folder in folders}
    complete = next((folder for folder, defect in defects.items() if defect is None), None)
    if complete is None:
        found = ", ".join(f"{folder}: {defect}" for folder, defect in defects.items()) or f"none in {run_dir}"
        raise InputError(
            f"`resume_from_checkpoint` is {training_args.resume_from_checkpoint}, but there is no complete checkpoint "
            f"({found}): name another one, or start without it."
        )
    check_resume(complete, training_args)


def _check_eval_window(found: DryRun, inputs: Inputs, training_args: BAPOConfig) -> None:
    """Refuse evaluation prompts that the model fails at, beside those that are trained on (`InputError`)."""
    if found.model_config is None or inputs.data.train is None or has_rotary_positions(found.model_config):
        return
    limits = token_limits(found.model_config, training_args.max_completion_length)
    check_window([("eval", inputs.data.test)], inputs.processing_class, limits, training_args.chat_template_kwargs)


@contextmanager
def as_in_processes(processes: int, on_gpus: bool = False) -> Iterator[None]:
    """
    Have settings, which are checked against the machine that reads them, read as in so many processes.

    With `on_gpus`, as on a machine with GPUs that compute in bfloat16.
    """
    pretended: list[tuple[Any, str, Any]] = [(TrainingArguments, "world_size", property(lambda self: processes))]
    if on_gpus:
        pretended.append((of_transformers, "is_torch_bf16_gpu_available", lambda: True))
    originals = [getattr(owner, name) for owner, name, _ in pretended]
    for owner, name, value in pretended:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(pretended, originals, strict=True):
            setattr(owner, name, original)


@contextmanager
def throwaway_cache() -> Iterator[None]:
    """
    Have datasets prepare files and map rows in a folder that goes, without progress bars.

    What is prepared already of the Hub's data is read from where it is.
    """
    kept: Path = datasets.config.HF_DATASETS_CACHE
    caches, shows_bars = datasets.is_caching_enabled(), not datasets.utils.are_progress_bars_disabled()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "datasets"
        cache.mkdir()
        for path in kept.iterdir() if kept.is_dir() else ():
            if path.is_dir() and path.name not in LOADERS:
                (cache / path.name).symlink_to(path.resolve())
        datasets.config.HF_DATASETS_CACHE = cache
        datasets.disable_caching()  # of what is mapped: beside the user's data
        datasets.disable_progress_bars()
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = kept
            if caches:
                datasets.enable_caching()
            if shows_bars:
                datasets.enable_progress_bars()


def _print_merge(model_args: ModelConfig, base: str | None, training_args: BAPOConfig) -> None:
    adapter = str(model_args.model_name_or_path)
    check_adapter(base)
    dtype, reason = merged_dtype(adapter, model_args.dtype)
    of_base = base_dtype(adapter, str(base), model_args.model_revision, training_args.trust_remote_code)
    if training_args.distributed_state.is_main_process:
        print(f"Merges the adapter {adapter} into its base {base}, in {merged_folder(training_args)}: {_DRY_RUN}")
        print(f"Weights are saved in {of_base if dtype == 'auto' else dtype}, {reason}.", flush=True)


def _prompts(data: Data) -> Any:
    return data.test if data.train is None else data.train
