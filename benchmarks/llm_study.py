"""
BAPO, GRPO and VESPO on a real chat model: sums asked in words, 16 updates on the samples of a generation.

    python -m benchmarks.llm_study --jobs 1

The model and the task are those of `make demo-llm`: SmolLM2-135M-Instruct with LoRA. Each arm has its own learning
rate, the best of a small grid on a seed that is not reported. An interrupted study goes on where it stopped.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.cpu_speed import base_dtype, has_bfloat16, speed_up_cpu
from bapo_trl.tasks import load_chat_sums, smollm2_path
from benchmarks.common import ROOT, Section, provenance, save_result, table
from benchmarks.run_pool import run_all
from benchmarks.stability.summary import mean_and_interval
from benchmarks.training_run import fixed_clip
from demo_llm import complete, seeded


GENERATIONS, PILOT_GENERATIONS = 12, 8
UPDATES_PER_GENERATION = 16
SEEDS, PILOT_SEED = (0, 1, 2), 1000
LEARNING_RATES = (1e-4, 2e-4, 4e-4)
PROBLEMS, NUM_SAMPLES = 256, 4
TRAINERS = {"BAPO": (BAPOTrainer, BAPOConfig), "GRPO": (GRPOTrainer, GRPOConfig)}
# Trainer and settings of each arm; VESPO with TRL's defaults
ARMS = {
    "BAPO": ("BAPO", {}),
    "GRPO": ("BAPO", fixed_clip(0.8, 1.2)),
    "VESPO": ("BAPO", {"loss_type": "vespo"}),
}
SETTINGS = {
    "use_cpu": True,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "per_device_train_batch_size": 8,
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


def spec(arm: str, learning_rate: float, seed: int, generations: int) -> dict:
    """Return what [`run`] takes."""
    trainer, settings = ARMS[arm]
    args = {**settings, "learning_rate": learning_rate}
    return {"seed": seed, "generations": generations, "trainer": trainer, "args": args}


def run(spec: dict) -> dict:
    """
    Train once and measure held-out accuracy before and after.

    Args:
        spec (`dict`):
            `seed`, `generations`, `trainer` (a key of `TRAINERS`) and `args`, settings on top of `SETTINGS`.

    Returns:
        `dict` with `held_out` (two points), `reward` of each generation, and `seconds` of the training.
    """
    torch.set_num_threads(1)
    task = load_chat_sums()
    problems = task.test_dataset.select(range(PROBLEMS))
    trainer_class, config_class = TRAINERS[spec["trainer"]]
    with tempfile.TemporaryDirectory() as folder:
        args = config_class(
            folder,
            seed=spec["seed"],
            max_steps=spec["generations"] * UPDATES_PER_GENERATION,
            bf16=has_bfloat16(),
            **{**SETTINGS, **spec["args"]},
        )
        args.model_init_kwargs = {"dtype": base_dtype(args, trains_adapter=True)}
        trainer = trainer_class(
            str(smollm2_path()),
            task.reward_func,
            args,
            train_dataset=task.train_dataset,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        speed_up_cpu(trainer)
        points = [{"update": 0, **accuracy(trainer, problems, task.reward_func)}]
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
        points.append({"update": args.max_steps, **accuracy(trainer, problems, task.reward_func)})
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    return {"held_out": points, "reward": rewards, "seconds": round(seconds)}


@torch.no_grad()
def accuracy(trainer: GRPOTrainer, problems, reward_func) -> dict[str, float]:
    """Return greedy accuracy, and the mean of 4 samples."""
    model, tokenizer = trainer.model, trainer.processing_class
    prompts, answers = problems["prompt"][:], problems["answer"][:]
    was_training = model.training
    model.eval()
    greedy, _ = complete(model, tokenizer, prompts, trainer.args.max_completion_length)
    with seeded(model.device, 0):
        sampled, _ = complete(model, tokenizer, prompts * NUM_SAMPLES, trainer.args.max_completion_length, sample=True)
    model.train(was_training)
    return {
        "greedy": statistics.mean(reward_func(greedy, answers)),
        "sampled": statistics.mean(reward_func(sampled, answers * NUM_SAMPLES)),
    }


def fetch_model(specs: Sequence[dict]) -> None:
    """Fetch the model, so that no run has to."""
    if specs:
        smollm2_path()


def choose_learning_rates(finished: Path, jobs: int) -> dict[str, dict[float, float]]:
    """Return for each arm the sampled accuracy at the end of the pilot with each learning rate."""
    named = {(arm, rate): spec(arm, rate, PILOT_SEED, PILOT_GENERATIONS) for arm in ARMS for rate in LEARNING_RATES}
    results = dict(zip(named, run_all(list(named.values()), finished, jobs, run, fetch_model), strict=True))
    return {
        arm: {rate: round(results[arm, rate]["held_out"][-1]["sampled"], 4) for rate in LEARNING_RATES} for arm in ARMS
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--finished", type=Path, default=ROOT / "outputs" / "llm_study.jsonl", help="finished runs")
    arguments = parser.parse_args()

    pilots = choose_learning_rates(arguments.finished, arguments.jobs)
    rates = {arm: max(accuracies, key=accuracies.__getitem__) for arm, accuracies in pilots.items()}
    named = {(arm, seed): spec(arm, rates[arm], seed, GENERATIONS) for seed in SEEDS for arm in ARMS}
    results = run_all(list(named.values()), arguments.finished, arguments.jobs, run, fetch_model)
    settings = {
        "generations": GENERATIONS,
        "updates_per_generation": UPDATES_PER_GENERATION,
        "problems": PROBLEMS,
        "learning_rates": rates,
        "pilots": {arm: list(accuracies.items()) for arm, accuracies in pilots.items()},
        "pilot_generations": PILOT_GENERATIONS,
        "threads": 1,
    }
    rows = [result_to_row(*key, result) for key, result in zip(named, results, strict=True)]
    save_result("llm_study", "cpu", settings, rows)


def result_to_row(arm: str, seed: int, result: dict) -> dict:
    """Return what the result file keeps of a run."""
    before, after = result["held_out"]
    figures = {
        f"{kind}_{when}": round(point[kind], 4)
        for when, point in (("before", before), ("after", after))
        for kind in ("greedy", "sampled")
    }
    final_reward = statistics.mean(result["reward"][-(len(result["reward"]) // 4) :])
    return {
        "arm": arm, "seed": seed, **figures, "final_reward": round(final_reward, 4), "seconds": result["seconds"],
    }  # fmt: skip


def summarize(rows: Sequence[dict]) -> list[dict]:
    """Return means and intervals of each arm, and the differences to BAPO's on the same seeds."""
    by_key = {(row["arm"], row["seed"]): row for row in rows}
    summary = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        group = [row for row in rows if row["arm"] == arm]
        below = [
            by_key["BAPO", row["seed"]]["sampled_after"] - row["sampled_after"]
            for row in group
            if arm != "BAPO" and ("BAPO", row["seed"]) in by_key
        ]
        keys = ("greedy_before", "greedy_after", "sampled_before", "sampled_after", "final_reward")
        summary.append(
            {"arm": arm, "below": below} | {key: mean_and_interval([r[key] for r in group]) for key in keys}
        )
    return summary


def render(content: dict) -> Section:
    """Return the section of a result."""
    settings, rows = content["settings"], content["results"]
    seeds = len({row["seed"] for row in rows})
    pilots = "; ".join(
        f"{arm} {', '.join(f'{rate:g} ({accuracy:.3f})' for rate, accuracy in accuracies)}"
        for arm, accuracies in settings["pilots"].items()
    )
    cells = [
        [
            row["arm"],
            f"{settings['learning_rates'][row['arm']]:g}",
            *(
                f"{row[f'{kind}_before']['mean']:.3f} to {_with_interval(row[f'{kind}_after'])}"
                for kind in ("greedy", "sampled")
            ),
            _with_interval(mean_and_interval(row["below"]), "+") if row["below"] else "-",
            _with_interval(row["final_reward"]),
        ]
        for row in summarize(rows)
    ]
    text = [
        "## BAPO, GRPO and VESPO on a chat model",
        "SmolLM2-135M-Instruct with LoRA on the sums of `make demo-llm`: 128 completions a generation, "
        f"{settings['updates_per_generation']} updates on them, {settings['generations']} generations. GRPO means the "
        "fixed clip range 0.8 to 1.2 in the same code; VESPO runs in TRL's trainer. Accuracy is of "
        f"{settings['problems']} held-out problems, before to after. Figures are means over {seeds} seeds ± half the "
        "width of the 95 % interval (Student's t). BAPO above: its sampled accuracy less the arm's, seed by seed.",
        f"Learning rates: the best of three for each arm, by sampled accuracy after {settings['pilot_generations']} "
        f"generations on another seed: {pilots}.",
        table(["Arm", "Learning rate", "Greedy", "Mean of 4 samples", "BAPO above", "Final reward"], cells),
        provenance(content),
    ]
    return Section("\n\n".join(text))


def _with_interval(value: dict, sign: str = "") -> str:
    half_width = value["half_width"]
    return f"{value['mean']:{sign}.3f}" + ("" if half_width is None else f" ± {half_width:.3f}")


if __name__ == "__main__":
    main()
