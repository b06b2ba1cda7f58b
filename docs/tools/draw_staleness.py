"""
Draw docs/staleness.png: the staleness of the samples of each update, under the settings that raise it.

    python docs/tools/draw_staleness.py

Each panel is a real training of a tiny model: what `staleness/mean` and `staleness/max` log.
"""

import tempfile
from pathlib import Path

from datasets import Dataset
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.tasks import character_tokenizer
from benchmarks.tiny_model import tiny_model


PICTURE = Path(__file__).resolve().parents[1] / "staleness.png"
UPDATES = 32
STALEST, MEAN = "#0072B2", "#D55E00"  # of Okabe and Ito
PANELS = {
    "TRL's default: 1 update per generation": {"steps_per_generation": 1},
    "steps_per_generation=4": {"steps_per_generation": 4},
    "steps_per_generation=4\nnum_iterations=2": {"steps_per_generation": 4, "num_iterations": 2},
    "steps_per_generation=4\nreplay_fraction=0.5": {"steps_per_generation": 4, "replay_fraction": 0.5},
    "steps_per_generation=4, replay_fraction=1\nreplay_min_staleness=8": {
        "steps_per_generation": 4, "replay_fraction": 1.0, "replay_min_staleness": 8,
    },
    "steps_per_generation=4\npartial_rollout_oversampling=1.5": {
        "steps_per_generation": 4, "partial_rollout_oversampling": 1.5, "partial_rollout_chunk_length": 6,
    },
}  # fmt: skip


def reward(completions, **kwargs):
    """Reward short completions: any reward with a spread will do."""
    return [-float(len(text)) for text in completions]


def staleness(settings: dict, updates: int = UPDATES) -> list[tuple[float, float]]:
    """Return `staleness/mean` and `staleness/max` of each update of a tiny training."""
    tokenizer = character_tokenizer("0123456789+-*/=?")
    with tempfile.TemporaryDirectory() as folder:
        args = BAPOConfig(
            folder, per_device_train_batch_size=8, gradient_accumulation_steps=1, num_generations=4,
            max_completion_length=48, learning_rate=1e-6, max_steps=updates, logging_steps=1, save_strategy="no",
            use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False, report_to="none",
            disable_tqdm=True, **settings,
        )  # fmt: skip
        trainer = BAPOTrainer(
            tiny_model(tokenizer, seed=0, max_position_embeddings=128),
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [f"{i}+{i}=" for i in range(64)]}),
            processing_class=tokenizer,
        )
        trainer.train()
    logs = [log for log in trainer.state.log_history if "staleness/max" in log]
    return [(log["staleness/mean"], log["staleness/max"]) for log in logs]


def draw(path: Path) -> None:
    """Write the picture."""
    figure = Figure(figsize=(8, 8.4), layout="constrained")
    updates = range(1, UPDATES + 1)
    panels = figure.subplots(3, 2, sharex=True, sharey=True)
    for axes, (title, settings) in zip(panels.flat, PANELS.items(), strict=True):
        means, largest = zip(*staleness(settings), strict=True)
        axes.fill_between(updates, largest, step="mid", color=STALEST, alpha=0.25, linewidth=0)
        axes.step(updates, largest, where="mid", color=STALEST, linewidth=1.5, label="stalest sample")
        axes.plot(updates, means, ".", color=MEAN, markersize=8, label="mean")
        axes.set_title(title, fontsize=10.5, family=None if "TRL" in title else "monospace")
        axes.xaxis.set_major_locator(MultipleLocator(8))
        axes.yaxis.set_major_locator(MultipleLocator(4))
        axes.tick_params(labelsize=11)
        axes.grid(alpha=0.3)
    panels[0][0].legend(loc="upper left", fontsize=11)
    figure.suptitle("Staleness under six settings", fontsize=14)
    figure.supxlabel("optimizer update", fontsize=13)
    figure.supylabel("staleness of the samples (policy versions)", fontsize=13)
    figure.savefig(path, dpi=150, facecolor="white")


if __name__ == "__main__":
    draw(PICTURE)
    print(f"Written: {PICTURE.name}")
