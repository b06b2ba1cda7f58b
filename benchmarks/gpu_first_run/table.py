"""The tables of docs/study_gpu.md, from the file of a run."""

import statistics
from collections.abc import Sequence

from benchmarks.common import table, verdict
from benchmarks.gpu_first_run.to_accuracy import METHODS, learned_in_time, mean_rewards
from benchmarks.gpu_first_run.trainers import SCOPES


DEVICE_TIME = 1.02
PEAK_MEMORY = 1.02
SAME_REWARD = 0.1


def render(content: dict) -> str:
    """Return the tables of a run in Markdown: a line on the machine, then a table per part, with missing cases."""
    machine = dict(content["machine"])
    device, driver = machine.pop("device"), machine.pop("driver")
    on = f"{device}, driver {driver}" if driver else f"{device} (no GPU)"
    versions = ", ".join(f"{name} {version}" for name, version in machine.items())
    sections = [f"On {on}, {content['date']}; {versions}. Seed {content['asked']['seed']}."]
    for name, part in content["parts"].items():
        failed = [f"- {case}: {row['error']}" for case, row in part["cases"].items() if "error" in row]
        failed += [f"- {case}: skipped: {row['skipped']}" for case, row in part["cases"].items() if "skipped" in row]
        rows = {case: row for case, row in part["cases"].items() if not {"error", "skipped"} & row.keys()}
        lines = [TABLES[name](rows)] if rows else []
        status = [] if part["status"] == "done" else [f"Part `{name}`: {part['status']}."]
        sections += [f"### {TITLES[name]}", *status, *lines, *(["\n".join(failed)] if failed else [])]
    return "\n\n".join(sections)


TITLES = {
    "time": "Time to an accuracy",
    "runs": "It runs",
    "cost": "An update over GRPOTrainer's",
    "layout": "An update without padding and skipped samples over GRPOTrainer's",
    "memory": "Peak memory over GRPOTrainer's",
    "reads": "Calls of an update that wait for the device",
    "search": "The search against the step loop",
    "rollouts": "Partial rollouts against whole generations",
    "sharded": "Sharded in one process, resumed",
    "colocate": "vLLM in colocate mode, random weights",
    "learns": "Learning of the embedded task by both samplers",
    "chat": "Learning of a chat model by both samplers",
    "qlora": "Learning of a chat model in 4 bits and in bfloat16",
}


def _ratios(own: Sequence[float], other: Sequence[float]) -> str:
    ratios = [one / two for one, two in zip(own, other, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _runs(rows: dict[str, dict]) -> str:
    lines = []
    for case, row in rows.items():
        if "largest_difference" in row:
            found = (
                f"weights differ by {row['largest_difference']:.2g} at most; GRPOTrainer from itself by "
                f"{row['largest_difference_of_grpo_from_itself']:.2g}"
            )
        else:
            losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
            norms = ", ".join(f"{norm:.2g}" for norm in row["gradient_norms"])
            found = f"{row['updates']} updates, losses {losses}, gradients {norms}"
        lines.append([case, found, f"{row['largest_change_of_a_weight']:.2g}", verdict(passes(row))])
    return table(["Run", "Result", "Largest change of a weight", "Passes"], lines)


def passes(row: dict) -> bool:
    """Return whether a case of `runs` trained: finite values, a gradient in each update, and changed weights."""
    if "largest_difference" in row:
        same = row["largest_difference"] <= row["largest_difference_of_grpo_from_itself"]
        return same and row["largest_change_of_a_weight"] > 0
    is_sound = row["is_finite"] and not row["misplaced_tensors"]
    return is_sound and all(norm > 0 for norm in row["gradient_norms"]) and row["largest_change_of_a_weight"] > 0


def _cost(rows: dict[str, dict]) -> str:
    lines = []
    for case, row in rows.items():
        base = row["profiles"]["grpo"]
        for name, profile in row["profiles"].items():
            over = profile["device_seconds"] / base["device_seconds"]
            lines.append(
                [case, "GRPOTrainer" if name == "grpo" else name if name == "grpo again" else f"`{name}`",
                 f"{profile['device_seconds']:.4f} s", f"{over:.4f}",
                 verdict(over <= DEVICE_TIME) if name in ("micro_batch", "carried_over") else "",
                 f"{profile['kernels']:,}", f"{profile['host_waits']:,}",
                 f"{statistics.median(row['seconds'][name]):.2f} s",
                 _ratios(row["seconds"][name], row["seconds"]["grpo"])]
            )  # fmt: skip
    header = ["Model", "Trainer", "Time on the device", "over GRPOTrainer", f"At most {DEVICE_TIME}", "Kernels",
              "Host waits", "Wall time", "over GRPOTrainer"]  # fmt: skip
    note = "Of one update each; wall time: median (smallest to largest) over the rounds. `grpo again` is the noise."
    return f"{table(header, lines)}\n\n{note}"


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


def _memory(rows: dict[str, dict]) -> str:
    lines = []
    for case, row in rows.items():
        for kind in SCOPES:
            ratio = row[kind]["peak_bytes"] / row["grpo"]["peak_bytes"]
            peak = f"{row[kind]['peak_bytes'] / 2**30:.2f} GiB"
            lines.append([case, f"`{kind}`", peak, f"{ratio:.3f}", verdict(ratio <= PEAK_MEMORY)])
    return table(["Model", "Scope", "Peak", "over GRPOTrainer", f"At most {PEAK_MEMORY}"], lines)


def _reads(rows: dict[str, dict]) -> str:
    lines = [[case, str(row["synchronizing_calls"])] for case, row in rows.items()]
    of_grpo = set(rows.get("grpo", {}).get("lines", {}))
    own = sorted({line for row in rows.values() for line in row["lines"]} - of_grpo)
    return "\n\n".join([table(["Trainer", "Calls"], lines), "\n".join(f"- `{line}`" for line in own)]).strip()


def _search(rows: dict[str, dict]) -> str:
    lines = []
    for case, row in rows.items():
        ratios = [_ratios(row["seconds"][loop], row["seconds"]["search"]) for loop in ("recomputed", "hoisted")]
        lines.append([case, f"{row['tokens']:,}", *ratios, verdict(row["same_bounds_as_on_the_cpu"])])
    return table(["Measure", "Tokens", "Faster than the loop", "than the hoisted loop", "Bounds as on the CPU"], lines)


def _rollouts(rows: dict[str, dict]) -> str:
    lines = []
    for case, row in rows.items():
        pairs = {key: [[one[key] for one in row[kind]] for kind in ("whole", "partial")] for key in ("steps", "wall")}
        lines.append([case, *(_ratios(*pairs[key]) for key in ("steps", "wall"))])
    return table(["Partial rollouts", "Fewer decode steps", "Less wall time"], lines)


def _sharded(rows: dict[str, dict]) -> str:
    lines = []
    for case, row in rows.items():
        seconds, saved = row["seconds_of_updates"], row["saved_after_updates"][:-1]
        with_save, after = [seconds[number - 1] for number in saved], [seconds[number] for number in saved]
        others = [second for number, second in enumerate(seconds, 1) if not {number, number - 1} & {*saved}]
        medians = [f"{statistics.median(values):.2f} s" for values in (others, with_save, after)]
        weights = [f"{row[key]:.2g}" for key in ("largest_difference", "largest_change_of_a_weight")]
        lines.append([case, *weights, *medians])
    header = ["Training", "Largest difference of a weight, resumed", "change in training", "An update", "with a save",
              "after a save"]  # fmt: skip
    return f"{table(header, lines)}\n\nSeconds: medians."


def _sampled(rows: dict[str, dict]) -> str:
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


def mean_at_the_end(row: dict) -> float:
    """Return the mean reward of the last quarter of a training's rollout batches."""
    rewards = [one["reward"] for one in row["generations"]]
    return statistics.fmean(rewards[-max(1, len(rewards) // 4) :])


def rewards_by_variant(rows: dict[str, dict]) -> list[list[str]]:
    """Return a line per variant of `chat`: seeds, mean rewards of the first batch and at the end, and by seed."""
    variants: dict[str, list[dict]] = {}
    for case, row in rows.items():
        variants.setdefault(case.partition(", seed ")[0], []).append(row)
    lines = []
    for variant, runs in variants.items():
        first = statistics.fmean(row["generations"][0]["reward"] for row in runs)
        ends = [mean_at_the_end(row) for row in runs]
        by_seed = ", ".join(f"{end:.2f}" for end in ends)
        lines.append([variant, str(len(runs)), f"{first:.2f}", f"{statistics.fmean(ends):.2f}", by_seed])
    return lines


def _chat(rows: dict[str, dict]) -> str:
    header = ["Training", "Seeds", "Mean reward of the first batch", "of the last quarter", "of each seed"]
    return f"{table(header, rewards_by_variant(rows))}\n\n{_sampled(rows)}"


def _learns(rows: dict[str, dict]) -> str:
    ends = {case: mean_at_the_end(row) for case, row in rows.items()}
    difference = max(ends.values()) - min(ends.values())
    said = ", ".join(f"{case} {end:.3f}" for case, end in ends.items())
    agree = f"Mean reward of the last quarter: {said}. Within {SAME_REWARD}: {verdict(difference <= SAME_REWARD)}."
    return f"{_sampled(rows)}\n\n{agree}"


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


TABLES = {
    "time": _time,
    "runs": _runs,
    "cost": _cost,
    "layout": _layout,
    "memory": _memory,
    "reads": _reads,
    "search": _search,
    "rollouts": _rollouts,
    "sharded": _sharded,
    "colocate": _sampled,
    "learns": _learns,
    "chat": _chat,
    "qlora": _chat,
}
