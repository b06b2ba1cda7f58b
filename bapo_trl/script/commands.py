"""The commands that train or evaluate, by name and with their help texts."""

from typing import NamedTuple


class Command(NamedTuple):
    """What was typed to come here."""

    name: str
    description: str  # begin of the help text


_TRAINING = """
Train a model with BAPO. Without any argument: the embedded arithmetic task, on a laptop without a GPU.

One of the recipes, or your own; flags override its values. In several processes:

    {command} --config quickstart
    bapo-trl launch --accelerate zero3 --num_processes 6 {launched} --config math_7b --learning_rate 1e-6

Your own data and reward, with columns of other names, evaluated before and after:

    {command} --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name math.jsonl \\
        --prompt_column question --answer_column answer --reward_funcs accuracy_reward my_rewards.is_short \\
        --eval_fraction 0.1 --extract_answer boxed --output_dir out --steps_per_generation 8
"""
_EVALUATION = """
Evaluate a model: what `bapo-trl train` does with `--do_train false`, and with the same settings. Those of a recipe
that are for its training do not count.

A saved model or adapter on AIME 2024, and on your own prompts:

    bapo-trl evaluate --config aime24 --model_name_or_path out
    bapo-trl evaluate --model_name_or_path out --eval_dataset prompts.jsonl --reward_funcs my_rewards.is_short \\
        --num_generations_eval 4 --output_dir evaluation
"""

SCRIPT = Command("train_bapo.py", _TRAINING.format(command="python train_bapo.py", launched="train_bapo.py"))
TRAIN = Command("bapo-trl train", _TRAINING.format(command="bapo-trl train", launched="train"))
EVALUATE = Command("bapo-trl evaluate", _EVALUATION)
