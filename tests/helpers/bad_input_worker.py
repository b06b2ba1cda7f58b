"""Training in which something goes wrong on one rank: `python -m tests.helpers.bad_input_worker FOLDER FAULT`.

Writes what each rank raised, and at which update, to FOLDER/RANK.txt.
"""

import math
import sys
import traceback
from datetime import datetime
from pathlib import Path

from accelerate import PartialState

from bapo_trl import BAPOTrainer
from bapo_trl.upstream.fixes import end_training
from tests.helpers.toy import digits_reward, toy_dataset, toy_trainer


STALE = {
    "num_iterations": 1, "replay_fraction": 0.5, "partial_rollout_oversampling": 1.5,
    "partial_rollout_chunk_length": 2,
}  # fmt: skip


def main(folder: str, fault: str) -> None:
    rank = resume = None

    def only_rank_1(completions, **kwargs):
        rewards = digits_reward(completions)
        if rank == 1 and fault == "reward raises":
            raise KeyError("mine")
        return [math.inf, *rewards[1:]] if rank == 1 else rewards

    class BreaksGradient(BAPOTrainer):
        """Of the second update, on rank 1."""

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            if self.state.global_step == 1 and rank == 1:
                loss.register_hook(lambda gradient: gradient * math.nan)
            return loss

    parts, settings = {}, {"shuffle_dataset": False, "gradient_checkpointing": False}
    if fault.startswith("reward"):
        settings["reward_funcs"] = only_rank_1
    elif fault == "gradient":
        settings["trainer_class"] = BreaksGradient
    elif fault == "row":  # with a value that no checkpoint could keep
        settings |= STALE
        parts["train_dataset"] = toy_dataset().with_transform(
            lambda rows: {**rows, "when": [datetime(2026, 11, 23) if rank == 1 else "today"] * len(rows["prompt"])}
        )
    else:  # pool or queue: of its own, in a checkpoint
        settings |= STALE
        toy_trainer(Path(folder) / "out", **settings, max_steps=2, save_strategy="steps", save_steps=2).train()
        resume = f"{folder}/out/checkpoint-2"
    trainer = toy_trainer(Path(folder) / "out", trainer_args=parts, **settings)
    rank = PartialState().process_index
    assert trainer.accelerator.num_processes == 2
    if resume is not None and rank == 1:
        (file,) = Path(resume).glob(f"*_{fault}_00001_of_00002.safetensors")
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        said = "".join(traceback.format_exception_only(error))
        (Path(folder) / f"{rank}.txt").write_text(
            f"{said}{type(trainer.model_wrapped).__name__} {trainer.state.global_step}"
        )
        if fault == "reward raises":  # of rank 1 alone
            raise
    end_training(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
