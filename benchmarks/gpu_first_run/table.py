"""The tables of a run, from its file."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.common import table, verdict
from benchmarks.gpu_first_run.to_accuracy import METHODS, learned_in_time, mean_rewards


def render(content: Mapping) -> str:
    """Return the tables of a run in Markdown: a line on the machine, then a table per part, with missing cases."""
    machine = dict(content["machine"])
    device, driver = machine.pop("device"), machine.pop("driver")
    on = f"{device}, driver {driver}" if driver else f"{device} (no GPU)"
    versions = ", ".join(f"{name} {version}" for name, version in machine.items())
    sections = [f"On {on}, {content['date']}; {versions}. Seed {content['asked']['seed']}."]
    for name, part in content["parts"].items():
        if name not in TABLES:
            sections.append(f"Part `{name}`: measured by an earlier version, which printed its table.")
            continue
        title, make_table = TABLES[name]
        failed = [f"- {case}: {row['error']}" for case, row in part["cases"].items() if "error" in row]
        failed += [f"- {case}: skipped: {row['skipped']}" for case, row in part["cases"].items() if "skipped" in row]
        rows = {case: row for case, row in part["cases"].items() if not {"error", "skipped"} & row.keys()}
        lines = [make_table(rows)] if rows else []
        status = [] if part["status"] == "done" else [f"Part `{name}`: {part['status']}."]
        sections += [f"### {title}", *status, *lines, *(["\n".join(failed)] if failed else [])]
    return "\n\n".join(sections)


def _ratios(own: Sequence[float], other: Sequence[float]) -> str:
    ratios = [one / two for one, two in zip(own, other, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _time(rows: dict[str, dict]) -> str:
    lines = []
    for case, row in rows.items():
        found, (first, last) = row["to_target"], mean_rewards(row)
        bound = "" if found["reached"] else "over "
        phases = ", ".join(f"{name} {value:.1f}" for name, value in row["seconds_of_phases"].items() if value)
        costs = [
            f"{bound}{found[name]:,.{digits}f}" for name, digits in (("seconds", 1), ("tokens", 0), ("updates", 1))
        ]
        lines.append(
            [case, f"{row['curve'][0][1]:.2f} to {row['curve'][-1][1]:.2f}", f"{first:.2f} to {last:.2f}",
             *costs, phases, verdict(learned_in_time(row))]
        )  # fmt: skip
    header = ["Training", "Accuracy", "Reward, first to last quarter", "Seconds to the accuracy", "Tokens", "Updates",
              "Seconds of each phase in the whole run", "Reward rises, each phase takes time"]  # fmt: skip
    target = next(iter(rows.values()))["to_target"]["target"]
    return f"{table(header, lines)}\n\nAccuracy to reach: {target}. {_ratio_of_seconds(rows)}"


def _ratio_of_seconds(rows: dict[str, dict]) -> str:
    base, other = METHODS
    reached = {case: row["to_target"]["seconds"] for case, row in rows.items() if row["to_target"]["reached"]}
    seeds = [case.partition(", ")[2] for case in reached if case.startswith(f"{base}, ")]
    ratios = [
        reached[f"{other}, {seed}"] / reached[f"{base}, {seed}"] for seed in seeds if f"{other}, {seed}" in reached
    ]
    if not ratios:
        return "No seed reached it with both."
    mean = statistics.geometric_mean(ratios)
    return (
        f"Seconds of the {other} over {base}'s: {mean:.2f} (geometric mean of {len(ratios)} seeds that both reached)."
    )


def _layout(rows: dict[str, dict]) -> str:
    lines = []
    for case, row in rows.items():
        own, other = (row["seconds"][kind] for kind in ("bapo", "grpo"))
        updates = [[sum(generation[1:]) for generation in each] for each in (own, other)]  # the first one scores
        time = statistics.median(one / two for one, two in zip(*updates, strict=True))
        peaks = row.get("peak_bytes")
        memory = peaks["bapo"] / peaks["grpo"] if peaks else None
        norms = zip(*(row["gradient_norms"][kind] for kind in ("bapo", "grpo")), strict=True)
        lines.append(
            [case, _ratios(*updates), f"at most {row['targets']['time']}: {verdict(time <= row['targets']['time'])}",
             _ratios(*([sum(generation) for generation in each] for each in (own, other))),
             "-" if memory is None else f"{memory:.3f}",
             "-" if memory is None
             else f"at most {row['targets']['memory']}: {verdict(memory <= row['targets']['memory'])}",
             f"{row['padding']['computed']:.2f}", f"{row['padding']['skipped']:.0%}",
             f"{max(abs(one - two) / two for one, two in norms):.2g}"]
        )  # fmt: skip
    header = ["Completions", "Time of an update", "Goal", "of a generation's updates, with scoring", "Peak above idle",
              "Goal", "Positions over tokens", "Samples skipped", "Norm of the gradient differs by"]  # fmt: skip
    note = (
        "Wall time: median (smallest to largest) over the generations. Difference of the norm: relative, the largest."
    )
    return f"{table(header, lines)}\n\n{note}"


def _sharded(rows: dict[str, dict]) -> str:
    lines = []
    for case, row in rows.items():
        seconds, saved = row["seconds_of_updates"], row["saved_after_updates"][:-1]
        with_save, after = [seconds[number - 1] for number in saved], [seconds[number] for number in saved]
        others = [second for number, second in enumerate(seconds, 1) if not {number, number - 1} & {*saved}]
        medians = [f"{statistics.median(values):.2f} s" for values in (others, with_save, after)]
        weights = [f"{row[key]:.2g}" for key in ("largest_difference", "largest_change_of_a_weight")]
        lines.append([case, str(row.get("processes", 1)), *weights, *medians])
    header = ["Training", "Processes", "Largest difference of a weight, resumed", "change in training", "An update",
              "with a save", "after a save"]  # fmt: skip
    return f"{table(header, lines)}\n\nSeconds: medians."


def _qlora(rows: dict[str, dict]) -> str:
    lines = []
    for case, row in rows.items():
        generations = row["generations"]
        differences = [one.get("sampling/sampling_logp_difference/mean") for one in generations]
        lines.append(
            [case, str(row["updates"]), ", ".join(f"{one['reward']:.2f}" for one in generations),
             ", ".join("-" if one is None else f"{one:.3f}" for one in differences),
             f"{row['tokens'] / row['generation_s']:,.0f}", f"{row['generation_s'] / row['seconds']:.0%}",
             f"{row['start_s']:.0f} s"]
        )  # fmt: skip
    header = ["Training", "Updates", "Reward of each generation", "Sampler's log-probabilities from the trainer's",
              "Tokens a second", "Time in generation", "Start"]  # fmt: skip
    return table(header, lines)


TABLES = {
    "time": ("Time to an accuracy", _time),
    "layout": ("An update without padding and skipped samples over GRPOTrainer's", _layout),
    "sharded": ("Sharded, resumed", _sharded),
    "qlora": ("Learning of a chat model in 4 bits and in bfloat16", _qlora),
}
