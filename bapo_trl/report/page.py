"""The page of the report: one HTML file that needs no other, for light and dark screens, wide and narrow."""

import html
import json
import re
from collections.abc import Mapping, Sequence

from .figure import caption, color_of
from .health import Finding
from .panels import Panel
from .runs import Group, Run


MAIN_SETTINGS = (
    "model", "model_name_or_path", "dataset_name", "reward_funcs", "loss_type", "learning_rate", "beta",
    "importance_sampling_level", "positive_contribution_target", "ratio_lower_start", "ratio_lower_max",
    "ratio_upper_start", "ratio_upper_max", "search_scope", "negative_weight_min",
    "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
    "num_iterations", "max_completion_length", "temperature", "replay_fraction", "replay_zero_advantage",
    "partial_rollout_oversampling", "use_vllm", "max_steps", "logging_steps",
)  # fmt: skip
"""Settings that the table always has, if the runs saved them; others are there where the groups differ in them."""

NEVER_SHOWN = frozenset({"output_dir", "logging_dir", "run_name", "resume_from_checkpoint", "local_rank"})

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #ffffff; --soft: #5c6370; --line: #d9dce1;
  --card: #f6f7f9; --warning: #b3261e; --note: #8a5a00; --healthy: #1d7a3e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e7ea; --paper: #16181c; --soft: #a3a9b4; --line: #363a42; --card: #1f2228; --warning: #ff8a80;
    --note: #ffc46b; --healthy: #7ddc9c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 86rem; padding: 1rem 1.25rem 3rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 1.8rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
code { font: .9em ui-monospace, "DejaVu Sans Mono", monospace; }
.soft, figcaption.soft { color: var(--soft); font-size: .9rem; }
ul { list-style: none; margin: 0; padding: 0; }
.health li { background: var(--card); border-left: 4px solid var(--line); border-radius: 4px; margin: .4rem 0;
  padding: .5rem .8rem; }
.health p { margin: .2rem 0 0; }
.warning { border-color: var(--warning) !important; } .warning .tag { color: var(--warning); }
.note { border-color: var(--note) !important; } .note .tag { color: var(--note); }
.healthy { border-color: var(--healthy) !important; } .healthy .tag { color: var(--healthy); }
.tag { font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; }
.swatch { display: inline-block; width: 1.4em; height: .3em; border-radius: 2px; margin: 0 .4em .2em 0; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 23rem), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: 6px; padding: .6rem .6rem .2rem; }
figcaption { font-weight: 600; font-size: .95rem; }
svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line);
  min-width: 7rem; }
"""


def render_page(
    groups: Sequence[Group], health: Sequence[tuple[str, Sequence[Finding]]], panels: Mapping[Panel, str]
) -> str:
    """
    Return the page as HTML. What users wrote (names, settings) is escaped.

    `health` pairs titles of runs with the findings that these share; `panels` has the SVG of each.
    """
    title = "Training report: " + ", ".join(group.title for group in groups)
    is_alone = sum(len(group.runs) for group in groups) == 1
    lists = "".join(_health("" if is_alone else runs, findings) for runs, findings in health)
    figures = "".join(
        f"<figure><figcaption>{html.escape(panel.title)}</figcaption>{svg}</figure>" for panel, svg in panels.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{html.escape(title)}</h1>\n{_legend(groups)}"
        f'<h2>Health</h2><div class="health">{lists}</div>\n'
        f'<h2>Over the optimizer updates</h2><p class="soft">{html.escape(caption(groups))}</p>'
        f'<div class="panels">{figures}</div>\n'
        f'<h2>Settings</h2><div class="scroll">{_settings_table(groups)}</div>\n'
        "</body></html>\n"
    )


def _health(label: str, findings: Sequence[Finding]) -> str:
    items = "".join(
        f'<li class="{finding.severity}"><span class="tag">{_text(_title(finding))}</span> {_text(finding.sentence)}'
        + (f'<p class="soft">{_text(finding.meaning)}</p>' if finding.meaning else "")
        + (f"<p><b>Try:</b> {_text(finding.remedy)}</p>" if finding.remedy else "")
        + "</li>"
        for finding in findings
    )
    return (f"<h3>{html.escape(label)}</h3>" if label else "") + f"<ul>{items}</ul>"


def _title(finding: Finding) -> str:
    same = finding.name.lower() == finding.severity
    return f"{finding.name}:" if same else f"{finding.name} ({finding.severity}):"


def _legend(groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return ""
    items = "".join(
        f'<li><span class="swatch" style="background:{color_of(index)}"></span>{html.escape(group.title)}</li>'
        for index, group in enumerate(groups)
    )
    return f'<ul class="legend">{items}</ul>\n'


def _settings_table(groups: Sequence[Group]) -> str:
    firsts = [group.runs[0] for group in groups]
    used = [{name for name in run.settings if name not in run.method.unused} for run in firsts]
    names = [name for name in MAIN_SETTINGS if any(name in some for some in used)]
    others = sorted(set().union(*used) - {*MAIN_SETTINGS, *NEVER_SHOWN, "seed", "data_seed"})
    names += [
        name
        for name in others
        if len({_value(run, name) for run in firsts if run.settings and name not in run.method.unused}) > 1
    ]
    rows = {"method": [run.method.name or "not saved" for run in firsts]}
    rows |= {name: [_value(run, name) for run in firsts] for name in names}
    rows["seed"] = [", ".join(_value(run, "seed") for run in group.runs) for group in groups]
    rows["last update logged"] = [", ".join(str(run.logs.steps[-1]) for run in group.runs) for group in groups]
    head = "".join(f"<th>{html.escape(group.label)}</th>" for group in groups)
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
        for name, values in rows.items()
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _value(run: Run, name: str) -> str:
    value = "not used" if name in run.method.unused else run.settings.get(name, "not saved")
    return value if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    """Return escaped text, with what is between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
