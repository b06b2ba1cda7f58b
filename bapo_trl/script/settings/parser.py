"""Parse flags and recipes. Errors end the command with one line, which suggests the nearest known name."""

import argparse
import difflib
import json
from collections.abc import Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from transformers import IntervalStrategy
from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.utils import DatasetConfig

from ...bapo_config import BAPOConfig, own_fields
from ...errors import InputError
from ..commands import EVALUATE, TRAIN, Command
from ..failures import reject
from .arguments import EMBEDDED, BAPOScriptArguments
from .methods import apply_method, without_training
from .recipes import DEMO_FOLDER, is_true, look_ahead


# What TRL, transformers and this package accept beyond the annotation
_ALSO_ACCEPTED = {"fsdp": bool | list, "max_grad_norm": None, "resume_from_checkpoint": bool, "scale_rewards": bool}
_MAY_NAME_A_FILE = {"accelerator_config", "deepspeed", "fsdp_config"}


class Settings(NamedTuple):
    """Settings from flags and a recipe."""

    script: BAPOScriptArguments
    training: BAPOConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig


def parse_arguments(arguments: Sequence[str], command: Command = TRAIN) -> Settings:
    """
    Return the settings from flags and a recipe; without any argument, from the recipe `quickstart`.

    Raises:
        SystemExit: With 0 after `--help`; with 2, and one line on stderr, for unknown flags and keys.
        InputError: For an invalid recipe, and for settings that contradict each other.
    """
    arguments = list(arguments) or ["--config", "quickstart"]
    if command is EVALUATE:
        arguments += ["--do_train", "false"]
    flags, recipe = look_ahead(arguments)
    recipe.pop("env", None)  # already set
    if command is EVALUATE:
        recipe = without_training(recipe, "num_generations" in flags)
    recipe = apply_method(flags, recipe)
    named = {**recipe, **flags}
    trains = is_true(named.get("do_train", True))

    parser = _Parser(command)
    has_data = any(named.get(name) for name in ("dataset_name", "eval_dataset", "datasets"))
    if is_true(named.get("merge_adapter", False)) and not trains and not has_data:
        parser.set_defaults(bf16=False)  # TRL's default asks for a GPU, which merging does not use
    unknown = [name for name in recipe if name not in parser.types]
    if unknown:
        parser.error(f"unknown key in {flags['config']}: {parser.with_nearest(unknown, '')}")
    recipe = {name: parser.from_recipe(name, value, parser.types[name]) for name, value in recipe.items()}
    parser.set_defaults_with_config(**recipe)
    try:
        *settings, _ = parser.parse_args_into_dataclasses(arguments)
    except (TypeError, ValueError, ArithmeticError, OSError, ImportError) as error:  # from TRL and transformers
        raise InputError(str(error)) from error
    script_args, training_args, model_args, dataset_args = settings

    resume: Any = training_args.resume_from_checkpoint
    resume = {"true": True, "false": None}.get(str(resume).lower(), resume)  # else a folder
    training_args.resume_from_checkpoint = resume
    is_demo = script_args.dataset_name == EMBEDDED and training_args.output_dir == DEMO_FOLDER  # nobody's work
    script_args.overwrite_output_dir |= is_demo
    evaluates = script_args.eval_dataset is not None or script_args.eval_fraction is not None
    training_args.do_eval |= evaluates or not training_args.do_train
    if not training_args.do_train:  # drops a recipe's settings for training
        training_args.eval_strategy = IntervalStrategy.NO
        training_args.max_steps = 1  # no step is made, but transformers requires a number for streams
        model_args.use_peft = False
    elif training_args.do_eval and (training_args.bf16_full_eval or training_args.fp16_full_eval):
        raise InputError(
            "`bf16_full_eval` or `fp16_full_eval` is set: the evaluation before the training would leave the weights "
            "in half precision for the training. Remove the setting, or evaluate with --do_train false."
        )
    return Settings(script_args, training_args, model_args, dataset_args)


class _Parser(TrlParser):
    """
    TRL's parser, which checks all names before any value, and reports errors in one line with the nearest name. Its
    help text has only the flags of this package.
    """

    def __init__(self, command: Command):
        super().__init__(
            (BAPOScriptArguments, BAPOConfig, ModelConfig, DatasetMixtureConfig),  # type: ignore[arg-type]
            prog=command.name,
            description=command.description,
            epilog="All fields of TRL's GRPOConfig, ModelConfig and DatasetMixtureConfig are flags, too.",
            usage=f"{command.name} [--config RECIPE] [--NAME VALUE ...]",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument(
            "--config",
            metavar="RECIPE",
            help="Recipe to take settings from: a name that `bapo-trl recipes` lists, or the path of a YAML file.",
        )
        self.add_argument(
            "--accelerate_config",
            metavar="NAME",
            help="Start several processes with this accelerate configuration: a name of TRL or bapo-trl, such "
            "as multi_gpu, zero2, zero3, fsdp2 or cpu_ddp, or the path of a file. The flags of `accelerate launch`, "
            "such as `--num_processes`, are flags of the command, too.",
        )
        self.types: dict[str, Any] = {}
        for each in self.dataclass_types:
            self.types |= get_type_hints(each)
        for name, kind in _ALSO_ACCEPTED.items():
            self.types[name] |= kind
        # TRL's dropout of 0.05 on adapters would put noise on every importance ratio
        self.set_defaults(do_train=True, dtype=None, lora_dropout=0.0)
        shown = {
            "help",
            "config",
            "accelerate_config",
            *(field.name for field in (*fields(BAPOScriptArguments), *own_fields())),
        }
        for action in self._actions:
            if action.dest not in shown:
                action.help = argparse.SUPPRESS
            kinds = _alternatives(self.types.get(action.dest))
            if str in kinds and dict in map(_origin, kinds):
                action.type = _file_or_mapping if action.dest in _MAY_NAME_A_FILE else mapping

    def parse_known_args(self, args=None, namespace=None):
        namespace, remaining = super().parse_known_args(args, namespace)
        unknown = [argument.partition("=")[0][2:] for argument in remaining if argument.startswith("--")]
        if unknown:
            self.error(f"unknown flag: {self.with_nearest(unknown, '--')}")
        if remaining:
            self.error(f"'{remaining[0]}' follows no flag: remove it, or put its flag before it")
        return namespace, remaining

    def from_recipe(self, name: str, value: Any, kind: Any) -> Any:
        """Return the value of a setting in a recipe, text as its flag reads it; end with one line for a wrong type."""
        kinds = _alternatives(kind)
        items = next((get_args(each)[0] for each in kinds if get_origin(each) is list), None)
        if items is not None and value is not None and not isinstance(value, list) and str not in kinds:
            value = [value]  # one value needs no brackets
        if items is not None and isinstance(value, list):
            return [self.from_recipe(name, item, items) for item in value]
        if isinstance(value, str):
            read = vars(self.parse_args([f"--{name}={value}"]))[name]
            return read[0] if isinstance(read, list) else read
        if not _fits(value, kind):
            expected = " or ".join(getattr(each, "__name__", str(each)) for each in kinds)
            self.error(f"`{name}` is {value!r}: set it to a value of the type {expected}")
        return value

    def with_nearest(self, names: Sequence[str], prefix: str) -> str:
        """Return unknown names, each with the nearest known name."""
        known = [*self.types, *(["config"] if prefix else [])]
        described = []
        for name in (name.removeprefix("--") for name in names):
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            described.append(f"{prefix}{name} ({f'the nearest is {prefix}{near[0]}' if near else 'none is near'})")
        return ", ".join(described)

    def error(self, message: str) -> NoReturn:
        """End with one line, without the usage."""
        reject(self.prog, message)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types of which a field accepts any."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _origin(kind: Any) -> Any:
    return get_origin(kind) or kind


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value has the type of a field. A whole number is a float, too, and 0 or 1 a bool."""
    origin, args = _origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in args)
    if origin is Literal or kind is bool:
        return value in (args or (0, 1))
    if args and origin is list:
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value)
    if kind is DatasetConfig:  # which rejects unknown names
        types = get_type_hints(kind)
        return isinstance(value, dict) and all(_fits(part, types.get(name, Any)) for name, part in value.items())
    is_bool = isinstance(value, bool)
    return kind is Any or (not is_bool and isinstance(value, (int, float) if kind is float else origin))


def mapping(text: str) -> str:
    """Return text that is a JSON mapping, which TRL and transformers read. The name is in argparse's error."""
    if not text.startswith("{"):
        raise ValueError
    json.loads(text)
    return text


def _file_or_mapping(text: str) -> str:
    return mapping(text) if text.startswith("{") else text
