"""Trains with a replay queue on two ranks whose queues differ in size, and writes what each rank saw."""

import sys

from accelerate import PartialState

from bapo_trl import BAPOTrainer
from tests.helpers.ranks import finish
from tests.helpers.toy import digits_reward, toy_model, toy_run
from tests.replay.test_mixer import REPLAY


def unequal_reward(completions, **kwargs):
    """Give all completions of rank 1 the same reward, whose mean over 6 of them is another number in float32."""
    return [0.911] * len(completions) if PartialState().process_index else digits_reward(completions)


class Unequal(BAPOTrainer):
    """Rank 1 finds no advantage in its rows; both keep the bounds and the sizes of their queues."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bounds, self.sizes = [], []

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.accelerator.sync_gradients:
            self.bounds.append([self.clip_bounds.low.item(), self.clip_bounds.high.item()])
            self.sizes.append(len(self._replay.queue))
        return loss


def main(folder: str) -> None:
    args = {**REPLAY, "replay_zero_advantage": True, "num_iterations": 2, "num_generations": 6}
    trainer = toy_run(folder + "/run", model=toy_model(), trainer_class=Unequal, reward_funcs=unequal_reward, **args)
    finish(
        trainer, folder, bounds=trainer.bounds, sizes=trainer.sizes,
        ties=[log["frac_reward_zero_std"] for log in trainer.state.log_history if "frac_reward_zero_std" in log],
        weights=sum(weight.double().sum().item() for weight in trainer.model.parameters()),
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
