"""The tables of the study. Each has seven columns at most."""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.common import table

from .arms import MAIN
from .summary import best_rate, pilot_accuracies


SURROGATE_ARMS = ("BAPO, surrogate", "released recipe's bounds")
SETTING = "Updates per generation"
README_ARMS = ("GRPO", "clip-higher", "CISPO", "BAPO", "SAPO", "GSPO", "VESPO")


# Of README.md


def readme_table(summary: Sequence[dict]) -> str:
    """Return the table of the final accuracy of the published methods, with intervals where they are wide."""
    finals = {(row["arm"], row["staleness_setting"]): row["final"] for row in summary}
    settings = ("4", "16", "64")

    def cell(final: dict | None) -> str:
        if final is None:
            return "-"
        half = final["half_width"] or 0.0
        return f"{final['mean']:.2f}" + (f" ± {half:.2f}" if half > 0.02 else "")

    cells = [[arm, *(cell(finals.get((arm, setting))) for setting in settings)] for arm in README_ARMS]
    return table([SETTING.lower(), *settings], cells)


# Of docs/results.md


def final_tables(summary: Sequence[dict]) -> list[str]:
    """Return the tables of the final accuracy: of all arms where samples are stale, of the main arms elsewhere."""
    by_key = {(row["staleness_setting"], row["arm"]): row for row in summary}
    stale = ("16", "64")
    arms = list(dict.fromkeys(arm for staleness, arm in by_key if staleness in stale))
    others = list(
        dict.fromkeys(row["staleness_setting"] for row in ordered(summary) if row["staleness_setting"] not in stale)
    )

    def final(staleness: str, arm: str) -> str:
        return with_interval(by_key[staleness, arm]["final"], 3) if (staleness, arm) in by_key else "-"

    def gain(staleness: str, arm: str) -> str:
        return above_bapo(by_key[staleness, arm]) if (staleness, arm) in by_key else "-"

    parts = []
    if arms:
        header = ["Arm", *(name for s in stale for name in (f"Final accuracy at {s}", f"Above BAPO at {s}"))]
        cells = [[arm, *(cell for s in stale for cell in (final(s, arm), gain(s, arm)))] for arm in arms]
        parts += ["Final accuracy at 16 and at 64 updates per generation:", table(header, cells)]
    if others:
        cells = [[staleness, *(final(staleness, arm) for arm in MAIN)] for staleness in others]
        parts += ["Final accuracy elsewhere:", table([SETTING, *MAIN], cells)]
    return parts


def search_table(runs: Sequence[dict]) -> list[str]:
    """Return the table on what BAPO's search did."""
    groups: dict[str, list[dict]] = {}
    for run in ordered(runs):
        if "at_start" in run:
            groups.setdefault(run["staleness_setting"], []).append(run)
    rows = [
        [
            staleness,
            f"{statistics.mean(run['at_start'] for run in group):.0%}",
            f"{statistics.mean(run['at_end'] for run in group):.0%}",
            f"{statistics.mean(run['initial_share_deviation'] for run in group):.3f} "
            f"({min(run['initial_share_range'][0] for run in group):.2f} to "
            f"{max(run['initial_share_range'][1] for run in group):.2f})",
            f"{statistics.mean(run['mean_share_gain'] for run in group):.3f}",
            f"{max(run['largest_share_gain'] for run in group):.3f}",
            ", ".join(f"{run['ratio_at_gradient_peak']:.1f}" for run in group),
        ]
        for staleness, group in groups.items()
    ]
    header = [
        SETTING,
        "Stayed at start",
        "Went to end",
        "Deviation (range) of the share under start bounds",
        "Raised by the search, mean where it moved",
        "At most",
        "Largest ratio at the gradient's peak, each seed",
    ]
    return ["What BAPO's search did, over all updates of all seeds:", table(header, rows)] if rows else []


def candidates_table(compared: Sequence[dict]) -> list[str]:
    """Return the table of the candidates for the default, against BAPO on seeds of their own."""
    if not compared:
        return []
    seeds = sorted({seed for row in compared for seed in row["seeds"]})
    rows = [
        [
            row["staleness_setting"],
            row["arm"],
            with_interval(row["final"], 3),
            above_bapo(row),
            "-" if row["arm"] == "BAPO" else ", ".join(f"{gain:+.3f}" for gain in row["gains"]),
            with_interval(row["gradient_peak"], 1),
            ", ".join(f"{ratio:.1f}" for ratio in row["ratios_at_gradient_peak"]),
        ]
        for row in ordered(compared)
    ]
    header = [SETTING, "Arm", "Final accuracy", "Above BAPO", "On each seed", "Gradient peak", "Largest ratio there"]
    text = (
        f"Candidates for the default, on seeds that had no part in their choice ({seeds[0]} to {seeds[-1]}), at "
        "BAPO's learning rate:"
    )
    return [text, table(header, rows)]


# Of docs/results_tables.md


def summary_tables(summary: Sequence[dict]) -> list[str]:
    """Return the tables of all arms: accuracy, course of the training, bounds and times."""
    rows = ordered(summary)
    return [
        "Accuracy:",
        table(
            [SETTING, "Arm", "Learning rate", "Seeds", "Final accuracy", "Above BAPO", "Area"],
            map(accuracy_cells, rows),
        ),
        "Course of the training:",
        table(
            [SETTING, "Arm", "Largest fall", "Entropy", "Gradient peak", "Collapsed", "Share"],
            map(training_cells, rows),
        ),
        *undefined_gradients(rows),
        "Bounds, staleness and times:",
        table(
            [SETTING, "Arm", "Bounds", "Stayed at start", "Went to end", "Staleness", "Seconds an update"],
            map(bounds_cells, rows),
        ),
    ]


def accuracy_cells(row: dict) -> list[str]:
    """Return the cells of a row of the table of accuracies."""
    return [
        row["staleness_setting"],
        row["arm"],
        f"{row['learning_rate']:g}",
        str(len(row["seeds"])),
        with_interval(row["final"], 3),
        above_bapo(row),
        with_interval(row["area"], 3),
    ]


def training_cells(row: dict) -> list[str]:
    """Return the cells of a row of the table on the course of the training."""
    share = row["means"].get("bapo/positive_share") if row["arm"] not in SURROGATE_ARMS else None
    return [
        row["staleness_setting"],
        row["arm"],
        with_interval(row["largest_fall"], 2),
        with_interval(row["entropy_ratio"], 2),
        with_interval(row["gradient_peak"], 1),
        f"{row['collapsed']:.0%}",
        "-" if share is None else f"{share:.3f}",
    ]


def bounds_cells(row: dict) -> list[str]:
    """Return the cells of a row of the table of bounds and times."""
    means, decimals = row["means"], 4 if row["arm"] == "GSPO" else 2
    bounds = [f"{means[name]:.{decimals}f}" for name in ("bapo/clip_low", "bapo/clip_high") if name in means]
    return [
        row["staleness_setting"],
        row["arm"],
        " to ".join(bounds) or "-",
        f"{row['at_start']:.0%}" if "at_start" in row else "-",
        f"{row['at_end']:.0%}" if "at_end" in row else "-",
        f"{means['staleness/mean']:.1f}" if "staleness/mean" in means else "-",
        f"{row['seconds_per_update']:.2f}",
    ]


def undefined_gradients(rows: Sequence[dict]) -> list[str]:
    """Return the sentence on updates whose gradient was infinite or NaN, which the gradient peak leaves out."""
    counts = ", ".join(
        f"{row['arm']} at {row['staleness_setting']}: {row['undefined_gradients']}"
        for row in rows
        if row["undefined_gradients"]
    )
    return [f"Updates with an infinite or undefined gradient, left out of its peak: {counts}."] if counts else []


def pilots_table(pilots: Sequence[dict]) -> list[str]:
    """Return the table of the accuracies by learning rate, the chosen one in bold."""
    rows = []
    for (arm, staleness), accuracies in pilot_accuracies(pilots).items():
        chosen = best_rate(accuracies)
        texts = {rate: f"{rate:g}: {accuracy:.3f}" for rate, accuracy in accuracies.items()}
        texts[chosen] = f"**{texts[chosen]}**"
        rows.append([staleness, arm, ", ".join(texts.values())])
    if not rows:
        return []
    text = "Learning rates that were tried, with the mean accuracy of the last two measurements; the best was chosen:"
    return [text, table([SETTING, "Arm", "Accuracy at each learning rate"], rows)]


# Parts of both


def ordered(rows: Iterable[dict]) -> list[dict]:
    """Return rows by what makes samples stale; arms stay as they were run."""

    def place(row: dict) -> tuple[str, int]:
        updates, _, rest = row["staleness_setting"].partition(",")
        return (rest, int(updates))

    return sorted(rows, key=place)


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
