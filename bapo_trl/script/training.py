"""What `bapo-trl train` and `train_bapo.py` do, from the flags to the report."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from accelerate.utils import is_peft_model
from trl import ModelConfig

from ..bapo_config import BAPOConfig
from ..checkpoints.rank_errors import on_main_process, raising_on_all_ranks
from ..checkpoints.stop_signals import EXIT_CODE, StopSignals, exit_stopped
from ..evaluation.sampling import EvaluatedTrainer
from ..report.method import method_by_settings
from ..report.write import report_line
from ..upstream.fixes import end_training
from .arguments import BAPOScriptArguments
from .before_after import BeforeAfter
from .command_line import parse_arguments
from .commands import TRAIN, Command, asks_for_dry_run
from .console import settings_table
from .earlier_run import check_resume, check_start, goes_on, merged_folder, remove_earlier_run, resume_argument
from .models import adapter_base, check_adapter, check_merged, check_vllm, merged_dtype, save_merged
from .planning import print_plan
from .preparation import Inputs, gather_inputs, make_trainer, only_merges
from .prompts import count_missing_answers, other_form_line, prompts_line, unread_answer


def main(arguments: Sequence[str], command: Command = TRAIN) -> None:
    """
    Train, evaluate, publish, merge and report, as far as the flags behind a command ask for it.

    Raises:
        SystemExit: For flags that cannot be read, as in [`~command_line.parse_arguments`]. With
            [`~checkpoints.stop_signals.EXIT_CODE`] for a training that a signal stopped, once it is saved.
        ValueError: For settings that cannot work, with the fix.
    """
    if asks_for_dry_run(arguments):
        return print_plan(arguments, command)
    script_args, training_args, model_args, dataset_args = parse_arguments(arguments, command)
    model = model_args.model_name_or_path
    base = adapter_base(model, model_args.model_revision)
    check_start(script_args, training_args, model, base)
    if only_merges(script_args, training_args, dataset_args):
        return _merge(model, base, training_args, model_args)

    if not training_args.do_train and training_args.distributed_state.is_main_process:
        title = script_args.eval_dataset or ("a mixture" if dataset_args.datasets else script_args.dataset_name)
        print(f"Evaluates the model {model} on {title}, into {training_args.output_dir}", flush=True)
    check_vllm(training_args)
    inputs = gather_inputs(script_args, training_args, model_args, dataset_args, base)
    trainer = make_trainer(inputs, script_args, training_args, model_args, dataset_args)
    data, model, output_dir = inputs.data, inputs.model, Path(training_args.output_dir)
    say = trainer.accelerator.print
    evaluation = BeforeAfter(trainer, data.test, output_dir, inputs.extract_answer) if training_args.do_eval else None
    if not training_args.do_train and data.test is not None:
        say(prompts_line(data.test, trainer.processing_class))
        other_form = other_form_line(model, script_args)
        if other_form is not None:
            say(other_form)

    with trainer.holding_output_dir():
        if training_args.do_train:
            if not goes_on(training_args):
                on_main_process(lambda: remove_earlier_run(output_dir))
            _train(trainer, inputs, script_args, training_args, evaluation)
        if evaluation is not None:
            evaluated, parts = model, inputs.parts
            if training_args.do_train:
                evaluated = training_args.output_dir
                parts = [(evaluated, None), *(inputs.parts[-1:] if is_peft_model(trainer.model) else [])]
            evaluation.after(parts)
            if training_args.do_train:
                with raising_on_all_ranks():
                    trainer.save_state()  # with what was found
            say(evaluation.report(evaluated, data.test_title or data.title))

    if training_args.push_to_hub:
        with _saving(trainer):
            trainer.push_to_hub()
        say(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}")

    # Last of what is saved, so that it is not published beside the adapter
    if script_args.merge_adapter:
        if training_args.do_train:
            _merge(training_args.output_dir, base or model, training_args, replace(model_args, model_revision=None))
        else:
            _merge(model, base, training_args, model_args)

    end_training(trainer)

    # Last, so that no figure stands in the way of the rest
    if training_args.do_train and trainer.is_world_process_zero():
        say(report_line(trainer.state.log_history, output_dir / "report.png"))


def _train(
    trainer: EvaluatedTrainer,
    inputs: Inputs,
    script_args: BAPOScriptArguments,
    training_args: BAPOConfig,
    evaluation: BeforeAfter | None,
) -> None:
    """Train and save, with what the terminal says before and after."""
    data, output_dir = inputs.data, Path(training_args.output_dir)
    say = trainer.accelerator.print
    resume = trainer.checkpoint_to_resume(resume_argument(training_args.resume_from_checkpoint))
    is_over = resume is not None and not check_resume(resume, training_args)
    if script_args.merge_adapter:  # of a run that goes on, not asked before
        check_merged(merged_folder(training_args), script_args.overwrite_output_dir, [inputs.model, inputs.base])
    say(f"{method_by_settings(vars(training_args)).name} on {data.title}")
    say(settings_table(training_args, script_args.method))
    say(prompts_line(data.train, trainer.processing_class))
    missing = on_main_process(lambda: count_missing_answers(data.train))  # reads all rows
    if missing:
        say(f"Note: {missing} of {len(data.train)} prompts have no `solution`: a reward that reads it gives none.")
    unread = unread_answer(data.train, script_args.answer_column)
    if unread is not None:
        say(f"Note: rewards read the data's own column `solution`, not `{unread}`: rename it if that is wrong.")
    steps = training_args.logging_steps  # below 1, a part of all updates
    every = f"{steps:g} updates" if steps >= 1 else "the updates since the line before"
    say(f"Each line below: means over {every}, or over as many as it says; age in policy versions.")
    if resume is not None:
        say(f"Goes on from {resume}.")
    if is_over:
        say(f"Note: {resume} is of the last update. Nothing is left to train, but the model was not saved yet.")

    if evaluation is not None:
        evaluation.before(inputs.parts)
    stop = StopSignals()
    trainer.add_callback(stop)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        stop.restore()
    done = trainer.state.global_step
    checkpoint = output_dir / f"checkpoint-{done}"
    if stop.signal is not None:
        say(
            f"Stopped by {stop.signal.name} after update {done}, saved in {checkpoint}. To go on: "
            f"the same command with --resume_from_checkpoint true. Exit code {EXIT_CODE}."
        )
        exit_stopped(trainer)
    with _saving(trainer):
        trainer.save_model(training_args.output_dir)
        trainer.create_model_card(model_name=output_dir.resolve().name)  # peft has written one of its own
        trainer.save_state()
    say(f"Model: {training_args.output_dir}")
    if checkpoint.is_dir():
        say(f"Checkpoint: {checkpoint}")


def _merge(adapter: str, base: str | None, training_args: BAPOConfig, model_args: ModelConfig) -> None:
    """Save the merged model, from the main process, and say where and in which type."""
    check_adapter(base)
    folder = merged_folder(training_args)
    dtype, reason = merged_dtype(adapter, model_args.dtype)
    trusts, revision = training_args.trust_remote_code, model_args.model_revision
    dtype = on_main_process(lambda: save_merged(adapter, base, folder, trusts, revision, dtype))
    if training_args.distributed_state.is_main_process:
        print(f"Merged model: {folder} ({dtype}, {reason})")


def _saving(trainer: EvaluatedTrainer) -> AbstractContextManager:
    """Raise on all ranks what one fails with; not under DeepSpeed and FSDP, whose ranks save together."""
    is_sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return nullcontext() if is_sharded else raising_on_all_ranks()
