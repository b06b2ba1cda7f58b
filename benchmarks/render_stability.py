"""The section on stability under staleness, and its figures."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from page_parts import provenance, table, verdict


TASK_TITLES = {"running_totals": "running totals (the hard task)", "sums": "sums (the easy task)"}
ARM_COLORS = {"GRPO": "tab:blue", "clip-higher": "tab:orange", "BAPO": "tab:red"}
STALENESS_COLORS = {"1": "black", "4": "tab:blue", "16": "tab:orange", "64": "tab:red"}
SURROGATE_ARMS = ("BAPO, surrogate", "released recipe's bounds")


def render_stability(content: dict, folder: Path) -> str:
    """
    Return the section, and draw its figures.

    Args:
        content (`dict`):
            What `stability.py` saved.
        folder (`Path`):
            Where the figures go.
    """
    settings, rows = content["settings"], content["results"]
    suffix = "" if content["machine"]["device"] == "CPU" else "_cuda"
    hard = [row for row in rows if row["task"] == "running_totals"]
    figures = {
        f"stability_{name}{suffix}.png": (draw, title)
        for name, draw, title in (
            ("grpo", draw_staleness, "GRPO by staleness"),
            ("arms", draw_arms, "GRPO, clip-higher and BAPO"),
            ("bounds", draw_bounds, "Bounds and positive share"),
        )
    }
    for name, (draw, _) in figures.items():
        draw(hard, folder / name)
    return "\n\n".join(
        [
            f"## Stability under staleness ({content['machine']['device']})",
            *([] if settings["runs_left"] == 0 else [unfinished(settings["runs_left"])]),
            *introduction(settings, rows),
            *(part for task in settings["updates"] for part in task_part(task, rows, settings)),
            f"Figures: {TASK_TITLES['running_totals']}; lines are means over the seeds, bands go from the lowest to "
            "the highest.",
            *(f"![{title}]({name})" for name, (_, title) in figures.items()),
            provenance(content),
        ]
    )


def unfinished(runs_left: int) -> str:
    """Return the paragraph that tells of runs to come."""
    return (
        f"**Unfinished: at least {runs_left} runs are to come.** Arms and cells that are missing, and rows with fewer "
        "seeds than others, are among them. The command below (`--jobs 0`) makes no runs, only this report."
    )


def introduction(settings: dict, rows: Sequence[dict]) -> list[str]:
    """Return the paragraphs on what was run."""
    start = {
        task: statistics.mean(row["held_out"][0][1] for row in rows if row["task"] == task)
        for task in settings["updates"]
        if any(row["task"] == task for row in rows)
    }
    tokens = {task: [row["tokens_per_update"] for row in settings["summary"] if row["task"] == task] for task in start}
    tasks = "; ".join(
        f"{TASK_TITLES[task]}, {start[task]:.0%} of sampled answers right at the start, "
        f"{min(tokens[task]):,} to {max(tokens[task]):,} answer tokens an update, {settings['updates'][task]} updates"
        for task in start
    )
    grids = ", ".join(
        f"{' / '.join(f'{rate:g}' for rate in rates)} ({task.replace('_', ' ')})"
        for task, rates in settings["learning_rates"].items()
    )
    return [
        "The paper's claim is that with stale samples GRPO's fixed bounds degrade and BAPO's do not. Staleness is set "
        "by the number of optimizer updates between two generations: at 64, the last update of a generation trains on "
        f"samples that are 63 updates old. Tasks: {tasks}. With 64 updates per generation, runs have twice as many "
        "updates, so that there are at least two generations: staler samples also mean fewer generations. In running "
        "totals an answer has several steps, only the last total is checked, and wrong answers are longer than right "
        "ones, so that tokens of negative advantage outnumber the positive ones.",
        "All arms share warm start, problems and their order, the number of generated answers and of updates. Those "
        "with bounds, GSPO among them, run in `BAPOTrainer`, which with fixed bounds is `GRPOTrainer` bit for bit; "
        "CISPO, SAPO and VESPO run in TRL's `GRPOTrainer`. Their losses have the settings of TRL's documentation. "
        "GSPO and SAPO average the loss over each answer first, the others over all tokens, as TRL's recipes have it; "
        "GSPO's bounds (0.9997 to 1.0004) were published for large models. With 1 update per generation every ratio "
        "is 1, and no bound has an effect. In the queue's cell half of each batch is drawn from the replay queue once "
        "that holds samples of at least 16 updates of age.",
        f"Each arm has two learning rates, for up to 16 updates per generation and for 64: the best of {grids} on "
        f"seed {', '.join(map(str, settings['pilot_seeds']))}, which is not reported; where the best lies at an "
        "end of the grid, the grid goes on by factors of 2, up to twice. The ablation takes BAPO's. They are chosen "
        "on the same held-out problems as are reported. Accuracy is that of sampled answers (temperature 1) to 512 "
        "held-out problems, two each. Mean ± half the width of the 95 % interval over the seeds (Student's t). Area: "
        "under the held-out accuracy, over the updates. Largest fall: of the accuracy below its best so far. "
        "Entropy: at the end over the start, on answers that the policy "
        "samples to held-out problems. Gradient peak: largest norm (before it is cut to 1) over the median. "
        "Collapsed: runs that end under half of their own best accuracy, or break off. Above BAPO: mean of the "
        "differences in final accuracy to BAPO on the same seeds (also where BAPO has more). Share: of the "
        "positive-advantage tokens in the policy loss, under the `gradient` measure, mean over the updates. Bounds "
        "and age of the samples: means over the updates; in parentheses, shares of the updates whose search stayed at "
        "its start and went to its end. Seconds: median, generation included, with other work on the machine.",
    ]


def task_part(task: str, runs: Sequence[dict], settings: dict) -> list[str]:
    """Return the heading, the verdicts on the aim and the tables of a task."""
    rows = [row for row in settings["summary"] if row["task"] == task]
    if not rows:
        return []
    header = [
        "Updates per generation",
        "Arm",
        "Learning rate",
        "Seeds",
        "Final accuracy",
        "Above BAPO",
        "Area",
        "Largest fall",
        "Entropy",
        "Gradient peak",
        "Collapsed",
        "Share",
        "Bounds",
        "Age",
        "Seconds an update",
    ]
    return [
        f"### {TASK_TITLES[task].capitalize()}",
        *verdicts(rows),
        table(header, [cells(row) for row in sorted(rows, key=order)]),
        *undefined_part(rows),
        *search_part([run for run in runs if run["task"] == task and run["arm"] == "BAPO"]),
        *candidates_part([row for row in settings["candidates"] if row["task"] == task]),
        *pilots_part(settings["pilots"][task]),
    ]


def undefined_part(rows: Sequence[dict]) -> list[str]:
    """Return the sentence on updates whose gradient was infinite or NaN, which the gradient peak leaves out."""
    counts = [
        f"{row['arm']} at {row['cell']}: {row['undefined_gradients']}" for row in rows if row["undefined_gradients"]
    ]
    return (
        [f"Updates with an infinite or undefined gradient, left out of its peak: {', '.join(counts)}."]
        if counts
        else []
    )


def candidates_part(compared: Sequence[dict]) -> list[str]:
    """Return the table of the candidates for the default, against BAPO on seeds of their own."""
    if not compared:
        return []
    seeds = sorted({seed for row in compared for seed in row["seeds"]})
    rows = [
        [
            row["cell"],
            row["arm"],
            with_interval(row["final"], 3),
            above_bapo(row),
            "-" if row["arm"] == "BAPO" else ", ".join(f"{gain:+.3f}" for gain in row["gains"]),
            with_interval(row["gradient_peak"], 1),
            ", ".join(f"{ratio:.1f}" for ratio in row["ratios_at_gradient_peak"]),
        ]
        for row in sorted(compared, key=order)
    ]
    header = [
        "Updates per generation",
        "Arm",
        "Final accuracy",
        "Above BAPO",
        "On each seed",
        "Gradient peak",
        "Largest ratio there",
    ]
    text = (
        f"Candidates for the default, on seeds that had no part in their choice ({seeds[0]} to {seeds[-1]}), at "
        "BAPO's learning rate:"
    )
    return [text, table(header, rows)]


def pilots_part(pilots: Sequence[dict]) -> list[str]:
    """Return the table of the accuracies by learning rate, the chosen one in bold."""
    rates = sorted({rate for arm in pilots for rate, _ in arm["accuracies"]})
    if len(rates) < 2:
        return []
    rows = []
    for arm in pilots:
        texts = {rate: f"{accuracy:.3f}" for rate, accuracy in arm["accuracies"]}
        chosen, _ = max(arm["accuracies"], key=lambda pair: pair[1])
        texts[chosen] = f"**{texts[chosen]}**"
        rows.append([arm["cell"], arm["arm"], *(texts.get(rate, "-") for rate in rates)])
    return [
        "Accuracy by learning rate, from which it was chosen: mean of the last two measurements of the pilots.",
        table(["Updates per generation", "Arm", *(f"{rate:g}" for rate in rates)], rows),
    ]


def search_part(runs: Sequence[dict]) -> list[str]:
    """Return the table on what BAPO's search did."""
    groups: dict[str, list[dict]] = {}
    for run in sorted(runs, key=order):
        groups.setdefault(run["cell"], []).append(run)
    rows = [
        [
            cell,
            f"{statistics.mean(run['at_start'] for run in group):.0%}",
            f"{statistics.mean(run['at_end'] for run in group):.0%}",
            f"{statistics.mean(run['initial_share_deviation'] for run in group):.3f}",
            f"{min(run['initial_share_range'][0] for run in group):.2f} to "
            f"{max(run['initial_share_range'][1] for run in group):.2f}",
            f"{statistics.mean(run['mean_share_gain'] for run in group):.3f}",
            f"{max(run['largest_share_gain'] for run in group):.3f}",
            ", ".join(f"{run['ratio_at_gradient_peak']:.1f}" for run in group),
        ]
        for cell, group in groups.items()
    ]
    header = [
        "Updates per generation",
        "Stayed at start",
        "Went to end",
        "Share under start bounds: deviation",
        "Range",
        "Raised by the search: mean where it moved",
        "At most",
        "Largest ratio at the gradient's peak, each seed",
    ]
    return ["What BAPO's search did, over all updates of all seeds:", table(header, rows)] if rows else []


def verdicts(rows: Sequence[dict]) -> list[str]:
    """Return what the rows of a task say of the aim at staleness 16 and 64."""
    lines = []
    for cell in ("16", "64"):
        arms = {row["arm"]: row for row in rows if row["cell"] == cell}
        if not {"BAPO", "GRPO", "clip-higher"} <= set(arms):
            continue
        bapo = arms.pop("BAPO")
        others = {name: row for name, row in arms.items() if "at_start" not in row}  # no search
        apart = [name for name in ("GRPO", "clip-higher") if are_apart(bapo, others[name])]
        best = max(others, key=lambda name: others[name]["gain"]["mean"])
        entropy = bapo["entropy_ratio"]["mean"] / others["GRPO"]["entropy_ratio"]["mean"]
        lines.append(
            f"- {cell} updates per generation: BAPO ends at {with_interval(bapo['final'], 3)}, GRPO at "
            f"{with_interval(others['GRPO']['final'], 3)}, clip-higher at "
            f"{with_interval(others['clip-higher']['final'], 3)}. Of the {len(others)} arms without a search, {best} "
            f"ends highest ({above_bapo(others[best])} against BAPO on the same seeds). BAPO above all of them: "
            f"{verdict(others[best]['gain']['mean'] < 0)}. Intervals apart from GRPO and "
            f"clip-higher, and above: {verdict(len(apart) == 2)}. No collapsed run: "
            f"{verdict(not bapo['collapsed'])}. Entropy at least 1.5 times GRPO's: {verdict(entropy >= 1.5)} "
            f"({entropy:.2f})."
        )
    return ["Aims:\n\n" + "\n".join(lines)] if lines else []


def are_apart(higher: dict, lower: dict) -> bool:
    """Return whether one interval of the final accuracy lies wholly above the other."""
    high, low = higher["final"], lower["final"]
    if high["half_width"] is None or low["half_width"] is None:
        return False
    return high["mean"] - high["half_width"] > low["mean"] + low["half_width"]


def order(row: dict) -> tuple:
    """Return the place of a row in its table: by what makes samples stale; arms stay as they were run."""
    updates, _, rest = row["cell"].partition(",")
    return (rest, int(updates))


def cells(row: dict) -> list[str]:
    """Return the cells of a row of the table."""
    means = row["means"]
    share = means.get("bapo/positive_share") if row["arm"] not in SURROGATE_ARMS else None
    bounds = "-"
    if "bapo/clip_low" in means:
        bounds = f"{means['bapo/clip_low']:.2f} to {means['bapo/clip_high']:.2f}"
        if row["arm"] == "GSPO":
            bounds = f"{means['bapo/clip_low']:.4f} to {means['bapo/clip_high']:.4f}"
        if "at_start" in row:
            bounds += f" ({row['at_start']:.0%}, {row['at_end']:.0%})"
    return [
        row["cell"],
        row["arm"],
        f"{row['learning_rate']:g}",
        str(len(row["seeds"])),
        with_interval(row["final"], 3),
        above_bapo(row),
        with_interval(row["area"], 3),
        with_interval(row["largest_fall"], 2),
        with_interval(row["entropy_ratio"], 2),
        with_interval(row["gradient_peak"], 1),
        f"{row['collapsed']:.0%}",
        "-" if share is None else f"{share:.3f}",
        bounds,
        f"{means['staleness/mean']:.1f}" if "staleness/mean" in means else "-",
        f"{row['seconds_per_update']:.2f}",
    ]


def above_bapo(row: dict) -> str:
    """Return the mean difference to BAPO on the same seeds, with its interval."""
    if row["arm"] == "BAPO" or not row["gains"]:
        return "-"
    return with_interval(row["gain"], 3, sign="+")


def with_interval(value: dict, decimals: int, sign: str = "-") -> str:
    """Return a mean, and half the width of its interval if it has one; with the sign `+` also before positive ones."""
    if value["mean"] is None:
        return "-"
    half = "" if value["half_width"] is None else f" ± {value['half_width']:.{decimals}f}"
    return f"{value['mean']:{sign}.{decimals}f}{half}"


# Figures. A line is the mean over the seeds, the band around it goes from the smallest to the largest.


def draw_staleness(rows: Sequence[dict], path: Path) -> None:
    """Draw the dynamics of GRPO by staleness."""
    lines = {
        f"{staleness} updates per generation": (select(rows, "GRPO", staleness), color)
        for staleness, color in STALENESS_COLORS.items()
    }
    figure, panels = plt.subplots(1, 4, figsize=(15, 3.8), layout="constrained")
    draw_dynamics(panels, lines)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(lines))
    figure.suptitle("GRPO (bounds 0.8 to 1.2) by staleness")
    save(figure, path)


def draw_arms(rows: Sequence[dict], path: Path) -> None:
    """Draw GRPO, clip-higher and BAPO beside one another at staleness 16 and 64."""
    figure, panels = plt.subplots(2, 4, figsize=(15, 7), layout="constrained")
    for row_of_panels, staleness in zip(panels, ("16", "64"), strict=True):
        lines = {arm: (select(rows, arm, staleness), color) for arm, color in ARM_COLORS.items()}
        draw_dynamics(row_of_panels, lines)
        row_of_panels[0].set_ylabel(f"{staleness} updates per generation")
    panels[0, 0].legend(fontsize="small")
    save(figure, path)


def draw_bounds(rows: Sequence[dict], path: Path) -> None:
    """Draw BAPO's bounds and positive share by staleness."""
    names = {
        "bapo/clip_high": "upper bound",
        "bapo/clip_low": "lower bound",
        "bapo/positive_share": "positive share, target 0.5",
    }
    figure, panels = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for panel, (name, title) in zip(panels, names.items(), strict=True):
        for staleness, color in STALENESS_COLORS.items():
            draw_line(panel, metric_curves(select(rows, "BAPO", staleness), name), f"{staleness}", color)
        panel.set_title(title)
        panel.set_xlabel("updates")
        panel.grid(alpha=0.3)
    draw_line(panels[2], metric_curves(select(rows, "GRPO", "64"), "bapo/positive_share"), "64, GRPO", "gray")
    panels[2].axhline(0.5, color="black", linewidth=0.8, linestyle="--")
    panels[2].legend(fontsize="small", title="updates per generation", loc="lower right")
    save(figure, path)


def select(rows: Sequence[dict], arm: str, cell: str) -> list[dict]:
    """Return the runs of an arm in a cell."""
    return [row for row in rows if row["arm"] == arm and row["cell"] == cell]


def draw_dynamics(panels: Iterable, lines: dict[str, tuple[list[dict], str]]) -> None:
    """Draw accuracy, entropy, gradient norm and positive share of some groups of runs, a panel each."""
    for panel, (title, curves) in zip(
        panels,
        {
            "held-out accuracy": lambda runs: held_out_curves(runs, 1),
            "entropy of sampled answers (nats)": lambda runs: held_out_curves(runs, 3),
            "gradient norm": lambda runs: metric_curves(runs, "grad_norm"),
            "positive share": lambda runs: metric_curves(runs, "bapo/positive_share"),
        }.items(),
        strict=True,
    ):
        for label, (runs, color) in lines.items():
            draw_line(panel, curves(runs), label, color)
        panel.set_title(title)
        panel.set_xlabel("updates")
        panel.grid(alpha=0.3)


def held_out_curves(runs: Sequence[dict], column: int) -> tuple[list[float], list[list[float]]]:
    """Return the updates of the held-out measurements, and a column of them for each run."""
    updates = [point[0] for point in runs[0]["held_out"]] if runs else []
    return updates, [[point[column] for point in run["held_out"]] for run in runs]


def metric_curves(runs: Sequence[dict], name: str) -> tuple[list[float], list[list[float]]]:
    """Return the middles of the stretches of a run, and a metric's means over them for each run."""
    curves = [run["stretches"][name] for run in runs]
    if not curves:
        return [], []
    length = runs[0]["held_out"][-1][0] / len(curves[0])
    return [(index + 0.5) * length for index in range(len(curves[0]))], curves


def draw_line(panel, points: tuple[list[float], list[list[float]]], label: str, color: str) -> None:
    """Draw the mean of some curves, and a band from the lowest to the highest."""
    updates, curves = points
    columns = [[value for value in column if value is not None] for column in zip(*curves, strict=True)]
    drawn = [(update, column) for update, column in zip(updates, columns, strict=True) if column]
    if not drawn:
        return
    updates, columns = zip(*drawn, strict=True)
    panel.plot(updates, [statistics.mean(column) for column in columns], color=color, label=label)
    panel.fill_between(updates, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.15, linewidth=0)


def save(figure, path: Path) -> None:
    """Write a figure and forget it."""
    figure.savefig(path, dpi=110)
    plt.close(figure)
