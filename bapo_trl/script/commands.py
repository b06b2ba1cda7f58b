"""The commands that train or evaluate, by name and with their help texts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """What was typed to come here."""

    name: str
    description: str  # begin of the help text


_TRAINING = """
Train a model with BAPO.

The embedded arithmetic task, on a laptop without a GPU:

    {command}

One of the recipes ({command} --config quickstart), or your own; flags override its values. In several processes:

    {launch} --config math_7b --learning_rate 1e-6

Your own data and reward, all settings from the command line:

    {command} --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name prompts.jsonl \\
        --reward_funcs my_rewards.is_short --output_dir out --steps_per_generation 8 --num_iterations 2

Columns of other names, and evaluation before and after:

    {command} --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name math.jsonl \\
        --prompt_column question --answer_column answer --reward_funcs accuracy_reward --eval_fraction 0.1 \\
        --extract_answer boxed --output_dir out

A saved model or adapter, evaluated alone:

    {command} --config recipes/aime24.yaml --model_name_or_path out
"""
_EVALUATION = """
Evaluate a model: what `bapo-trl train` does with `--do_train false`, and with the same settings. Those of a recipe
that are for its training do not count.

A saved model or adapter on AIME 2024:

    bapo-trl evaluate --config recipes/aime24.yaml --model_name_or_path out

On your own prompts:

    bapo-trl evaluate --model_name_or_path out --eval_dataset prompts.jsonl --reward_funcs my_rewards.is_short \\
        --num_generations_eval 4 --output_dir evaluation
"""

_LAUNCH = "bapo-trl launch --accelerate zero3 --num_processes 6"
SCRIPT = Command("train_bapo.py", _TRAINING.format(command="python train_bapo.py", launch=f"{_LAUNCH} train_bapo.py"))
TRAIN = Command("bapo-trl train", _TRAINING.format(command="bapo-trl train", launch=f"{_LAUNCH} train"))
EVALUATE = Command("bapo-trl evaluate", _EVALUATION)
LAUNCHED = ("train", "evaluate")
"""Commands that `bapo-trl launch` takes in place of a script."""
