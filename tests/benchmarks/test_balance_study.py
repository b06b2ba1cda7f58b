"""The study of the balance: its arms, its plan, and what its section says of invented rows."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from bapo_trl import BAPOConfig, BAPOTrainer
from benchmarks import measured_trainer
from benchmarks.balance import arms, plan, section
from benchmarks.common import RESULTS, describe_run
from benchmarks.run_pool import run_key
from benchmarks.stability.plan import Run, StalenessSetting
from benchmarks.stability.rows import run_to_row
from tests.helpers.toy import toy_trainer, training_logs


FIRST_STUDY = json.loads((RESULTS / "stability.json").read_text())["results"]


def config_of(arm, folder):
    settings = {**arms.ARMS, **arms.REPEATED}[arm]
    return BAPOConfig(folder, use_cpu=True, bf16=False, gradient_checkpointing=False, **settings)


@pytest.mark.parametrize("arm", [*arms.ARMS, *arms.REPEATED])
def test_arms_are_what_their_names_say(arm, tmp_path):
    config = config_of(arm, tmp_path)
    target = float(arm.split("share ")[1].split(",")[0]) if "share" in arm else {"BAPO, weight": 0.7}.get(arm)
    if "constant weight" in arm:
        target = 1.0
        assert config.negative_weight_min == float(arm.split("weight ")[1])
    assert (config.negative_weight_min < 1) == (target is not None)
    if target is not None:
        assert config.positive_contribution_target == target
    assert config.bound_grid.is_fixed == (not arm.startswith("BAPO"))
    is_capped = arm == "widest, cap" or (arm.startswith("share") and "no cap" not in arm)
    assert (config.negative_ratio_cap == 3.0) == is_capped
    assert config.loss_type == {"VESPO": "vespo", "CISPO": "cispo", "GSPO": "grpo"}.get(arm.split(",")[0], "dapo")


def rows_of(runs, final=0.5):
    return [
        {"arm": run.arm, "task": run.task, "staleness_setting": run.staleness.name, "purpose": run.purpose,
         "learning_rate": run.learning_rate, "seed": run.seed, "final": final, "held_out": [[0, final], [1, final]]}
        for run in runs
    ]  # fmt: skip


def test_the_plan_tunes_new_arms_and_takes_the_known_rates_of_published_ones():
    asked = []

    def make(runs):
        asked.extend(runs)
        rows = rows_of(runs)
        for row in rows:
            if row["purpose"] == "pilot":  # best at 8e-4
                row["held_out"] = [[0, 0.0], [1, 1 - abs(row["learning_rate"] - 8e-4)]]
            elif row["arm"] == "share 0.8":
                row |= {"final": 0.9, "weights": [0.4, 0.4] if row["task"] == "running_totals" else [0.5, 0.9]}
            elif row["arm"] == "VESPO, share 0.8":
                row["weights"] = [1.0, 0.96] if row["task"] == "running_totals" else [0.6, 0.4]
        return rows

    plan.make_study(make, FIRST_STUDY)
    hard = {run for run in asked if (run.task, run.staleness.name) == ("running_totals", "64")}
    assert {run.learning_rate for run in hard if run.purpose == "pilot" and run.arm == "share 0.8"} == {
        4e-4, 8e-4, 1.6e-3,
    }  # fmt: skip
    reported = [run for run in hard if run.purpose == "reported"]
    counts = Counter(run.arm for run in reported)
    assert {arm: counts.pop(arm) for arm in (*arms.ARMS, *arms.REPEATED)} == {
        arm: 5 if arm == "share 0.8" else 3 for arm in (*arms.ARMS, *arms.REPEATED)
    }
    assert counts == {
        "VESPO, constant weight 0.50": 3,  # that of the other task: its own is nearly 1
        "share 0.8; weights shuffled": 3,
        "share 0.8; positives weighed up": 3,
        "share 0.8; carried over": 3,
        "constant weight 0.40": 3,  # its own mean
        "constant weight 0.70": 3,  # that of the other task
    }
    rates = {run.arm: run.learning_rate for run in reported}
    assert rates["share 0.8"] == rates["constant weight 0.40"] == 8e-4
    assert (rates["VESPO"], rates["widest"]) == (1.6e-3, 2e-4)
    assert {run.seed for run in asked if run.purpose == "pilot"} == {1000}
    easy = {run.arm for run in asked if (run.task, run.staleness.name) == ("sums", "64")}
    assert {"VESPO, constant weight 0.50", "VESPO, share 0.8; weights shuffled"} < easy
    assert "VESPO, constant weight 0.98" not in easy  # nearly VESPO itself


def test_the_further_questions_have_pilots_or_the_learning_rates_of_64_updates():
    asked = []

    def make(runs):
        asked.extend(runs)
        return [{**row, "weights": [0.5]} for row in rows_of(runs)]

    plan.make_study(make, FIRST_STUDY)
    of_setting = {}
    for run in asked:
        of_setting.setdefault((run.task, run.staleness.name), []).append(run)
    passes = of_setting["sums", "256, 4 passes"]
    assert {run.learning_rate for run in passes if run.purpose == "pilot"} >= {2.5e-4, 5e-4, 1e-3}
    assert {run.arm for run in passes if run.purpose == "reported"} == {*plan.BEST, "GRPO"}
    assert plan.PRESET.spec(passes[0])["args"]["steps_per_generation"] == 64
    assert plan.PRESET.spec(passes[0])["generations"] == 2
    queue = of_setting["sums", "16, queue from 64"]
    assert {run.purpose for run in queue} == {"reported"}
    assert plan.PRESET.spec(queue[0])["args"]["replay_min_staleness"] == 64
    long = of_setting["running_totals_long", "64"]
    assert {run.arm for run in long} == {*plan.BEST, "BAPO", "widest"}
    assert {run.learning_rate for run in long if run.arm == "VESPO"} == {1.6e-3}  # that of the hard task
    assert Counter(run.seed for run in long) == {0: 5, 1: 5, 2: 5}
    assert plan.PRESET.spec(of_setting["running_totals_larger_model", "64"][0])["generations"] == 2


def test_some_of_the_arms_alone():
    asked = []

    def make(runs):
        asked.extend(runs)
        return [{**row, "weights": [0.5]} for row in rows_of(runs)]

    plan.make_study(make, FIRST_STUDY, ["VESPO, share 0.8", "VESPO"])
    assert {arms.controlled_by(run.arm) or run.arm for run in asked} == {"VESPO, share 0.8", "VESPO"}


def test_a_run_that_is_reported_measures_pass_at_k():
    run = Run("reported", "sums", "VESPO, share 0.8", StalenessSetting(16), 1e-3, 0)
    spec = plan.PRESET.spec(run)
    assert (spec["k"], spec["trainer"], spec["args"]["loss_type"]) == (4, "BAPO", "vespo")
    assert spec["args"]["steps_per_generation"] == 16
    assert "k" not in plan.PRESET.spec(Run("pilot", "sums", "VESPO", StalenessSetting(16), 1e-3, 1000))


def test_controls_change_one_thing_of_the_best_share():
    run = Run("reported", "sums", "share 0.9", StalenessSetting(16), 1e-3, 0)
    of_arm = plan.PRESET.spec(run)
    weights = [0.1, 0.2, 0.3, 0.4]
    preset = replace(plan.PRESET, rows={run_key(of_arm): {"weights": weights}})

    def difference(arm):
        spec = preset.spec(replace(run, arm=arm))
        args = {key: value for key, value in spec["args"].items() if of_arm["args"].get(key) != value}
        return {key: value for key, value in spec.items() if key != "args" and of_arm.get(key) != value} | args

    assert difference("share 0.9; positives weighed up") == {"trainer": "weighed up"}
    assert difference("share 0.9; carried over") == {"search_scope": "carried_over"}
    assert difference("constant weight 0.43") == {"positive_contribution_target": 1.0, "negative_weight_min": 0.43}
    shuffled = difference("share 0.9; weights shuffled")
    assert shuffled.pop("weights") != weights
    assert shuffled == {"trainer": "given weights"}
    assert sorted(preset.spec(replace(run, arm="share 0.9; weights shuffled"))["weights"]) == weights


def test_given_weights_are_those_that_train(tmp_path):
    balance = {"negative_weight_min": 0.05, "positive_contribution_target": 0.9, "ratio_lower_start": 0.9}
    one_at_a_time = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 12}
    weights = [0.5, 0.25, 1.0, 0.75]
    given = toy_trainer(
        tmp_path, trainer_class=measured_trainer.GivenWeightsTrainer, max_steps=4, **balance, **one_at_a_time
    )
    given.given_weights = weights
    given.train()
    logs = training_logs(given)
    assert [log["bapo/negative_weight"] for log in logs] == weights
    constant = toy_trainer(
        tmp_path, max_steps=1, **{**balance, "positive_contribution_target": 1.0, "negative_weight_min": 0.5},
        **one_at_a_time,
    )  # fmt: skip
    constant.train()
    (log,) = training_logs(constant)
    for key in ("loss", "grad_norm", "bapo/positive_share"):  # the first update
        assert logs[0][key] == pytest.approx(log[key], rel=1e-6)


def test_positives_weighed_up_give_the_same_gradient_in_another_size(tmp_path):
    balance = {"negative_weight_min": 0.05, "positive_contribution_target": 0.9, "max_steps": 1}
    logs = []
    for trainer_class in (BAPOTrainer, measured_trainer.WeighedUpTrainer):
        trainer = toy_trainer(tmp_path, trainer_class=trainer_class, **balance)
        trainer.train()
        logs += training_logs(trainer)
    weight = logs[0]["bapo/negative_weight"]
    assert weight < 0.9
    assert logs[1]["grad_norm"] == pytest.approx(logs[0]["grad_norm"] / weight, rel=1e-5)


def finished(final, share, weight):
    points = [{"update": u, "sampled": a, "greedy": a, "entropy": 1.0} for u, a in ((0, 0.2), (10, 0.9), (20, final))]
    series = {"grad_norm": [1.0] * 19 + [4.0], "bapo/negative_weight": [1.0, weight] * 10}
    return {
        "updates": 20, "seconds": 9.0, "generated_tokens": [100], "held_out": points, "series": series,
        "means": {} if share is None else {"bapo/positive_share": share}, "pass@k": 0.95,
    }  # fmt: skip


def test_the_section_ranks_arms_and_compares_them_with_vespo_on_the_same_seeds():
    rows = []
    of_arm = (
        ("VESPO", 0.8, 0.5), ("share 0.8", 0.85, 0.8), ("BAPO", 0.3, 0.4), ("CISPO", 0.7, None),
        ("share 0.8; weights shuffled", 0.81, 0.7), ("constant weight 0.75", 0.9, 0.7),
    )  # fmt: skip
    for arm, final, share in of_arm:
        for seed in (0, 1):
            run = Run("reported", "running_totals", arm, StalenessSetting(64), 8e-4, seed)
            rows.append(run_to_row(run, finished(final + 0.02 * seed, share, 0.5), {"negative_weight_min": 0.05}))
    pilot = Run("pilot", "running_totals", "share 0.8", StalenessSetting(64), 8e-4, 1000)
    rows.append(run_to_row(pilot, finished(0.6, 0.8, 0.5), {"negative_weight_min": 0.05}))
    settings = {"arms": [*arms.ARMS, *arms.REPEATED], "seeds": [0, 1], "k": 4, "threads": 1}
    shown = section.render({**describe_run("balance", "cpu"), "settings": settings, "results": rows})
    lines = [line.strip("| ").split(" | ") for line in shown.text.splitlines() if line.startswith("| ")][2:]
    assert [line[0] for line in lines[:4]] == ["share 0.8", "VESPO", "CISPO", "BAPO (2 of 2 collapsed)"]
    assert [line[:2] for line in lines[6:]] == [  # after their header
        ["share 0.8", "constant weight 0.75"], ["share 0.8", "weights shuffled"],
    ]  # fmt: skip
    assert [line[3] for line in lines[6:]] == ["+0.050 ± 0.000", "-0.040 ± 0.000"]
    assert lines[0][2] == "+0.050 ± 0.000"
    assert lines[0][5] == "4.0 ± 0.0"
    assert lines[0][6] == "0.80 (0.75)"
    assert lines[2][6].startswith("-")
    assert "Not run: share 0.9" in shown.text
    assert "Run in the study above, without pass@4: GRPO; widest; GSPO." in shown.text
    assert "64 updates per generation: +0.82 (5 arms)" in shown.text
    assert "0.0008: 0.750" in shown.tables  # the mean of the last two measurements


def test_rank_correlation_takes_the_mean_rank_of_ties():
    assert section.rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert section.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4: scipy.stats.spearmanr gives 0.9486832980505139
    assert section.rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505139)
