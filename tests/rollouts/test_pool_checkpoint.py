"""The pool in a checkpoint folder: what is written comes back, and nothing else is taken for it."""

import pytest

from bapo_trl.rollouts.pool import FILES, RolloutPool, deal_out
from tests.helpers.alike import assert_same_states


EOS = 1


def save_pool(pool, folder):
    return FILES.write(folder, pool.rank, pool.num_ranks, pool.state_dict())


def load_pool(pool, folder):
    return FILES.load(folder, pool.rank, pool.num_ranks, pool.load_state_dict, deal_out)


def pool_of(rank: int, num_ranks: int, num_groups: int) -> RolloutPool:
    """Groups of 2 completions: the first has ended, the second has two segments, of which the latest is not scored."""
    pool = RolloutPool(2, 20, [EOS], rank, num_ranks)
    for index in range(num_groups):
        pool.admit({"prompt": f"rank {rank}", "level": [index, {"é": None}]}, [5, 6 + index])
    begun = pool.unfinished()
    pool.take(begun, [[7, EOS], [8, 9]] * num_groups, 0, 2, [[-0.5, None], [-0.25, -1.5]] * num_groups)
    for _, completion in pool.unscored():
        completion.logps += [-0.5, -0.75]
    pool.take(pool.unfinished(), [[11, 12]] * num_groups, 4, 2, [[-2.0, -3.0]] * num_groups)
    return pool


def test_what_is_saved_comes_back(tmp_path):
    pool, restored = pool_of(1, 2, 3), RolloutPool(2, 20, [EOS], 1, 2)
    assert save_pool(pool, tmp_path).name == "rollout_pool_00001_of_00002.safetensors"
    save_pool(pool_of(0, 2, 0), tmp_path)
    assert load_pool(restored, tmp_path)
    assert list(restored) == list(pool)
    assert_same_states(restored.state_dict(), pool.state_dict())
    completion = next(iter(restored)).completions[1]
    assert (completion.tokens, completion.segments) == ([8, 9, 11, 12], [[0, 2], [4, 2]])
    assert (completion.logps, completion.sampler_logps) == ([-0.5, -0.75], [-0.25, -1.5, -2.0, -3.0])
    assert restored.counts == {"emitted": 0, "emitted_tokens": 0, "ended": 3, "ended_tokens": 6}


def test_columns_of_any_size_come_back(tmp_path):
    """100 MB are the most that the header of a safetensors file takes."""
    pool = RolloutPool(1, 20, [EOS])
    pool.admit({"prompt": "é", "tests": "x" * 100_000_000}, [5])
    save_pool(pool, tmp_path)
    restored = RolloutPool(1, 20, [EOS])
    assert load_pool(restored, tmp_path)
    assert list(restored) == list(pool)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_another_number_of_ranks_deals_the_groups_out_again(tmp_path, num_ranks):
    pools = [pool_of(rank, 3, num_groups) for rank, num_groups in enumerate((2, 0, 3))]
    for pool in pools:
        save_pool(pool, tmp_path)
    dealt = [RolloutPool(2, 20, [EOS], rank, num_ranks) for rank in range(num_ranks)]
    assert all(load_pool(pool, tmp_path) for pool in dealt)
    saved = {group.id: group for pool in pools for group in pool}
    assert sorted(group.id for pool in dealt for group in pool) == sorted(saved)
    assert all(group == saved[group.id] for pool in dealt for group in pool)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert sum(pool.counts["ended"] for pool in dealt) == 5
    assert all(pool.counts.keys() == pools[0].counts.keys() for pool in dealt)
    assert all(pool.admit({}, [5]) > max(saved) for pool in dealt)
