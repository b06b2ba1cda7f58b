"""Files of a rank's state in a checkpoint that are damaged, foreign or missing: each is refused by its name."""

from pathlib import Path

import pytest

from bapo_trl.replay import queue as queues
from bapo_trl.rollouts import pool as pools
from tests.replay.test_queue import queues_with
from tests.rollouts.test_pool_checkpoint import pool_of


FORMATS = {"replay_queue": queues.FILES.format, "rollout_pool": pools.FILES.format}


def save_rank(kind: str, folder: Path, rank: int, num_ranks: int) -> None:
    queue = kind == "replay_queue"
    state = (queues_with([5, 4])[rank] if queue else pool_of(rank, num_ranks, 2)).state_dict()
    (queues if queue else pools).FILES.write(folder, rank, num_ranks, state)


def load_rank(kind: str, folder: Path, rank: int, num_ranks: int) -> None:
    if kind == "replay_queue":
        module, part = queues, queues.ReplayQueue(10)
    else:
        module, part = pools, pools.RolloutPool(2, 20, [1], rank, num_ranks)
    module.FILES.load(folder, rank, num_ranks, part.load_state_dict, module.deal_out)


ANOTHER = {"replay_queue": (b'"F32"', b'"I32"'), "rollout_pool": (b'"next_id": 5', b'"next_id": 7')}
CHANGED = "is damaged .what it holds is not what was written"


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda kind, content, other: content.replace(*ANOTHER[kind], 1), CHANGED),
        (lambda kind, content, other: other, CHANGED),
        (
            lambda kind, content, other: content.replace((old := FORMATS[kind].encode()), old[:-1] + b"9", 1),
            "is damaged .its format is 'bapo_trl .* 9', not '{format}'",
        ),
        (lambda kind, content, other: None, "is missing, while other ranks' are there"),
    ],
    ids=["another type or value", "of another rank", "format", "removed"],
)
def test_damaged_foreign_and_missing_files_are_refused_by_name(tmp_path, kind, damaged, message, num_ranks):
    for rank in range(2):
        save_rank(kind, tmp_path, rank, 2)
    other, path = (tmp_path / f"{kind}_0000{rank}_of_00002.safetensors" for rank in range(2))
    content = damaged(kind, path.read_bytes(), other.read_bytes())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.name} {message.format(format=FORMATS[kind])}"):
        load_rank(kind, tmp_path, 1, num_ranks)


@pytest.mark.parametrize("kind", FORMATS)
def test_files_of_two_runs_are_refused(tmp_path, kind):
    save_rank(kind, tmp_path, 0, 1)
    save_rank(kind, tmp_path, 1, 2)
    with pytest.raises(ValueError, match=rf"{kind.replace('_', ' ')}s of runs with \[1, 2\] processes"):
        load_rank(kind, tmp_path, 0, 1)
