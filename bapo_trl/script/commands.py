"""Names and help texts of the commands that train or evaluate."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command of the package."""

    name: str
    description: str  # beginning of the help text


_TRAINING = """
Train a model. Without arguments, train a tiny model to add two numbers, in minutes and without a GPU.

Take settings from a recipe, or from a YAML file of your own; flags override its values. Start several processes:

    {command} --config quickstart
    {command} --accelerate_config zero3 --num_processes 6 --config math_7b --learning_rate 1e-6

Train on your own data and reward functions, and evaluate before and after training:

    {command} --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name math.jsonl \\
        --prompt_column question --answer_column answer --reward_funcs accuracy_reward my_rewards.is_short \\
        --eval_fraction 0.1 --extract_answer boxed --output_dir out --steps_per_generation 8

`--model_name_or_path` takes a folder, a Hub id, `embedded` (the tiny model) or `smollm2` (SmolLM2-135M-Instruct, from
a Python package).
"""
_EVALUATION = """
Evaluate a model. The same as `bapo-trl train --do_train false`, with the same settings. Settings of a recipe that only
concern training are ignored.

Evaluate a saved model or adapter on AIME 2024, and on your own prompts:

    bapo-trl evaluate --config aime24 --model_name_or_path out
    bapo-trl evaluate --model_name_or_path out --eval_dataset prompts.jsonl --reward_funcs my_rewards.is_short \\
        --num_generations_eval 4 --output_dir evaluation
"""

SCRIPT = Command("train_bapo.py", _TRAINING.format(command="python train_bapo.py"))
TRAIN = Command("bapo-trl train", _TRAINING.format(command="bapo-trl train"))
EVALUATE = Command("bapo-trl evaluate", _EVALUATION)
