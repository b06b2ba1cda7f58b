"""What `bapo-trl train` and `train_bapo.py` do, from the settings to the report."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from ...bapo_config import BAPOConfig
from ...checkpoints.rank_errors import on_main_process, raising_on_all_ranks
from ...checkpoints.stop_signals import EXIT_CODE, StopSignals, exit_stopped
from ...evaluation.measure import Evaluation
from ...report.command import report_line
from ...report.facts import method_name
from ...upstream.fixes import end_training
from ..console import UpdateLines, settings_table, without_bars_in_files
from ..data.columns import prompt_lines
from ..models import merge, merges_alone, parts_of
from ..preparation import Inputs, Trainer, gather_inputs, make_trainer
from ..settings.arguments import EMBEDDED
from ..settings.methods import TRL
from ..settings.parser import Settings
from .evaluate import evaluate_after, evaluate_before
from .output_folder import check_resume, check_start, continues, remove_earlier_run


def run(settings: Settings) -> None:
    """
    Train, evaluate, publish, merge and report, as far as the settings ask for it.

    Raises:
        SystemExit: With [`~checkpoints.stop_signals.EXIT_CODE`] for a training that a signal stopped, once it is
            saved.
        ValueError: For settings that cannot work, with the fix.
    """
    script_args, training_args, model_args, _ = settings
    without_bars_in_files()
    parts = parts_of(model_args.model_name_or_path, model_args.model_revision)
    check_start(settings, parts)
    if merges_alone(settings):
        return on_main_process(lambda: merge(training_args, model_args))

    inputs = gather_inputs(settings, parts)
    if not training_args.do_train and training_args.distributed_state.is_main_process:
        title, into = inputs.data.test_title or inputs.data.title, training_args.output_dir
        print(f"Evaluation of {model_args.model_name_or_path} on {title}; results in {into}", flush=True)
    trainer = make_trainer(settings, inputs)
    data, output_dir, say = inputs.data, Path(training_args.output_dir), trainer.accelerator.print
    replaces = training_args.do_train or script_args.overwrite_output_dir
    if training_args.do_train:
        name = "TRL's GRPOTrainer" if script_args.method == TRL else method_name(training_args)
        say(f"{name} on {data.title}")
        say(settings_table(training_args, script_args.method))
    say(prompt_lines(data, trainer.processing_class))

    before = None
    with trainer.locking_output_dir():
        if training_args.do_train:
            if not continues(training_args):
                on_main_process(lambda: remove_earlier_run(output_dir))
            before = _train(trainer, inputs, training_args)
        if training_args.do_eval:
            say(evaluate_after(trainer, inputs, before, replaces))
            if training_args.do_train:
                with raising_on_all_ranks():
                    trainer.save_state()  # with what was found

    if training_args.push_to_hub:
        with _saving(trainer):
            trainer.push_to_hub()
        say(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}")
    if script_args.merge_adapter:  # last of what is saved, so that it is not published beside the adapter
        on_main_process(lambda: merge(training_args, model_args))
    end_training(trainer)

    # Last, so that no figure stands in the way of the rest
    if training_args.do_train and trainer.is_world_process_zero():
        say(f"\nModel: {output_dir}\nLog: {output_dir / TRAINER_STATE_NAME}")
        say(report_line(trainer.state.log_history, output_dir / "report.png"))
        if script_args.dataset_name == EMBEDDED:
            say("Next: train on your own data (docs/your_own_data.md).")
        elif not training_args.do_eval:
            say("Next: measure the model with bapo-trl evaluate.")


def _train(trainer: Trainer, inputs: Inputs, training_args: BAPOConfig) -> Evaluation | None:
    """Train and save, with what the terminal says of it; return the evaluation of the start, if asked for."""
    output_dir, say = Path(training_args.output_dir), trainer.accelerator.print
    resume = trainer.checkpoint_to_resume(training_args.resume_from_checkpoint)
    if resume is not None:
        check_resume(resume, training_args)
        say(f"Resumes from {resume}.")
    before = evaluate_before(trainer, inputs) if training_args.do_eval else None
    stop = StopSignals()
    trainer.add_callback(stop)
    if not training_args.disable_tqdm:
        say("Each row averages the updates since the previous row. ESS: effective sample size (docs/monitor.md).")
        trainer.add_callback(UpdateLines)  # last, so that it sees which evaluations the others leave out
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        stop.restore()
    done = trainer.state.global_step
    checkpoint = output_dir / f"checkpoint-{done}"
    if stop.signal is not None:
        say(
            f"Stopped by {stop.signal.name} after update {done}, saved in {checkpoint}. To resume: "
            f"the same command with --resume_from_checkpoint true. Exit code {EXIT_CODE}."
        )
    exit_stopped(trainer)
    with _saving(trainer):
        trainer.save_model(training_args.output_dir)
        trainer.create_model_card(model_name=output_dir.resolve().name)  # peft has written one of its own
        trainer.save_state()
    say(f"Saved {training_args.output_dir}")
    return before


def _saving(trainer: Trainer) -> AbstractContextManager:
    """Raise on all ranks what one fails with; not under DeepSpeed and FSDP, whose ranks save together."""
    is_sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    return nullcontext() if is_sharded else raising_on_all_ranks()
