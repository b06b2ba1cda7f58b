"""`--dry_run true` of `train` and `evaluate`: what the run would do. No weight is loaded, nothing is written."""

from collections.abc import Sequence
from typing import Any

from trl import ModelConfig, get_peft_config

from ..bapo_config import BAPOConfig
from ..plan.dry_run import dry_run
from ..plan.memory import Layout, layout_of_process
from ..report.method import method_by_settings
from ..upstream.pretence import as_on_gpus
from .command_line import parse_arguments
from .commands import TRAIN, Command
from .earlier_run import check_output_dir
from .models import PACKAGED_MODELS, adapter_base
from .preparation import Inputs, gather_inputs


def main(arguments: Sequence[str], command: Command = TRAIN, layout: Layout | None = None) -> None:
    """
    Print what a run with these flags would do.

    Args:
        arguments (sequence of `str`): Flags.
        command ([`~commands.Command`], *optional*, defaults to `bapo-trl train`): The command that they follow.
        layout ([`~memory.Layout`], *optional*): Where it would train; by default where this process would.

    Raises:
        SystemExit, ValueError: As the run would, for flags that cannot be read and settings that cannot work.
    """
    processes = (layout or layout_of_process()).processes
    with as_on_gpus(processes):
        script_args, training_args, model_args, dataset_args = parse_arguments(arguments, command)
        name = model_args.model_name_or_path
        base = None if name is None or name in PACKAGED_MODELS else adapter_base(name, model_args.model_revision)
        if training_args.do_train and training_args.resume_from_checkpoint in (None, "false"):
            check_output_dir(training_args.output_dir, script_args.overwrite_output_dir, name)
        inputs = gather_inputs(script_args, training_args, model_args, dataset_args, base)
        training_args.model_init_kwargs = _init_kwargs(training_args, model_args)
        found = dry_run(
            training_args,
            inputs.model if base is None else base,
            inputs.reward_funcs,
            inputs.data.test if inputs.data.train is None else inputs.data.train,
            inputs.processing_class,
            _peft_config(inputs, training_args, model_args),
            layout,
        )
        if not training_args.distributed_state.is_main_process:
            return
        title = inputs.data.title if training_args.do_train else inputs.data.test_title or inputs.data.title
        method = method_by_settings(vars(training_args)).name if training_args.do_train else "Evaluation"
        print(f"{method} on {title}: a dry run. No weights are loaded, nothing is written.\n\n{found}")
        for message in training_args.warnings() if training_args.do_train else ():
            print(f"\nWarning: {message}")


def _init_kwargs(training_args: BAPOConfig, model_args: ModelConfig) -> dict[str, Any]:
    given: Any = training_args.model_init_kwargs or {}
    return {"revision": model_args.model_revision, "dtype": model_args.dtype or "float32", **given}


def _peft_config(inputs: Inputs, training_args: BAPOConfig, model_args: ModelConfig) -> Any:
    """Return the adapter to train: a new one, or the saved one that the model is."""
    if inputs.base is None:
        return get_peft_config(model_args)
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(inputs.model, revision=model_args.model_revision)
    config.inference_mode = not training_args.do_train
    return config
