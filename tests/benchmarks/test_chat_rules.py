"""The rules of the chat study, on accuracies made up for them."""

import pytest

from benchmarks.chat_rules import CAP, DELTA, arms_to_judge, best_arm, cap_stays, differing, is_whole


NOISE = (-0.02, 0.02, -0.01, 0.01, -0.015, 0.015, -0.005, 0.005)


def task(**above: float) -> dict[str, dict[int, float]]:
    """Accuracies that differ from VESPO's by a mean and a noise: by 3 standard errors of 0.005 at 0.015."""
    arms = {"VESPO": dict.fromkeys(range(8), 0.5)}
    for arm, mean in above.items():
        arms[{"cap": CAP, "delta": DELTA}.get(arm, arm)] = {
            seed: 0.5 + mean + noise for seed, noise in enumerate(NOISE)
        }
    return arms


def test_an_arm_is_named_that_is_above_on_both_tasks_by_an_interval_for_six():
    assert best_arm([task(a=0.03, b=0.04), task(a=0.04, b=0.05)]) == "b"
    assert best_arm([task(a=0.03, b=0.04), task(a=0.03)]) == "a"
    assert best_arm([task(a=0.03), task(a=-0.03)]) is None
    assert best_arm([task(a=0.03), task(a=0.015)]) is None  # above by an interval for one comparison alone
    assert best_arm([task(a=-0.03), task(a=-0.03)]) is None


def test_a_task_with_a_seed_missing_decides_nothing():
    part = task(a=0.03)
    del part["a"][7]
    with pytest.raises(ValueError, match="a has 7 of 8 seeds"):
        best_arm([task(a=0.03), part])


def test_a_task_is_shown_when_it_is_whole():
    part = task(a=0.03, b=0.04)
    assert is_whole(part)
    del part["b"][0]
    assert not is_whole(part)
    assert not is_whole({"a": part["a"]})  # nothing to compare with


@pytest.mark.parametrize("rule", [best_arm, cap_stays])
def test_one_task_of_two_decides_nothing(rule):
    with pytest.raises(ValueError, match="1 of 2 tasks"):
        rule([task(a=0.03, cap=0.03, delta=0.0)])


def test_the_cap_is_judged_on_both_tasks():
    with pytest.raises(ValueError, match="cap was not run on all tasks"):
        cap_stays([task(cap=0.03, delta=0.0), task(delta=0.0)])


def test_the_cap_which_has_two_seeds_at_4_is_judged_at_16_alone():
    part = task(a=0.03, cap=0.03)
    part[CAP] = {seed: part[CAP][seed] for seed in (0, 1)}
    assert differing(arms_to_judge(part, updates=4)) == ["a"]
    with pytest.raises(ValueError, match="cap has 2 of 8 seeds"):
        differing(arms_to_judge(part, updates=16))


def apart(cap: float) -> dict[str, dict[int, float]]:
    """A task whose cap ends above `delta` by a mean and a noise."""
    arms = task(cap=cap)
    return {**arms, DELTA: arms["VESPO"]}


@pytest.mark.parametrize(
    ("first", "second", "stays"),
    [(0.015, 0.0, True), (0.0, 0.015, True), (0.0, 0.0, False), (0.015, -0.015, False), (-0.015, 0.0, False)],
)
def test_the_cap_stays_where_it_is_above_on_one_task_and_below_on_none(first, second, stays):
    assert cap_stays([apart(first), apart(second)]) is stays


def test_arms_that_differ_are_listed_on_either_side():
    assert differing(task(a=0.03, b=-0.03, c=0.0)) == ["a", "b"]
