r"""
Train a model with BAPO.

The embedded arithmetic task, on a laptop without a GPU:

    python train_bapo.py

One of the recipes, or your own; flags override its values:

    accelerate launch train_bapo.py --config recipes/math_7b.yaml --learning_rate 1e-6

Your own data and reward, all settings from the command line:

    python train_bapo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name prompts.jsonl \
        --reward_funcs my_rewards.is_short --output_dir out --steps_per_generation 8 --num_iterations 2

Columns of other names, and evaluation before and after:

    python train_bapo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name math.jsonl \
        --prompt_column question --answer_column answer --reward_funcs accuracy_reward --eval_fraction 0.1 \
        --extract_answer boxed --output_dir out

A saved model or adapter, evaluated alone:

    python train_bapo.py --config recipes/aime24.yaml --model_name_or_path out

`--help` lists all settings: those of this script, of `BAPOConfig` (a `GRPOConfig`), of TRL's `ModelConfig` (LoRA flags
among them) and of TRL's dataset mixtures.
"""

import argparse
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import ProgressCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    get_peft_config,
    get_quantization_config,
)

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.cpu_speed import base_dtype, speed_up_cpu
from bapo_trl.prompts import check_columns, check_number_of_prompts
from bapo_trl.script.arguments import EMBEDDED, BAPOScriptArguments, RecipeParser
from bapo_trl.script.before_after import BeforeAfter
from bapo_trl.script.console import BoundsProgressCallback, settings_table
from bapo_trl.script.data import format_data, has_data, load_data
from bapo_trl.script.datasets import make_task
from bapo_trl.script.model_checks import check_packages, settle_lora_targets
from bapo_trl.script.models import adapter_base, load_adapter, load_processing_class, save_merged
from bapo_trl.script.prompts import check_chat_template, is_chat
from bapo_trl.script.report import report_line
from bapo_trl.script.rewards import resolve_extractor, resolve_reward_funcs
from bapo_trl.script.sampling import SamplesCompletions
from bapo_trl.tasks import SMOLLM2, held_out_accuracy, load_task, smollm2_path, warm_start_path
from bapo_trl.upstream_fixes import end_training


PACKAGED_MODELS = {EMBEDDED: warm_start_path, SMOLLM2: smollm2_path}
QUICKSTART = Path(__file__).resolve().parent / "recipes" / "quickstart.yaml"
NOTHING_TO_MERGE = (
    "`merge_adapter` is set, but there is no adapter: set `use_peft` to train one, or `model_name_or_path` to the "
    "folder of a saved one."
)


class EvaluatedTrainer(SamplesCompletions, BAPOTrainer):
    """[`BAPOTrainer`] whose completions of given prompts can be counted one by one."""


def parse_arguments(arguments: list[str]):
    named = {argument.partition("=")[0].replace("-", "_") for argument in arguments}
    merges = {"__merge_adapter", "__model_name_or_path"} <= named
    if not named & {"__config", "__dataset_name", "__eval_dataset", "__help", "_h"} and not merges:
        arguments = ["--config", str(QUICKSTART), *arguments]
    parser = RecipeParser(
        (BAPOScriptArguments, BAPOConfig, ModelConfig, DatasetMixtureConfig),
        description=__doc__,
        usage="train_bapo.py [--config RECIPE] [--NAME VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(do_train=True, dtype=None)
    script_args, training_args, *others = parser.parse_args_and_config(arguments)
    evaluates = script_args.eval_dataset is not None or script_args.eval_fraction is not None
    training_args.do_eval |= evaluates or not training_args.do_train
    return script_args, training_args, *others


def choose_rewards(names: list[str] | None, task) -> list[Any]:
    if names:
        return resolve_reward_funcs(names)
    if task is None:
        raise ValueError("`reward_funcs` is not set: name a reward of TRL's or an import path, see --help.")
    return [task.reward_func]


def merge(adapter: str, base: str | None, training_args: BAPOConfig):
    """Save the merged model, from the main process, and say where."""
    if base is None:
        raise ValueError(NOTHING_TO_MERGE)
    folder = Path(training_args.output_dir) / "merged"
    if training_args.distributed_state.is_main_process:
        save_merged(adapter, base, folder, training_args.trust_remote_code)
        print(f"Merged model: {folder}")
    training_args.distributed_state.wait_for_everyone()


def main(arguments: list[str]):
    script_args, training_args, model_args, dataset_args = parse_arguments(arguments)

    if not training_args.do_train and training_args.resume_from_checkpoint not in (None, "false"):
        raise ValueError(
            f"`resume_from_checkpoint` is '{training_args.resume_from_checkpoint}', but `do_train` is false and "
            "evaluation is of `model_name_or_path`: set that to the checkpoint's folder."
        )
    model = model_args.model_name_or_path
    base = None if model is None or model in PACKAGED_MODELS else adapter_base(model, model_args.model_revision)
    if script_args.merge_adapter and not training_args.do_train and not has_data(script_args, dataset_args):
        return merge(model, base, training_args)

    # Data, rewards and model
    task = load_task() if script_args.dataset_name == EMBEDDED else None
    made = make_task(script_args.dataset_name, script_args.task_args)
    data = load_data(script_args, training_args, dataset_args, made)
    reward_funcs = choose_rewards(script_args.reward_funcs, made)
    if model is None:
        raise ValueError("`model_name_or_path` is not set: give a folder, an id on the Hub, 'embedded' or 'smollm2'.")
    if script_args.merge_adapter and base is None and not (training_args.do_train and model_args.use_peft):
        raise ValueError(NOTHING_TO_MERGE)
    extract_answer = resolve_extractor(script_args.extract_answer)
    if task is not None and training_args.use_cpu:
        torch.set_num_threads(1)  # so small a model gains nothing from more, and loses a lot on a busy machine
    if model in PACKAGED_MODELS:
        with training_args.main_process_first(desc="packaged model"):
            model = str(PACKAGED_MODELS[model]())
    load_tokenizer = cache(
        partial(load_processing_class, model, base, model_args.model_revision, training_args.trust_remote_code)
    )
    data = format_data(data, script_args, load_tokenizer)
    prompts = data.train if data.train is not None else data.test
    check_columns(prompts, data.test)
    if training_args.do_train:
        check_number_of_prompts(data.train, training_args)
    check_packages(model_args)
    if base is None:
        settle_lora_targets(model, model_args, training_args.trust_remote_code)
    processing_class: Any = load_tokenizer()
    for dataset in (data.train, data.test):
        check_chat_template(dataset, processing_class)
    model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype or base_dtype(training_args, model_args.use_peft),
        "trust_remote_code": training_args.trust_remote_code,
        **(training_args.model_init_kwargs or {}),
    }

    # Trainer
    if base is not None and model_args.use_peft:
        raise ValueError(
            f"`use_peft` asks for a new adapter, but `model_name_or_path` is one, {model}: leave `use_peft` out to "
            "train it on, or merge it first (--do_train false --merge_adapter true)."
        )
    quantization = get_quantization_config(model_args)
    if base is None:
        training_args.model_init_kwargs = model_init_kwargs
    else:
        if quantization is not None:
            model_init_kwargs["quantization_config"] = quantization
        if training_args.world_size > 1:
            model_init_kwargs["device_map"] = None
    trainer = EvaluatedTrainer(
        model if base is None else load_adapter(model, base, training_args.do_train, **model_init_kwargs),
        reward_funcs,
        training_args,
        train_dataset=prompts,
        eval_dataset=data.test if training_args.do_eval else None,
        processing_class=processing_class,
        quantization_config=quantization if base is None else None,
        peft_config=get_peft_config(model_args),
    )
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(BoundsProgressCallback)
    say = trainer.accelerator.print
    output_dir = Path(training_args.output_dir)
    evaluation = BeforeAfter(trainer, data.test, output_dir, extract_answer) if training_args.do_eval else None
    speed = speed_up_cpu(trainer)
    if speed is not None:
        say(speed)

    resume = trainer.checkpoint_to_resume(resume_argument(training_args.resume_from_checkpoint))
    if resume is not None:
        check_resume(resume, training_args)
    if training_args.do_train:
        say(f"BAPO on {data.title}\n{settings_table(training_args)}")
        say(f"Prompts: {'chat messages' if is_chat(prompts) else 'plain text'}")
        say(f"Each line below: means over the last {training_args.logging_steps:g} updates, age in policy versions.")
        earlier = get_last_checkpoint(output_dir) if output_dir.is_dir() else None
        if earlier is not None and resume is None:
            say(
                f"Note: {earlier} is of an earlier run and may be overwritten. `--resume_from_checkpoint true` goes "
                "on from it, another `--output_dir` keeps it."
            )

    # Train
    if training_args.do_train:
        scores_itself = task is not None and trainer.accelerator.num_processes == 1
        before = held_out_accuracy(trainer.model, processing_class, task.test_dataset) if scores_itself else None
        if evaluation is not None and not scores_itself:
            evaluation.before(model, model_args.model_revision)
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
            after = held_out_accuracy(trainer.model, processing_class, task.test_dataset)
            since = " since the warm start" if resume else ""
            say(
                f"Held-out accuracy{since}, greedy {before.greedy:.3f} -> {after.greedy:.3f}, "
                f"mean of 4 samples {before.sampled:.3f} -> {after.sampled:.3f}"
            )
        elif task is not None:
            say("Held-out accuracy: measured on one process only; `--do_eval true` evaluates on several.")
        say(f"Model: {training_args.output_dir}")
        checkpoint = output_dir / f"checkpoint-{trainer.state.global_step}"
        if checkpoint.is_dir():
            say(f"Checkpoint: {checkpoint}")

    # Evaluate
    if evaluation is not None:
        evaluated = training_args.output_dir if training_args.do_train else model
        evaluation.after(evaluated, None if training_args.do_train else model_args.model_revision)
        say(evaluation.report(evaluated, data.test_title or data.title))

    # Publish
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=data.hub_id)
        say(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}")

    # Merge: last of what is saved, so that it is not published beside the adapter
    if script_args.merge_adapter:
        merge(training_args.output_dir if training_args.do_train else model, base or model, training_args)

    end_training(trainer)

    # Report: last, so that no figure stands in the way of the rest
    if training_args.do_train and trainer.is_world_process_zero():
        say(report_line(trainer.state.log_history, output_dir / "report.png"))


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
