"""The section on stability under staleness, and its figures."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from page_parts import provenance, table


TASK_TITLES = {"running_totals": "Running totals (the hard task)", "sums": "Sums (the easy task)"}
ARM_COLORS = {"GRPO": "tab:blue", "clip-higher": "tab:orange", "BAPO": "tab:red"}
STALENESS_COLORS = {"1": "black", "4": "tab:blue", "16": "tab:orange", "64": "tab:red"}


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
    hard = [row for row in rows if row["task"] == "running_totals"]
    draw_staleness(hard, folder / "stability_grpo.png")
    draw_arms(hard, folder / "stability_bapo.png")
    draw_bounds(hard, folder / "stability_bounds.png")
    return "\n\n".join(
        [
            "## Stability under staleness",
            *introduction(settings),
            *(part for task in settings["updates"] for part in task_part(task, settings["summary"])),
            "![GRPO by staleness](stability_grpo.png)",
            "![GRPO, clip-higher and BAPO](stability_bapo.png)",
            "![Bounds and positive share](stability_bounds.png)",
            provenance(content),
        ]
    )


def introduction(settings: dict) -> list[str]:
    """Return the paragraphs on what was run."""
    return [
        "The paper's claim is that with stale samples GRPO's fixed bounds degrade and BAPO's do not. Staleness is the "
        "number of optimizer updates between two generations (with one pass over a generation, samples are up to that"
        "many updates old). Two embedded tasks: running totals, in the regime the paper describes (10 % of answers "
        "right at the start, about 50 tokens an answer, wrong ones 12 % longer than right ones, more than 20,000 "
        "tokens an update), and sums, the quickstart's task (44 % right at the start, up to 4 tokens an answer, 128 "
        f"answers an update). Runs on running totals have {settings['updates']['running_totals']} updates, on sums "
        f"{settings['updates']['sums']}; twice as many at staleness 64, so that there are at least two generations. "
        "All arms run through the same code (GRPO, clip-higher and GSPO as fixed bounds in `BAPOTrainer`, which is "
        "`GRPOTrainer` bit for bit; CISPO, SAPO and VESPO in TRL's `GRPOTrainer` with the settings of TRL's "
        "documentation), from the same warm start, with the same problems in the same order and the same number of "
        "generated answers.",
        "Each arm has its own learning rate for up to 16 updates per generation and for 64, the best of "
        + ", ".join(
            f"{' / '.join(f'{rate:g}' for rate in rates)} ({task.replace('_', ' ')})"
            for task, rates in settings["learning_rates"].items()
        )
        + f" on {len(settings['pilot_seeds'])} seed that is not reported. Accuracy is that of sampled answers "
        "(temperature 1) to 512 held-out problems, two each. Mean ± half the width of the 95 % interval over the "
        "seeds (Student's t). Area: under the held-out accuracy, over the updates. Entropy: at the end over the "
        "start, on answers that the policy samples to held-out problems. Gradient peak: largest norm over the median. "
        "Collapsed: share of runs that end under half of their own best accuracy. Share: the positive-advantage "
        "tokens' part in the policy loss, mean over the updates. Bounds: mean over the updates.",
    ]


def task_part(task: str, summary: Sequence[dict]) -> list[str]:
    """Return the heading and the table of a task."""
    rows = [row for row in summary if row["task"] == task]
    if not rows:
        return []
    return [
        f"### {TASK_TITLES[task]}",
        table(
            [
                "Updates per generation",
                "Arm",
                "Learning rate",
                "Seeds",
                "Final accuracy",
                "Area",
                "Entropy",
                "Gradient peak",
                "Collapsed",
                "Share",
                "Bounds",
                "Tokens an update",
                "Seconds an update",
            ],
            [cells(row) for row in sorted(rows, key=order)],
        ),
    ]


def order(row: dict) -> tuple:
    """Return the place of a row in its table: by staleness, then by arm as they were run."""
    updates, _, rest = row["cell"].partition(",")
    return (rest, int(updates))


def cells(row: dict) -> list[str]:
    """Return the cells of a row of the table."""
    means = row["means"]
    bounds = "-"
    if "bapo/clip_low" in means:
        bounds = f"{means['bapo/clip_low']:.2f} to {means['bapo/clip_high']:.2f}"
    return [
        row["cell"],
        row["arm"],
        f"{row['learning_rate']:g}",
        str(row["seeds"]),
        with_interval(row["final"], 3),
        with_interval(row["area"], 3),
        with_interval(row["entropy_ratio"], 2),
        with_interval(row["gradient_peak"], 1),
        f"{row['collapsed']:.0%}",
        f"{means['bapo/positive_share']:.3f}" if "bapo/positive_share" in means else "-",
        bounds,
        f"{row['tokens_per_update']:,}",
        f"{row['seconds_per_update']:.2f}",
    ]


def with_interval(value: dict, decimals: int) -> str:
    """Return a mean, and half the width of its interval if it has one."""
    half = "" if value["half_width"] is None else f" ± {value['half_width']:.{decimals}f}"
    return f"{value['mean']:.{decimals}f}{half}"


# Figures. A line is the mean over the seeds, the band around it goes from the smallest to the largest.


def draw_staleness(rows: Sequence[dict], path: Path) -> None:
    """Draw the dynamics of GRPO by staleness."""
    lines = {
        f"{staleness} updates per generation": (select(rows, "GRPO", staleness), color)
        for staleness, color in STALENESS_COLORS.items()
    }
    figure, panels = plt.subplots(1, 4, figsize=(15, 3.8), layout="constrained")
    draw_dynamics(panels, lines)
    panels[0].legend(fontsize="small")
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
            draw_line(panel, stretches(select(rows, "BAPO", staleness), name), f"{staleness}", color)
        panel.set_title(title)
        panel.set_xlabel("updates")
        panel.grid(alpha=0.3)
    for arm in ("GRPO",):
        draw_line(panels[2], stretches(select(rows, arm, "64"), "bapo/positive_share"), "64, GRPO", "gray")
    panels[2].axhline(0.5, color="black", linewidth=0.8, linestyle="--")
    panels[2].legend(fontsize="small", title="updates per generation")
    save(figure, path)


def select(rows: Sequence[dict], arm: str, cell: str) -> list[dict]:
    """Return the runs of an arm in a cell."""
    return [row for row in rows if row["arm"] == arm and row["cell"] == cell]


def draw_dynamics(panels: Iterable, lines: dict[str, tuple[list[dict], str]]) -> None:
    """Draw accuracy, entropy, gradient norm and positive share of some groups of runs, a panel each."""
    for panel, (title, curves) in zip(
        panels,
        {
            "held-out accuracy": lambda runs: held_out(runs, 1),
            "entropy of sampled answers (nats)": lambda runs: held_out(runs, 3),
            "gradient norm": lambda runs: stretches(runs, "grad_norm"),
            "positive share": lambda runs: stretches(runs, "bapo/positive_share"),
        }.items(),
        strict=True,
    ):
        for label, (runs, color) in lines.items():
            draw_line(panel, curves(runs), label, color)
        panel.set_title(title)
        panel.set_xlabel("updates")
        panel.grid(alpha=0.3)


def held_out(runs: Sequence[dict], column: int) -> tuple[list[float], list[list[float]]]:
    """Return the updates of the held-out measurements, and a column of them for each run."""
    updates = [point[0] for point in runs[0]["held_out"]] if runs else []
    return updates, [[point[column] for point in run["held_out"]] for run in runs]


def stretches(runs: Sequence[dict], name: str) -> tuple[list[float], list[list[float]]]:
    """Return the middles of the stretches of a run, and a metric's means over them for each run."""
    curves = [run["stretches"][name] for run in runs]
    if not curves:
        return [], []
    length = runs[0]["updates"] / len(curves[0])
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
