"""Flags and recipes of `train_bapo.py`: what cannot be read ends in one line, with the nearest name that is known."""

import difflib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import yaml
from trl import ScriptArguments, TrlParser


EMBEDDED = "embedded"
"""What `dataset_name` and `model_name_or_path` say for the embedded task and its model."""


@dataclass
class BAPOScriptArguments(ScriptArguments):
    """
    Arguments of this script. `--dataset_name` is a file (json, jsonl, parquet), a folder, a Hub id, `embedded`,
    `chat_sums` (sums asked of a chat model) or `reasoning_gym:TASK`. `--model_name_or_path` is a folder, a Hub id,
    `embedded` or `smollm2` (SmolLM2-135M-Instruct from a package).

    The fields are described by their help texts, which `--help` shows.
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
    prompt_column: list[str] | None = field(
        default=None,
        metadata={
            "help": "Column with the prompts, text or chat messages; of several, the first that a dataset has. By "
            "default `prompt`, as it is. With this, `prompt_template` or `system_prompt`, a prompt that is text "
            "becomes the message of a user where the model has a chat template."
        },
    )
    answer_column: list[str] | None = field(
        default=None,
        metadata={
            "help": "Column with the answers; of several, the first that a dataset has. A dot leads to a field, as in "
            "`reward_model.ground_truth`. Rewards get it as `solution` too, unless there is such a column."
        },
    )
    prompt_template: str | None = field(
        default=None,
        metadata={
            "help": "Text around each prompt: {prompt} stands for the prompt, {NAME} for the column NAME; other "
            "braces stay."
        },
    )
    system_prompt: str | None = field(default=None, metadata={"help": "Text of the system message of each prompt."})
    eval_dataset: str | None = field(
        default=None,
        metadata={
            "help": "Prompts to evaluate on, before and after the training: a file, a folder or a Hub id. Its only "
            "split, or `dataset_test_split`."
        },
    )
    eval_fraction: float | None = field(
        default=None,
        metadata={
            "help": "Share of the training prompts to hold out and evaluate on, before and after the training, in "
            "(0, 1). The same prompts for any seed."
        },
    )
    extract_answer: str | None = field(
        default=None,
        metadata={
            "help": "What finds the answer in a completion, for maj@k: boxed, last_number, text (all of it), or an "
            "import path of a function of the text."
        },
    )
    merge_adapter: bool = field(
        default=False,
        metadata={
            "help": "Whether to save the model with the adapter merged in, in the folder `merged` of `output_dir`. "
            "With `do_train` false and no data, nothing else is done."
        },
    )

    def __post_init__(self):
        for name in ("reward_funcs", "prompt_column", "answer_column"):
            if isinstance(getattr(self, name), str):  # in a recipe, one name needs no brackets
                setattr(self, name, [getattr(self, name)])


class RecipeParser(TrlParser):
    """
    TRL's parser of flags and a YAML file (`--config`), which checks all names before any value.

    What differs from [`~trl.TrlParser`]: a file that is missing or no recipe, and unknown names, end the process with
    code 2 and one line on stderr, as argparse does for values; `--config=PATH` is understood; no flag may be
    abbreviated.
    """

    def __init__(self, dataclass_types: Iterable[Any], **kwargs):
        super().__init__(dataclass_types, allow_abbrev=False, **kwargs)
        self._recipe: str | None = None

    def parse_args_and_config(self, args: Iterable[str] | None = None, *rest, **kwargs):
        args = sys.argv[1:] if args is None else args
        args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
        if "--config" in args:
            self._recipe = next(iter(args[args.index("--config") + 1 :]), "")
            if not os.path.isfile(self._recipe):
                self._refuse(f"`--config` is '{self._recipe}': there is no such file")
            defect = _find_defect(self._recipe)
            if defect is not None:
                self._refuse(f"the recipe {self._recipe} {defect}")
        return super().parse_args_and_config(args, *rest, **kwargs)

    def set_defaults_with_config(self, **config):
        remaining = super().set_defaults_with_config(**config)
        unknown = [flag.removeprefix("--") for flag in remaining[::2]]  # a value follows each
        if unknown:
            self._refuse(f"unknown key in {self._recipe}: {self._with_nearest(unknown)}")
        return remaining

    def parse_known_args(self, args=None, namespace=None):
        namespace, remaining = super().parse_known_args(args, namespace)
        unknown = [argument.partition("=")[0] for argument in remaining if argument.startswith("--")]
        if unknown:
            self._refuse(f"unknown flag: {self._with_nearest(unknown, prefix='--')}")
        if remaining:
            self._refuse(f"'{remaining[0]}' belongs to no flag")
        return namespace, remaining

    def _with_nearest(self, names: list[str], prefix: str = "") -> str:
        known = ["config", *(f.name for settings in self.dataclass_types for f in fields(settings) if f.init)]

        def described(name: str) -> str:
            near = difflib.get_close_matches(name.removeprefix(prefix).replace("-", "_"), known, n=1)
            return f"{name} (the nearest is {prefix}{near[0]})" if near else f"{name} (none is near: --help lists all)"

        return ", ".join(described(name) for name in names)

    def _refuse(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def _find_defect(path: str) -> str | None:
    """Return what keeps a file from being a recipe, with the fix; `None` if it is one."""
    example = "write one setting a line, such as `learning_rate: 1.0e-6`"
    try:
        with open(path, encoding="utf-8") as file:
            recipe = yaml.safe_load(file)
    except OSError as error:
        return f"cannot be read ({error.strerror}): check its permissions"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return f"is not valid YAML ({' '.join(str(error).split())}): correct it there"
    if recipe is None:
        return f"is empty: {example}"
    if not isinstance(recipe, dict):
        return f"is a {type(recipe).__name__}, not settings by name: {example}"
    for name in recipe:
        if not isinstance(name, str):
            return f"has the key {name!r}, which is no name: {example}"
    env = recipe.get("env", {})
    if not isinstance(env, dict):
        return f"has an `env` that is a {type(env).__name__}: write one variable a line below it, such as `  A: 1`"
    return None
