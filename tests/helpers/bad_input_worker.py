"""Training in which one rank alone sees bad data: `python -m tests.helpers.bad_input_worker FOLDER FAULT`.

Writes what each rank raised to FOLDER/RANK.txt.
"""

import math
import sys
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset

from bapo_trl.upstream_fixes import end_training
from tests.helpers.toy import digits_reward, toy_dataset, toy_trainer


def main(folder: str, fault: str) -> None:
    rank = PartialState(cpu=True).process_index

    def only_rank_1(completions, **kwargs):
        rewards = digits_reward(completions)
        return [math.inf, *rewards[1:]] if rank == 1 else rewards

    parts, reward = {}, digits_reward
    if fault == "reward":
        reward = only_rank_1
    else:  # in the rows of rank 1, as a transform makes them
        prompts = toy_dataset().to_dict()["prompt"]
        prompts[8:16] = ["?"] * 8
        dataset = Dataset.from_dict({"prompt": prompts})
        parts["train_dataset"] = dataset.with_transform(
            lambda rows: {"prompt": ["" if prompt == "?" else prompt for prompt in rows["prompt"]]}
        )
    trainer = toy_trainer(Path(folder) / "out", reward_funcs=reward, trainer_args=parts, shuffle_dataset=False)
    assert trainer.accelerator.num_processes == 2
    try:
        trainer.train()
    except Exception as error:
        (Path(folder) / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    end_training(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
