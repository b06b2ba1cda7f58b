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
from ..inputs.advice import ADVICE
from ..losses import CLIPPED_LOSS_TYPES
from .arguments import BAPOScriptArguments
from .commands import EVALUATE, TRAIN, Command
from .failures import refuse
from .recipes import is_true, look_ahead


def _fixed_bounds(low: float, high: float) -> dict[str, float]:
    return {"ratio_lower_start": low, "ratio_lower_max": low, "ratio_upper_start": high, "ratio_upper_max": high}


METHODS: Mapping[str, Mapping[str, Any]] = {
    "grpo": _fixed_bounds(0.8, 1.2),
    "clip_higher": _fixed_bounds(0.8, 1.28),  # DAPO's
    "bapo": {},
    "bapo_released": {
        "positive_contribution_target": 0.33333333,
        "ratio_lower_start": 0.8,
        "ratio_lower_max": 0.95,
        "ratio_lower_step": 0.05,
        "ratio_upper_start": 1.2,
        "ratio_upper_max": 2.0,
        "ratio_upper_step": 0.1,
        "contribution_measure": "surrogate",
        "search_order": "lower_first",
        "search_scope": "micro_batch",
        "delta": 3.0,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {**_fixed_bounds(1 - 3e-4, 1 + 4e-4), "importance_sampling_level": "sequence", "loss_type": "grpo"},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "recommended": ADVICE,
}
"""Settings by method. Those of TRL's other losses are the ones that TRL's documentation gives for their papers."""

METHOD_SETTINGS = (
    *(f"ratio_{side}_{part}" for side in ("lower", "upper") for part in ("start", "max", "step")),
    "positive_contribution_target", "contribution_measure", "search_order", "negative_weight_min",
    "delta", "importance_sampling_level", "epsilon_high",
)  # fmt: skip
"""Settings that make a method, besides the loss."""

# Besides those of replay and partial rollouts. A training that was in order on its processes may not be so on these
_TRAINING_SETTINGS = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "num_iterations", "learning_rate", "method", "loss_type", "epsilon", *METHOD_SETTINGS, "eval_strategy",
    "save_strategy", "load_best_model_at_end", "resume_from_checkpoint", "merge_adapter", "push_to_hub",
}  # fmt: skip


def apply_method(flags: Mapping[str, str], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return a recipe with the settings of the method that it or a flag names, and without those of another method.

    What stands beside the method, in flags or in the recipe that names it, stays, or contradicts it (`InputError`).
    """
    name = flags.get("method", recipe.get("method"))
    if name is None:
        return dict(recipe)
    if str(name) not in METHODS:  # YAML may give a list
        raise InputError(f"`method` is {name!r}: set it to one of {', '.join(METHODS)}.")
    method = METHODS[name]
    beside = flags if "method" in flags else {**recipe, **flags}
    defaults = {field.name: field.default for field in fields(BAPOConfig)}
    settings = {field: defaults[field] for field in METHOD_SETTINGS} | dict(method)
    if {**recipe, **flags}.get("loss_type", "dapo") not in CLIPPED_LOSS_TYPES:
        settings.setdefault("loss_type", defaults["loss_type"])  # a method without a loss of its own has clip bounds
    for field, value in beside.items():
        is_of_method = field in method or (field == "loss_type" and field in settings)
        if is_of_method and str(value) != str(settings[field]):
            raise InputError(
                f"`method` is '{name}', which sets `{field}` to {settings[field]!r}, and `{field}` is {value!r}: "
                "leave one of them out."
            )
    return {**recipe, **{field: value for field, value in settings.items() if field not in beside}}


def without_training(recipe: Mapping[str, Any], has_group: bool) -> dict[str, Any]:
    """Return the settings of a recipe that an evaluation reads. Its group is that of one, unless a flag gives it."""
    kept = {
        name: value
        for name, value in recipe.items()
        if name not in _TRAINING_SETTINGS and not name.startswith(("replay_", "partial_rollout_"))
    }
    group = kept.pop("num_generations", None)
    return kept if group is None or has_group else {"num_generations_eval": group, **kept}


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
        SystemExit: With 0 after `--help`; with 2 and one line on stderr for flags and keys that cannot be read.
        InputError: For a recipe that cannot be read, and for settings that contradict one another.
    """
    arguments = list(arguments) or ["--config", "quickstart"]
    if command is EVALUATE:
        arguments += ["--do_train", "false"]
    flags, recipe = look_ahead(arguments)
    recipe.pop("env", None)  # set before
    if command is EVALUATE:
        recipe = without_training(recipe, "num_generations" in flags)
    recipe = apply_method(flags, recipe)
    named = {**recipe, **flags}
    trains = is_true(named.get("do_train", True))

    parser = _Parser(command)
    has_data = any(named.get(name) for name in ("dataset_name", "eval_dataset", "datasets"))
    if is_true(named.get("merge_adapter", False)) and not trains and not has_data:
        parser.set_defaults(bf16=False)  # TRL's default asks for a GPU, which merging does not use
    unknown = parser.set_defaults_with_config(**recipe)[::2]  # a value follows each
    if unknown:
        parser.error(f"unknown key in {flags['config']}: {parser.with_nearest(unknown, '')}")
    try:
        *settings, _ = parser.parse_args_into_dataclasses(arguments)
    except (TypeError, ValueError, ArithmeticError, OSError, ImportError) as error:  # of TRL and transformers
        raise InputError(str(error)) from error
    script_args, training_args, model_args, dataset_args = settings

    training_args.loss_was_chosen = not named.keys().isdisjoint({"method", "loss_type"})
    evaluates = script_args.eval_dataset is not None or script_args.eval_fraction is not None
    training_args.do_eval |= evaluates or not training_args.do_train
    if not training_args.do_train:  # settings of a recipe that are for its training
        training_args.eval_strategy = IntervalStrategy.NO
        training_args.max_steps = 1  # none is made, but transformers asks for a number where the data is a stream
        model_args.use_peft = False
    elif training_args.do_eval and (training_args.bf16_full_eval or training_args.fp16_full_eval):
        raise InputError(
            "`bf16_full_eval` or `fp16_full_eval` is set: the evaluation before the training would leave the weights "
            "in half precision, and they would be trained so. Leave it out, or evaluate with --do_train false."
        )
    return Settings(script_args, training_args, model_args, dataset_args)


class _Parser(TrlParser):
    """
    TRL's parser, which looks at all names before any value, and refuses in one line with the nearest name. Its help
    text has the flags of this package alone.
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
        # TRL's dropout of 0.05 on adapters would put noise on every importance ratio
        self.set_defaults(do_train=True, dtype=None, lora_dropout=0.0)
        shown = {"help", "config", *(field.name for field in (*fields(BAPOScriptArguments), *own_fields()))}
        for action in self._actions:
            if action.dest not in shown:
                action.help = argparse.SUPPRESS

    def parse_known_args(self, args=None, namespace=None):
        namespace, remaining = super().parse_known_args(args, namespace)
        unknown = [argument.partition("=")[0][2:] for argument in remaining if argument.startswith("--")]
        if unknown:
            self.error(f"unknown flag: {self.with_nearest(unknown, '--')}")
        if remaining:
            self.error(f"'{remaining[0]}' belongs to no flag")
        return namespace, remaining

    def with_nearest(self, names: Sequence[str], prefix: str) -> str:
        """Return names that are not known, each with the nearest that is."""
        known = [action.dest for action in self._actions]
        described = []
        for name in (name.removeprefix("--") for name in names):
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            described.append(f"{prefix}{name} ({f'the nearest is {prefix}{near[0]}' if near else 'none is near'})")
        return ", ".join(described)

    def error(self, message: str) -> NoReturn:
        """End with one line, without the usage."""
        refuse(self.prog, message)
