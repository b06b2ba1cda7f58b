"""Flags and recipes on the command line: what cannot be read ends in one line, with the nearest name that is known."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from transformers import IntervalStrategy
from trl import DatasetMixtureConfig, ModelConfig, TrlParser

from ..bapo_config import BAPOConfig, own_fields
from ..errors import InputError
from .arguments import BAPOScriptArguments
from .commands import EVALUATE, TRAIN, Command
from .failures import refuse
from .methods import MADE_OF, check_method, settings_of_method
from .recipes import RECIPES, find_recipe, read_recipe, recipe_names, set_environment


# Besides those of replay and partial rollouts. A training that was in order on its processes may not be so on these
_OF_TRAINING = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "num_iterations", "learning_rate", "method", "loss_type", "epsilon", *MADE_OF, "eval_strategy",
    "save_strategy", "load_best_model_at_end", "resume_from_checkpoint", "merge_adapter", "push_to_hub",
}  # fmt: skip


_NO = ("false", "f", "no", "n", "0")


def parse_arguments(
    arguments: Sequence[str], command: Command = TRAIN
) -> tuple[BAPOScriptArguments, BAPOConfig, ModelConfig, DatasetMixtureConfig]:
    """
    Return the settings that flags and a recipe ask for; without any argument, those of the recipe `quickstart`.

    Raises:
        SystemExit: With 0 after `--help`; with 2 and one line on stderr for what cannot be read.
        ValueError: For settings that contradict one another.
    """
    arguments = list(arguments) or ["--config", str(RECIPES / "quickstart.yaml")]
    if command is EVALUATE:
        arguments += ["--do_train", "false"]
    parser = RecipeParser(
        (BAPOScriptArguments, BAPOConfig, ModelConfig, DatasetMixtureConfig),
        prog=command.name,
        description=command.description,
        usage=f"{command.name} [--config RECIPE] [--NAME VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.ignores_training = command is EVALUATE
    # TRL's dropout of 0.05 on adapters would put noise on every importance ratio
    parser.set_defaults(do_train=True, dtype=None, lora_dropout=0.0)
    flags, named = _named_settings(arguments)
    if _merges_alone(named):
        parser.set_defaults(bf16=False)  # TRL's default asks for a GPU, which merging does not use
    if parser.ignores_training:
        named = flags
    method = named.get("method")
    if method is not None:
        # What a recipe has beside its own method belongs to it; a flag's method comes before a recipe
        beside = flags if "method" in flags else named
        settings = settings_of_method(method, str(named.get("loss_type", BAPOConfig.loss_type)))
        check_method(method, beside, settings)
        parser.method_settings = {name: value for name, value in settings.items() if name not in beside}
    script_args, training_args, model_args, dataset_args = parser.parse_args_and_config(arguments)
    training_args.loss_was_chosen = not named.keys().isdisjoint({"method", "loss_type"})
    evaluates = script_args.eval_dataset is not None or script_args.eval_fraction is not None
    training_args.do_eval |= evaluates or not training_args.do_train
    if training_args.do_train and training_args.do_eval:
        for name in ("bf16_full_eval", "fp16_full_eval"):
            if getattr(training_args, name):
                raise InputError(
                    f"`{name}` is set: the evaluation before the training would leave the weights in half precision, "
                    "and they would be trained so. Leave it out, or evaluate with --do_train false."
                )
    streams = script_args.dataset_streaming or dataset_args.streaming
    if training_args.do_train and streams and training_args.max_steps <= 0:
        raise InputError(
            "`max_steps` is not set, and a stream does not tell its length: set it to a number of updates."
        )
    if training_args.learning_rate < 0:
        raise InputError(f"`learning_rate` is {training_args.learning_rate}: set it to at least 0, e.g. 1e-6.")
    if not training_args.do_train:  # settings of a recipe that are for its training
        training_args.eval_strategy = IntervalStrategy.NO
        training_args.max_steps = 1  # none is made, but transformers asks for a number where the data is a stream
        model_args.use_peft = False
    return script_args, training_args, model_args, dataset_args


def _named_settings(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that flags name, and those that flags or their recipe name, before they are parsed."""
    flags: dict[str, Any] = {}
    for place, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, has_value, value = argument[2:].partition("=")
            following = arguments[place + 1] if place + 1 < len(arguments) else ""
            flags[name.replace("-", "_")] = value if has_value else following
    both = flags
    with suppress(InputError):  # said when the flags are parsed
        both = {**read_recipe(flags.get("config", "")), **flags}
    return flags, both


def _merges_alone(named: Mapping[str, Any]) -> bool:
    """Whether settings ask to merge a saved adapter, and for nothing else, as `only_merges` tells of parsed ones."""
    merges = str(named.get("merge_adapter", "false")).lower() not in _NO
    trains = str(named.get("do_train", "true")).lower() not in _NO
    return merges and not trains and not any(named.get(name) for name in ("dataset_name", "eval_dataset", "datasets"))


class RecipeParser(TrlParser):
    """
    TRL's parser of flags and a YAML file (`--config`), which checks all names before any value.

    What differs from [`~trl.TrlParser`]: a file that is missing or no recipe, and unknown names, end the process with
    code 2 and one line on stderr, as argparse does for values; `--config=PATH` and names of the package's recipes are
    understood; no flag may be abbreviated.
    """

    def __init__(self, dataclass_types: Iterable[Any], **kwargs):
        super().__init__(dataclass_types, allow_abbrev=False, **kwargs)
        self.add_argument("--help-all", action=_HelpAll, help="show those of TRL and transformers as well, and exit")
        self._recipe: str | None = None
        self.method_settings: dict[str, Any] = {}
        self.ignores_training = False
        self._flags: set[str] = set()

    def format_help(self, shows_all: bool = False) -> str:
        """Return the help text: the flags of this package, those of TRL and transformers only if asked for."""
        own = {
            "Data, rewards and evaluation": {f.name for f in fields(BAPOScriptArguments)} - {"ignore_bias_buffers"},
            "BAPO": {f.name for f in own_fields()},
        }
        first = {"help", argparse.SUPPRESS}  # the second is of --help-all
        others = {action.dest for action in self._actions} - first - set().union(*own.values())
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        sections = {"Help": first, **own, **({"TRL and transformers": others} if shows_all else {})}
        for title, names in sections.items():
            formatter.start_section(title)
            formatter.add_arguments([action for action in self._actions if action.dest in names])
            formatter.end_section()
        if not shows_all:
            formatter.add_text(
                f"{len(others)} more are of TRL and transformers (--help-all), such as --model_name_or_path, "
                "--output_dir, --learning_rate, --use_peft."
            )
        return formatter.format_help()

    def parse_args_and_config(self, args: Iterable[str] | None = None, *rest, **kwargs):
        """Return the settings; those of `method_settings` come before a recipe's, and after flags."""
        self.set_defaults(**self.method_settings)
        args = sys.argv[1:] if args is None else args
        args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
        self._flags = {arg.partition("=")[0].replace("-", "_").replace("__", "--", 1) for arg in args}
        recipe: dict[str, Any] = {}
        if "--config" in args:
            place = args.index("--config") + 1
            named = next(iter(args[place:]), "")
            self._recipe = find_recipe(named)
            if self._recipe is None:
                self._refuse(
                    f"`--config` is '{named}': there is no such file; the recipes of the package are "
                    f"{', '.join(recipe_names())}"
                )
            args[place - 1 : place + 1] = ()
            try:
                recipe = read_recipe(self._recipe)  # TRL would read it by the locale
            except InputError as error:
                self._refuse(f"the recipe {error}".removesuffix("."))
        try:
            set_environment(recipe.pop("env", {}))
            if recipe:
                self.set_defaults_with_config(**recipe)
            return super().parse_args_and_config(args, *rest, **kwargs)
        except InputError:
            raise
        except (TypeError, ValueError, ArithmeticError, OSError, ImportError) as error:  # of TRL and transformers
            raise InputError(str(error)) from error

    def set_defaults_with_config(self, **config):
        if self.ignores_training:
            config = _without_training(config, "--num_generations" in self._flags)
        config = {**config, **self.method_settings}
        for settings in self.dataclass_types:
            hints = get_type_hints(settings)
            for name in config.keys() & {f.name for f in fields(settings) if f.init}:
                wanted = _wanted(hints[name], config[name])
                if wanted is not None:
                    self._refuse(f"{self._recipe}: `{name}` is {config[name]!r}: set it to {wanted}")
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

    def error(self, message: str) -> NoReturn:
        """End as for a name that is not known, without the usage."""
        self._refuse(message)

    def _refuse(self, message: str) -> NoReturn:
        refuse(self.prog, message)


class _HelpAll(argparse.Action):
    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        print(parser.format_help(shows_all=True))
        parser.exit()


def _without_training(recipe: Mapping[str, Any], has_group: bool) -> dict[str, Any]:
    """Return the settings of a recipe that an evaluation reads. Its group is that of one, unless a flag gives it."""
    kept = {
        name: value
        for name, value in recipe.items()
        if name not in _OF_TRAINING and not name.startswith(("replay_", "partial_rollout_"))
    }
    group = kept.pop("num_generations", None)
    return kept if group is None or has_group else {"num_generations_eval": group, **kept}


def _wanted(hint: Any, value: Any) -> str | None:
    """Return what a setting takes instead of a value of a type that it does not; `None` if it takes it."""
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    types = {get_origin(each) or each for each in hints}
    elements = [get_args(each)[0] for each in hints if get_origin(each) is list]
    if isinstance(value, list) and any(map(is_dataclass, elements)):  # which TRL makes from mappings
        return None if all(isinstance(each, dict) for each in value) else "a list of mappings"
    if isinstance(value, list) and elements:
        wanted = next((wanted for each in value if (wanted := _wanted(elements[0], each))), None)
        return None if wanted is None else f"a list of {wanted}"
    if isinstance(value, str) or type(value) in types or types & {Any, Literal}:  # text: as on the command line
        return None
    if type(value) is int and float in types:
        return None
    names = {
        bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "a mapping",
        str: "text, in quotes",
    }  # fmt: skip
    return " or ".join(names[each] for each in names if each in types) or "another value: see --help"
