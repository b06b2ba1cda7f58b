"""Trains with partial rollouts on ranks whose completions differ much in length, and writes what each rank saw."""

import json
import sys

from datasets import Dataset

from bapo_trl.tasks import character_tokenizer
from tests.helpers.ranks import finish
from tests.helpers.toy import toy_run
from tests.rollouts.test_rollout_rounds import PARTIAL, Recording, countdown_model, trained_rows


def main(folder: str, settings: str) -> None:
    settings = json.loads(settings)
    resume = settings.pop("resume", None)
    tokenizer = character_tokenizer()
    # A generation's prompts go to the ranks in turns of `groups`: short ones to rank 0, long ones to rank 1, whose
    # completions run on
    groups = 12
    short, long = (
        [tokenizer.decode([start + i % width]) for i in range(groups)] for start, width in ((2, 4), (20, 18))
    )
    prompts = ["1+" + last for _ in range(5) for last in short + long]
    trainer = toy_run(
        folder + "/run",
        model=countdown_model(),
        trainer_class=Recording,
        trainer_args={"train_dataset": Dataset.from_dict({"prompt": prompts})},
        **{**PARTIAL, "shuffle_dataset": False, **settings},
        resume=resume,
    )
    finish(
        trainer, folder, prompts=trainer.prompts,
        rows=[[ids.tolist() for ids in row] for *row, _ in trained_rows(trainer)],
        rows_per_batch=[int(batch["completion_mask"].any(dim=1).sum()) for batch in trainer.batches],
        parked=[group.inputs["prompt"] for group in trainer._rounds.pool],
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
