"""`--dry_run true` of `train` and `evaluate`: what the run would do. No weight is loaded, nothing is written."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as LOADERS  # "json", "csv", ...
from transformers import TrainingArguments
from transformers import training_args as of_transformers
from trl import ModelConfig, get_peft_config, get_quantization_config

from ..bapo_config import BAPOConfig
from ..inputs.setting_warnings import setting_warnings
from ..plan.dry_run import dry_run
from ..plan.memory import Layout, layout_of_process
from ..report.method import method_by_settings
from ..tasks import SMOLLM2, check_smollm2, has_smollm2, save_warm_start_shape
from .arguments import EMBEDDED
from .command_line import parse_arguments
from .commands import TRAIN, Command
from .datasets import Data, load_data, make_task
from .earlier_run import check_start, merged_folder
from .models import PACKAGED_MODELS, adapter_base, base_revision, check_adapter
from .preparation import Inputs, gather_inputs, only_merges


_DRY_RUN = "a dry run. No weights are loaded, nothing is written."


def print_plan(arguments: Sequence[str], command: Command = TRAIN, layout: Layout | None = None) -> None:
    """Print what a run with these flags would do, by default where this process would train; refuse as it would."""
    processes = (layout or layout_of_process()).processes
    with as_on_gpus(processes), throwaway_cache() as folder:
        script_args, training_args, model_args, dataset_args = parse_arguments(arguments, command)
        name = model_args.model_name_or_path
        base = adapter_base(name, model_args.model_revision)
        check_start(script_args, training_args, name, base)
        if only_merges(script_args, training_args, dataset_args):
            return _print_merge(name, base, training_args)
        revision = model_args.model_revision if base is None else base_revision(name, model_args.model_revision)
        training_args.model_init_kwargs = _init_kwargs(training_args, model_args, revision)
        if name == SMOLLM2 and not has_smollm2():
            check_smollm2()
            data = load_data(
                script_args, training_args, dataset_args, make_task(script_args.dataset_name, script_args.task_args)
            )
            found = dry_run(training_args, None, train_dataset=_prompts(data), layout=layout)
        else:
            fetch = partial(_fetch_shape, folder=folder)
            inputs = gather_inputs(script_args, training_args, model_args, dataset_args, base, fetch)
            data = inputs.data
            found = dry_run(
                training_args,
                inputs.model if base is None else base,
                inputs.reward_funcs,
                _prompts(data),
                inputs.processing_class,
                _peft_config(inputs, training_args, model_args),
                layout,
            )
        if not training_args.distributed_state.is_main_process:
            return
        title = data.title if training_args.do_train else data.test_title or data.title
        method = method_by_settings(vars(training_args)).name if training_args.do_train else "Evaluation"
        print(f"{method} on {title}: {_DRY_RUN}\n\n{found}")
        for message in setting_warnings(training_args) if training_args.do_train else ():
            print(f"\nWarning: {message}")


@contextmanager
def as_on_gpus(processes: int) -> Iterator[None]:
    """Have settings, which are checked against the machine that reads them, read as on so many GPUs with bfloat16."""
    pretended: tuple[tuple[Any, str, Any], ...] = (
        (TrainingArguments, "world_size", property(lambda self: processes)),
        (of_transformers, "is_torch_bf16_gpu_available", lambda: True),
    )
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


def _print_merge(adapter: str, base: str | None, training_args: BAPOConfig) -> None:
    check_adapter(base)
    if training_args.distributed_state.is_main_process:
        print(f"Merges the adapter {adapter} into its base {base}, in {merged_folder(training_args)}: {_DRY_RUN}")


def _prompts(data: Data) -> Any:
    return data.test if data.train is None else data.train


def _fetch_shape(name: str, training_args: BAPOConfig, folder: Path) -> str:
    """Return the folder or id of a model; of the embedded one, which may not be built yet, all but its weights."""
    if name == EMBEDDED:
        save_warm_start_shape(folder / name)
        return str(folder / name)
    return str(PACKAGED_MODELS[name]()) if name in PACKAGED_MODELS else name


def _init_kwargs(training_args: BAPOConfig, model_args: ModelConfig, revision: str | None) -> dict[str, Any]:
    given: Any = training_args.model_init_kwargs or {}
    quantization = get_quantization_config(model_args)
    chosen = {"revision": revision, "dtype": model_args.dtype or "float32"}
    return {**chosen, **({} if quantization is None else {"quantization_config": quantization}), **given}


def _peft_config(inputs: Inputs, training_args: BAPOConfig, model_args: ModelConfig) -> Any:
    """Return the adapter to train: a new one, or the saved one that the model is."""
    if inputs.base is None:
        return get_peft_config(model_args)
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(inputs.model, revision=model_args.model_revision)
    config.inference_mode = not training_args.do_train
    return config
