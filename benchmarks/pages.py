"""
Fill the tables of the pages in `docs/` and `benchmarks/reports/` from the runs in `benchmarks/results/`.

    python -m benchmarks.pages

A table stands between `<!-- table NAME -->` and `<!-- end -->`; `TABLES` names the function that writes it. To print
all figures of a study: `python -m benchmarks.pages stability` (any file of runs), with `--against ARM`. To keep the
runs that `bapo-trl compare` made: `python -m benchmarks.pages --keep outputs/FOLDER --commit COMMIT`.

Each table of accuracies shows the number of seeds of each row. A difference is the mean
over the seeds that both of its sides have, and equals the difference of the accuracies beside it, up to rounding.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial, reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from transformers import BitsAndBytesConfig

from bapo_trl import BAPOConfig
from bapo_trl.compare.results import Row, read_rows
from bapo_trl.compare.statistics import Difference, differences, differences_from, mean_over_seeds
from bapo_trl.compare.tables import as_markdown, compare, markdown, with_interval
from bapo_trl.script.memory import GIB, Memory, plan_memory, shape_of
from benchmarks import time_to_accuracy
from benchmarks.common import RESULTS, ROOT, best_rate, best_rates, describe_run, rows
from benchmarks.few_positive import (
    ARMS,
    LEVEL,
    PARTS,
    Setting,
    by_setting,
    compared,
    complete,
    finals_by_rate,
    setting_of,
)
from benchmarks.gpu_first_run.shapes import QWEN_05B, QWEN_3B, QWEN_7B, QWEN_15B, Shape, lora
from benchmarks.health_rates import health_table


MARK = re.compile(r"<!-- table ([^\n]*?) -->\n.*?<!-- end -->", re.DOTALL)
FOLDERS = (ROOT / "docs", ROOT / "benchmarks" / "reports")
PAGES = tuple(path for folder in FOLDERS for path in sorted(folder.glob("*.md")) if MARK.search(path.read_text()))
Finals = Mapping[str, Mapping[int, float]]  # of each arm, by seed
AGAINST = "VESPO"
# The chat study: its seeds, the arms that are compared, and the one that was the run of another at 4 updates
CHAT_STUDIES = {"chat_chain_sum": "chain_sum", "chat_leg_counting": "leg_counting"}
CHAT_NAMES = {
    "BAPO, upper bound alone": "BAPO, search only the upper bound",
    "half the weight, delta": "wide fixed bounds, half the weight, `delta=3.0`",
    "half the weight, cap": "wide fixed bounds, half the weight, ratio cap",
}
CHAT_SEEDS, NOT_AT_4 = 8, "half the weight, cap"
TASK, UPDATES = "task", "updates per generation"
STALE = ("16", "64")  # updates per generation
WEIGHTS = {
    "VESPO, constant weight 0.5": "VESPO, constant weight 0.5",
    "VESPO, share 0.8": "VESPO, adaptive weight",
    "share 0.8": "wide fixed bounds, adaptive weight",
    "BAPO": "BAPO",
    "GRPO": "GRPO",
}
QWEN = {"0.5B": QWEN_05B, "1.5B": QWEN_15B, "3B": QWEN_3B, "7B": QWEN_7B}
GPUS, QLORA_PROMPT = (16, 24, 40, 80), 512  # sizes in GiB, and tokens
ASYNC_METHODS = ("GRPO", "clip-higher", "BAPO", "wide fixed bounds")
METHODS = ("GRPO", "clip-higher", "CISPO", "SAPO", "GSPO", "VESPO")
VARIANTS = {  # arms of the study by what they change
    "upper bound alone, delta 3": "search only the upper bound, `delta=3.0`",
    "lower bound alone": "search only the lower bound",
    "lower bound first": '`search_order="lower_first"`',
    "fixed at start": "bounds fixed at 0.6 and 1.2",
    "fixed at end": "bounds fixed at 0.9 and 3.0",
    "fixed at the widest": "wide fixed bounds (0.6 and 3.0)",
    "fixed at the widest, delta 3": "wide fixed bounds, `delta=3.0`",
    "GRPO's bounds, delta 3": "bounds fixed at 0.8 and 1.2, `delta=3.0`",
    "released recipe's bounds": "the authors' released recipe",
    "BAPO, target 0.4": "target 0.4",
    "target 0.6": "target 0.6",
    "BAPO, surrogate": '`contribution_measure="surrogate"`',
    "BAPO, sequence level": "sequence-level ratios",
    "coarse grid": "search steps 5 and 6 times as large",
    "smoothed bounds": "bounds smoothed over updates",
}
CANDIDATES = {  # variants that were chosen on the seeds of the others, and measured on seeds that had no part in it
    "upper bound alone": "search only the upper bound (`ratio_lower_max=0.6`)",
    "delta 3": "`delta=3.0`, TRL's cap on ratios",
}


REPLAY = {  # arms of the study: samples, and whether samples of zero advantage are replaced
    "one pass": ("one pass", "no"),
    "same rows, 4 passes": ("same samples, 4 passes", "no"),
    "queue, 4 passes": ("buffer, 4 passes", "no"),
    "queue, 4 passes, ties replaced": ("buffer, 4 passes", "yes"),
    "queue, 8 passes, ties replaced": ("buffer, 8 passes", "yes"),
}

PARTIAL = {  # arms with partial rollouts, and the same without
    "partial, 1.5": "synchronous",
    "partial, 1.9": "synchronous",
    "partial, 1.5, queue, 2 passes": "queue, 2 passes",
    "partial, 1.5, queue, 2 passes, half rate": "queue, 2 passes, half rate",
}
PARTIAL_NAMES = {
    "partial, 1.5": "oversampling 1.5",
    "partial, 1.9": "oversampling 1.9",
    "partial, 1.5, queue, 2 passes": "1.5, replay, 2 passes",
    "partial, 1.5, queue, 2 passes, half rate": "1.5, replay, 2 passes, half the rate",
}


def finals(runs: Iterable[Row]) -> Finals:
    """Return the final accuracy of each arm by seed."""
    by_arm: dict[str, dict[int, float]] = {}
    for row in runs:
        if row.final is not None:  # as it is for a run that failed
            by_arm.setdefault(row.arm, {})[row.seed] = row.final
    return by_arm


def final_table(by_setting: Mapping[str, Finals], baseline: str, names: Mapping[str, str] | None = None) -> str:
    """
    Return a table of final accuracies, and of their differences from one arm over the seeds that both have. A row of
    fewer seeds than the baseline shows the baseline's accuracy on these seeds.
    """
    arms = dict.fromkeys(arm for by_arm in by_setting.values() for arm in by_arm)
    lines = []
    for arm in arms:
        counts = [str(len(by_arm[arm])) for by_arm in by_setting.values() if arm in by_arm]
        cells = [(names or {}).get(arm, arm), " / ".join(dict.fromkeys(counts))]
        for by_arm in by_setting.values():
            if arm in by_arm:
                mean, against, difference = paired(by_arm, arm, baseline)
                cells += [mean if against is None else f"{mean} ({baseline}: {against})", difference]
            else:
                cells += ["-", "-"]
        lines.append(cells)
    header = [part for name in by_setting for part in (name, f"difference from {baseline}")]
    return markdown(["method", "seeds", *header], lines)


def paired(by_arm: Finals, arm: str, baseline: str) -> tuple[str, str | None, str]:
    """
    Return the mean accuracy of an arm, the baseline's on the same seeds, and the difference, as text. The second is
    `None` if the baseline has no other seeds: its own row shows it. The interval of the difference is corrected for
    the comparisons of all arms with the baseline.

    Raises:
        ValueError: If the arm has a seed that the baseline lacks: its mean would not be that of the difference.
    """
    mean = with_interval(mean_over_seeds(list(by_arm[arm].values())), ".3f")
    if arm == baseline or baseline not in by_arm:
        return mean, None, "-"
    if missing := by_arm[arm].keys() - by_arm[baseline].keys():
        raise ValueError(f"{arm} has the seeds {sorted(missing)}, which {baseline} lacks.")
    found = differences_from(by_arm, baseline)[arm]
    same = [by_arm[baseline][seed] for seed in by_arm[arm]]
    against = None if len(same) == len(by_arm[baseline]) else f"{sum(same) / len(same):.3f}"
    return mean, against, with_interval(found.mean, ".3f", "+")


def long_table(
    first: str, places: Sequence[tuple[str, Finals, Mapping[str, str]]], baseline: str, second: str = "method"
) -> str:
    """
    Return a table with a line for each setting and arm: seeds, accuracy, the baseline's accuracy on the same seeds,
    and the difference. `places` are settings, with their accuracies and, optionally, the learning rate of each arm.
    """
    lines = []
    for setting, by_arm, rates in places:
        base = f"{sum(by_arm[baseline].values()) / len(by_arm[baseline]):.3f}"
        for arm in by_arm:
            mean, against, difference = paired(by_arm, arm, baseline)
            cells = [setting, arm, *([rates[arm]] if rates else []), str(len(by_arm[arm])), mean]
            lines.append([*cells, "-" if arm == baseline else against or base, difference])
    extra = ["learning rate"] if any(rates for _, _, rates in places) else []
    return markdown([first, second, *extra, "seeds", "accuracy", f"{baseline}, same seeds", "difference"], lines)


def rate_name(rate: float) -> str:
    """Return a learning rate as text: 2e-4."""
    digits, exponent = f"{rate:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def methods_table() -> str:
    """Return the published methods on the hard task, compared with BAPO."""
    places = []
    for updates in STALE:
        runs = rows("stability", **{TASK: "running totals", UPDATES: updates})
        found, rates = finals(runs), {row.arm: rate_name(row.settings["learning_rate"]) for row in runs}
        places.append((updates, {arm: found[arm] for arm in (*METHODS[:2], "BAPO", *METHODS[2:])}, rates))
    return long_table(UPDATES, places, "BAPO")


def variants_table() -> str:
    """Return the variants of BAPO on the hard task, each group of seeds under BAPO's accuracy on these seeds."""
    lines = []
    for study, seeds, arms in (("stability", range(3), VARIANTS), ("stability_candidates", range(5, 10), CANDIDATES)):
        by_setting = []
        for updates in STALE:
            found = finals(rows(study, **{TASK: "running totals", UPDATES: updates}))
            by_setting.append({arm: {seed: found[arm][seed] for seed in seeds} for arm in ("BAPO", *arms)})
        for arm, text in {"BAPO": "**BAPO**", **arms}.items():
            cells = [text, f"{seeds[0]}-{seeds[-1]}"]
            for by_arm in by_setting:
                mean, _, difference = paired(by_arm, arm, "BAPO")
                cells += [mean.partition(" ")[0], difference]
            lines.append(cells)
    return markdown(
        ["variant", "seeds", *(part for name in STALE for part in (f"{name} updates", "difference"))], lines
    )


def chat_settings() -> dict[str, Finals]:
    """Return the settings of the chat study in which every arm, VESPO included, has all its seeds, by name."""
    found = {}
    for updates in (4, 16):
        for study, name in CHAT_STUDIES.items():
            by_arm = finals(rows(study, steps_per_generation=updates))
            if updates == 4:
                by_arm.pop(NOT_AT_4, None)
            if AGAINST in by_arm and all(len(seeds) == CHAT_SEEDS for seeds in by_arm.values()):
                found[f"{name}, {updates} updates per generation"] = by_arm
    return found


def differences_table(baseline: str, places: Mapping[str, Finals], arms: Mapping[str, str]) -> str:
    """
    Return a table of differences from an arm over the seeds that both have, with their number, and with intervals
    that are corrected for the comparisons of a setting.
    """

    shown = [baseline, *arms]
    found = [
        differences_from({arm: by_arm[arm] for arm in shown if arm in by_arm}, baseline) for by_arm in places.values()
    ]

    def cell(difference: Difference | None) -> str:
        return f"{with_interval(difference.mean, '.3f', '+')} ({len(difference.values)})" if difference else "-"

    lines = [[text, *(cell(by_arm.get(arm)) for by_arm in found)] for arm, text in arms.items()]
    return markdown([f"difference from {baseline} (common seeds)", *places], lines)


def replay_table() -> str:
    """Return accuracy, tokens and time of the variants of replay, by the bounds; tokens relative to one pass."""
    lines = []
    for bounds in ("BAPO", "GRPO"):
        runs = {(row.arm, row.seed): row for row in rows("replay", bounds=bounds)}
        seeds = sorted({seed for _, seed in runs})
        for arm, cells in REPLAY.items():
            each = [(runs[arm, seed], last_accuracy(runs["one pass", seed])) for seed in seeds]
            reached = [tokens for row, aim in each if (tokens := fraction_until(aim, row)) is not None]
            accuracy, seconds = (fmean(f(row) for row, _ in each) for f in (last_accuracy, lambda row: row.seconds))
            rate = rate_name(each[0][0].settings["learning_rate"])
            tokens = f"{fmean(reached):.2f} ({len(reached)})"
            lines.append([bounds, *cells, rate, str(len(each)), f"{accuracy:.3f}", tokens, f"{seconds:.0f}"])
    header = ["bounds", "samples", "zero-advantage replaced", "learning rate", "seeds", "accuracy"]
    return markdown([*header, "tokens", "seconds"], lines)


def last_accuracy(row: Row) -> float:
    """Return the mean of the last two measurements."""
    return fmean(accuracy for _, accuracy in row.curve[-2:])


def fraction_until(aim: float, row: Row) -> float | None:
    """Return the fraction of a run's generations until an accuracy is reached, between measurements by a line."""
    for (before, low), (after, high) in pairwise(row.curve):
        if high >= aim:
            part = (aim - low) / (high - low) if low < aim else 0.0
            return (before + part * (after - before)) / row.curve[-1][0]
    return None


def regime_grid(runs: Sequence[Row], cell: Callable[[Setting, str], str], names: Sequence[str] = ARMS) -> str:
    """Return a table with a line for each staleness and method, and a column for each positive contribution."""
    stalenesses, contributions = (sorted(set(values)) for values in zip(*map(setting_of, runs), strict=True))
    seeds = str(len({row.seed for row in runs}))
    lines = [
        [str(updates), name, seeds, *(cell((updates, each), name) for each in contributions)]
        for updates in stalenesses
        for name in names
    ]
    return markdown([UPDATES, "method", "seeds", *(f"contribution {each:g}" for each in contributions)], lines)


def regime_rates_table() -> str:
    """Return each method's best learning rate on the pilot seed, and the accuracy at half, once and twice the rate."""
    pilot = finals_by_rate(rows("regime_pilot"))

    def cell(setting: Setting, arm: str) -> str:
        by_rate = pilot[setting][arm]
        best = best_rate(by_rate)
        return f"{rate_name(best)}: {', '.join(f'{by_rate[rate]:.2f}' for rate in (best / 2, best, best * 2))}"

    return regime_grid(rows("regime_pilot"), cell)


def regime_table() -> str:
    """Return final accuracies, and differences from VESPO, corrected for the five of a setting."""
    runs = complete(rows("regime"))
    accuracies = by_setting(runs)
    found = {(setting, each.arm): each for setting, by_arm in accuracies.items() for each in compared(by_arm)}

    def cell(setting: Setting, arm: str) -> str:
        mean = f"{fmean(accuracies[setting][arm].values()):.3f}"
        if (setting, arm) not in found:
            return mean
        text = f"{mean} ({with_interval(found[setting, arm].mean, '.3f', '+')})"
        return f"**{text}**" if found[setting, arm].p_value < LEVEL else text

    return regime_grid(runs, cell)


def regime_lead_table() -> str:
    """Return the lead of BAPO over GRPO in final accuracy."""
    runs = complete(rows("regime"))
    accuracies = by_setting(runs)

    def cell(setting: Setting, name: str) -> str:
        (lead,) = differences(accuracies[setting], [("BAPO", "GRPO")])
        return with_interval(lead.mean, ".3f", "+")

    return regime_grid(runs, cell, ["BAPO - GRPO"])


def regime_course_table() -> str:
    """Return mean accuracy over training and max drawdown, means over seeds."""
    runs, courses = complete(rows("regime")), defaultdict(list)
    for row in runs:
        courses[setting_of(row), row.arm].append((row.mean_accuracy, row.max_drawdown))

    def cell(setting: Setting, arm: str) -> str:
        return ", ".join(f"{fmean(values):.2f}" for values in zip(*courses[setting, arm], strict=True))

    return regime_grid(runs, cell)


def regime_contributions_table() -> str:
    """Return the positive contribution over training, means over seeds, with the range of the first updates."""
    measured = defaultdict(list)
    for row in json.loads((RESULTS / "regime_contributions.json").read_text())["results"]:
        measured[row["updates_per_generation"], row["contribution"]].append([row[part] for part in PARTS])
    lines = []
    for (updates, contribution), runs in sorted(measured.items()):
        first, *_ = parts = list(zip(*runs, strict=True))
        means = [f"{fmean(values):.2f}" for values in parts]
        means[0] += f" ({min(first):.2f} to {max(first):.2f})"
        lines.append([str(updates), f"{contribution:g}", str(len(runs)), *means])
    return markdown([UPDATES, "contribution", "seeds", *(f"updates {part}" for part in PARTS)], lines)


def gpu_chat_table() -> str:
    """Return the rewards of the chat model on a GPU, by sampler and feature."""
    cases = json.loads((RESULTS / "gpu_h200.json").read_text())["parts"]["chat"]["cases"]
    variants = defaultdict(list)
    for case, row in cases.items():
        variants[case.partition(", seed ")[0]].append([one["reward"] for one in row["generations"]])
    lines = []
    for variant, runs in variants.items():
        ends = [fmean(rewards[-max(1, len(rewards) // 4) :]) for rewards in runs]
        first = fmean(rewards[0] for rewards in runs)
        by_seed = ", ".join(f"{end:.2f}" for end in ends)
        lines.append([variant, str(len(runs)), f"{first:.2f}", f"{fmean(ends):.2f}", by_seed])
    return markdown(
        ["sampler and settings", "seeds", "first rollout batch", "last quarter", "last quarter, by seed"], lines
    )


def gpu_curve_table() -> str:
    """Return the rewards and the entropy of the chat model over a run on a GPU."""
    run = json.loads((RESULTS / "gpu_h100.json").read_text())["earlier"]["smollm2_sums_by_transformers"]["log"]
    lines = [[name, *(f"{log[name]:.2f}" for log in run)] for name in ("reward", "entropy")]
    return markdown(["update", *(str(log["step"]) for log in run)], lines)


def chat_rate_table() -> str:
    """Return the accuracies of the chat model on a CPU at the recipe's learning rate, by update and seed."""
    rows = json.loads((RESULTS / "smollm2_sums.json").read_text())["rows"]
    lines = [
        [str(row["seed"]), *(f"{accuracy:.2f}" for _, accuracy in row["curve"]), f"{row['max_drawdown']:.2f}"]
        for row in rows
    ]
    return markdown(["seed", *(str(step) for step, _ in rows[0]["curve"]), "largest drop"], lines)


def results_table(
    name: str, columns: Mapping[str, Callable[[dict], str]], is_shown: Callable[[dict], bool] = lambda row: True
) -> str:
    """Return a table of a benchmark's results: a column for each name, with the text of a row."""
    results = filter(is_shown, json.loads((RESULTS / f"{name}.json").read_text())["results"])
    return markdown([*columns], [[cell(row) for cell in columns.values()] for row in results])


def number(*keys: str, form: str = "{:.3f}") -> Callable[[dict], str]:
    """Return a cell that shows what stands in a row under nested keys."""
    return lambda row: form.format(reduce(getitem, keys, row))


def quartiles(key: str) -> Callable[[dict], str]:
    """Return a cell that shows a median and its quartiles."""
    return lambda row: "{median:.2f} ({lower_quartile:.2f} to {upper_quartile:.2f})".format(**row[key])


def gpu_config(**settings: Any) -> BAPOConfig:
    """Return the settings of a run on a GPU; the machine that this runs on may have none."""
    args = BAPOConfig(use_cpu=True, bf16=True, **settings)
    args.use_cpu = False
    return args


def lora_memory(args: BAPOConfig, shape: Shape, in_4_bits: bool) -> Memory:
    """Return the memory of a trainer with LoRA, and with a base in 4 bits or in bfloat16."""
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True) if in_4_bits else None
    (memory,) = plan_memory(args, shape.config(), "bfloat16", QLORA_PROMPT, lora(), quantization).values()
    return memory


def engine_weights(shape: Shape) -> int:
    """Return the bytes of vLLM's weights, in bfloat16."""
    return 2 * shape_of(shape.config()).weights


def qlora_memory(shape: Shape, in_4_bits: bool = True) -> tuple[Memory, float]:
    """Return the memory of the trainer of `recipes/qlora_small.yaml` with another model, and of vLLM's weights."""
    recipe = yaml.safe_load((ROOT / "recipes/qlora_small.yaml").read_text())
    known = {field.name for field in fields(BAPOConfig)}
    args = gpu_config(**{name: value for name, value in recipe.items() if name in known})
    return lora_memory(args, shape, in_4_bits), engine_weights(shape)


def qlora_memory_table() -> str:
    """Return the memory of QLoRA over vLLM on the same GPU, by the model, and a GPU that it leaves a quarter of."""
    lines = []
    for name, shape in QWEN.items():
        memory, engine = qlora_memory(shape)
        total = (memory.update + engine) / GIB
        parts = [qlora_memory(shape, False)[0].weights, memory.weights, memory.gradients + memory.optimizer]
        cells = [f"{size / GIB:.1f}" for size in (*parts, memory.activations, engine)]
        gpu = next(size for size in GPUS if total <= size * 3 / 4)
        lines.append([name, *cells, f"{total:.1f}", f"{gpu} GiB"])
    header = ["Qwen2.5", "weights in bfloat16", "weights in 4 bits", "gradients, optimizer", "logits, activations"]
    return markdown([*header, "vLLM's weights", "sum in 4 bits", "GPU"], lines)


def lora_memory_table() -> str:
    """Return the memory of LoRA with completions of 4,096 tokens, by the model, and GPUs with a quarter to spare."""

    def gpu(size: float) -> str:
        return next((f"{each} GiB" for each in GPUS if size / GIB <= each * 3 / 4), "-")

    args = gpu_config(
        per_device_train_batch_size=2, gradient_accumulation_steps=8, steps_per_generation=32, num_generations=8,
        max_completion_length=4096,
    )  # fmt: skip
    lines = []
    for name, shape in QWEN.items():
        memory, packed = (lora_memory(args, shape, in_4_bits) for in_4_bits in (False, True))
        engine = engine_weights(shape)
        sizes = [memory.update, memory.sampling, engine, packed.update]
        cells = [f"{size / GIB:.1f}" for size in sizes]
        needs = [max(memory.update, memory.sampling), memory.update + engine, packed.update + engine]
        lines.append([name, *cells, *map(gpu, needs)])
    header = ["update", "sampling by transformers", "vLLM's weights", "update, QLoRA"]
    return markdown(["Qwen2.5", *header, "GPU, no vLLM", "GPU, colocate", "GPU, colocate, QLoRA"], lines)


def overlap_accuracy_table() -> str:
    """Return final accuracies without and with overlapped generation, and the difference."""
    lines = []
    for updates in (4, 16):
        by_arm = finals(rows("overlap_accuracy", steps_per_generation=updates))
        means = [paired(by_arm, arm, "BAPO") for arm in ("BAPO", "BAPO, overlapped")]
        lines.append(
            [str(updates), str(len(by_arm["BAPO, overlapped"])), *(mean for mean, _, _ in means), means[1][2]]
        )
    return markdown([UPDATES, "seeds", "without", "with overlap", "difference"], lines)


def partial_finals() -> Finals:
    """Return the final accuracies of the study of partial rollouts; a seed of each kind of bounds counts as one."""
    bounds = ("BAPO", "GRPO")
    return {
        arm: {
            len(bounds) * seed + number: final
            for number, name in enumerate(bounds)
            for seed, final in finals(rows("partial", bounds=name))[arm].items()
        }
        for arm in {*PARTIAL, *PARTIAL.values()}
    }


def partial_accuracy_table() -> str:
    """Return the differences in final accuracy of partial rollouts from full generations."""
    found = differences(partial_finals(), list(PARTIAL.items()))
    lines = [[PARTIAL_NAMES[each.arm], str(len(each.values)), with_interval(each.mean, ".3f", "+")] for each in found]
    return markdown(["oversampling, replay", "pairs", "difference in final accuracy"], lines)


def async_places() -> list[tuple[str, Finals, Mapping[str, str]]]:
    """Return the staleness, the methods on seeds 1 to 5 at their best learning rate on seed 0, and these rates."""
    places = []
    for staleness in (1, 4, 16, 64):
        runs = rows("async_staleness", staleness=staleness)
        best = best_rates((row for row in runs if row.seed == 0), lambda row: row.arm)
        found = finals(row for row in runs if row.seed > 0 and row.sweep["learning_rate"] == best[row.arm])
        rates = {arm: rate_name(rate) for arm, rate in best.items()}
        places.append((str(staleness), {arm: found[arm] for arm in ASYNC_METHODS}, rates))
    return places


def found_weights_table() -> str:
    """Return after how many transfers each fault of a server's weights was found, by the setting of the training."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    columns = list(dict.fromkeys(row["setting"] for row in server_weights("faults")))
    for row in server_weights("faults"):
        fault = row["fault"] + (f", server in {row['server']}" if "server" in row else "")
        after = row["found_after"]
        found[fault][row["setting"]] = f"not in {row['patience']}" if after is None else str(after)
    lines = [[fault, *(of_fault.get(column, "-") for column in columns)] for fault, of_fault in found.items()]
    return markdown(["fault", *columns], lines)


def healthy_weights_table() -> str:
    """Return what the check saw in runs without a fault."""
    lines = [
        [
            row["model"],
            row["setting"] + (f", model in {row['dtype']}" if "dtype" in row else ""),
            str(row["transfers"]),
            str(row["alarms"]),
            f"{row['first_difference']:.3f}",
            f"{row['largest_difference']:.3f}",
            f"{row['smallest_share']:.2f} to {row['largest_share']:.2f}" if "shares" in row else "-",
        ]
        for row in server_weights("healthy")
    ]
    header = ["model", "training", "transfers", "false alarms", "difference after the first transfer"]
    return markdown([*header, "largest difference", "fraction of the change"], lines)


def server_weights(part: str) -> list[dict[str, Any]]:
    """Return the rows of a part of the benchmark of the server's weights."""
    rows = json.loads((RESULTS / "server_weights.json").read_text())["results"]
    return [row for row in rows if row["part"] == part]


def time_final_table(study: str) -> str:
    plan = time_to_accuracy.STUDIES[study]
    found = finals(row for row in rows(study) if row.arm in plan.arms)
    return final_table({"final accuracy": found}, plan.baseline)


def equal_time_table(study: str) -> str:
    found = time_to_accuracy.at_equal_time(study)
    return final_table({"accuracy when TRL's run ends": found}, time_to_accuracy.STUDIES[study].baseline)


TABLES: dict[str, Callable[[], str]] = {
    "methods": lambda: differences_table(
        "BAPO",
        {
            f"{name} updates per generation": finals(rows("stability", **{TASK: "running totals", UPDATES: name}))
            for name in STALE
        },
        dict(zip(METHODS, METHODS, strict=True)),
    ),
    "methods_by_updates": methods_table,
    "variants": variants_table,
    "weights": lambda: differences_table(
        AGAINST,
        {
            f"`{task.replace(' ', '_')}`, {updates} updates per generation": finals(
                rows("balance", **{TASK: task, UPDATES: updates})
            )
            for task in ("running totals", "sums")
            for updates in STALE
        },
        WEIGHTS,
    ),
    "replay": replay_table,
    "partial_accuracy": partial_accuracy_table,
    "chat": lambda: final_table(chat_settings(), AGAINST, CHAT_NAMES),
    "tied": lambda: final_table(
        {f"rate {rate:g}": finals(rows("tied_groups", learning_rate=rate)) for rate in (2.5e-4, 5e-4)}, "refilled"
    ),
    "server_weights_found": found_weights_table,
    "server_weights_healthy": healthy_weights_table,
    # How far vLLM's weights are from the trainer's policy, by the adapter's training
    "lora_transfer": lambda: results_table(
        "lora_transfer",
        {"learning rate": number("learning_rate", form="{:g}"), "updates": number("updates", form="{}")}
        | {
            f"{shown}, {dtype}": number(dtype, kind)
            for dtype in ("float32", "bfloat16")
            for kind, shown in (("base", "no adapter"), ("nearest", "nearest"), ("stochastic", "stochastic"))
        },
    ),
    "qlora_transfer": lambda: results_table(
        "qlora_transfer",
        {
            "updates": number("updates", form="{}"),
            "no adapter": number("no adapter"),
            "nearest": number("nearest"),
            "stochastic": lambda row: f"{min(row['stochastic']):.3f} to {max(row['stochastic']):.3f}",
            "merged into the unquantized base": number("merged into the unquantized base"),
        },
    ),
    "qlora_memory": qlora_memory_table,
    "lora_memory": lora_memory_table,
    "gpu_chat": gpu_chat_table,
    "gpu_curve": gpu_curve_table,
    "chat_rate": chat_rate_table,
    "health": health_table,
    "layout": lambda: results_table(
        "layout_cost",
        {
            "completions": number("name", form="{}"),
            "update": quartiles("update"),
            "generation with its scoring": quartiles("generation"),
            "peak memory": number("memory", form="{:.2f}"),
            "computed / tokens": number("computed", form="{:.2f}"),
        },
    ),
    "overlap_time": lambda: results_table(
        "overlap",
        {
            **{name: number(name, "median", form="{:.2f} s") for name in ("generation", "training")},
            "generation with overlap": number("generation_overlapped", "median", form="{:.2f} s"),
            "between two requests": number("between_requests", "median", form="{:.2f} s"),
            "speed-up": quartiles("speedup"),
            "time of a generation step over the longer of the two": quartiles("over_longer"),
        },
    ),
    "partial_rollouts": lambda: results_table(
        "partial_rollouts",
        {
            **{name: number(name, form="{}") for name in ("sampler", "oversampling", "chunk")},
            "decode steps": number("steps_ratio", "median", form="{:.2f}"),
            "idle slots": number("idle_ratio", "median", form="{:.2f}"),
            "wall time": number("wall_ratio", "median", form="{:.2f}"),
        },
        lambda row: row["oversampling"] > 1,
    ),
    "overlap_accuracy": overlap_accuracy_table,
    **{name: partial(time_to_accuracy.recommendation_table, name) for name in time_to_accuracy.AGAINST_TRL},
    **{f"{name}_final": partial(time_final_table, name) for name in time_to_accuracy.AGAINST_TRL},
    **{f"{name}_methods": partial(time_to_accuracy.methods_table, name) for name in time_to_accuracy.STUDIES},
    "time_recipe_phases": time_to_accuracy.phases_table,
    "time_server_equal": partial(equal_time_table, "time_server_longer"),
    "async": lambda: long_table("staleness", async_places(), "GRPO"),
    "regime": regime_table,
    "regime_lead": regime_lead_table,
    "regime_course": regime_course_table,
    "regime_rates": regime_rates_table,
    "regime_contributions": regime_contributions_table,
    "scopes": lambda: long_table(
        UPDATES, [(name, finals(rows(f"scopes_{name}")), {}) for name in STALE], "batch", "scope"
    ),
}


def filled(page: str) -> str:
    """Return a page with its tables as of the results."""

    def fill(place: re.Match) -> str:
        return f"<!-- table {place[1]} -->\n\n{TABLES[place[1]]()}\n\n<!-- end -->"

    return MARK.sub(fill, page)


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
    common = set.intersection(*({(k, str(v)) for k, v in run["settings"].items()} for run in runs.values()))
    base = dict(sorted(common))
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
    path.write_text(text.replace(f"{ROOT}/", "") + "\n")  # an error of a run names files of the machine


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
