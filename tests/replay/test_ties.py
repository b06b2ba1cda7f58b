"""Groups with equal rewards, whatever rounding makes of them: the rule, and what the replay queue is offered."""

from fractions import Fraction

import pytest
import torch

from bapo_trl.batch.reward_sums import zero_advantage_rows
from tests.helpers.toy import ON_GPU, toy_run, training_logs
from tests.replay.test_mixer import REPLAY, Spy, queue_of


NAN = torch.nan

# 8 generations a prompt: the mean of 8 equal float32 numbers is often another number.
GROUPS_OF_8 = {**REPLAY, "num_generations": 8, "per_device_train_batch_size": 8, "replay_fraction": 0.0}
ZERO = {**GROUPS_OF_8, "replay_zero_advantage": True}


# The rule


def tied(rewards, weights=(1.0,), num_generations=3, **settings) -> list[bool]:
    rewards = torch.tensor(rewards)
    if rewards.dim() == 1:
        rewards = rewards.unsqueeze(1)
    return zero_advantage_rows(rewards, torch.tensor(weights), num_generations, **settings).tolist()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.7, 0.7, 0.7, 0.7, 0.7, 0.7001], [True] * 3 + [False] * 3),
        ([0.1, 0.1, 0.1, -0.357, -0.357, -0.357], [True] * 6),
        ([1000.0, 1000.0, 1000.0001], [False] * 3),  # neighbours in float32
        ([1e6, 1e6, 1e6], [True] * 3),
        ([NAN, 0.3, 0.3, NAN, 0.3, 0.4], [True] * 3 + [False] * 3),
        ([NAN, NAN, NAN, NAN, 0.4, NAN], [True] * 6),  # nothing to tell apart
    ],
)
def test_rewards_of_one_function_tie_where_they_are_the_same_number(rewards, expected):
    assert tied(rewards) == expected


def test_sums_that_differ_by_rounding_tie():
    rewards = [[0.5, 0.2], [0.4, 0.3], [0.7, 0.0]]  # all 0.7, but not in float32
    assert len(set(torch.tensor(rewards).sum(dim=1).tolist())) > 1
    assert tied(rewards, (1.0, 1.0)) == [True] * 3
    assert tied([[0.5, 0.2], [0.4, 0.3], [0.7, 0.00001]], (1.0, 1.0)) == [False] * 3


@pytest.mark.parametrize("num_generations", [2, 3, 7, 8, 16])
def test_no_tie_of_THREE_DECIMALS_is_missed(num_generations):
    rewards = (torch.arange(-2000, 2001) / 1000).repeat_interleave(num_generations).unsqueeze(1)
    assert zero_advantage_rows(rewards, torch.ones(1), num_generations).all()


# Through `train()`


def by_start(if_digit, otherwise):
    """A reward by whether a completion starts with a digit."""
    return lambda completions, **kwargs: [if_digit if text[:1].isdigit() else otherwise for text in completions]


def length_penalty(completions, **kwargs):
    return [0.9 - 0.007 * (len(text) // 4) for text in completions]


THREE_DECIMALS = by_start(0.357, 0.911)


class Ties(Spy):
    """Keeps the rewards of each generation."""

    def __init__(self, *args, **kwargs):
        self.rewards = []
        super().__init__(*args, **kwargs)

    def _calculate_rewards(self, *args):
        rewards_per_func = super()._calculate_rewards(*args)
        self.rewards.append(rewards_per_func.tolist())
        return rewards_per_func


def exact(value) -> Fraction:
    """Return the decimal number that a float32 stands for; 0 where there is none."""
    return Fraction(0) if value != value else Fraction(str(round(value, 4)))


def run_with_ties(tmp_path, reward_funcs, **args):
    """Train; return the trainer and, by generation, advantages and exact ties of the rows, and the logged fraction."""
    trainer = toy_run(tmp_path, trainer_class=Ties, reward_funcs=reward_funcs, **args)
    fractions = [log["frac_reward_zero_std"] for log in training_logs(trainer) if "frac_reward_zero_std" in log]
    weights = [Fraction(str(weight)) for weight in trainer.args.reward_weights or [1] * len(trainer.reward_funcs)]
    ties = []
    for rewards in trainer.rewards:
        totals = [sum(weight * exact(value) for weight, value in zip(weights, row, strict=True)) for row in rewards]
        groups = [totals[start : start + 8] for start in range(0, len(totals), 8)]
        ties.append([len(set(group)) == 1 for group in groups for _ in group])
    advantages = [advantages.cpu() for _, advantages in trainer.generated]
    return trainer, list(zip(advantages, ties, fractions, strict=True))


@pytest.mark.trainings
@pytest.mark.parametrize(
    ("reward_funcs", "args"),
    [
        (THREE_DECIMALS, {}),
        (THREE_DECIMALS, {"scale_rewards": "none"}),
        ([by_start(0.0, 1.0), length_penalty], {"reward_weights": [0.7, 0.3]}),
        ([by_start(None, 0.713), by_start(0.0, 0.1)], {}),
    ],
    ids=["decimals", "unscaled", "weighted", "none"],
)
def test_rows_of_tied_groups_are_offered_and_are_the_fraction_that_is_logged(tmp_path, reward_funcs, args):
    trainer, generations = run_with_ties(tmp_path, reward_funcs, **ZERO, **args)
    for advantages, is_tied, fraction in generations:
        assert (advantages == 0).tolist() == is_tied
        assert fraction == pytest.approx(sum(is_tied) / len(is_tied))
    assert {flag for _, is_tied, _ in generations for flag in is_tied} == {True, False}
    queued = [version for rows in queue_of(trainer).rows for version in rows.policy_versions]
    assert queued.count(0) == generations[0][1].count(False)


@pytest.mark.parametrize(
    "args", [{"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}], ids=str
)
def test_scaled_over_the_batch_tied_groups_are_offered_and_trls_fraction_is_left_alone(tmp_path, args):
    _, generations = run_with_ties(tmp_path, THREE_DECIMALS, **ZERO, **args)
    for advantages, is_tied, fraction in generations:
        assert (advantages == 0).tolist() == is_tied
        assert fraction in (0.0, float(all(is_tied)))  # TRL's is about the rewards of the whole batch, at once
    assert any(any(is_tied) for _, is_tied, _ in generations)


@pytest.mark.skipif(ON_GPU, reason="on a GPU, these advantages are 0")
def test_without_the_flag_advantages_and_fraction_are_trls(tmp_path):
    """Rounding keeps some tied groups away from 0 there: the tests above can fail."""
    _, generations = run_with_ties(tmp_path, THREE_DECIMALS, **{**GROUPS_OF_8, "replay_fraction": 0.5})
    advantages = torch.cat([advantages for advantages, _, _ in generations])
    is_tied = torch.tensor([flag for _, is_tied, _ in generations for flag in is_tied])
    assert ((advantages != 0) & is_tied).any()
    assert advantages[is_tied].abs().max() < 2e-3
    assert any(fraction < sum(is_tied) / len(is_tied) for _, is_tied, fraction in generations)


# A subclass with rewards of its own
