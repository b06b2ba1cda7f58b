"""The pool in a checkpoint folder: what is written comes back, and nothing else is taken for it."""

import pytest

from bapo_trl.rollouts.checkpoint import load_pool, save_pool
from bapo_trl.rollouts.pool import PoolCounts, RolloutPool


EOS = 1


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
    state = pool_of(1, 2, 3).state()
    assert save_pool(state, tmp_path, 1, 2).name == "rollout_pool_00001_of_00002.safetensors"
    save_pool(pool_of(0, 2, 0).state(), tmp_path, 0, 2)
    assert load_pool(tmp_path, 1, 2) == state
    completion = state.groups[0].completions[1]
    assert (completion.tokens, completion.segments) == ([8, 9, 11, 12], [[0, 2], [4, 2]])
    assert (completion.logps, completion.sampler_logps) == ([-0.5, -0.75], [-0.25, -1.5, -2.0, -3.0])
    assert state.counts == PoolCounts(emitted=0, emitted_tokens=0, ended=3, ended_tokens=6)


def test_columns_of_any_size_come_back(tmp_path):
    """100 MB are the most that the header of a safetensors file takes."""
    pool = RolloutPool(1, 20, [EOS])
    pool.admit({"prompt": "é", "tests": "x" * 100_000_000}, [5])
    save_pool(pool.state(), tmp_path, 0, 1)
    assert load_pool(tmp_path, 0, 1) == pool.state()


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_another_number_of_ranks_deals_the_groups_out_again(tmp_path, num_ranks):
    pools = [pool_of(rank, 3, num_groups) for rank, num_groups in enumerate((2, 0, 3))]
    for rank, pool in enumerate(pools):
        save_pool(pool.state(), tmp_path, rank, 3)
    dealt = [load_pool(tmp_path, rank, num_ranks) for rank in range(num_ranks)]
    saved = {group.id: group for pool in pools for group in pool}
    assert sorted(group.id for state in dealt for group in state.groups) == sorted(saved)
    assert all(group == saved[group.id] for state in dealt for group in state.groups)
    assert max(len(state.groups) for state in dealt) - min(len(state.groups) for state in dealt) <= 1
    assert sum(state.counts.ended for state in dealt) == 5
    assert all(state.next_id > max(saved) for state in dealt)
