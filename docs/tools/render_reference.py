"""
Write the reference pages from the code: docs/settings.md, docs/command_line.md and docs/recipes.md.

    python docs/tools/render_reference.py

Each page has hand-written text before a mark that names this script. What follows the mark is written here, from the
help texts of the settings, from the parsers of the commands, and from the recipes.
"""

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import Field, fields
from pathlib import Path
from unittest.mock import patch

import yaml
from trl import ScriptArguments

from bapo_trl import cli
from bapo_trl.bapo_config import own_fields
from bapo_trl.compare import command as compare
from bapo_trl.report import command as report
from bapo_trl.script import serving
from bapo_trl.script.commands import EVALUATE, TRAIN
from bapo_trl.script.settings import recipes
from bapo_trl.script.settings.arguments import BAPOScriptArguments
from bapo_trl.script.settings.parser import parse_arguments


DOCS = Path(__file__).resolve().parents[1]
MARK = "<!-- The rest of this page is written by docs/tools/render_reference.py -->\n"

# Heading, its text, and the names that stand under it: how they begin
GROUPS = {
    "Bound search": (
        "Choose the clip bounds of each update ([How BAPO works](how_bapo_works.md)).",
        ("positive_contribution_target", "ratio_", "contribution_", "search_"),
    ),
    "Weight of negative tokens": (
        "Off by default. [How BAPO works](how_bapo_works.md) has the formula.",
        ("negative_weight",),
    ),
    "Micro-batches": (
        "Compute no padding, and no sample without a gradient ([Micro-batches](micro_batches.md)).",
        ("micro_batch_", "skip_"),
    ),
    "Replay buffer": ("Train again on finished samples ([Replay buffer](replay.md)).", ("replay_",)),
    "Partial rollouts": (
        "Pause unfinished completions; a later policy continues them ([Partial rollouts](partial_rollouts.md)).",
        ("partial_rollout_",),
    ),
    "Overlapped generation": (
        "Generate and train at the same time ([Overlapped generation](overlapped_generation.md)).",
        ("overlap_",),
    ),
    "vLLM": (
        "A vLLM server's checks, timeouts and log-probabilities ([ZeRO-3 with a vLLM server](zero3_vllm.md)).",
        ("vllm_", "use_sampler_logps"),
    ),
}

# Settings of a recipe that its section lists, if the recipe has them
MAIN_SETTINGS = (
    "model_name_or_path", "dataset_name", "eval_dataset", "loss_type", "use_peft", "use_vllm", "use_cpu",
    "positive_contribution_target", "num_generations", "num_generations_eval", "max_completion_length",
    "learning_rate", "max_steps",
)  # fmt: skip


def settings() -> str:
    """Return a table of settings for each group, with default, range and help text."""
    left, parts = list(own_fields()), []
    for title, (text, prefixes) in GROUPS.items():
        members = [f for f in left if f.name.startswith(prefixes)]
        left = [f for f in left if f not in members]
        rows = [[f"`{f.name}`", _value(f.default), _values(f), f.metadata["help"]] for f in members]
        parts.append(f"## {title}\n\n{text}\n\n{_table(['setting', 'default', 'values', 'meaning'], rows)}")
    if left:
        raise ValueError(f"Settings without a group: {', '.join(f.name for f in left)}. Add a prefix to `GROUPS`.")
    return "\n\n".join(parts)


def command_line() -> str:
    """Return a section for each command, with its description, its usage and its own flags."""
    of_trl = {f.name for f in fields(ScriptArguments)} - {"dataset_name"}
    ours = [f for f in fields(BAPOScriptArguments) if f.name not in of_trl]
    starting = {each.dest: each.help for each in _parser_of(parse_arguments)._actions}
    train = _table(
        ["flag", "default", "meaning"],
        [
            *([f"`--{name}`", "none", starting[name]] for name in ("config", "accelerate_config")),
            *([f"`--{f.name}`", _value(f.default), f.metadata["help"]] for f in ours),
        ],
    )
    parsers = {
        "recipes": _parser_of(recipes.main), "compare": _parser_of(compare.main), "report": _parser_of(report.main),
        "serve": _parser_of(serving.main),
    }  # fmt: skip
    sections = {
        "train": f"{TRAIN.description.strip()}\n\nUsage: `bapo-trl train [--NAME VALUE ...]`\n\n{train}\n\n"
        "All [settings of `BAPOConfig`](settings.md) are flags as well, and so are the fields of TRL's `GRPOConfig`, "
        "`ModelConfig` and `DatasetMixtureConfig`. `bapo-trl train --help` lists the flags of this package.",
        "evaluate": f"{EVALUATE.description.strip()}\n\nUsage: `bapo-trl evaluate [--NAME VALUE ...]`\n\n"
        "The flags are those of [train](#train).",
        **{name: _section(parser) for name, parser in parsers.items()},
    }
    purposes = _table(
        ["command", "purpose"], [[f"[{name}](#{name})", purpose] for name, (_, purpose) in cli.COMMANDS.items()]
    )
    return "\n\n".join([purposes, *(f"## {name}\n\n{sections[name]}" for name in cli.COMMANDS)])


def recipe_list() -> str:
    """Return a section for each recipe of the package: its head comment and its main settings."""
    parts = []
    for name in recipes.recipe_names():
        text = (recipes.RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
        comment = re.match(r"(?:#.*\n)+", text)[0]
        paragraphs = re.sub(r"^# ?", "", comment, flags=re.MULTILINE).strip().split("\n\n")
        values = yaml.safe_load(text)
        main = [f"`{each}: {_as_yaml(values[each])}`" for each in MAIN_SETTINGS if each in values]
        if "steps_per_generation" in values:
            passes, accumulation = values.get("num_iterations", 1), values["gradient_accumulation_steps"]
            main.append(f"{values['steps_per_generation'] * passes // accumulation} updates per generation")
        prose = [f"`{_in_one_line(part)}`" if part.startswith("  ") else part for part in paragraphs]
        parts.append("\n\n".join([f"## {name}", *prose, f"Main settings: {', '.join(main)}."]))
    return "\n\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings,
    "command_line.md": command_line,
    "recipes.md": recipe_list,
}


def rendered(name: str) -> str:
    """Return a page with its generated part written again."""
    by_hand, mark, _ = (DOCS / name).read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"docs/{name} lacks the line {MARK.strip()!r}: put it where the generated part begins.")
    linked = re.sub(r"(?<![\w/])docs/(\w+\.md)", r"[docs/\1](\1)", PAGES[name]())
    return f"{by_hand}{mark}\n{linked}\n"


class _Captured(Exception):
    """Carries the parser of a command out of it, before it parses anything."""


def _parser_of(main: Callable[[Sequence[str]], object]) -> argparse.ArgumentParser:
    found: list[argparse.ArgumentParser] = []

    def stop(self, *args, **kwargs):
        found.append(self)
        raise _Captured

    with patch.object(argparse.ArgumentParser, "parse_known_args", stop), suppress(_Captured):
        main([])
    return found[0]


def _section(parser: argparse.ArgumentParser, only: Sequence[str] = ()) -> str:
    """Return description, usage and flags of a command; with `only`, the flags of these names alone."""
    actions = [each for each in parser._actions if each.dest != "help" and (not only or each.dest in only)]
    needed = [_flag(each) for each in actions if each.option_strings and each.required]
    places = [each.metavar + (" ..." if each.nargs == "+" else "") for each in actions if not each.option_strings]
    optional = ["[FLAGS]"] if any(each.option_strings and not each.required for each in actions) else []
    usage = (parser.usage or " ".join(["%(prog)s", *places, *needed, *optional])) % {"prog": parser.prog}
    rows = [[f"`{_flag(each)}`", each.help] for each in actions]
    parts = [parser.description.strip(), f"Usage: `{usage}`", *([_table(["flag", "meaning"], rows)] if rows else [])]
    return "\n\n".join(parts)


def _flag(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar)
    many = " ..." if action.nargs == "+" else ""
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}{many}"
    return f"{action.option_strings[0]}{value}"


def _in_one_line(command: str) -> str:
    return " ".join(command.replace("\\\n", " ").split())


def _value(value: object) -> str:
    return "none" if value is None else f"`{value}`"


def _values(f: Field) -> str:
    if "choices" in f.metadata:
        return ", ".join(f"`{choice}`" for choice in f.metadata["choices"])
    return f.metadata.get("range", "`True`, `False`")


def _as_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(rendered(name), encoding="utf-8")
        print(f"Written: docs/{name}")
