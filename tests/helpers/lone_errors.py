"""What one of two ranks alone raises, in the parts of a run where each reads or checks what is its own.

    python -m tests.helpers.lone_errors FOLDER

A JSON line on the standard output has what each rank raised, by the case. Rank 1 is the one that finds something.
"""

import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from accelerate import PartialState

from bapo_trl.errors import InputError
from tests.helpers.save_kills import PARTIAL_REPLAY, in_processes
from tests.rollouts.test_rollout_rounds import prompts_of_many_lengths, trainer_of


SAVING = {**PARTIAL_REPLAY, "save_strategy": "steps", "save_steps": 3, "max_steps": 3}


def row(trainer, folder: Path, is_wrong: bool) -> None:
    """A value that no checkpoint could keep, in the rows of a rank."""
    when = datetime(2026, 11, 23) if is_wrong else "today"
    trainer.train_dataset = trainer.train_dataset.with_transform(
        lambda rows: {"prompt": rows["prompt"], "when": [when] * len(rows["prompt"])}
    )
    trainer.train()


def damaged(name: str) -> Callable:
    def resume(trainer, folder: Path, is_wrong: bool) -> None:
        file = folder / "saved" / "checkpoint-3" / f"{name}_00001_of_00002.safetensors"
        whole = file.read_bytes()
        if is_wrong:
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        try:
            trainer.train(resume_from_checkpoint=str(file.parent))
        finally:
            if is_wrong:
                file.write_bytes(whole)

    return resume


CASES = {"row": row, "pool": damaged("rollout_pool"), "queue": damaged("replay_queue")}


def raised(rank: int, folder: Path) -> dict[str, str]:
    data = {"train_dataset": prompts_of_many_lengths()}
    trainer_of(folder / "saved", **SAVING).train()
    assert PartialState().num_processes == 2
    errors = {}
    for name, case in CASES.items():
        trainer = trainer_of(folder / name, trainer_args=data, **PARTIAL_REPLAY, remove_unused_columns=False)
        try:
            case(trainer, folder, rank == 1)
        except (InputError, RuntimeError) as error:
            errors[name] = str(error)
    return errors


def main(folder: str) -> None:
    ranks = in_processes(2, Path(folder), lambda rank: raised(rank, Path(folder)))
    print(json.dumps(ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
