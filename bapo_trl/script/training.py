"""What `bapo-trl train` and `train_bapo.py` do, from the settings to the report."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy

from ..bapo_config import BAPOConfig
from ..checkpoints.rank_errors import on_main_process, raising_on_all_ranks
from ..checkpoints.stop_signals import EXIT_CODE, StopSignals, exit_stopped
from ..evaluation.accuracy import accuracy_table
from ..evaluation.measure import Evaluation, evaluate
from ..report.command import report_line
from ..report.facts import method_name
from ..upstream.cpu_speed import speed_up_cpu
from ..upstream.fixes import end_training
from .arguments import EMBEDDED
from .command_line import TRL, Settings
from .console import UpdateLines, rewards_in_words, settings_table, without_bars_in_files
from .datasets import prompt_lines
from .earlier_run import check_resume, check_start, continues, overwrites, remove_earlier_run, resume_argument
from .models import merge, merges_alone, parts_of
from .preparation import Inputs, Trainer, gather_inputs, load_data_and_rewards, make_trainer


# What the completions of a model depend on, beside the tokenizer
_MODEL_FILES = (
    "*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "config.json", "adapter_config.json",
    "generation_config.json",
)  # fmt: skip


def run(settings: Settings) -> None:
    """
    Train, evaluate, publish, merge and report, as far as the settings ask for it.

    Raises:
        SystemExit: With [`~checkpoints.stop_signals.EXIT_CODE`] for a training that a signal stopped, once it is
            saved.
        ValueError: For settings that cannot work, with the fix.
    """
    script_args, training_args, model_args, dataset_args = settings
    without_bars_in_files()
    parts = parts_of(model_args.model_name_or_path, model_args.model_revision)
    check_start(settings, parts)
    if merges_alone(settings):
        return on_main_process(lambda: merge(training_args, model_args))

    inputs = gather_inputs(settings, parts, *load_data_and_rewards(settings))
    if not training_args.do_train and training_args.distributed_state.is_main_process:
        title = script_args.eval_dataset or ("a mixture" if dataset_args.datasets else script_args.dataset_name)
        into = training_args.output_dir
        print(f"Evaluation of {model_args.model_name_or_path} on {title}; results in {into}", flush=True)
    trainer = make_trainer(settings, inputs)
    data, output_dir, say = inputs.data, Path(training_args.output_dir), trainer.accelerator.print
    speed = speed_up_cpu(trainer)
    if speed is not None:
        say(speed)
    if training_args.do_train:
        name = "TRL's GRPOTrainer" if script_args.method == TRL else method_name(training_args)
        say(f"{name} on {data.title}")
        say(settings_table(training_args, script_args.method))
    say(on_main_process(lambda: prompt_lines(data, trainer.processing_class)))  # reads all rows

    before = None
    with trainer.locking_output_dir():
        if training_args.do_train:
            if not continues(training_args):
                on_main_process(lambda: remove_earlier_run(output_dir))
            before = _train(trainer, inputs, training_args)
        if training_args.do_eval:
            say(_evaluate_after(trainer, inputs, before, training_args.do_train or overwrites(settings)))
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
    resume = trainer.checkpoint_to_resume(resume_argument(training_args.resume_from_checkpoint))
    if resume is not None:
        check_resume(resume, training_args)
        say(f"Resumes from {resume}.")
    before = _evaluate_before(trainer, inputs) if training_args.do_eval else None
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


class _NoEvaluationAtTheEnd(TrainerCallback):
    """Leaves out the evaluation at the last update unless something needs it: another follows the training."""

    def on_step_end(self, args, state, control, **kwargs):
        is_awaited = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
        if state.global_step >= state.max_steps and not is_awaited:
            control.should_evaluate = False
        return control

    on_epoch_end = on_step_end


def _evaluate_before(trainer: Trainer, inputs: Inputs) -> Evaluation | None:
    """
    Evaluate the model that training starts from; a resumed run scores the completions that its first part saved.
    DeepSpeed and FSDP cannot evaluate before they train: they say so.
    """
    trainer.add_callback(_NoEvaluationAtTheEnd())
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        trainer.accelerator.print(
            "Before training: not evaluated under DeepSpeed or FSDP. `--do_train false` evaluates the model alone."
        )
        return None
    path = Path(trainer.args.output_dir, "eval_completions_before.jsonl")
    trainer.accelerator.print("Evaluating before training ...", flush=True)
    before = evaluate(trainer, inputs.data.test, path, inputs.extract_answer, _origin(inputs.parts))
    name, accuracy = next(iter(before.accuracies.items()), ("no prompt has a reward", "unknown"))
    trainer.accelerator.print(f"Accuracy before training: {accuracy} ({name})", flush=True)
    return before


def _origin(parts: Sequence[tuple[str, str | None]]) -> list[Any]:
    """Return what identifies a model: the sizes and times of its files, or its name on the Hub."""

    def stats(folder: str) -> list[Any]:
        files = (file for pattern in _MODEL_FILES for file in sorted(Path(folder).glob(pattern)))
        return [[file.name, (of_file := file.stat()).st_size, of_file.st_mtime_ns] for file in files]

    return [stats(name) if Path(name).is_dir() else [name, revision] for name, revision in parts]


def _save_results(trainer: Trainer, results: dict[str, Any], keeps_before: bool) -> None:
    """Write the results of an evaluation, and keep those that a training measured before its first update."""
    earlier = Path(trainer.args.output_dir, "eval_results.json")
    if keeps_before and earlier.exists():
        found = json.loads(earlier.read_text())
        results = {name: value for name, value in found.items() if name.startswith("before_")} | results
    trainer.save_metrics("eval", results)


def _evaluate_after(trainer: Trainer, inputs: Inputs, before: Evaluation | None, replaces: bool) -> str:
    """Evaluate the model as it is now, log its rewards, save the results, and return lines for the terminal."""
    data, output_dir = inputs.data, Path(trainer.args.output_dir)
    path = output_dir / "eval_completions.jsonl"
    trainer.accelerator.print("Evaluating ...", flush=True)
    parts: Sequence[tuple[str, str | None]] = inputs.parts
    if trainer.args.do_train:
        is_adapter = (output_dir / "adapter_config.json").exists()
        parts = [(str(output_dir), None), *([parts[-1]] if is_adapter else [])]
    after = evaluate(trainer, data.test, path, inputs.extract_answer, _origin(parts), replaces)
    rewards = {f"eval_{name}": value for name, value in after.metrics.items()}
    trainer.log(rewards)
    results, accuracies = after.as_results("eval"), {"accuracy": after.accuracies}
    if before is not None:
        results = {**before.as_results("before"), **results}
        accuracies = {"before": before.accuracies, "after": after.accuracies}
    on_main_process(lambda: _save_results(trainer, results, keeps_before=before is None))
    model = output_dir if trainer.args.do_train else inputs.parts[0][0]
    count = after.metrics.get("prompts_without_reward", 0)
    first, means = trainer.reward_func_names[0], [estimate.mean for estimate in after.accuracies.values()]
    lines = [
        f"Evaluation of {model} on {data.test_title or data.title}",
        f"  number of prompts: {after.num_prompts}; ± is one standard error (Wilson)",
        accuracy_table(accuracies),
        f"  {rewards_in_words(rewards)}",
        f"Note: no completion has a first reward (`{first}`) of 1 or more, so none is right."
        if means and not any(means)
        else "",
        f"Left out, without a reward: {count} of {count + after.num_prompts} prompts" if count else "",
        f"Completions: {path}",
        f"Metrics: {output_dir / 'eval_results.json'}",
    ]
    return "\n".join(line for line in lines if line)
