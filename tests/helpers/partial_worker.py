"""Trains with partial rollouts on ranks whose completions differ much in length, and writes what each rank saw."""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset

from bapo_trl.tasks import character_tokenizer
from bapo_trl.upstream.fixes import end_training
from tests.helpers.toy import ending_model, toy_trainer
from tests.rollouts.test_rollout_rounds import PARTIAL, Recording, countdown_model, trained_rows


def main(folder: str, settings: str) -> None:
    settings = json.loads(settings)
    resume = settings.pop("resume", None)
    counts_down = settings.pop("counts_down", False)
    tokenizer = character_tokenizer()
    # A generation's prompts go to the ranks in turns of `groups`: short ones to rank 0, long ones to rank 1, whose
    # completions run on
    groups = 12
    short, long = (
        [tokenizer.decode([start + i % width]) for i in range(groups)] for start, width in ((2, 4), (20, 18))
    )
    prompts = ["1+" + last for _ in range(5) for last in short + long]
    trainer = toy_trainer(
        folder + "/run",
        model=countdown_model() if counts_down else ending_model(),
        trainer_class=Recording,
        trainer_args={"train_dataset": Dataset.from_dict({"prompt": prompts})},
        **{**PARTIAL, "shuffle_dataset": False, **settings},
    )
    trainer.train(resume_from_checkpoint=resume)
    rows = [
        [prompt_ids.tolist(), token_ids.tolist(), versions.tolist(), logps.tolist()]
        for prompt_ids, token_ids, versions, logps in trained_rows(trainer)
    ]
    process = trainer.accelerator.process_index
    result = {
        "num_processes": trainer.accelerator.num_processes,
        "prompts": trainer.prompts,
        "rows": rows,
        "rows_per_batch": [int(batch["completion_mask"].any(dim=1).sum()) for batch in trainer.batches],
        "parked": [group.inputs["prompt"] for group in trainer._rounds.pool],
    }
    (Path(folder) / f"{process}.json").write_text(json.dumps(result))
    if process == 0:
        torch.save(trainer.weights, Path(folder) / "weights.pt")
    end_training(trainer)


if __name__ == "__main__":
    main(*sys.argv[1:])
