"""The section of the study of the balance on the pages of results and of tables."""

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.common import Section, link_to_tables, provenance, table
from benchmarks.stability.section import TASK_TITLES
from benchmarks.stability.summary import best_rate, mean_and_interval, pilot_accuracies
from benchmarks.stability.tables import with_interval

from .arms import REPEATED, SMALLEST_WEIGHT, controlled_by
from .plan import FURTHER, SETTINGS


FIGURE = "balance_share.png"
CONTROL, PUBLISHED = "control", "published method"
COLORS = {PUBLISHED: "tab:orange", "share or weight": "tab:blue", CONTROL: "tab:gray"}
TITLES = {
    **TASK_TITLES,
    "running_totals_long": "Running totals, wrong completions twice as long",
    "running_totals_longer": "Running totals, wrong completions four times as long",
    "running_totals_larger_model": "Running totals, four times the parameters",
}

NOT_RUN = """### What was not run, and why

The study had two cores. A run takes half a minute on sums at 64 updates and two minutes on running totals, and each
arm has pilots. So not all arms went on:

- On running totals, and on sums at 16 updates: the shares that led on sums at 64, VESPO, and constant weights. The
  others end at or below VESPO there.
- The published methods on running totals: their runs in the study above count. They lack pass@4.
- Controls on running totals: constant weights of VESPO alone, what a simpler setting would be.
- Carried over: on sums at 16 updates, for VESPO with a share of 0.8.
- 256 updates and a minimum staleness of 64: on sums alone.
- Longer completions and the larger model: not at all. A run takes 4 to 10 minutes, and 42 were left. The command above
  the date makes them."""


def summarize(rows: Sequence[dict]) -> list[dict]:
    """
    Return a row for each task, staleness setting and arm: means over the seeds, with intervals, best first.

    Each has the difference to another arm on the same seeds, `than`: VESPO, or the arm that a control is of.
    """
    groups: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        if row["purpose"] == "reported":
            groups.setdefault((row["task"], row["staleness_setting"], row["arm"]), {})[row["seed"]] = row
    summary = []
    for (task, staleness, arm), by_seed in groups.items():
        than = controlled_by(arm) or "VESPO"
        others = groups.get((task, staleness, than), {})
        pairs = [(row, others[seed]) for seed, row in by_seed.items() if seed in others and arm != than]
        group = list(by_seed.values())
        summary.append(
            {
                "task": task,
                "staleness_setting": staleness,
                "arm": arm,
                "learning_rate": group[0]["learning_rate"],
                "seeds": len(group),
                "collapsed": sum(row["is_collapsed"] for row in group),
                "than": than,
                "above": mean_and_interval([row["final"] - other["final"] for row, other in pairs]),
                "above_in_pass@k": mean_and_interval([row["pass@k"] - other["pass@k"] for row, other in pairs]),
                **{
                    key: mean_and_interval([row[key] for row in group])
                    for key in ("final", "area", "pass@k", "largest_fall", "gradient_peak", "entropy_ratio")
                },
                "share": mean_and_interval([row["means"].get("bapo/positive_share") for row in group]),
                "weight": mean_and_interval([_mean_weight(row) for row in group]),
            }
        )
    return sorted(summary, key=lambda row: -row["final"]["mean"])


def _mean_weight(row: dict) -> float:
    return row.get("mean_weight", 1.0)


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Return Spearman's correlation of two equally long lists of numbers."""
    ranks = [_ranks(values) for values in (left, right)]
    mean = (len(left) + 1) / 2
    deviations = [[rank - mean for rank in some] for some in ranks]
    product = sum(a * b for a, b in zip(*deviations, strict=True))
    return product / (sum(a * a for a in deviations[0]) * sum(b * b for b in deviations[1])) ** 0.5


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks of values from 1 on, that of equal ones their mean."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


def render(content: dict) -> Section:
    """Return the section of a result."""
    rows, settings = content["results"], content["settings"]
    summary = summarize(rows)
    pilots = [row for row in rows if row["purpose"] == "pilot"]
    heading = "Which balance, when (CPU)"
    text = [
        f"## {heading}",
        "The positive tokens are to have a share of the policy loss. Where the clip bounds leave less, negative "
        f"tokens get a weight below 1, at least {SMALLEST_WEIGHT}. Tasks, updates and rules are those of the study "
        "above. Arms called share have fixed bounds of 0.6 and 3.0 and a cap of 3.0 on the ratios of negative "
        "tokens, unless they name another method. All arms run in `BAPOTrainer`. Learning rates of the published "
        "methods are those of the study above; the others have pilots of their own.",
        f"Final is the accuracy of sampled completions. pass@{settings['k']}: held-out problems with a right one "
        f"among {settings['k']} samples. Figures are means ± half the width of the 95 % interval over the seeds "
        "(Student's t), none where there is one seed. Above VESPO: mean difference on the same seeds. A control "
        "changes one thing of an arm: its weights in another order, on the positive tokens instead, by the curves "
        "of the update before (carried over, and for once by the masses of the whole generation), or a constant "
        "weight, its own mean or that of the other task. Queue from 64: half of each batch comes from the replay "
        "queue, at least 64 updates old.",
    ]
    tables = [f"## {heading}"]
    asked = {
        **dict.fromkeys(SETTINGS, settings["arms"]),
        **{(question.task, question.staleness): question.arms for question in FURTHER},
    }
    for (task, staleness), names in asked.items():
        arms = [row for row in summary if (row["task"], row["staleness_setting"]) == (task, staleness.name)]
        title = f"### {_title(task, staleness.name)}"
        missing = [arm for arm in names if arm not in {row["arm"] for row in arms}]
        known = [arm for arm in missing if arm in REPEATED and (task, staleness) in SETTINGS]
        controls = [row for row in arms if controlled_by(row["arm"])]
        text.append(title)
        if arms:
            text.append(_final_table([row for row in arms if row not in controls], settings["k"]))
            tables += [title, _more_table(arms), *_pilots_table(pilots, task, staleness.name)]
        if controls:
            text.append(_controls_table(controls, settings["k"]))
        if known:
            text.append(f"Run in the study above, without pass@{settings['k']}: {'; '.join(known)}.")
        if len(missing) > len(known):
            text.append(f"Not run: {'; '.join(arm for arm in missing if arm not in known)}.")
    text += [NOT_RUN, *_scatter_text(summary), f"Areas, entropy and all learning rates: {link_to_tables(heading)}."]
    return Section("\n\n".join([*text, provenance(content)]), "\n\n".join(tables), {FIGURE: draw_shares(summary)})


def _title(task: str, staleness: str) -> str:
    updates, _, how = staleness.partition(", ")
    return f"{TITLES[task]}, {updates} updates per generation{', ' * bool(how)}{how}"


def _final_table(arms: Sequence[dict], k: int) -> str:
    header = ["Arm", "Final", "Above VESPO", f"pass@{k}", "Largest fall", "Gradient peak", "Share (weight)"]
    cells = [
        [
            row["arm"] + (f" ({row['collapsed']} of {row['seeds']} collapsed)" if row["collapsed"] else ""),
            with_interval(row["final"], 3),
            _signed(row["above"]),
            with_interval(row["pass@k"], 3),
            with_interval(row["largest_fall"], 3),
            with_interval(row["gradient_peak"], 1),
            "-" if row["share"]["mean"] is None else f"{row['share']['mean']:.2f} ({row['weight']['mean']:.2f})",
        ]
        for row in arms
    ]
    return table(header, cells)


def _more_table(arms: Sequence[dict]) -> str:
    cells = [
        [
            row["arm"],
            str(row["seeds"]),
            f"{row['learning_rate']:g}",
            with_interval(row["area"], 3),
            with_interval(row["entropy_ratio"], 2),
        ]
        for row in arms
    ]
    return table(["Arm", "Seeds", "Learning rate", "Area", "Entropy"], cells)


def _pilots_table(pilots: Sequence[dict], task: str, staleness: str) -> list[str]:
    some = [row for row in pilots if (row["task"], row["staleness_setting"]) == (task, staleness)]
    cells = [
        [arm, f"{best_rate(by_rate):g}", ", ".join(f"{rate:g}: {value:.3f}" for rate, value in by_rate.items())]
        for (arm, _), by_rate in pilot_accuracies(some).items()
    ]
    return [table(["Arm", "Chosen", "Accuracy of the pilots by learning rate"], cells)] if cells else []


def _controls_table(controls: Sequence[dict], k: int) -> str:
    cells = [
        [
            row["than"],
            row["arm"].partition("; ")[2] or row["arm"].removeprefix("VESPO, "),
            with_interval(row["final"], 3),
            _signed(row["above"]),
            _signed(row["above_in_pass@k"]),
            f"{row['share']['mean']:.2f} ({row['weight']['mean']:.2f})",
        ]
        for row in sorted(controls, key=lambda row: row["than"])
    ]
    return table(["Arm", "Control", "Final", "Above the arm", f"Above it in pass@{k}", "Share (weight)"], cells)


def _signed(value: dict) -> str:
    if value["mean"] is None:
        return "-"
    return f"{value['mean']:+.3f}" + ("" if value["half_width"] is None else f" ± {value['half_width']:.3f}")


def _with_share(summary: Sequence[dict]) -> dict[tuple[str, str], list[dict]]:
    """Return the arms whose share is measured, by task and staleness setting, where there are three or more."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in summary:
        if row["share"]["mean"] is not None:
            groups.setdefault((row["task"], row["staleness_setting"]), []).append(row)
    order = [(task, staleness.name) for task, staleness in SETTINGS]
    ordered = sorted(groups, key=lambda key: order.index(key) if key in order else len(order))
    return {key: groups[key] for key in ordered if len(groups[key]) > 2}


def _scatter_text(summary: Sequence[dict]) -> list[str]:
    correlations = [
        f"{_title(task, staleness)}: "
        f"{rank_correlation([row['share']['mean'] for row in rows], [row['final']['mean'] for row in rows]):+.2f} "
        f"({len(rows)} arms)"
        for (task, staleness), rows in _with_share(summary).items()
    ]
    if not correlations:
        return []
    return [
        "Does the share explain the ranking? Rank correlation (Spearman) of the share, a mean over the updates, and "
        f"the final accuracy over the arms: {'; '.join(correlations)}.",
        f"![Share and final accuracy]({FIGURE})",
    ]


def draw_shares(summary: Sequence[dict]) -> Figure:
    """Draw the share of each arm against its final accuracy, a panel for each task and staleness setting."""
    groups = _with_share(summary)
    figure = Figure(figsize=(10, 4 * max(1, (len(groups) + 1) // 2)), layout="constrained", dpi=120)
    for position, ((task, staleness), rows) in enumerate(groups.items()):
        axes = figure.add_subplot((len(groups) + 1) // 2, min(2, len(groups)), position + 1)
        for kind, color in COLORS.items():
            some = [row for row in rows if _kind(row["arm"]) == kind]
            shares, finals = ([row[key]["mean"] for row in some] for key in ("share", "final"))
            axes.scatter(shares, finals, color=color, label=kind, s=15 if kind == CONTROL else 40)
        middle = statistics.mean(f(row["share"]["mean"] for row in rows) for f in (min, max))
        for row in (row for row in rows if _kind(row["arm"]) != CONTROL):
            is_left = row["share"]["mean"] <= middle
            axes.annotate(
                row["arm"], (row["share"]["mean"], row["final"]["mean"]), fontsize=7, va="center",
                xytext=(5 if is_left else -5, 0), textcoords="offset points", ha="left" if is_left else "right",
            )  # fmt: skip
        axes.set(xlabel="share of positive tokens in the policy loss", ylabel="final accuracy")
        axes.set_title(_title(task, staleness).replace(", ", ",\n", 1), fontsize=10)
        axes.margins(x=0.15)
        handles = axes.get_legend_handles_labels()
    if groups:
        figure.legend(*handles, loc="outside lower center", ncols=3)
    return figure


def _kind(arm: str) -> str:
    if controlled_by(arm):
        return CONTROL
    return PUBLISHED if arm in REPEATED else "share or weight"
