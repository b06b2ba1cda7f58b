"""
Partial rollouts on completions of long-tailed length, at equal samples: reward with them and without.

    python -m benchmarks.partial_study --jobs 2

Under BAPO's bounds and under GRPO's fixed ones: generations that wait for their longest completion, partial rollouts
with more or less oversampling, and partial rollouts together with the replay queue and two passes. All arms share a
learning rate, chosen without partial rollouts on a seed that is not reported. An interrupted study goes on where it
stopped.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.common import ROOT, Section, link_to_tables, provenance, save_result, table
from benchmarks.run_pool import run_all
from benchmarks.stability.summary import mean_and_interval
from benchmarks.training_run import fixed_clip


TASK = "long_tailed_sums"
GENERATIONS, PILOT_GENERATIONS = 12, 8
UPDATES_PER_PASS = 4
SEEDS, PILOT_SEED = (0, 1, 2), 1000
LEARNING_RATES = (5e-4, 1e-3, 2e-3)
BOUNDS = {"BAPO": {}, "GRPO": fixed_clip(0.8, 1.2)}
CHUNK_TOKENS = 12  # the median completion: with less, these cheap decode steps go into prompts that are computed again
QUEUE = {"replay_fraction": 0.5, "replay_capacity": 8192, "num_iterations": 2}
# The rows of the queue arms are the stalest. These show whether a lower rate bears them.
HALF_RATE = {"learning_rate": 5e-4}


def partial(oversampling: float) -> dict:
    """Return the settings of partial rollouts."""
    return {"partial_rollout_oversampling": oversampling, "partial_rollout_chunk_length": CHUNK_TOKENS}


ARMS = {
    "synchronous": {},
    "partial, 1.5": partial(1.5),
    "queue, 2 passes": QUEUE,
    "partial, 1.5, queue, 2 passes": {**partial(1.5), **QUEUE},
    "partial, 1.9": partial(1.9),
    "queue, 2 passes, half rate": {**QUEUE, **HALF_RATE},
    "partial, 1.5, queue, 2 passes, half rate": {**partial(1.5), **QUEUE, **HALF_RATE},
}
# What each arm with partial rollouts is set against: the same without
WITHOUT = {
    "partial, 1.5": "synchronous",
    "partial, 1.5, queue, 2 passes": "queue, 2 passes",
    "partial, 1.9": "synchronous",
    "partial, 1.5, queue, 2 passes, half rate": "queue, 2 passes, half rate",
}
FIGURE = "partial_study.png"


def spec(bounds: str, arm: str, learning_rate: float, seed: int, generations: int) -> dict:
    """Return what [`training_run.run`] takes. Held-out accuracy is measured at the start, half-way and at the end."""
    args = {"learning_rate": learning_rate, **BOUNDS[bounds], **ARMS[arm]}
    updates = generations * UPDATES_PER_PASS * args.get("num_iterations", 1)
    return {"seed": seed, "generations": generations, "task": TASK, "held_out_every": updates // 2, "args": args}


def final_reward(result: dict) -> float:
    """Return the mean reward of the last quarter of the generations."""
    return statistics.mean(result["reward"][-(len(result["reward"]) // 4) :])


def choose_learning_rate(finished: Path, jobs: int) -> tuple[float, dict[float, float]]:
    """Return the best learning rate of the synchronous arm, and the final accuracy of each, means of both bounds."""
    named = {
        (rate, bounds): spec(bounds, "synchronous", rate, PILOT_SEED, PILOT_GENERATIONS)
        for rate in LEARNING_RATES
        for bounds in BOUNDS
    }
    results = dict(zip(named, run_all(list(named.values()), finished, jobs), strict=True))
    accuracies = {
        rate: round(statistics.mean(results[rate, bounds]["held_out"][-1]["sampled"] for bounds in BOUNDS), 4)
        for rate in LEARNING_RATES
    }
    return max(LEARNING_RATES, key=accuracies.__getitem__), accuracies


def result_to_row(bounds: str, arm: str, seed: int, result: dict) -> dict:
    """Return what the result file keeps of a run."""
    means = result["means"]
    return {
        "bounds": bounds,
        "arm": arm,
        "seed": seed,
        "final_reward": round(final_reward(result), 4),
        "held_out": result["held_out"][-1]["sampled"],
        "held_out_start": result["held_out"][0]["sampled"],
        "staleness": means["staleness/mean"],
        "share_of_several_versions": result["share_of_several_versions"],
        "trained_length_ratio": result["trained_length_ratio"],
        "decode_steps": sum(result["decode_steps"]),
        "completions": result["completions"],
        "updates": result["updates"],
        "seconds": result["seconds"],
        "seconds_so_far": result["seconds_so_far"],
        "lengths": result["lengths"],
        "cut_off": means["completions/clipped_ratio"],
        "reward": result["reward"],
        "decode_steps_so_far": list(itertools.accumulate(result["decode_steps"])),
    }


def summarize(rows: Sequence[dict]) -> list[dict]:
    """Return a row for each bounds and arm: means over the seeds with intervals, and differences seed by seed."""
    by_key = {(row["bounds"], row["arm"], row["seed"]): row for row in rows}
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["bounds"], row["arm"]), []).append(row)
    summary = []
    for (bounds, arm), group in groups.items():
        pairs = [
            (row, by_key[bounds, WITHOUT[arm], row["seed"]])
            for row in group
            if arm in WITHOUT and (bounds, WITHOUT[arm], row["seed"]) in by_key
        ]
        summary.append(
            {
                "bounds": bounds,
                "arm": arm,
                "seeds": len(group),
                **{key: mean_and_interval([row[key] for row in group]) for key in ("final_reward", "held_out")},
                "reward_gains": [round(row["final_reward"] - other["final_reward"], 4) for row, other in pairs],
                "held_out_gains": [round(row["held_out"] - other["held_out"], 4) for row, other in pairs],
                **{
                    key: statistics.mean(row[key] for row in group)
                    for key in ("staleness", "share_of_several_versions", "cut_off", "seconds", "updates")
                },
                "trained_length_ratio": _mean_or_none([row["trained_length_ratio"] for row in group]),
                "steps_per_sample": statistics.mean(row["decode_steps"] / row["completions"] for row in group),
                "completions": statistics.mean(row["completions"] for row in group),
            }
        )
    return summary


def judge(what: str, gains: Sequence[float]) -> str:
    """
    Return the sentence on a figure of an arm against the same without partial rollouts.

    Args:
        what (`str`):
            Arm and figure.
        gains (sequence of `float`):
            Differences to the arm without, of the same bounds and seed; at least two.
    """
    gain = mean_and_interval(gains)
    mean, half_width = gain["mean"], gain["half_width"]
    figures = f"{mean:+.3f} ± {half_width:.3f} over {len(gains)} pairs"
    if mean + half_width < 0:
        return f"{what}: **not as without, lower** ({figures})."
    if mean - half_width > 0:
        return f"{what}: not as without, but higher ({figures})."
    return f"{what}: as without ({figures}; a loss of more than {max(0.0, half_width - mean):.3f} is ruled out)."


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return statistics.mean(defined) if defined else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument(
        "--finished", type=Path, default=ROOT / "outputs" / "partial_study.jsonl", help="finished runs"
    )
    arguments = parser.parse_args()

    learning_rate, pilot_accuracies = choose_learning_rate(arguments.finished, arguments.jobs)
    named = {
        (bounds, arm, seed): spec(bounds, arm, learning_rate, seed, GENERATIONS)
        for arm in ARMS
        for seed in SEEDS
        for bounds in BOUNDS
    }
    results = run_all(list(named.values()), arguments.finished, arguments.jobs)
    settings = {
        "generations": GENERATIONS,
        "learning_rate": learning_rate,
        "pilot_accuracies": [[rate, accuracy] for rate, accuracy in pilot_accuracies.items()],
        "pilot_seed": PILOT_SEED,
        "pilot_generations": PILOT_GENERATIONS,
        "chunk_tokens": CHUNK_TOKENS,
        "queue": QUEUE,
        "threads": 1,
    }
    rows = [result_to_row(*key, result) for key, result in zip(named, results, strict=True)]
    save_result("partial_study", "cpu", settings, rows)


# The section of the results pages


def render(content: dict) -> Section:
    """Return the section of a result."""
    settings, rows = content["settings"], content["results"]
    summary = summarize(rows)
    heading = "Reward with partial rollouts"
    pilots = ", ".join(f"{rate:g} ({accuracy:.3f})" for rate, accuracy in settings["pilot_accuracies"])
    start = statistics.mean(row["held_out_start"] for row in rows)
    seeds = len({row["seed"] for row in rows})
    text = [
        f"## {heading}",
        "The task is the sums of the demo, with a filler of lognormal length before each answer "
        "(`benchmarks/long_tailed_sums.py`). The reward checks the answer and not the filler. "
        f"{start:.0%} of sampled completions are right at the start. {describe_lengths(rows)}",
        f"A generation is 512 completions to 64 prompts, in groups of 8, and {UPDATES_PER_PASS} updates in each pass. "
        f"Every run generates {settings['generations']} times. With partial rollouts, the groups in flight at the end "
        "are not trained, and the first batch is short by as many. GRPO means the fixed clip range 0.8 to 1.2 in the "
        f"same code. A chunk is {settings['chunk_tokens']} tokens, about the median completion. The queue has "
        f"`replay_fraction` {settings['queue']['replay_fraction']}.",
        f"The learning rate is {settings['learning_rate']:g}, in the arms at half rate "
        f"{HALF_RATE['learning_rate']:g}. It is the best of three for the synchronous arm, by held-out accuracy after "
        f"{settings['pilot_generations']} generations on another seed, mean of both bounds: {pilots}.",
        "Final reward is the mean over the last quarter of the generations. With partial rollouts it is that of "
        "completions which older policies began, so it lags a little while reward rises. Held-out accuracy does not: "
        f"it is that of the last policy, sampled. Figures are means over {seeds} seeds ± half the width of the 95 % "
        "interval (Student's t).",
        "Target: reward as without partial rollouts, at equal samples. As without means that the 95 % interval of the "
        "differences, seed by seed, holds 0 (both bounds together, which share seeds). Held-out accuracy is judged "
        "the same way:",
        "\n".join(f"- {sentence}" for sentence in verdicts(summary)),
        "Above: the mean difference to the arm without partial rollouts on the same seeds.",
        table(["Bounds", "Arm", "Final reward", "Above", "Held-out", "Held-out above"], map(main_cells, summary)),
        "Decode steps are the tokens of the longest completion of each call of the sampler, summed. They are what a "
        "generation waits for. Here they are set against the completions that were trained.",
        table(
            ["Bounds", "Arm", "Decode steps a completion", "Staleness (versions)", "Of several versions"],
            map(rollout_cells, summary),
        ),
        f"Lengths, completions cut off, updates and seconds: {link_to_tables(heading)}.",
        f"![Reward by generations, decode steps and seconds]({FIGURE})",
        provenance(content),
    ]
    tables = [
        f"## {heading}",
        "Trained lengths are those of completions that were trained over those of all that ended, over the whole run. "
        "Above: the differences in final reward, seed by seed. Seconds are those of training and generation, with "
        "other runs beside.",
        table(
            ["Bounds", "Arm", "Above on each seed", "Trained lengths", "Cut off", "Updates", "Seconds"],
            map(other_cells, summary),
        ),
    ]
    return Section("\n\n".join(text), "\n\n".join(tables), {FIGURE: draw(rows)})


def describe_lengths(rows: Sequence[dict]) -> str:
    """Return the sentences on how long the completions are, at the start and at the end of the runs."""
    first_median, first_95th, last_median, last_95th = (
        statistics.mean(row["lengths"][when][key] for row in rows)
        for when in ("first", "last")
        for key in ("median", "95th")
    )
    return (
        f"In the first quarter of the runs, the median completion has {first_median:.0f} tokens and the 95th "
        f"percentile {first_95th:.0f} ({first_95th / first_median:.1f} times as many), in the last quarter "
        f"{last_median:.0f} and {last_95th:.0f} ({last_95th / last_median:.1f} times). At 120 tokens a completion is "
        f"cut off, and wrong: {statistics.mean(row['cut_off'] for row in rows):.1%} of them."
    )


def verdicts(summary: Sequence[dict]) -> list[str]:
    """Return the sentences of [`judge`] on each arm with partial rollouts: its reward, its held-out accuracy."""
    sentences = []
    for arm in WITHOUT:
        for figure, key in (("final reward", "reward_gains"), ("held-out accuracy", "held_out_gains")):
            gains = [gain for row in summary if row["arm"] == arm for gain in row[key]]
            if len(gains) > 1:
                sentences.append(judge(f"{arm}, {figure}", gains))
    return sentences


def main_cells(row: dict) -> list[str]:
    """Return the cells of a row of the table of rewards."""
    return [
        row["bounds"],
        row["arm"],
        _with_interval(row["final_reward"]),
        _gain(row["reward_gains"]),
        _with_interval(row["held_out"]),
        _gain(row["held_out_gains"]),
    ]


def rollout_cells(row: dict) -> list[str]:
    """Return the cells of a row of the table of decode steps."""
    return [
        row["bounds"],
        row["arm"],
        f"{row['steps_per_sample']:.3f}",
        f"{row['staleness']:.1f}",
        f"{row['share_of_several_versions']:.0%}",
    ]


def other_cells(row: dict) -> list[str]:
    """Return the cells of a row of the table on the page of tables."""
    ratio = row["trained_length_ratio"]
    return [
        row["bounds"],
        row["arm"],
        ", ".join(f"{gain:+.3f}" for gain in row["reward_gains"]) or "-",
        "-" if ratio is None else f"{ratio:.3f}",
        f"{row['cut_off']:.2%}",
        f"{row['updates']:.0f}",
        f"{row['seconds']:.0f}",
    ]


def _with_interval(value: dict, sign: str = "") -> str:
    half_width = value["half_width"]
    return f"{value['mean']:{sign}.3f}" + ("" if half_width is None else f" ± {half_width:.3f}")


def _gain(gains: Sequence[float]) -> str:
    return _with_interval(mean_and_interval(gains), "+") if gains else "-"


# Lines of the figure; those at half rate are left to the tables
LINES = {
    "synchronous": ("black", "-"),
    "partial, 1.5": ("tab:blue", "-"),
    "partial, 1.9": ("tab:blue", "--"),
    "queue, 2 passes": ("black", ":"),
    "partial, 1.5, queue, 2 passes": ("tab:blue", ":"),
}


def draw(rows: Sequence[dict]) -> Figure:
    """Return the figure of reward by generations, decode steps and seconds, means over the seeds."""
    axes = {"generations": None, "decode steps": "decode_steps_so_far", "seconds of the run": "seconds_so_far"}
    figure = Figure(figsize=(11, 12), dpi=120, layout="constrained")
    panels = figure.subplots(len(axes), len(BOUNDS), sharey=True)
    for column, bounds in zip(panels.T, BOUNDS, strict=True):
        for arm, (color, style) in LINES.items():
            runs = [row for row in rows if (row["bounds"], row["arm"]) == (bounds, arm)]
            if not runs:
                continue
            rewards = _mean_curve([run["reward"] for run in runs])
            for panel, key in zip(column, axes.values(), strict=True):
                x = range(1, len(rewards) + 1) if key is None else _mean_curve([run[key] for run in runs])
                panel.plot(x, rewards, color=color, linestyle=style, label=arm)
        column[0].set_title(f"{bounds} bounds")
        for panel, label in zip(column, axes, strict=True):
            panel.set_xlabel(label)
            panel.set_ylabel("reward of the trained completions")
            panel.grid(alpha=0.3)
    panels[0, 0].legend(fontsize="small")
    return figure


def _mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.mean(values) for values in zip(*curves, strict=True)]


if __name__ == "__main__":
    main()
