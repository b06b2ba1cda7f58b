"""
Draw the effects of docs/results.md with their intervals, from the runs in benchmarks/results/.

    python docs/tools/draw_effects.py

Intervals of differences have Holm's correction for the comparisons of a panel.
"""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bapo_trl.compare.statistics import Mean, differences, differences_from, mean_over_seeds
from benchmarks.common import rows
from benchmarks.pages import (
    ASYNC_METHODS,
    METHODS,
    PARTIAL,
    PARTIAL_NAMES,
    REPLAY,
    TASK,
    UPDATES,
    VARIANTS,
    WEIGHTS,
    Finals,
    async_places,
    finals,
    fraction_until,
    last_accuracy,
    partial_finals,
)  # fmt: skip
from benchmarks.pictures import style_panel


FOLDER = Path(__file__).resolve().parents[1]
DIFFERENCE = "difference in final accuracy"
SOME_VARIANTS = (
    "fixed at the widest", "lower bound alone", "BAPO, surrogate", "lower bound first", "released recipe's bounds",
    "BAPO, target 0.4",
)  # fmt: skip


def effects(by_arm: Finals, baseline: str, names: Mapping[str, str]) -> dict[str, Mean]:
    """Return the differences from the baseline of the arms that `names` has, corrected for all arms, by their name."""
    found = differences_from(by_arm, baseline)
    return {name: found[arm].mean for arm, name in names.items() if arm in found}


def methods() -> dict[str, dict[str, Mean]]:
    panels = {}
    for updates, title in (("16", "16 updates per generation:\n64 updates,\n1.3 M tokens"),
                           ("64", "64 updates per generation:\n128 updates,\n2.7 to 3.0 M tokens")):  # fmt: skip
        by_arm = finals(rows("stability", **{TASK: "running totals", UPDATES: updates}))
        compared = {arm: by_arm[arm] for arm in ("BAPO", *METHODS)}
        panels[title] = effects(compared, "BAPO", {arm: arm for arm in METHODS})
    return panels


def variants() -> dict[str, dict[str, Mean]]:
    by_arm = finals(rows("stability", **{TASK: "running totals", UPDATES: "64"}))
    compared = {arm: {seed: by_arm[arm][seed] for seed in range(3)} for arm in ("BAPO", *VARIANTS)}
    return {"": effects(compared, "BAPO", {arm: VARIANTS[arm].replace("`", "") for arm in SOME_VARIANTS})}


def weights() -> dict[str, dict[str, Mean]]:
    panels = {}
    for task, length in (("running totals", 128), ("sums", 256)):
        by_arm = finals(rows("balance", **{TASK: task, UPDATES: "64"}))
        compared = {arm: by_arm[arm] for arm in ("VESPO", *WEIGHTS) if arm in by_arm}
        names = {arm: WEIGHTS[arm] for arm in list(WEIGHTS)[:3]}
        panels[f"{task},\nafter {length} updates"] = effects(compared, "VESPO", names)
    return panels


def stale_async() -> dict[str, dict[str, Mean]]:
    names = {arm: arm for arm in ASYNC_METHODS}
    return {f"staleness {staleness}": effects(found, "GRPO", names) for staleness, found, _ in async_places()}


def scopes() -> dict[str, dict[str, Mean]]:
    names = {scope: scope for scope in ("carried_over", "micro_batch")}
    return {
        f"{n} updates per generation,\nafter {length} updates": effects(finals(rows(f"scopes_{n}")), "batch", names)
        for n, length in (("16", 64), ("64", 128))
    }


def overlap() -> dict[str, dict[str, Mean]]:
    found = {}
    for updates in (4, 16):
        by_arm = finals(rows("overlap_accuracy", steps_per_generation=updates))
        name = {"BAPO, overlapped": f"{updates} updates per generation"}
        found |= effects({arm: by_arm[arm] for arm in ("BAPO", *name)}, "BAPO", name)
    return {"": found}


def partial_rollouts() -> dict[str, dict[str, Mean]]:
    by_arm = partial_finals()
    found = {each.arm: each.mean for each in differences(by_arm, list(PARTIAL.items()))}
    return {"": {name: found[arm] for arm, name in PARTIAL_NAMES.items()}}


def replay() -> dict[str, dict[str, Mean]]:
    panels = {}
    for bounds in ("BAPO", "GRPO"):
        runs = {(row.arm, row.seed): row for row in rows("replay", bounds=bounds)}
        aims = {seed: last_accuracy(row) for (arm, seed), row in runs.items() if arm == "one pass"}
        found = {}
        for arm, (samples, replaced) in REPLAY.items():
            each = [fraction_until(aim, runs[arm, seed]) for seed, aim in aims.items()]
            name = f"{samples}{', zero-advantage replaced' if replaced == 'yes' else ''}"
            found[name] = mean_over_seeds([tokens for tokens in each if tokens is not None])
        panels[f"{bounds}'s bounds"] = found
    return panels


PICTURES = {
    "effect_methods": (methods, f"{DIFFERENCE} from BAPO, 3 to 5 seeds", 0),
    "effect_variants": (variants, f"{DIFFERENCE} from BAPO, 64 updates per generation, 3 seeds, after 128 updates", 0),
    "effect_weight": (weights, f"{DIFFERENCE} from VESPO, 64 updates per generation", 0),
    "effect_scopes": (scopes, f"{DIFFERENCE} from batch", 0),
    "effect_async": (stale_async, f"{DIFFERENCE} from GRPO, after 128 updates, 5 seeds", 0),
    "effect_overlap": (overlap, f"{DIFFERENCE}, with overlap - without, after 128 updates, 5 seeds", 0),
    "effect_partial": (
        partial_rollouts,
        f"{DIFFERENCE}, with - without partial rollouts, after equally many updates, 6 pairs",
        0,
    ),
    "effect_replay": (replay, "generated tokens until the accuracy of one pass, relative to its run, 5 seeds", 1),
}


def draw(path: Path, panels: Mapping[str, Mapping[str, Mean]], label: str, reference: float) -> None:
    """Draw a panel for each entry: the means of its arms, with their 95 % intervals, and a line at no effect."""
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    columns = 2 if len(panels) == 4 else len(panels)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(6.6, 0.9 + lines * (0.4 + 0.4 * len(names))), layout="constrained")  # for a phone, too
    every_axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, (title, panel) in zip(every_axes, panels.items(), strict=True):
        places = [len(names) - names.index(name) for name in panel]
        values, widths = ([getattr(mean, part) for mean in panel.values()] for part in ("value", "half_width"))
        axes.errorbar(values, places, xerr=widths, fmt="o", color="#0072B2", capsize=4, markersize=6, linewidth=2)
        axes.axvline(reference, color="0.3", linewidth=1)
        axes.set(yticks=range(len(names), 0, -1), ylim=(0.4, len(names) + 0.6))
        axes.set_yticklabels([fill(name, 26, break_long_words=False) for name in names])
        axes.xaxis.set_major_locator(MaxNLocator(4))
        style_panel(axes, "", "", "")
        axes.set_title(title, fontsize=11, loc="left")
        axes.tick_params(labelsize=10.5)
    figure.supxlabel(fill(label, 68), fontsize=10.5)
    figure.savefig(path, dpi=150, facecolor="white")


if __name__ == "__main__":
    for name, (panels, label, reference) in PICTURES.items():
        draw(FOLDER / f"{name}.png", panels(), label, reference)
        print(f"Written: {name}.png")
