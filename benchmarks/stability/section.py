"""The sections of the study on the pages of results and of tables: what the tables are about, and what they say."""

import statistics
from collections.abc import Sequence

from benchmarks.common import Section, link_to_tables, provenance, verdict

from .arms import ABLATION, ARMS, MAIN
from .figures import HARD_TASK, draw_arms, draw_bounds, draw_staleness
from .summary import summarize
from .tables import (
    above_bapo,
    candidates_table,
    final_tables,
    pilots_table,
    readme_table,
    search_table,
    summary_tables,
    with_interval,
)


TASK_TITLES = {HARD_TASK: "Running totals (the hard task)", "sums": "Sums (the easy task)"}


def render(content: dict) -> Section:
    """Return the section of a result."""
    settings, rows = content["settings"], content["results"]
    by_purpose = {
        purpose: [row for row in rows if row["purpose"] == purpose] for purpose in ("reported", "candidate", "pilot")
    }
    heading = f"Stability under staleness ({content['machine']['device']})"
    suffix = "" if content["machine"]["device"] == "CPU" else "_cuda"
    hard = [row for row in by_purpose["reported"] if row["task"] == HARD_TASK]
    figures = {
        f"stability_{name}{suffix}.png": (draw(hard), title)
        for name, draw, title in (
            ("grpo", draw_staleness, "GRPO by staleness"),
            ("arms", draw_arms, "GRPO, clip-higher and BAPO"),
            ("bounds", draw_bounds, "Bounds and positive share"),
        )
    }
    summaries = {purpose: summarize(by_purpose[purpose]) for purpose in ("reported", "candidate")}
    text = [f"## {heading}", *unfinished(settings["runs_left"]), *introduction(settings, by_purpose["reported"])]
    tables = [f"## {heading}", *columns()]
    for task in settings["updates"]:
        runs, pilots, summary, candidates = (
            [row for row in some if row["task"] == task]
            for some in (by_purpose["reported"], by_purpose["pilot"], summaries["reported"], summaries["candidate"])
        )
        if summary:
            bapo = [run for run in runs if run["arm"] == "BAPO"]
            text += [f"### {TASK_TITLES[task]}", *aims(summary), *final_tables(summary)]
            text += [*search_table(bapo), *candidates_table(candidates)]
            tables += [f"### {TASK_TITLES[task]}", *summary_tables(summary), *pilots_table(pilots)]
    text += [
        f"Areas, entropy, gradients, bounds, staleness, times and all learning rates: {link_to_tables(heading)}.",
        f"Figures: {_in_sentence(TASK_TITLES[HARD_TASK])}. Lines are means over the seeds, bands go from the "
        "lowest to the highest.",
        *(f"![{title}]({name})" for name, (_, title) in figures.items()),
        provenance(content),
    ]
    return Section(
        "\n\n".join(text),
        "\n\n".join(tables),
        {name: figure for name, (figure, _) in figures.items()},
        "" if suffix else readme_table([row for row in summaries["reported"] if row["task"] == HARD_TASK]),
    )


def unfinished(runs_left: int) -> list[str]:
    """Return the paragraph that tells of runs to come."""
    if not runs_left:
        return []
    return [
        f"**Unfinished: at least {runs_left} runs are to come.** Arms and settings that are missing, and rows with "
        "fewer seeds than others, are among them."
    ]


def introduction(settings: dict, rows: Sequence[dict]) -> list[str]:
    """Return the paragraphs on what was run."""
    grids = ", ".join(
        f"{' / '.join(f'{rate:g}' for rate in rates)} ({task.replace('_', ' ')})"
        for task, rates in settings["learning_rates"].items()
    )
    retired = list(dict.fromkeys(row["arm"] for row in rows if row["arm"] not in {**ARMS, **ABLATION}))
    return [
        "The paper's claim: on stale samples GRPO's fixed bounds degrade, and BAPO's do not. Staleness is set by the "
        "number of optimizer updates between two generations. At 64, the last update of a generation trains on "
        "samples of a staleness of 63.",
        "Tasks:\n\n" + "\n".join(describe_task(task, settings, rows) for task in settings["updates"]),
        "With 64 updates per generation, runs have twice as many updates, for two generations at least. So staler "
        "samples also mean fewer generations.",
        "All arms share warm start, problems and their order, and the number of generated completions and of updates. "
        "Arms with bounds, GSPO among them, run in `BAPOTrainer`, which with fixed bounds is `GRPOTrainer` bit for "
        "bit. CISPO, SAPO and VESPO run in TRL's `GRPOTrainer`. The losses have the settings of TRL's documentation. "
        "GSPO and SAPO average the loss over each completion first, the others over all tokens, as TRL's recipes do. "
        "GSPO's bounds (0.9997 to 1.0004) were published for large models.",
        "With 1 update per generation every ratio is 1, and no bound has an effect. With the queue, half of each "
        "batch comes from the replay queue as soon as that holds samples of a staleness of at least 16 updates.",
        "Each arm has two learning rates: one for up to 16 updates per generation, one for 64. Each is the best of "
        f"{grids} on seed {', '.join(map(str, settings['pilot_seeds']))}, which is not reported. Where the best lies "
        "at an end of the grid, the grid goes on by factors of 2, up to twice. The ablation takes BAPO's. Learning "
        "rates are chosen on the held-out problems that are reported, too.",
        *([f"The code of some arms is gone, their runs stay: {', '.join(retired)}."] if retired else []),
        "Accuracy is that of sampled completions (temperature 1) to 512 held-out problems, two each: mean ± half the "
        "width of the 95 % interval over the seeds (Student's t). Above BAPO is the mean difference in final accuracy "
        "to BAPO on the same seeds (also where BAPO has more).",
    ]


def describe_task(task: str, settings: dict, rows: Sequence[dict]) -> str:
    """Return the item on a task."""
    runs = [row for row in rows if row["task"] == task]
    if not runs:
        return f"- {TASK_TITLES[task]}."
    start = statistics.mean(run["held_out"][0][1] for run in runs)
    tokens = [row["tokens_per_update"] for row in summarize(runs)]
    more = {
        HARD_TASK: " A completion has several steps, and only the last total is checked. Wrong completions are "
        "longer than right ones, so that tokens of negative advantage outnumber the positive ones."
    }
    return (
        f"- {TASK_TITLES[task]}: {start:.0%} of sampled completions right at the start, {min(tokens):,} to "
        f"{max(tokens):,} completion tokens an update, {settings['updates'][task]} updates.{more.get(task, '')}"
    )


def aims(summary: Sequence[dict]) -> list[str]:
    """Return what the rows of a task say of the aim at 16 and 64 updates per generation."""
    items = []
    for staleness in ("16", "64"):
        arms = {row["arm"]: row for row in summary if row["staleness_setting"] == staleness}
        if not set(MAIN) <= set(arms):
            continue
        bapo = arms.pop("BAPO")
        others = {name: row for name, row in arms.items() if "at_start" not in row}  # no search
        are_all_apart = all(are_apart(bapo, others[name]) for name in ("GRPO", "clip-higher"))
        best = max(others, key=lambda name: others[name]["gain"]["mean"])
        entropy = bapo["entropy_ratio"]["mean"] / others["GRPO"]["entropy_ratio"]["mean"]
        items.append(
            f"- {staleness} updates per generation: BAPO ends at {with_interval(bapo['final'], 3)}, GRPO at "
            f"{with_interval(others['GRPO']['final'], 3)}, clip-higher at "
            f"{with_interval(others['clip-higher']['final'], 3)}. BAPO above both, with intervals apart: "
            f"{verdict(are_all_apart)}. Of the {len(others)} arms without a search, {best} ends highest "
            f"({above_bapo(others[best])} against BAPO on the same seeds). BAPO above all of them: "
            f"{verdict(others[best]['gain']['mean'] < 0)}. No collapsed run: {verdict(not bapo['collapsed'])}. "
            f"Entropy at least 1.5 times GRPO's: {verdict(entropy >= 1.5)} ({entropy:.2f})."
        )
    return ["Aims:\n\n" + "\n".join(items)] if items else []


def are_apart(higher: dict, lower: dict) -> bool:
    """Return whether one interval of the final accuracy lies wholly above the other."""
    high, low = higher["final"], lower["final"]
    if high["half_width"] is None or low["half_width"] is None:
        return False
    return high["mean"] - high["half_width"] > low["mean"] + low["half_width"]


def columns() -> list[str]:
    """Return what the columns of the tables mean."""
    return [
        "- Area: under the held-out accuracy, over the updates.\n"
        "- Largest fall: of the accuracy below its best so far.\n"
        "- Entropy: at the end over the start, on completions that the policy samples to held-out problems.\n"
        "- Gradient peak: largest norm (before it is cut to 1) over the median.\n"
        "- Collapsed: runs that end under half of their own best accuracy, or break off.\n"
        "- Share: of the positive-advantage tokens in the policy loss, under the `gradient` measure.\n"
        "- Stayed at start, went to end: shares of the updates whose search did so.\n"
        "- Share, bounds and staleness are means over the updates.\n"
        "- Seconds an update: median, generation included, with other work on the machine."
    ]


def _in_sentence(title: str) -> str:
    return title[0].lower() + title[1:]
