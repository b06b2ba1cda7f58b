"""`--dry_run true` of `train` and `evaluate`: what the run would do. No weight is loaded, nothing is written."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as LOADERS  # "json", "csv", ...
from huggingface_hub import whoami
from transformers import TrainingArguments
from transformers import training_args as of_transformers

from ..bapo_config import BAPOConfig
from ..errors import InputError
from ..inputs.checks import has_rotary_positions, token_limits
from ..inputs.setting_warnings import setting_warnings
from ..plan.dry_run import DryRun, arithmetic_of, dry_run, processes_of_launcher
from ..plan.samples import check_window
from ..report.facts import method_name
from ..tasks import SMOLLM2, check_smollm2, has_smollm2
from .command_line import Settings, parse_arguments
from .commands import TRAIN, Command
from .datasets import Data
from .earlier_run import check_checkpoint
from .models import base_dtype, base_revision, fetch_model, merged_dtype, merged_folder
from .preparation import Inputs, Prepared, explaining_pushes, prepare


_SEE_END = "Prompts and rewards are not known: the end says why."
_DRY_RUN = "a dry run. No weights are loaded, nothing is written."


def print_plan(arguments: Sequence[str], command: Command = TRAIN, processes: int | None = None) -> None:
    """
    Print what a run with these flags would do, by default where this process would train; then refuse as it would.

    What cannot be known without the data or the model is left out.

    Raises:
        InputError: At the end, for all that the run would stop at. At once, for settings that cannot be read.
        SystemExit: For flags that cannot be read, as in [`~command_line.parse_arguments`].
    """
    problems: list[InputError] = []
    processes = processes or processes_of_launcher()
    with as_in_processes(processes), throwaway_cache():
        settings = _parse(arguments, command, processes, problems)
        with _noting(problems):
            check_checkpoint(settings.training)
        with _noting(problems), explaining_pushes(settings.training):
            if settings.training.push_to_hub:
                whoami(settings.training.hub_token)
        prepared = prepare(settings, partial(_noting, problems), _fetch)
        if prepared.merges_alone:
            with _noting(problems):
                if prepared.base is not None:
                    _print_merge(prepared)
        else:
            _print_run(prepared, processes, problems)
    if len(problems) > 1:
        texts = [" ".join([str(problem), *getattr(problem, "__notes__", ())]) for problem in problems]
        numbered = " ".join(f"({number}) {text}" for number, text in enumerate(texts, start=1))
        raise InputError(f"{len(problems)} problems. {numbered}")
    for problem in problems:
        raise problem


def _print_run(prepared: Prepared, processes: int, problems: list[InputError]) -> None:
    """Print what a training or an evaluation would do, and add what it would stop at to the problems."""
    script_args, training_args, model_args, _ = prepared.settings
    inputs, data, found = prepared.inputs, prepared.data, None
    with _noting(problems):
        if inputs is not None:
            revision = model_args.model_revision
            if inputs.base is not None:
                revision = base_revision(inputs.model, revision)
            chosen = {"revision": revision, "attn_implementation": model_args.attn_implementation}
            training_args.model_init_kwargs = {**chosen, **(training_args.model_init_kwargs or {})}  # type: ignore[dict-item]
            found = dry_run(
                training_args,
                inputs.model if inputs.base is None else inputs.base,
                inputs.reward_funcs,
                _prompts(inputs.data),
                inputs.processing_class,
                processes,
                trains_adapter=inputs.base is not None or model_args.use_peft,
            )
            problems += map(InputError, found.problems)
            _check_eval_window(found, inputs, training_args)
    if not training_args.distributed_state.is_main_process:
        return
    if found is None:
        found = arithmetic_of(training_args, None if data is None else _prompts(data), processes)
        is_built = model_args.model_name_or_path != SMOLLM2 or has_smollm2()
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
        with suppress(_NotBuiltError):
            yield
    except InputError as problem:
        problems.append(problem)


class _NotBuiltError(Exception):
    """A model is fetched from elsewhere by the run, and not by its plan."""


def _parse(arguments: Sequence[str], command: Command, processes: int, problems: list[InputError]) -> Settings:
    """Return the settings; those that need a GPU, where there is none, as with one, and the refusal as a problem."""
    try:
        return parse_arguments(arguments, command)
    except InputError as refusal:
        with as_in_processes(processes, on_gpus=True):
            settings = parse_arguments(arguments, command)
        problems.append(refusal)
        return settings


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
def throwaway_cache() -> Iterator[Path]:
    """
    Have datasets prepare files and map rows in a folder that goes, without progress bars, and yield that folder.

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
            yield Path(folder)
        finally:
            datasets.config.HF_DATASETS_CACHE = kept
            if caches:
                datasets.enable_caching()
            if shows_bars:
                datasets.enable_progress_bars()


def _print_merge(prepared: Prepared) -> None:
    _, training_args, model_args, _ = prepared.settings
    adapter, base = str(model_args.model_name_or_path), str(prepared.base)
    dtype, reason = merged_dtype(adapter, model_args.dtype)
    of_base = base_dtype(adapter, base, model_args.model_revision, training_args.trust_remote_code)
    if training_args.distributed_state.is_main_process:
        print(f"Merges the adapter {adapter} into its base {base}, in {merged_folder(training_args)}: {_DRY_RUN}")
        print(f"Weights are saved in {of_base if dtype == 'auto' else dtype}, {reason}.", flush=True)


def _prompts(data: Data) -> Any:
    return data.test if data.train is None else data.train


def _fetch(name: str, training_args: BAPOConfig) -> str:
    """Do as [`~models.fetch_model`], but fetch nothing from elsewhere."""
    if name == SMOLLM2 and not has_smollm2():
        check_smollm2()
        raise _NotBuiltError
    return fetch_model(name, training_args)
