"""Trains with a replay queue on two ranks whose queues differ in size, and writes what each rank saw."""

import json
import sys
from pathlib import Path

from bapo_trl import BAPOTrainer
from bapo_trl.distributed import end_training
from tests.test_replay import REPLAY
from tests.toy import toy_model, toy_trainer


class Unequal(BAPOTrainer):
    """Rank 1 finds no advantage in half of its rows; both keep the bounds and the sizes of their queues."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bounds, self.sizes = [], []

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)
        rewards[len(rewards) // 2 :] *= 0
        return rewards

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.accelerator.sync_gradients:
            self.bounds.append([self.clip_bounds.low.item(), self.clip_bounds.high.item()])
            self.sizes.append(len(self._replay.queue))
        return loss


def main(folder: str) -> None:
    args = {**REPLAY, "replay_zero_advantage": True, "num_iterations": 2}
    trainer = toy_trainer(folder + "/run", model=toy_model(), trainer_class=Unequal, **args)
    trainer.train()
    result = {
        "num_processes": trainer.accelerator.num_processes,
        "bounds": trainer.bounds,
        "sizes": trainer.sizes,
        "weights": sum(weight.double().sum().item() for weight in trainer.model.parameters()),
    }
    (Path(folder) / f"{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    end_training(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
