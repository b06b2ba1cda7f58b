"""
Fill the tables of the pages in `docs/` and of `README.md` from the runs in `benchmarks/results/`.

    python -m benchmarks.pages

A table stands between `<!-- table NAME -->` and `<!-- end -->`; `TABLES` says what it is of. To print all that a study
holds: `python -m benchmarks.pages stability` (any file of runs), with `--against ARM`. To keep the runs that `bapo-trl
compare` made: `python -m benchmarks.pages --keep outputs/FOLDER --commit COMMIT`.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from bapo_trl.compare.results import Row, read_rows
from bapo_trl.compare.statistics import differences, mean_over_seeds
from bapo_trl.compare.tables import as_markdown, compare, markdown, with_interval
from benchmarks.common import RESULTS, ROOT, describe_run


DOCS = ("results", "which_loss", "replay", "lora")
PAGES = (*(ROOT / "docs" / f"{name}.md" for name in DOCS), ROOT / "README.md")
Finals = Mapping[str, Mapping[int, float]]  # of each arm, by seed
AGAINST = "VESPO"
# The chat study: its seeds, the arms that are compared, and the one that was the run of another at 4 updates
CHAT_STUDIES = {"chat_chain_sum": "chain sums", "chat_leg_counting": "legs"}
CHAT_SEEDS, OTHERS, NOT_AT_4 = 8, 6, "half the weight, cap"
TASK, UPDATES = "task", "updates per generation"
WIDE = 0.02  # half-widths below this are left out of the README
NAMES = {"VESPO": "VESPO (advised)", "VESPO, constant weight 0.5": "VESPO, half the weight"}
SCOPES = ("16", "64")
WEIGHTS = ("VESPO, constant weight 0.5", "VESPO, share 0.8", "share 0.8", "BAPO", "GRPO")
METHODS = ("GRPO", "clip-higher", "CISPO", "SAPO", "GSPO", "VESPO")
VARIANTS = {  # arms of the study by what they change; of two, the seeds that had no part in their choice
    "upper bound alone": "`ratio_lower_max=0.6`: the upper bound alone is searched",
    "delta 3": "`delta=3.0`: TRL's cap on ratios",
    "upper bound alone, delta 3": "both",
    "fixed at the widest": "bounds fixed at 0.6 and 3.0",
    "fixed at end": "bounds fixed at 0.9 and 3.0",
    "BAPO, target 0.4": "target 0.4",
    "target 0.6": "target 0.6",
    "BAPO, surrogate": '`contribution_measure="surrogate"`',
    "lower bound first": '`search_order="lower_first"`',
    "coarse grid": "steps 5 and 6 times as long",
    "BAPO, sequence level": "ratios of sequences",
    "released recipe's bounds": "the authors' released recipe",
}
README_ARMS = (
    "GRPO", "clip-higher", "CISPO", "BAPO", "SAPO", "GSPO", "VESPO", "VESPO, constant weight 0.5",
)  # fmt: skip


@cache
def rows(name: str, **sweep: Any) -> tuple[Row, ...]:
    """Return the runs of a study, in one setting if that is given."""
    found = read_rows(RESULTS / f"{name}.json").values()
    return tuple(row for row in found if all(row.sweep.get(key) == value for key, value in sweep.items()))


def finals(runs: Iterable[Row]) -> Finals:
    """Return the final accuracy of each arm by seed."""
    by_arm: dict[str, dict[int, float]] = {}
    for row in runs:
        if row.final is not None:  # as it is for a run that failed
            by_arm.setdefault(row.arm, {})[row.seed] = row.final
    return by_arm


def final_table(by_setting: Mapping[str, Finals], baseline: str, comparisons: int = 1) -> str:
    """
    Return a table of final accuracies, and of how far each arm ends above one of them on the same seeds, by intervals
    that hold for so many `comparisons` at once.
    """
    arms = dict.fromkeys(arm for by_arm in by_setting.values() for arm in by_arm)
    lines = []
    for arm in arms:
        cells = [arm]
        for by_arm in by_setting.values():
            pairs = [(arm, baseline)] if {arm, baseline} <= by_arm.keys() and arm != baseline else []
            above = differences(by_arm, pairs, comparisons)
            mean = mean_over_seeds(list(by_arm[arm].values())) if arm in by_arm else None
            cells += [with_interval(mean, ".3f"), with_interval(above[0].mean, ".3f", "+") if above else "-"]
        lines.append(cells)
    return markdown(["arm", *(part for name in by_setting for part in (name, f"above {baseline}"))], lines)


def readme_table() -> str:
    """Return the final accuracies of the published methods and of VESPO with half the weight, on the hard task."""
    settings = ("4", "16", "64")
    by_setting = {}
    for name in settings:
        sweep = {TASK: "running totals", UPDATES: name}
        by_setting[name] = finals([*rows("balance", **sweep), *rows("stability", **sweep)])

    def cell(values: Mapping[int, float] | None) -> str:
        if not values:
            return "-"
        mean = mean_over_seeds(list(values.values()))
        return f"{mean.value:.2f}" + (f" ± {mean.half_width:.2f}" if mean.half_width > WIDE else "")

    lines = [[NAMES.get(arm, arm), *(cell(by_setting[name].get(arm)) for name in settings)] for arm in README_ARMS]
    return markdown([UPDATES, *settings], lines)


def chat_settings() -> dict[str, Finals]:
    """Return the settings of the chat study of which each arm, VESPO among them, has all its seeds, by name."""
    found = {}
    for updates in (4, 16):
        for study, name in CHAT_STUDIES.items():
            by_arm = finals(rows(study, steps_per_generation=updates))
            if updates == 4:
                by_arm.pop(NOT_AT_4, None)
            if AGAINST in by_arm and all(len(seeds) == CHAT_SEEDS for seeds in by_arm.values()):
                found[f"{name} at {updates}"] = by_arm
    return found


def above_bapo(arm: str, updates: str) -> str:
    """Return how far an arm ends above BAPO on the hard task, by seeds of their own where there are any."""
    sweep = {TASK: "running totals", UPDATES: updates}
    candidates, all_arms = (finals(rows(study, **sweep)) for study in ("stability_candidates", "stability"))
    by_arm = candidates if arm in candidates else all_arms
    return with_interval(differences(by_arm, [(arm, "BAPO")])[0].mean, ".3f", "+")


def weights_table() -> str:
    """Return how far arms with a weight on negative tokens end above VESPO, on both small tasks."""
    places = [(task, updates) for task in ("running totals", "sums") for updates in ("16", "64")]
    by_place = [finals(rows("balance", **{TASK: task, UPDATES: updates})) for task, updates in places]
    lines = []
    for arm in WEIGHTS:
        above = [differences(by_arm, [(arm, "VESPO")]) if arm in by_arm else None for by_arm in by_place]
        lines.append([arm, *(with_interval(each[0].mean, ".3f", "+") if each else "-" for each in above)])
    return markdown(["above VESPO", *(f"{task}, {updates}" for task, updates in places)], lines)


def lora_transfer_table() -> str:
    """Return how far vLLM's weights are from the trainer's policy, by the share of the adapter."""
    results = json.loads((RESULTS / "lora_transfer.json").read_text())["results"]
    lines = [
        [f"{row['share']:g}", *(f"{row[name]:.3f}" for name in ("base", "nearest", "stochastic"))] for row in results
    ]
    header = ["share of the adapter", "base model alone", "rounded to the nearest (TRL)", "rounded stochastically"]
    return markdown(header, lines)


def overlap_time_table() -> str:
    """Return what overlapped generation saves, by how long a generation takes beside its training."""
    lines = []
    for row in json.loads((RESULTS / "overlap.json").read_text())["results"]:
        seconds = [row[name]["median"] for name in ("generation", "training")]
        ratios = [
            f"{row[name]['median']:.2f} ({row[name]['lower_quartile']:.2f} to {row[name]['upper_quartile']:.2f})"
            for name in ("speedup", "over_longer")
        ]
        lines.append([*(f"{second:.2f} s" for second in seconds), *ratios])
    return markdown(
        ["generation", "training", "speed-up", "time of a generation step over the longer of the two"], lines
    )


def overlap_accuracy_table() -> str:
    """Return final accuracies without and with overlapped generation, and the difference."""
    lines = []
    for updates in (4, 16):
        by_arm = finals(rows("overlap_accuracy", steps_per_generation=updates))
        means = [mean_over_seeds(list(by_arm[arm].values())) for arm in ("BAPO", "BAPO, overlapped")]
        (above,) = differences(by_arm, [("BAPO, overlapped", "BAPO")])
        cells = [with_interval(mean, ".3f") for mean in means]
        lines.append([str(updates), *cells, with_interval(above.mean, ".3f", "+")])
    return markdown([UPDATES, "without", "with overlap", "difference"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme_table,
    "stability": lambda: final_table(
        {f"at {name}": finals(rows("stability", **{TASK: "running totals", UPDATES: name})) for name in ("16", "64")},
        "BAPO",
    ),
    "methods": lambda: markdown(
        ["hard task, above BAPO", "at 16", "at 64"],
        [[arm, above_bapo(arm, "16"), above_bapo(arm, "64")] for arm in METHODS],
    ),
    "variants": lambda: markdown(
        ["one thing changed", "at 64, above BAPO"], [[text, above_bapo(arm, "64")] for arm, text in VARIANTS.items()]
    ),
    "weights": weights_table,
    "chat": lambda: final_table(chat_settings(), AGAINST, OTHERS),
    "tied": lambda: final_table(
        {f"rate {rate:g}": finals(rows("tied_groups", learning_rate=rate)) for rate in (2.5e-4, 5e-4)}, "refilled"
    ),
    "lora_transfer": lora_transfer_table,
    "overlap_time": overlap_time_table,
    "overlap_accuracy": overlap_accuracy_table,
    "scopes": lambda: final_table({f"at {name}": finals(rows(f"scopes_{name}")) for name in SCOPES}, "batch"),
}


def filled(page: str) -> str:
    """Return a page with its tables as of the results."""

    def fill(place: re.Match) -> str:
        return f"<!-- table {place[1]} -->\n\n{TABLES[place[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table ([^\n]*?) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def keep(folder: Path, commit: str) -> None:
    """
    Write the runs of a study's folder into its file of results, with the machine and the commit that made them.

    Runs that only the file has stay in it: a study of many hours is made in parts, and not on one machine. A run that
    failed takes no other's place.

    Raises:
        ValueError: If runs of an arm differ in their settings, or runs of a seed in their start.
    """
    path = RESULTS / f"{folder.name}.json"
    before = json.loads(path.read_text()) if path.exists() else {"settings": {}, "rows": []}
    kept = {_run_of(row): {**row, "settings": {**before["settings"], **row["settings"]}} for row in before["rows"]}
    read = sorted(map(asdict, read_rows(folder).values()), key=lambda row: row["error"] is None)
    made = {_run_of(row): row for row in read}  # the one that ended, where one of other settings failed
    for row in made.values():
        row["settings"].pop("seed", None)  # stands beside them
    runs = kept | {run: row for run, row in made.items() if row["error"] is None or run not in kept}
    _check_parts(list(runs.values()))
    base = dict(set.intersection(*({(k, str(v)) for k, v in run["settings"].items()} for run in runs.values())))
    for row in runs.values():
        row["settings"] = {key: value for key, value in row["settings"].items() if key not in base}
    about = describe_run("pages")
    del about["command"], about["machine"]["load_average"]  # of this moment, not of the runs
    head = {"command": f"bapo-trl compare {folder.name}.yaml", "commit": commit, **about}
    earlier = [part for part in (_head(before), *before.get("earlier", ())) if part and part != _head(head)]
    if earlier:
        head["earlier"] = earlier
    lines = ",\n".join(
        json.dumps({key: value for key, value in row.items() if value is not None}) for row in runs.values()
    )
    text = json.dumps({**head, "settings": base, "rows": "ROWS"}, indent=1).replace('"ROWS"', f"[\n{lines}\n]")
    path.write_text(text + "\n")


def _run_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return row["arm"], str(row["sweep"]), row["seed"]


def _head(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file of results says of the commit and the machine."""
    return {key: value for key, value in content.items() if key not in ("settings", "rows", "earlier")}


def _check_parts(runs: Sequence[Mapping[str, Any]]) -> None:
    settings: dict[tuple[str, str], str] = {}
    starts: dict[tuple[str, int], float] = {}
    for row in runs:
        own = str(sorted((name, str(value)) for name, value in row["settings"].items()))
        if settings.setdefault(_run_of(row)[:2], own) != own:
            raise ValueError(f"{row['arm']}, seed {row['seed']}, has other settings than a run of another seed.")
        for step, accuracy in row.get("curve", [])[:1]:
            if step == 0 and starts.setdefault(_run_of(row)[1:], accuracy) != accuracy:
                raise ValueError(f"{row['arm']}, seed {row['seed']}, has another start than a run of the same seed.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", help="file of runs to print whole, by its name")
    parser.add_argument("--against", help="arm that the others are compared with (the first)")
    parser.add_argument("--keep", type=Path, help="folder of a study whose runs are written into a file of results")
    parser.add_argument("--commit", help="commit that made them; required with --keep")
    options = parser.parse_args()
    if options.keep:
        if not options.commit:
            parser.error("--keep needs the --commit that made the runs")
        return keep(options.keep, options.commit)
    if options.study:
        runs = rows(options.study)
        arms = list(dict.fromkeys(row.arm for row in runs))
        print(as_markdown(compare(runs, arms, options.against or arms[0])))
        return
    for path in PAGES:
        path.write_text(filled(path.read_text()))
        print(f"Written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
