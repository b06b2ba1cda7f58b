"""
BAPO and other methods on a real chat model: a task of reasoning-gym, 16 updates on the samples of a generation.

    python -m benchmarks.llm_study --jobs 1

The model is that of `make demo-llm`, SmolLM2-135M-Instruct with LoRA. Each arm has its own learning rate, the best of
a small grid on a seed that is not reported. An interrupted study goes on where it stopped; with `--jobs 0`, it writes
the arms that are finished.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import PrinterCallback, ProgressCallback

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.cpu_speed import base_dtype, has_bfloat16, speed_up_cpu
from bapo_trl.tasks import load_gym_task, smollm2_path
from benchmarks.common import ROOT, Section, provenance, save_result, table
from benchmarks.run_pool import run_all
from benchmarks.stability.summary import best_rate, mean_and_interval
from benchmarks.training_run import SERIES, fixed_clip
from demo_llm import complete, seeded


TASK = ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2})
GENERATIONS, PILOT_GENERATIONS = 10, 6
UPDATES_PER_GENERATION, ROWS = 16, 8
SEEDS, PILOT_SEED = (0, 1, 2), 1000
LEARNING_RATES = (1e-4, 2e-4, 4e-4)
PROBLEMS, NUM_SAMPLES = 256, 4
WIDEST = {**fixed_clip(0.6, 3.0), "negative_ratio_cap": 3.0}
SHARE = {**WIDEST, "positive_contribution_target": 0.7, "negative_weight_min": 0.05}
# Settings of each arm, on top of BAPO's defaults. With a target of 1, the weight of negative tokens is its minimum.
ARMS = {
    "BAPO": {},
    "GRPO": fixed_clip(0.8, 1.2),
    "VESPO": {"loss_type": "vespo"},
    "share 0.7": SHARE,
    "share 0.7, weight of the generation": {
        **SHARE, "search_scope": "carried_over", "carried_over_masses": "generation",
    },
    "constant weight 0.5": {**WIDEST, "positive_contribution_target": 1.0, "negative_weight_min": 0.5},
}  # fmt: skip
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


START = {"seed": PILOT_SEED, "generations": 0, "problems": PROBLEMS, "args": {}}


def pilot(arm: str, learning_rate: float) -> dict:
    """Return what [`run`] takes for a run that chooses a learning rate."""
    args = {**ARMS[arm], "learning_rate": learning_rate}
    return {"seed": PILOT_SEED, "generations": PILOT_GENERATIONS, "problems": 0, "args": args}


def spec(arm: str, learning_rate: float, seed: int) -> dict:
    """Return what [`run`] takes for a run that is reported."""
    args = {**ARMS[arm], "learning_rate": learning_rate}
    return {"seed": seed, "generations": GENERATIONS, "problems": PROBLEMS, "args": args}


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


@torch.no_grad()
def accuracy(trainer: BAPOTrainer, problems, reward_func: Callable[..., list[float]]) -> dict[str, float]:
    """Return what is right of the greedy completions, of 4 samples on average, and of the best of the 4 (pass@4)."""
    model, tokenizer = trainer.model, trainer.processing_class
    prompts, entries = problems["prompt"][:], problems["entry"][:]

    def is_right(texts: list[str], entries: list[str]) -> list[bool]:
        return [reward >= 1 for reward in reward_func(texts, entry=entries)]

    model.eval()
    greedy, _ = complete(model, tokenizer, prompts, trainer.args.max_completion_length)
    with seeded(model.device, 0):
        sampled, _ = complete(model, tokenizer, prompts * NUM_SAMPLES, trainer.args.max_completion_length, sample=True)
    model.train()
    right = is_right(sampled, entries * NUM_SAMPLES)
    return {
        "greedy": statistics.mean(is_right(greedy, entries)),
        "sampled": statistics.mean(right),
        "pass@4": statistics.mean(any(right[index :: len(prompts)]) for index in range(len(prompts))),
    }


def fetch_model(specs: Sequence[dict]) -> None:
    """Fetch the model, so that no run has to."""
    if specs:
        smollm2_path()


Make = Callable[[list[dict]], list[dict | None]]


def choose_learning_rates(arms: Sequence[str], make: Make) -> dict[str, dict[float, float]]:
    """Return the mean reward of the last two generations by learning rate, for arms whose pilots are all there."""
    results = iter(make([pilot(arm, rate) for arm in arms for rate in LEARNING_RATES]))
    pilots = {arm: {rate: next(results) for rate in LEARNING_RATES} for arm in arms}
    return {
        arm: {rate: round(statistics.mean(result["reward"][-2:]), 4) for rate, result in by_rate.items()}
        for arm, by_rate in pilots.items()
        if None not in by_rate.values()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each; 0: write what is there")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="arms to run (all)")
    parser.add_argument("--finished", type=Path, default=ROOT / "outputs" / "llm_study.jsonl", help="finished runs")
    arguments = parser.parse_args()

    def make(specs: list[dict]) -> list[dict | None]:
        return run_all(specs, arguments.finished, arguments.jobs, run, fetch_model)

    (start,) = make([START])
    pilots = choose_learning_rates(arguments.arms, make)
    named = [(arm, seed) for seed in SEEDS for arm in pilots]
    results = make([spec(arm, best_rate(pilots[arm]), seed) for arm, seed in named])
    rows = [
        result_to_row(arm, seed, result)
        for (arm, seed), result in zip(named, results, strict=True)
        if result is not None
    ]
    if start is None or not rows:
        parser.error(f"there is no finished run in {arguments.finished}: run with --jobs 1.")
    settings = {
        "task": TASK,
        "generations": GENERATIONS,
        "updates_per_generation": UPDATES_PER_GENERATION,
        "rows": ROWS,
        "problems": PROBLEMS,
        "start": start["held_out"][-1],
        "learning_rates": {arm: best_rate(rewards) for arm, rewards in pilots.items()},
        "pilots": {arm: list(rewards.items()) for arm, rewards in pilots.items()},
        "pilot_generations": PILOT_GENERATIONS,
        "arms_left": [arm for arm in ARMS if arm not in {row["arm"] for row in rows}],
        "threads": 1,
    }
    save_result("llm_study", "cpu", settings, rows)


def result_to_row(arm: str, seed: int, result: dict) -> dict:
    """Return what the result file keeps of a run."""
    rewards, series = result["reward"], result["series"]
    per_three = [statistics.mean(rewards[index : index + 3]) for index in range(len(rewards) - 2)]
    norms = [norm for norm in series["grad_norm"] if norm]
    return {
        "arm": arm,
        "seed": seed,
        **{kind: round(value, 4) for kind, value in result["held_out"][-1].items() if kind != "update"},
        "reward": rewards,
        "fall": round(max(per_three) - per_three[-1], 4),
        "gradient_peak": round(max(norms) / statistics.median(norms), 2),
        "entropy": [round(value, 3) for value in (series["entropy"][0], series["entropy"][-1])],
        "negative_weight": round(statistics.mean(series.get("bapo/negative_weight", [1.0])), 3),
        "seconds": result["seconds"],
    }


def summarize(rows: Sequence[dict]) -> list[dict]:
    """Return means and intervals of each arm, and how far BAPO ends above it on the same seeds."""
    by_key = {(row["arm"], row["seed"]): row for row in rows}
    summary = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        group = [row for row in rows if row["arm"] == arm]
        below = [
            by_key["BAPO", row["seed"]]["sampled"] - row["sampled"]
            for row in group
            if arm != "BAPO" and ("BAPO", row["seed"]) in by_key
        ]
        figures = {
            key: mean_and_interval([row[key] for row in group])
            for key in ("greedy", "sampled", "pass@4", "fall", "gradient_peak", "negative_weight")
        }
        summary.append({"arm": arm, "below": mean_and_interval(below), **figures})
    return summary


def render(content: dict) -> Section:
    """Return the section of a result."""
    settings, rows = content["settings"], content["results"]
    seeds = len({row["seed"] for row in rows})
    pilots = "; ".join(
        f"{arm} {', '.join(f'{rate:g} ({reward:.3f})' for rate, reward in rewards)}"
        for arm, rewards in settings["pilots"].items()
    )
    start = settings["start"]
    summary = summarize(rows)
    task = settings["task"][0]
    text = [
        "## BAPO and other methods on a chat model",
        f"SmolLM2-135M-Instruct with LoRA on `reasoning_gym:{task}` with sums and differences of two numbers of one "
        f"or two digits: {settings['rows'] * settings['updates_per_generation']} completions a generation, "
        f"{settings['updates_per_generation']} updates on them, {settings['generations']} generations. All arms run "
        'in `BAPOTrainer`; GRPO means the fixed clip range 0.8 to 1.2, VESPO is `loss_type="vespo"`. Accuracy is of '
        f"{settings['problems']} held-out problems. Figures are means over {seeds} seeds ± half the width of the "
        "95 % interval (Student's t). BAPO above: its sampled accuracy less the arm's, seed by seed.",
        f"At the start: greedy {start['greedy']:.3f}, mean of 4 samples {start['sampled']:.3f}, pass@4 "
        f"{start['pass@4']:.3f}.",
        table(
            ["Arm", "Learning rate", "Greedy", "Mean of 4 samples", "BAPO above", "pass@4"],
            [
                [
                    row["arm"],
                    f"{settings['learning_rates'][row['arm']]:g}",
                    _with_interval(row["greedy"]),
                    _with_interval(row["sampled"]),
                    _with_interval(row["below"], "+") if row["below"]["mean"] is not None else "-",
                    _with_interval(row["pass@4"]),
                ]
                for row in summary
            ],
        ),
        "Fall: how far the reward on fresh samples, a mean over three generations, ends below its best. Gradient "
        "peak: the largest gradient norm over the median. Weight: that of negative tokens, mean over the updates.",
        table(
            ["Arm", "Fall", "Gradient peak", "Weight"],
            [
                [row["arm"], *(_with_interval(row[key]) for key in ("fall", "gradient_peak", "negative_weight"))]
                for row in summary
            ],
        ),
        f"Learning rates: the best of three for each arm, by the mean reward of the last two of "
        f"{settings['pilot_generations']} generations on another seed: {pilots}.",
        *([f"Not run yet: {', '.join(settings['arms_left'])}."] if settings["arms_left"] else []),
        provenance(content),
    ]
    return Section("\n\n".join(text))


def _with_interval(value: dict, sign: str = "") -> str:
    half_width = value["half_width"]
    return f"{value['mean']:{sign}.3f}" + ("" if half_width is None else f" ± {half_width:.3f}")


if __name__ == "__main__":
    main()
