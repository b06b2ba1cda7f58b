"""
BAPO and other methods on a real chat model: a task of reasoning-gym, 16 updates on the samples of a generation.

    python -m benchmarks.llm_study --jobs 1

The model is that of `make demo-llm`, SmolLM2-135M-Instruct with LoRA. Each arm has its own learning rate, the best of
a small grid on a seed that is not reported. Runs that the result file holds are not made again, and an interrupted
study goes on where it stopped. With `--jobs 0`, what is finished is written.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import PrinterCallback, ProgressCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import held_out_accuracy, load_gym_task, smollm2_path
from bapo_trl.upstream.cpu_speed import base_dtype, has_bfloat16, speed_up_cpu
from benchmarks.balance import arms as balance
from benchmarks.common import ROOT, Section, earlier_runs, provenance, result_path, save_result, table
from benchmarks.run_pool import run_all, run_key
from benchmarks.stability.summary import best_rate, mean_and_interval
from benchmarks.training_run import SERIES, fixed_clip


TASK = ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2})
GENERATIONS, PILOT_GENERATIONS = 10, 6
UPDATES_PER_GENERATION, ROWS = 16, 8
SEEDS, PILOT_SEED = (0, 1, 2), 1000
LEARNING_RATES = (1e-4, 2e-4, 4e-4)
FEWER_RATES = (2e-4, 4e-4)  # of the arms that came after those: 1e-4 was best for none
GIVEN_RATES = {"VESPO, share 0.8, at 2e-4": 2e-4, "VESPO, constant weight 0.5, at 2e-4": 2e-4}  # without pilots
PROBLEMS, NUM_SAMPLES = 256, 4
# Settings of each arm, on top of BAPO's defaults: those of the small tasks.
ARMS = {
    "BAPO": {},
    "GRPO": fixed_clip(0.8, 1.2),
    "VESPO": {"loss_type": "vespo"},
    "share 0.7": balance.settings_of("share 0.7"),
    "VESPO, share 0.8": balance.settings_of("VESPO, share 0.8"),
    "constant weight 0.5": balance.settings_of("constant weight 0.5"),
    "VESPO, constant weight 0.5": balance.settings_of("VESPO, constant weight 0.5"),
    # Was it the learning rate? These have the lower one, whatever their pilots say.
    "VESPO, share 0.8, at 2e-4": balance.settings_of("VESPO, share 0.8"),
    "VESPO, constant weight 0.5, at 2e-4": balance.settings_of("VESPO, constant weight 0.5"),
}
SETTINGS = {
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "per_device_train_batch_size": ROWS,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": UPDATES_PER_GENERATION,
    "num_generations": 8,
    "max_completion_length": 16,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def learning_rates(arm: str) -> tuple[float, ...]:
    """Return those that the pilots of an arm have."""
    return LEARNING_RATES if arm in ("BAPO", "GRPO", "VESPO", "share 0.7") else FEWER_RATES


@dataclass(frozen=True)
class Run:
    """A run of the study: `start` (nothing is trained), `pilot` (chooses a learning rate) or `reported`."""

    purpose: str
    arm: str
    learning_rate: float
    seed: int

    def spec(self) -> dict:
        """Return what [`run`] takes."""
        if self.purpose == "start":
            return {"seed": self.seed, "generations": 0, "problems": PROBLEMS, "args": {}}
        return {
            "seed": self.seed,
            "generations": GENERATIONS if self.purpose == "reported" else PILOT_GENERATIONS,
            "problems": PROBLEMS if self.purpose == "reported" else 0,
            "args": {**ARMS[self.arm], "learning_rate": self.learning_rate},
        }


START = Run("start", "BAPO", 0.0, PILOT_SEED)


def run(spec: dict) -> dict:
    """
    Train once and measure accuracy afterwards.

    Args:
        spec (`dict`):
            `seed`, `generations` (with 0, the model is measured as it is), `problems`, the number of held-out problems
            it is measured on, and `args`, settings on top of `SETTINGS`.

    Returns:
        `dict` with `held_out` (one point), `reward` of each generation, `series` of the metrics of each update, and
        `seconds` of the training.
    """
    torch.set_num_threads(1)
    name, task_args = TASK
    task = load_gym_task(name, task_args)
    with tempfile.TemporaryDirectory() as folder:
        args = BAPOConfig(
            folder,
            seed=spec["seed"],
            max_steps=spec["generations"] * UPDATES_PER_GENERATION,
            bf16=has_bfloat16(),
            **{**SETTINGS, **spec["args"]},
        )
        args.model_init_kwargs = {"dtype": base_dtype(args, trains_adapter=True)}
        trainer = BAPOTrainer(
            str(smollm2_path()),
            task.reward_func,
            args,
            train_dataset=task.train_dataset,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        speed_up_cpu(trainer)
        started = time.perf_counter()
        if spec["generations"]:
            trainer.train()
        seconds = time.perf_counter() - started
        point = {"update": args.max_steps}
        if spec["problems"]:
            problems = task.test_dataset.select(range(spec["problems"]))
            point |= accuracy(trainer, problems, task.reward_func)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "held_out": [point],
        "reward": [round(log["reward"], 4) for log in logs if "reward" in log],
        "series": {key: [log[key] for log in logs] for key in SERIES if all(key in log for log in logs)},
        "seconds": round(seconds),
    }


def accuracy(trainer: BAPOTrainer, problems, reward_func: Callable[..., list[float]]) -> dict[str, float]:
    """Return what is right of the greedy completions, of 4 samples on average, and of the best of the 4 (pass@4)."""
    found = held_out_accuracy(
        trainer.model, trainer.processing_class,
        [{"prompt": row["prompt"], "answer": row["entry"]} for row in problems],
        num_samples=NUM_SAMPLES, max_new_tokens=trainer.args.max_completion_length, batch_size=64,
        reward_func=lambda texts, entries: [float(reward >= 1) for reward in reward_func(texts, entry=entries)],
    )  # fmt: skip
    return {"greedy": found.greedy, "sampled": found.sampled, "pass@4": found.solved}


def fetch_model(specs: Sequence[dict]) -> None:
    """Fetch the model, so that no run has to."""
    if specs:
        smollm2_path()


Make = Callable[[Sequence[Run]], list[dict]]


def make_study(arms: Sequence[str], make: Make) -> None:
    """
    Make the runs of some arms: pilots first, then the runs with the best learning rate of each.

    Args:
        arms (sequence of `str`):
            Keys of `ARMS`.
        make (callable):
            Returns the rows of some runs, fewer than runs if some are not made now.
    """
    make([START])
    tuned = [arm for arm in arms if arm not in GIVEN_RATES]
    pilots = make([Run("pilot", arm, rate, PILOT_SEED) for arm in tuned for rate in learning_rates(arm)])
    rates = {arm: best_rate(rewards) for arm, rewards in pilot_rewards(pilots).items()}
    rates |= {arm: GIVEN_RATES[arm] for arm in arms if arm in GIVEN_RATES}
    make([Run("reported", arm, rate, seed) for seed in SEEDS for arm, rate in rates.items()])


def pilot_rewards(rows: Sequence[dict]) -> dict[str, dict[float, float]]:
    """Return the mean reward of the last two generations by arm and learning rate, for arms with all their pilots."""
    rewards: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["purpose"] == "pilot":
            rewards.setdefault(row["arm"], {})[row["learning_rate"]] = round(statistics.mean(row["reward"][-2:]), 4)
    return {arm: by_rate for arm, by_rate in rewards.items() if set(by_rate) == set(learning_rates(arm))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each; 0: write what is there")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="arms to run (all)")
    parser.add_argument("--finished", type=Path, default=ROOT / "outputs" / "llm_study.jsonl", help="finished runs")
    arguments = parser.parse_args()
    path = result_path("llm_study", "cpu")
    old = json.loads(path.read_text()) if path.exists() else {"results": []}
    rows = {row["key"]: row for row in old["results"]}

    def make(runs: Sequence[Run]) -> list[dict]:
        missing = {key: each for each in runs if (key := run_key(each.spec())) not in rows}
        specs = [each.spec() for each in missing.values()]
        results = run_all(specs, arguments.finished, arguments.jobs, run, fetch_model) if specs else []
        for (key, each), result in zip(missing.items(), results, strict=True):
            if result is not None:
                rows[key] = {"key": key, **asdict(each), **result_to_row(result)}
        return [rows[key] for key in map(run_key, (each.spec() for each in runs)) if key in rows]

    make_study(arguments.arms, make)
    if len(rows) > len(old["results"]):
        settings = {
            "task": TASK,
            "generations": GENERATIONS,
            "updates_per_generation": UPDATES_PER_GENERATION,
            "rows": ROWS,
            "problems": PROBLEMS,
            "pilot_generations": PILOT_GENERATIONS,
            "arms": list(ARMS),
            "threads": 1,
        }
        save_result("llm_study", "cpu", settings, list(rows.values()), earlier_runs(old))


def result_to_row(result: dict) -> dict:
    """Return what the result file keeps of a run."""
    rewards, series = result["reward"], result["series"]
    row = {kind: round(value, 4) for kind, value in result["held_out"][-1].items() if kind != "update"}
    if not rewards:
        return row
    per_three = [statistics.mean(rewards[index : index + 3]) for index in range(len(rewards) - 2)]
    norms = [norm for norm in series["grad_norm"] if norm]
    return {
        **row,
        "reward": rewards,
        "fall": round(max(per_three) - per_three[-1], 4),
        "gradient_peak": round(max(norms) / statistics.median(norms), 2),
        "entropy": [round(value, 3) for value in (series["entropy"][0], series["entropy"][-1])],
        "share": round(statistics.mean(share for share in series["bapo/positive_share"] if share is not None), 3),
        "negative_weight": round(statistics.mean(series["bapo/negative_weight"]), 3),
        "seconds": result["seconds"],
    }


def summarize(rows: Sequence[dict]) -> list[dict]:
    """Return means of each arm, and how far it ends above VESPO on the same seeds; intervals from three seeds on."""
    rows = [row for row in rows if row["purpose"] == "reported"]
    of_vespo = {row["seed"]: row["sampled"] for row in rows if row["arm"] == "VESPO"}
    summary = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        group = [row for row in rows if row["arm"] == arm]
        values = {
            key: [row[key] for row in group]
            for key in ("greedy", "sampled", "pass@4", "fall", "gradient_peak", "share", "negative_weight")
        }
        pairs = [row for row in group if arm != "VESPO" and row["seed"] in of_vespo]
        values["above"] = [row["sampled"] - of_vespo[row["seed"]] for row in pairs]
        figures = {key: mean_and_interval(some) for key, some in values.items()}
        if len(group) < 3:
            figures = {key: {**each, "half_width": None} for key, each in figures.items()}
        rate = group[0]["learning_rate"]
        summary.append({"arm": arm, "learning_rate": rate, "seeds": len(group), **figures})
    return summary


def render(content: dict) -> Section:
    """Return the section of a result."""
    settings, rows = content["settings"], content["results"]
    (start,) = [row for row in rows if row["purpose"] == "start"]
    summary = summarize(rows)
    pilots = "; ".join(
        f"{arm} {', '.join(f'{rate:g} ({reward:.3f})' for rate, reward in sorted(by_rate.items()))}"
        for arm, by_rate in pilot_rewards(rows).items()
    )
    missing = [arm for arm in settings["arms"] if arm not in {row["arm"] for row in summary}]
    ends = [
        [
            row["arm"],
            f"{row['learning_rate']:g}",
            str(row["seeds"]),
            _with_interval(row["greedy"]),
            _with_interval(row["sampled"]),
            _with_interval(row["above"], "+") if row["above"]["mean"] is not None else "-",
            _with_interval(row["pass@4"]),
        ]
        for row in summary
    ]
    ways = [
        [row["arm"], *(_with_interval(row[key]) for key in ("fall", "gradient_peak", "share", "negative_weight"))]
        for row in summary
    ]
    text = [
        "## BAPO and other methods on a chat model",
        f"SmolLM2-135M-Instruct with LoRA on `reasoning_gym:{settings['task'][0]}`: sums and differences of two "
        f"numbers of one or two digits. {settings['rows'] * settings['updates_per_generation']} completions a "
        f"generation, {settings['updates_per_generation']} updates on them, {settings['generations']} generations. "
        'All arms run in `BAPOTrainer`; GRPO means the fixed clip range 0.8 to 1.2, VESPO is `loss_type="vespo"`. '
        f"Accuracy is of {settings['problems']} held-out problems. Figures are means over the seeds ± half the width "
        "of the 95 % interval (Student's t), from three seeds on. Above VESPO: mean difference in the mean of 4 "
        "samples, seed by seed.",
        f"At the start: greedy {start['greedy']:.3f}, mean of 4 samples {start['sampled']:.3f}, pass@4 "
        f"{start['pass@4']:.3f}.",
        table(["Arm", "Learning rate", "Seeds", "Greedy", "Mean of 4 samples", "Above VESPO", "pass@4"], ends),
        "Fall: how far the reward on fresh samples, a mean over three generations, ends below its best. Gradient "
        "peak: the largest gradient norm over the median. Share: of the positive tokens in the policy loss. Weight: "
        "that of negative tokens, 1 where an update has none. Both are means over the updates.",
        table(["Arm", "Fall", "Gradient peak", "Share", "Weight"], ways),
        f"Learning rates: the best of those named for each arm, by the mean reward of the last two of "
        f"{settings['pilot_generations']} generations on another seed: {pilots}.",
        "Weight of the generation: it went by the advantages of the whole generation, not of the update alone. It won "
        "nowhere, and its option is gone. Arms with a rate in their name were added to tell the learning rate from "
        f"the weight. Not run: {''.join(f'{arm}; ' for arm in missing)}32 samples an update, of which a run takes "
        "four times as long.",
        provenance(content),
    ]
    return Section("\n\n".join(text))


def _with_interval(value: dict, sign: str = "") -> str:
    half_width = value["half_width"]
    return f"{value['mean']:{sign}.3f}" + ("" if half_width is None else f" ± {half_width:.3f}")


if __name__ == "__main__":
    main()
