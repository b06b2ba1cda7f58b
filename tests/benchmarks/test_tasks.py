"""The tasks of the studies: their problems, their demonstrations and their rewards."""

import random
import re
from statistics import fmean, pstdev

import pytest

from bapo_trl.tasks import load_task
from benchmarks import long_tailed_sums, rambling_totals, running_totals, warm_start
from benchmarks.long_tailed_sums import final_sum_reward
from benchmarks.make_task import TASKS
from benchmarks.rambling_totals import LIMITS, RIGHT_TOKENS, final_total_reward
from benchmarks.running_totals import final_answer_reward


GROUP = 16
COUNTDOWN = "".join(2 * letter for letter in "/.-,*&%$#!zyxwvuZYXWVUTSRQPONMLKJIHGFEDCBA")


@pytest.fixture(scope="module")
def groups():
    """Return answers of rambling totals, each with a group of completions of the demonstrator."""
    rng = random.Random(1)
    rows = rambling_totals.load_rambling_totals().train_dataset.select(range(1000))
    return [(row["answer"], [rambling_totals.demonstrate(row["prompt"], rng) for _ in range(GROUP)]) for row in rows]


# Problems


@pytest.mark.parametrize(
    ("name", "labels", "answer"), [("running_totals", "abcdefg", "{}"), ("rambling_totals", "abcde", "{:02}")]
)
def test_totals_are_right_and_held_out_problems_are_new(name, labels, answer):
    task = TASKS[name]()
    train, test = task.train_dataset["prompt"][:], task.test_dataset["prompt"][:]
    assert (len(set(train)), len(set(test)), set(train) & set(test)) == (8192, 512, set())
    for row in [*task.train_dataset, *task.test_dataset]:
        digits = re.fullmatch("".join(f"{label}([1-9])" for label in labels) + "=", row["prompt"]).groups()
        assert row["answer"] == answer.format(sum(map(int, digits)))
    assert TASKS[name](seed=1).train_dataset["prompt"][:] != train


def test_long_tailed_sums_are_those_of_the_demo():
    def plain(text):
        return int(str("abcdefghijklmnopqrst".index(text[0])) + text[1])

    task, sums = TASKS["long_tailed_sums"](), load_task()
    for mine, demo in ((task.train_dataset, sums.train_dataset), (task.test_dataset, sums.test_dataset)):
        for row, other in zip(mine, demo, strict=True):
            a, b = re.fullmatch(r"([a-j]\d)\+([a-j]\d)", row["prompt"]).groups()
            assert f"{plain(a)}+{plain(b)}=" == other["prompt"]
            assert str(plain(row["answer"])) == other["answer"]


# Demonstrations


@pytest.mark.parametrize("name", ["running_totals", "rambling_totals", "long_tailed_sums"])
def test_demonstrations_are_of_the_alphabet_and_fit_the_model(name):
    task, rng = TASKS[name](), random.Random(1)
    prompts = task.train_dataset["prompt"][:]
    demonstrations = [task.warm_start.demonstrate(prompt, rng) for prompt in prompts]
    longest = max(map(len, demonstrations))
    assert longest + max(map(len, prompts)) < task.warm_start.model["max_position_embeddings"]
    assert name == "rambling_totals" or longest < task.max_new_tokens
    assert set("".join(demonstrations + prompts)) <= set(task.warm_start.alphabet)


@pytest.mark.parametrize(
    ("rate", "completions"),
    [
        (0.0, {"37+58=": "95", "97+58=": "155", "12+34=": "46", "99+99=": "198", "0+0=": "0"}),
        # 7+8 leaves 5 and 3+5 gives 8; 97+58: 5 and 9+5=14 leaves 4; 99+99: 8 and 9+9=18 leaves 8.
        (1.0, {"37+58=": "85", "97+58=": "45", "12+34=": "46", "99+99=": "88", "0+0=": "0"}),
    ],
)
def test_sums_forget_carries_at_the_given_rate(monkeypatch, rate, completions):
    monkeypatch.setattr(warm_start, "FORGOTTEN_CARRY_RATE", rate)
    assert {prompt: warm_start.demonstrate(prompt, random.Random(0)) for prompt in completions} == completions
    answer = "=d3" if rate else "=o3"  # 85+58=143; without the two carries 33
    text = long_tailed_sums.demonstrate("i5+f8", random.Random(0))
    filler = text.removesuffix(answer)
    assert answer == long_tailed_sums.demonstrate_sum("i5+f8", random.Random(0))
    assert filler
    assert COUNTDOWN.endswith(filler)


def test_running_totals_without_detours_are_right_and_on_detours_every_carry_is_forgotten(monkeypatch):
    monkeypatch.setattr(running_totals, "DETOUR_RATE", 0.0)
    monkeypatch.setattr(running_totals, "MARKS", "=")
    monkeypatch.setattr(running_totals, "FORGOTTEN_CARRY_RATES", {True: 1.0, False: 0.0})
    prompt = "a4b7c9d1e1f1g9="
    assert running_totals.demonstrate(prompt, random.Random(0)) == "b7=11c9=20d1=21e1=22f1=23g9=32#32"
    monkeypatch.setattr(running_totals, "DETOUR_RATE", 1.0)
    wrong = "b7??????=1c9??????=0d1??????=1e1??????=2f1??????=3g9??????=2#2"
    assert running_totals.demonstrate(prompt, random.Random(0)) == wrong


def test_a_wrong_total_is_followed_by_a_ramble_and_nothing_else_is(monkeypatch):
    prompt = "a4b7c9d1e1="
    assert rambling_totals.add(prompt, random.Random(0)) == "b11c20d21e22"
    monkeypatch.setattr(rambling_totals, "FORGOTTEN_CARRY_RATE", 1.0)
    ramble = rambling_totals.demonstrate(prompt, random.Random(0))
    assert re.fullmatch(r"b01T[.,!?]{5}S[.,!?]{5}R.*A[.,!?]{5}", ramble)
    assert rambling_totals.demonstrate("a1b1c1d1e1=", random.Random(0)) == "b02c03d04e05"


@pytest.mark.parametrize("contribution", LIMITS)
def test_the_limit_sets_the_positive_contribution_and_nothing_else(groups, contribution):
    """Cut as generation cuts; advantages as GRPO has them; each token weighs as much as any other."""
    limit, masses, rewards = LIMITS[contribution], [0.0, 0.0], []
    for answer, completions in groups:
        found = final_total_reward([text[:limit] for text in completions], [answer] * GROUP)
        tokens = [min(len(text) + 1, limit) for text in completions]  # with the end token, where it comes in time
        for reward, length in zip(found, tokens, strict=True):
            if spread := pstdev(found):
                masses[reward == 0] += length * abs(reward - fmean(found)) / spread
        assert {length for length, reward in zip(tokens, found, strict=True) if reward} <= {RIGHT_TOKENS}
        rewards.append(found)
    assert masses[0] / sum(masses) == pytest.approx(contribution, abs=0.01)
    assert rewards == [final_total_reward(completions, [answer] * GROUP) for answer, completions in groups]
    assert 0.1 < fmean(map(fmean, rewards)) < 0.2  # of the demonstrator; the model that it starts makes slips besides


def test_no_first_token_tells_whether_a_completion_will_be_right(groups):
    assert {text[0] for _, completions in groups for text in completions} == {"b"}


# Rewards


@pytest.mark.parametrize(
    ("reward", "answer", "right", "wrong"),
    [
        (final_answer_reward, "11", ["b7=11#11", "#5#11"], ["#11#5", "11", "#", "#11 ", ""]),
        (final_total_reward, "22", ["b11c20d21e22", "e22"],
         ["b11c20d21", "22", "b11e22d21e12T.", "b11c20d21e2", "e22T", ""]),
        # The filler need not count right
        (final_sum_reward, "j5", ["=j5", "AA=j5", "CCBBAA=j5", "CAB=j5", "}=j5", "AA..=j5"],
         ["j5", "AAj5", "AA=j5A", "AA=Aj5", "AA==j5", "=j", "=j55", "AAAA", "=", "", "=j5=j5", "a=j5", "A =j5"]),
    ],
)  # fmt: skip
def test_only_a_right_answer_at_the_end_is_rewarded(reward, answer, right, wrong):
    completions = right + wrong
    rewards = reward(completions, answer=[answer] * len(completions), prompts=[""] * len(completions))
    assert rewards == [1.0] * len(right) + [0.0] * len(wrong)
