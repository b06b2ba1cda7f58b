r"""
Train a model with BAPO.

The embedded arithmetic task, on a laptop without a GPU:

    python train_bapo.py

One of the recipes, or your own; flags override its values:

    accelerate launch train_bapo.py --config recipes/math_7b.yaml --learning_rate 1e-6

Your own data and reward, all settings from the command line:

    python train_bapo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name prompts.jsonl \
        --reward_funcs my_rewards.is_short --output_dir out --steps_per_generation 8 --num_iterations 2

`--help` lists all settings: those of this script, of `BAPOConfig` (a `GRPOConfig`), of TRL's `ModelConfig` (LoRA flags
among them) and of TRL's dataset mixtures.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import ProgressCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.cpu_speed import base_dtype, speed_up_cpu
from bapo_trl.script.arguments import RecipeParser
from bapo_trl.script.console import BoundsProgressCallback, log_line, settings_table
from bapo_trl.script.datasets import Data, common_hub_id, load_splits, make_task, pick_split
from bapo_trl.script.report import report_line
from bapo_trl.script.rewards import resolve_reward_funcs
from bapo_trl.tasks import SMOLLM2, held_out_accuracy, load_task, smollm2_path, warm_start_path
from bapo_trl.upstream_fixes import end_training


EMBEDDED = "embedded"
PACKAGED_MODELS = {EMBEDDED: warm_start_path, SMOLLM2: smollm2_path}
QUICKSTART = Path(__file__).resolve().parent / "recipes" / "quickstart.yaml"


@dataclass
class BAPOScriptArguments(ScriptArguments):
    """
    Arguments of this script. `--dataset_name` is a file (json, jsonl, parquet), a folder, a Hub id, `embedded`,
    `chat_sums` (sums asked of a chat model) or `reasoning_gym:TASK`. `--model_name_or_path` is a folder, a Hub id,
    `embedded` or `smollm2` (SmolLM2-135M-Instruct from a package).

    Args:
        reward_funcs (`list[str]`, *optional*):
            Reward functions: names of TRL's, or import paths `package.module.function`. The embedded task brings its
            own.
        task_args (`dict` or `str`, *optional*):
            Arguments of a task of reasoning-gym, as JSON.
    """

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Reward functions: accuracy_reward, reasoning_accuracy_reward, think_format_reward, "
            "get_soft_overlong_punishment, or import paths such as my_package.rewards.my_reward."
        },
    )
    task_args: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'Arguments of a task of reasoning-gym as JSON: \'{"min_terms": 2, "max_terms": 2}\'.'},
    )


def parse_arguments(arguments: list[str]):
    named = {argument.partition("=")[0].replace("-", "_") for argument in arguments}
    if not named & {"__config", "__dataset_name", "__help", "_h"}:
        arguments = ["--config", str(QUICKSTART), *arguments]
    parser = RecipeParser(
        (BAPOScriptArguments, BAPOConfig, ModelConfig, DatasetMixtureConfig),
        description=__doc__,
        usage="train_bapo.py [--config RECIPE] [--NAME VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(do_train=True, dtype=None)
    script_args, training_args, *others = parser.parse_args_and_config(arguments)
    training_args.do_eval |= not training_args.do_train
    return script_args, training_args, *others


def load_data(script_args, training_args, dataset_args, task, made) -> Data:
    if task is not None:
        return Data("the embedded task (sums of two numbers)", task.train_dataset, task.test_dataset)
    if made is not None:
        return Data(made.title, made.train_dataset, made.test_dataset)
    if dataset_args.datasets:
        title, sources = "a dataset mixture", [part.path for part in dataset_args.datasets]
        splits = get_dataset(dataset_args)
    elif script_args.dataset_name:
        title, sources = script_args.dataset_name, [script_args.dataset_name]
        splits = load_splits(script_args.dataset_name, script_args.dataset_config, script_args.dataset_streaming)
    else:
        raise ValueError(
            "`dataset_name` is not set: give a json, jsonl or parquet file, a dataset folder, an id on the Hub, or "
            f"'{EMBEDDED}' for the built-in task (or list `datasets` in the config file)."
        )
    train = pick_split(splits, script_args.dataset_train_split, "dataset_train_split")
    test = pick_split(splits, script_args.dataset_test_split, "dataset_test_split") if training_args.do_eval else None
    return Data(title, train, test, common_hub_id(sources))


def main(arguments: list[str]):
    script_args, training_args, model_args, dataset_args = parse_arguments(arguments)

    if not training_args.do_train and training_args.resume_from_checkpoint not in (None, "false"):
        raise ValueError(
            f"`resume_from_checkpoint` is '{training_args.resume_from_checkpoint}', but `do_train` is false and "
            "evaluation is of `model_name_or_path`: set that to the checkpoint's folder."
        )

    # Data, rewards and model
    task = load_task() if script_args.dataset_name == EMBEDDED else None
    made = make_task(script_args.dataset_name, script_args.task_args)
    data = load_data(script_args, training_args, dataset_args, task, made)
    if script_args.reward_funcs:
        reward_funcs = resolve_reward_funcs(script_args.reward_funcs)
    elif task is not None or made is not None:
        reward_funcs = [(task or made).reward_func]
    else:
        raise ValueError("`reward_funcs` is not set: name a reward of TRL's or an import path, see --help.")
    model = model_args.model_name_or_path
    if model is None:
        raise ValueError("`model_name_or_path` is not set: give a folder, an id on the Hub, 'embedded' or 'smollm2'.")
    if task is not None and training_args.use_cpu:
        torch.set_num_threads(1)  # so small a model gains nothing from more, and loses a lot on a busy machine
    if model in PACKAGED_MODELS:
        with training_args.main_process_first(desc="packaged model"):
            model = str(PACKAGED_MODELS[model]())
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype or base_dtype(training_args, model_args.use_peft),
        **(training_args.model_init_kwargs or {}),
    }

    # Trainer
    trainer = BAPOTrainer(
        model,
        reward_funcs,
        training_args,
        train_dataset=data.train,
        eval_dataset=data.test if training_args.do_eval else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(BoundsProgressCallback)
    say = trainer.accelerator.print
    speed = speed_up_cpu(trainer)
    if speed is not None:
        say(speed)

    resume = trainer.checkpoint_to_resume(resume_argument(training_args.resume_from_checkpoint))
    if resume is not None:
        check_resume(resume, training_args)
    if training_args.do_train:
        say(f"BAPO on {data.title}\n{settings_table(training_args)}")
        say(f"Each line below: means over the last {training_args.logging_steps:g} updates, age in policy versions.")
        has_folder = Path(training_args.output_dir).is_dir()
        earlier = get_last_checkpoint(training_args.output_dir) if has_folder else None
        if earlier is not None and resume is None:
            say(
                f"Note: {earlier} is of an earlier run and may be overwritten. `--resume_from_checkpoint true` goes "
                "on from it, another `--output_dir` keeps it."
            )

    # Train
    if training_args.do_train:
        scores_itself = task is not None and trainer.accelerator.num_processes == 1
        before = (
            held_out_accuracy(trainer.model, trainer.processing_class, task.test_dataset) if scores_itself else None
        )
        trainer.train(resume_from_checkpoint=resume)
        if trainer.state.global_step == 0:  # a stream does not know its length before it ends
            raise ValueError(
                f"No update was made: the data ended before the {training_args.generation_batch_size} samples of one "
                "generation (`generation_batch_size`) were there. Nothing is saved. Give more prompts, or lower "
                "`steps_per_generation` or `per_device_train_batch_size`."
            )
        trainer.save_model(training_args.output_dir)
        trainer.save_state()
        if scores_itself:
            after = held_out_accuracy(trainer.model, trainer.processing_class, task.test_dataset)
            since = " since the warm start" if resume else ""
            say(
                f"Held-out accuracy{since}, greedy {before.greedy:.3f} -> {after.greedy:.3f}, "
                f"mean of 4 samples {before.sampled:.3f} -> {after.sampled:.3f}"
            )
        elif task is not None:
            say("Held-out accuracy: measured on one process only; `--do_eval true` evaluates on several.")
        say(f"Model: {training_args.output_dir}")
        checkpoint = Path(training_args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        if checkpoint.is_dir():
            say(f"Checkpoint: {checkpoint}")

    # Evaluate
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.save_metrics("eval", metrics)
        evaluated = training_args.output_dir if training_args.do_train else model
        say(f"Evaluation of {evaluated} on {data.title}: {log_line(trainer.state.global_step, metrics)}")
        say(f"Metrics: {Path(training_args.output_dir) / 'eval_results.json'}")

    # Publish
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=data.hub_id)
        say(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}")

    end_training(trainer)

    # Report: last, so that no figure stands in the way of the rest
    if training_args.do_train and trainer.is_world_process_zero():
        say(report_line(trainer.state.log_history, Path(training_args.output_dir) / "report.png"))


def check_resume(folder: str, training_args: BAPOConfig):
    """Refuse a checkpoint at the end of its run: transformers would train one update more and save it as new."""
    done = TrainerState.load_from_json(str(Path(folder) / TRAINER_STATE_NAME)).global_step
    if 0 < training_args.max_steps <= done:
        raise ValueError(
            f"`resume_from_checkpoint` is {folder}, at update {done}, and `max_steps` is {training_args.max_steps}: "
            "nothing is left to train. Raise `max_steps`, or evaluate it with --do_train false --model_name_or_path "
            f"{folder}."
        )


def resume_argument(value: str | None) -> str | bool | None:
    """Return what to resume from: the newest whole checkpoint for "true", none for "false", else a folder."""
    return {"true": True, "false": None}.get(value.lower(), value) if value is not None else None


if __name__ == "__main__":
    main(sys.argv[1:])
