"""A rank's queue and pool in a checkpoint: what is written comes back, and nothing else is taken for it."""

from pathlib import Path

import pytest

from bapo_trl.inputs.written_values import DECODER
from bapo_trl.replay import buffer as buffers
from bapo_trl.replay.buffer import ReplayBuffer
from bapo_trl.rollouts import pool as pools
from bapo_trl.rollouts.pool import RolloutPool
from tests.helpers.alike import assert_same_states
from tests.replay.test_buffer import contents, make_rows


EOS = 1


def queue_with(rank: int, num_ranks: int, count: int) -> ReplayBuffer:
    queue = ReplayBuffer(1000)
    queue.add(make_rows(5, count, first=100 * rank))
    queue.draw(count // 2, 6, 6)
    return queue


def pool_with(rank: int, num_ranks: int, count: int) -> RolloutPool:
    """Groups of 2 completions: the first has ended, the second has two segments, of which the latest is not scored."""
    pool = RolloutPool(2, 20, [EOS], rank, num_ranks)
    for index in range(count):
        pool.admit({"prompt": f"rank {rank}", "level": [index, {"é": None}]}, [5, 6 + index])
    begun = pool.unfinished()
    pool.take(begun, [[7, EOS], [8, 9]] * count, 0, 2, [[-0.5, None], [-0.25, -1.5]] * count)
    for _, completion in pool.unscored():
        completion.logps += [-0.5, -0.75]
    pool.take(pool.unfinished(), [[11, 12]] * count, 4, 2, [[-2.0, -3.0]] * count)
    return pool


MODULES = {"replay_queue": buffers, "rollout_pool": pools}
FORMATS = {kind: module.FILES.format for kind, module in MODULES.items()}


def save(kind: str, part, folder: Path, rank: int, num_ranks: int) -> Path:
    return MODULES[kind].FILES.write(folder, rank, num_ranks, part.state_dict())


def save_ranks(kind: str, folder: Path, counts: list[int]) -> list:
    make = queue_with if kind == "replay_queue" else pool_with
    parts = [make(rank, len(counts), count) for rank, count in enumerate(counts)]
    for rank, part in enumerate(parts):
        path = save(kind, part, folder, rank, len(counts))
        assert path.name == f"{kind}_{rank:05d}_of_{len(counts):05d}.safetensors"
    return parts


def load(kind: str, folder: Path, rank: int, num_ranks: int, part=None):
    module = MODULES[kind]
    if part is None:
        part = ReplayBuffer(1000) if kind == "replay_queue" else RolloutPool(2, 20, [EOS], rank, num_ranks)
    assert module.FILES.load(folder, rank, num_ranks, part.load_state_dict, module.deal_out)
    return part


@pytest.mark.parametrize("counts", [[7], [5, 0, 3]])
@pytest.mark.parametrize("kind", MODULES)
def test_what_is_saved_comes_back(tmp_path, kind, counts):
    for rank, part in enumerate(save_ranks(kind, tmp_path, counts)):
        restored = load(kind, tmp_path, rank, len(counts))
        assert_same_states(restored.state_dict(), part.state_dict())
        assert len(restored) == counts[rank]


def test_a_completion_comes_back_with_its_segments_and_log_probabilities(tmp_path):
    save_ranks("rollout_pool", tmp_path, [3])
    restored = load("rollout_pool", tmp_path, 0, 1)
    completion = next(iter(restored)).completions[1]
    assert (completion.tokens, completion.segments) == ([8, 9, 11, 12], [[0, 2], [4, 2]])
    assert (completion.logps, completion.sampler_logps) == ([-0.5, -0.75], [-0.25, -1.5, -2.0, -3.0])
    assert restored.counts == {"emitted": 0, "emitted_tokens": 0, "ended": 3, "ended_tokens": 6}


def test_values_of_files_come_back_as_written(tmp_path):
    row = DECODER.decode(
        '{"a": [0.10, 2.50, 1E+400, -0, NaN, 12345678901234567890123], "b": {"1": 7, "é": [null, true]}}'
    )
    pool = RolloutPool(1, 20, [EOS])
    pool.admit(row, [5])
    save("rollout_pool", pool, tmp_path, 0, 1)
    (group,) = load("rollout_pool", tmp_path, 0, 1, RolloutPool(1, 20, [EOS]))
    assert str(group.inputs) == str(row)
    assert group.inputs["a"][0] * 2 == 0.2


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_another_number_of_ranks_deals_the_rows_out_and_loses_none(tmp_path, num_ranks):
    save_ranks("replay_queue", tmp_path, [5, 0, 4])
    dealt = [contents(load("replay_queue", tmp_path, rank, num_ranks)) for rank in range(num_ranks)]
    in_order = [0, 1, 2, 3, 4, 200, 201, 202, 203]
    assert dealt == [in_order[rank::num_ranks] for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_another_number_of_ranks_deals_the_groups_out_and_loses_none(tmp_path, num_ranks):
    saved = save_ranks("rollout_pool", tmp_path, [2, 0, 3])
    dealt = [load("rollout_pool", tmp_path, rank, num_ranks) for rank in range(num_ranks)]
    in_order = sorted((group for pool in saved for group in pool), key=lambda group: group.id)
    assert [list(pool) for pool in dealt] == [in_order[rank::num_ranks] for rank in range(num_ranks)]
    assert sum(pool.counts["ended"] for pool in dealt) == 5
    assert all(pool.counts.keys() == saved[0].counts.keys() for pool in dealt)
    new = [pool.admit({}, [5]) for pool in dealt]
    assert len({*new, in_order[-1].id}) == num_ranks + 1
    assert min(new) > in_order[-1].id


def test_dealt_out_rows_are_in_the_order_of_entry_so_that_the_first_leave(tmp_path):
    for rank in range(2):
        queue = ReplayBuffer(100)
        for version in range(3):
            queue.add(make_rows(version, 2, first=100 * rank + 10 * version))
        save("replay_queue", queue, tmp_path, rank, 2)
    queue = load("replay_queue", tmp_path, 0, 1, ReplayBuffer(4))
    assert contents(queue) == [20, 21, 120, 121]
    assert queue.evictions["overflowed"] == 8


ANOTHER = {"replay_queue": (b'"F32"', b'"I32"'), "rollout_pool": (b'"next_id": 5', b'"next_id": 7')}
CHANGED = "is damaged .its checksum does not match"


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (lambda kind, content, other: content.replace(*ANOTHER[kind], 1), CHANGED),
        (lambda kind, content, other: other, CHANGED),
        (
            lambda kind, content, other: content.replace((old := FORMATS[kind].encode()), old[:-1] + b"9", 1),
            "is damaged .its format is 'bapo_trl .* 9', not '{format}'",
        ),
        (lambda kind, content, other: None, "is missing, but the files of other ranks exist"),
    ],
    ids=["another type or value", "of another rank", "format", "removed"],
)
def test_damaged_foreign_and_missing_files_are_rejected_by_name(tmp_path, kind, damaged, message, num_ranks):
    save_ranks(kind, tmp_path, [5, 2])
    other, path = (tmp_path / f"{kind}_0000{rank}_of_00002.safetensors" for rank in range(2))
    content = damaged(kind, path.read_bytes(), other.read_bytes())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path.name} {message.format(format=FORMATS[kind])}"):
        load(kind, tmp_path, 1, num_ranks)


@pytest.mark.parametrize("kind", MODULES)
def test_files_of_two_runs_are_rejected(tmp_path, kind):
    save_ranks(kind, tmp_path, [2])
    save_ranks(kind, tmp_path, [2, 2])
    with pytest.raises(ValueError, match=rf"{kind.replace('_', ' ')}s of runs with \[1, 2\] processes"):
        load(kind, tmp_path, 0, 1)
