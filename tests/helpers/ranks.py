"""What each rank of a run leaves for the test: its worker writes it at the end, and the test reads it."""

import json
from pathlib import Path

from bapo_trl.upstream.fixes import end_training
from tests.helpers.toy import training_logs


def finish(trainer, folder: str | Path, **result) -> None:
    """Write what this rank found, its logs and what it trained in to FOLDER/RANK.json, and end the training."""
    found = {
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        # Named without a variable: who holds the engine beyond `end_training` destroys the process group with it
        "engine": type(trainer.model_wrapped).__name__,
        "sharding": type(getattr(trainer.model_wrapped, "optimizer", None)).__name__,
        "logs": training_logs(trainer),
        **result,
    }
    Path(folder, f"{trainer.accelerator.process_index}.json").write_text(json.dumps(found))
    end_training(trainer)


def read_ranks(folder: Path, num_processes: int = 2, **expected) -> list[dict]:
    """Return what each rank wrote; see that so many processes trained, and that each says what is `expected`."""
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]
    for rank in ranks:
        assert rank["num_processes"] == num_processes
        assert {name: rank[name] for name in expected} == expected
    return ranks
