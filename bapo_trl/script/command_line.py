"""Flags and recipes on the command line: what cannot be read ends in one line, with the nearest name that is known."""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn

from transformers import IntervalStrategy
from trl import DatasetMixtureConfig, ModelConfig, TrlParser

from ..bapo_config import BAPOConfig, own_fields
from ..errors import InputError
from .arguments import BAPOScriptArguments
from .commands import EVALUATE, TRAIN, Command
from .failures import refuse
from .methods import apply_method, without_training
from .recipes import look_ahead


_NO = ("false", "f", "no", "n", "0")


class Settings(NamedTuple):
    """What flags and a recipe ask for."""

    script: BAPOScriptArguments
    training: BAPOConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig


def parse_arguments(arguments: Sequence[str], command: Command = TRAIN) -> Settings:
    """
    Return the settings that flags and a recipe ask for; without any argument, those of the recipe `quickstart`.

    Raises:
        SystemExit: With 0 after `--help`; with 2 and one line on stderr for what cannot be read.
        InputError: For settings that contradict one another.
    """
    arguments = list(arguments) or ["--config", "quickstart"]
    try:
        flags, recipe = look_ahead(arguments)
    except InputError as error:
        refuse(command.name, str(error))
    recipe.pop("env", None)  # set before
    if command is EVALUATE:
        arguments += ["--do_train", "false"]
        recipe = without_training(recipe, "num_generations" in flags)
    recipe = apply_method(flags, recipe)
    types: Any = (BAPOScriptArguments, BAPOConfig, ModelConfig, DatasetMixtureConfig)
    parser = _Parser(
        types,
        prog=command.name,
        description=command.description,
        usage=f"{command.name} [--config RECIPE] [--NAME VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # TRL's dropout of 0.05 on adapters would put noise on every importance ratio
    parser.set_defaults(do_train=True, dtype=None, lora_dropout=0.0)
    named = {**recipe, **flags}
    if _merges_alone(named):
        parser.set_defaults(bf16=False)  # TRL's default asks for a GPU, which merging does not use
    unknown = parser.set_defaults_with_config(**recipe)[::2]  # a value follows each
    if unknown:
        parser.error(f"unknown key in {flags['config']}: {parser.with_nearest(unknown, '')}")
    try:
        settings = Settings(*parser.parse_args_into_dataclasses(_without_config(arguments)))
    except InputError:
        raise
    except (TypeError, ValueError, ArithmeticError, OSError, ImportError) as error:  # of TRL and transformers
        raise InputError(str(error)) from error
    settings.training.loss_was_chosen = not named.keys().isdisjoint({"method", "loss_type"})
    return _settle(settings)


def _settle(settings: Settings) -> Settings:
    """Return the settings with what follows from them; refuse those that contradict one another (`InputError`)."""
    script_args, training_args, model_args, dataset_args = settings
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
    return settings


def _merges_alone(named: Mapping[str, Any]) -> bool:
    """Whether settings ask to merge a saved adapter, and for nothing else, as `only_merges` tells of parsed ones."""
    merges = str(named.get("merge_adapter", "false")).lower() not in _NO
    trains = str(named.get("do_train", "true")).lower() not in _NO
    return merges and not trains and not any(named.get(name) for name in ("dataset_name", "eval_dataset", "datasets"))


def _without_config(arguments: list[str]) -> list[str]:
    places = [place for place, argument in enumerate(arguments) if argument == "--config"]
    kept = [argument for place, argument in enumerate(arguments) if not {place, place - 1} & {*places}]
    return [argument for argument in kept if not argument.startswith("--config=")]


class _Parser(TrlParser):
    """TRL's parser, which looks at all names before any value, and refuses in one line with the nearest name."""

    def format_help(self) -> str:
        """Return the help text, with the flags of this package alone."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        ours = {f.name for f in (*fields(BAPOScriptArguments), *own_fields())} - {"ignore_bias_buffers"}
        formatter.start_section("Flags")
        formatter.add_arguments([action for action in self._actions if action.dest in {"help"} | ours])
        formatter.end_section()
        formatter.add_text("All fields of TRL's GRPOConfig, ModelConfig and DatasetMixtureConfig are flags as well.")
        return formatter.format_help()

    def parse_known_args(self, args=None, namespace=None):
        namespace, remaining = super().parse_known_args(args, namespace)
        unknown = [argument.partition("=")[0] for argument in remaining if argument.startswith("--")]
        if unknown:
            self.error(f"unknown flag: {self.with_nearest(unknown, '--')}")
        if remaining:
            self.error(f"'{remaining[0]}' belongs to no flag")
        return namespace, remaining

    def with_nearest(self, names: Sequence[str], prefix: str) -> str:
        """Return names that are not known, each with the nearest that is."""
        known = ["config", *(f.name for settings in self.dataclass_types for f in fields(settings) if f.init)]

        def described(name: str) -> str:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            return f"{prefix}{name} ({f'the nearest is {prefix}{near[0]}' if near else 'none is near'})"

        return ", ".join(described(name.removeprefix("--")) for name in names)

    def error(self, message: str) -> NoReturn:
        """End with one line, without the usage."""
        refuse(self.prog, message)
