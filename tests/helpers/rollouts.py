"""A rollout function as public ones are, and its training on two ranks: `python -m tests.helpers.rollouts FOLDER`.

Writes the updates of GRPOTrainer and of BAPOTrainer, and how often each sampled, to FOLDER/RANK.json.
"""

import sys
from pathlib import Path

from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig, BAPOTrainer
from tests.helpers.ranks import finish
from tests.helpers.toy import toy_trainer


def multi_turn(prompts, trainer):
    """
    Sample a turn at a time, by the trainer's own sampler, while episodes are active: later samples last longer.

    So the ranks sample differently often. After each turn the environment says a digit.
    """
    first = trainer.accelerator.process_index * len(prompts)
    prompt_ids = trainer._tokenize_prompts(prompts)[0]
    completion_ids = [[] for _ in prompts]
    masks = [[] for _ in prompts]
    turns_left = [1 + (first + place) // 4 for place in range(len(prompts))]
    heard = trainer.processing_class("7")["input_ids"]
    while any(turns_left):
        active = [place for place, turns in enumerate(turns_left) if turns]
        said, _ = trainer._generate_single_turn([prompt_ids[p] + completion_ids[p] for p in active], None, {}, 1)
        for place, tokens in zip(active, said, strict=True):
            turns_left[place] -= 1
            completion_ids[place] += tokens + heard
            masks[place] += [1] * len(tokens) + [0] * len(heard)
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None, "env_mask": masks}


def main(folder: str) -> None:
    num_turns = 0
    before = GRPOTrainer._generate_single_turn

    def silent_at_times(self, *args):
        nonlocal num_turns
        num_turns += 1
        said, logps = before(self, *args)
        return [[], *said[1:]], logps

    GRPOTrainer._generate_single_turn = silent_at_times
    results = {}
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (BAPOTrainer, BAPOConfig)):
        trainer = toy_trainer(
            Path(folder) / "out", None, trainer_class, config_class, {"rollout_func": multi_turn},
            per_device_train_batch_size=4, gradient_accumulation_steps=1, steps_per_generation=2, num_generations=2,
            gradient_checkpointing=False, max_steps=1,
        )  # fmt: skip
        num_turns = 0
        trainer.train()
        results[trainer_class.__name__] = {"updates": trainer.state.global_step, "turns": num_turns}
    finish(trainer, folder, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
