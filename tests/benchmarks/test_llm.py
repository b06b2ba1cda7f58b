"""The benchmarks of the chat model: their arms, and what their sections say of invented results."""

import json

import pytest
import torch

from bapo_trl import BAPOConfig
from bapo_trl.clip_bounds import contributions, search_bounds
from benchmarks import common, llm_speed, llm_study


CONTENT = {
    "command": "python -m benchmarks.x",
    "date": "2026-11-01",
    "machine": {
        "device": "CPU", "cpu": "x", "cores": 2, "load_average": 1.0, "python": "3", "torch": "2", "trl": "1",
        "transformers": "5",
    },
}  # fmt: skip


def cells(section) -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in section.text.splitlines() if line.startswith("| ")]
    assert max(map(len, rows)) <= 7
    return rows[2:]


def test_ratios_of_speed_are_of_pairs():
    seconds = {
        "all": [
            {"user": 18, "system": 2, "peak_gb": 3.0},
            {"user": 25, "system": 5, "peak_gb": 3.0},
            {"user": 20, "system": 0, "peak_gb": 3.0},
        ],
        "none": [
            {"user": 50, "system": 10, "peak_gb": 3.0},
            {"user": 70, "system": 20, "peak_gb": 3.0},
            {"user": 30, "system": 10, "peak_gb": 3.0},
        ],
    }
    rows = [llm_speed.to_row(arm, seconds) for arm in seconds]
    assert rows[1]["ratio"]["median"] == 3  # of 60/20, 90/30, 40/20
    assert (rows[0]["seconds"]["median"], rows[0]["system"]) == (20, 2)
    settings = {"target_seconds": 25, "completion_tokens": 16, "threads": 1}
    section = llm_speed.render({**CONTENT, "settings": settings, "results": rows})
    assert [row[3] for row in cells(section)] == ["1", "3.00 (2.50 to 3.00)"]
    assert "Met: yes" in section.text


def test_each_arm_of_the_speeds_leaves_one_measure_out():
    assert llm_speed.ARMS["none"] == set()
    for name in llm_speed.MEASURES:
        assert llm_speed.ARMS["all"] - llm_speed.ARMS[f"without {name}"] == {name}


def run_of(arm, seed=0, purpose="reported", learning_rate=1e-4):
    return llm_study.Run(purpose, arm, learning_rate, seed)


@pytest.mark.parametrize("arm", llm_study.ARMS)
def test_arms_differ_in_the_loss_alone(arm, tmp_path):
    config = BAPOConfig(tmp_path, bf16=False, **{**llm_study.SETTINGS, **run_of(arm).spec()["args"]})
    assert config.generation_batch_size == llm_study.ROWS * llm_study.UPDATES_PER_GENERATION
    assert config.learning_rate == 1e-4
    assert (config.loss_type == "vespo") == arm.startswith("VESPO")
    assert config.bound_grid.is_fixed == (arm != "BAPO")


@pytest.mark.parametrize("weight", [0.5, 0.8])
def test_a_target_of_one_gives_a_constant_weight(weight, tmp_path):
    settings = {**llm_study.ARMS["constant weight 0.5"], "negative_weight_min": weight}
    torch.manual_seed(0)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -0.5, 2.0, -1.0]])
    for spread in (0.0, 0.1, 1.0):
        ratio = (spread * torch.randn(1, 6)).exp()
        grid = BAPOConfig(tmp_path, use_cpu=True, bf16=False, **settings).bound_grid
        curves = contributions(ratio, advantages, torch.ones(1, 6), grid)
        found = search_bounds(curves, grid, 1.0, negative_weight_min=weight)
        assert found.negative_weight.item() == weight


def result(sampled: float, rewards: list[float]) -> dict:
    return {
        "held_out": [{"update": 160, "greedy": 0.4, "sampled": sampled, "pass@4": 0.6}],
        "reward": rewards,
        "series": {
            "grad_norm": [1.0, 0.0, 2.0, 4.0, 3.0], "entropy": [2.0, 1.0], "bapo/negative_weight": [1.0, 0.5],
            "bapo/positive_share": [0.25, None, 0.5],
        },
        "seconds": 9,
    }  # fmt: skip


def row_of(arm, seed, sampled, rewards, purpose="reported", learning_rate=1e-4):
    return {**vars(run_of(arm, seed, purpose, learning_rate)), **llm_study.result_to_row(result(sampled, rewards))}


def test_rows_of_the_study_hold_the_fall_from_the_best_three_generations():
    row = llm_study.result_to_row(result(0.5, [0.0, 0.3, 0.6, 0.6, 0.3, 0.0]))
    assert row["fall"] == 0.2  # from (0.3 + 0.6 + 0.6) / 3 to (0.6 + 0.3 + 0) / 3
    assert row["gradient_peak"] == 1.6  # 4 over the median of 1, 2, 3, 4
    assert (row["negative_weight"], row["share"]) == (0.75, 0.375)
    assert llm_study.result_to_row(result(0.5, [0.0, 0.3, 0.6]))["fall"] == 0


def test_the_study_says_how_far_arms_end_above_vespo_on_the_same_seeds():
    rewards = [0.1, 0.2, 0.3]
    start = {"greedy": 0.15, "sampled": 0.1, "pass@4": 0.3}
    rows = [
        {**vars(llm_study.START), **start},
        *(row_of("VESPO", 1000, 0.9, rewards, "pilot", rate) for rate in llm_study.LEARNING_RATES),
        *(
            row_of(arm, seed, sampled, rewards, learning_rate=2e-4 if arm == "GRPO" else 1e-4)
            for arm, seed, sampled in (
                ("VESPO", 0, 0.5),
                ("GRPO", 1, 0.3),
                ("VESPO", 1, 0.3),
                ("GRPO", 0, 0.3),
                ("GRPO", 2, 0.3),
                ("VESPO", 2, 0.4),
                ("share 0.7", 0, 0.6),
                ("share 0.7", 1, 0.6),
            )
        ),
    ]
    settings = {
        "generations": 10, "updates_per_generation": 16, "rows": 8, "problems": 256, "pilot_generations": 6,
        "threads": 1, "task": ["chain_sum", {}], "arms": ["BAPO", "GRPO", "VESPO"],
    }  # fmt: skip
    section = llm_study.render({**CONTENT, "settings": settings, "results": rows})
    vespo, grpo, share, _, _, vespo_balance, *_ = cells(section)
    assert (vespo[5], vespo[1], grpo[1], vespo[2]) == ("-", "0.0001", "0.0002", "3")
    # -0.2, 0 and -0.1: mean -0.1, deviation 0.1 over the root of 3, times 4.303
    assert grpo[5] == "-0.100 ± 0.248"
    assert grpo[4] == "0.300 ± 0.000"
    assert share[4:6] == ["0.600", "+0.200"]  # of two seeds
    assert vespo_balance[2:4] == ["1.600 ± 0.000", "0.375 ± 0.000"]
    assert "pass@4 0.300" in section.text
    assert "VESPO 0.0001 (0.250), 0.0002 (0.250), 0.0004 (0.250)" in section.text
    assert "Not run: BAPO; 32 samples an update" in section.text


def test_learning_rates_are_those_of_the_best_pilot():
    rewards = dict(zip(llm_study.LEARNING_RATES, ([0.9, 0.1, 0.2], [0.0, 0.3, 0.4], [0.0, 0.3, 0.2]), strict=True))
    made = []

    def make(runs):  # VESPO's last pilot is to come
        made.extend(runs)
        rows = [{**vars(run), "reward": rewards.get(run.learning_rate, [])} for run in runs]
        return rows[:-1] if runs[-1].purpose == "pilot" else rows

    llm_study.make_study(["GRPO", "VESPO"], make)
    assert made[0] == llm_study.START
    assert [(run.arm, run.learning_rate, run.seed) for run in made if run.purpose == "reported"] == [
        ("GRPO", 2e-4, seed) for seed in llm_study.SEEDS
    ]


def test_arms_with_a_given_rate_have_no_pilots():
    made = []
    llm_study.make_study(["VESPO, share 0.8, at 2e-4"], lambda runs: made.extend(runs) or [])
    arm = llm_study.Run("reported", "VESPO, share 0.8, at 2e-4", 2e-4, 0)
    assert made[:2] == [llm_study.START, arm]
    assert arm.spec()["args"] == {**run_of("VESPO, share 0.8").spec()["args"], "learning_rate": 2e-4}


def test_runs_that_have_rows_are_not_made_again(tmp_path, monkeypatch):
    specs = []

    def run_all(missing, finished, jobs, *_):
        specs.extend(missing)
        return [result(0.5, [0.1, 0.2, 0.3]) for _ in missing]

    monkeypatch.setattr(llm_study, "run_all", run_all)
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["llm_study", "--arms", "GRPO"])
    llm_study.main()
    assert len(specs) == 1 + 3 + 3
    monkeypatch.setattr("sys.argv", ["llm_study", "--arms", "GRPO", "BAPO"])
    llm_study.main()
    assert len(specs) == 7 + 6
    content = json.loads((tmp_path / "llm_study.json").read_text())
    assert len(content["results"]) == 13
    assert [set(made) for made in content["earlier"]] == [{"command", "date", "machine"}]  # of the first seven
