"""The result row of a run, from the files that `train` writes."""

import json

import pytest

from bapo_trl.compare.results import Row, row_of
from bapo_trl.compare.study import Run


RUN = Run("BAPO", {"steps": 16}, 3, {"num_generations_eval": 2}, {"steps": 16, "seed": 3})
FACTS = {"method": "BAPO", "limits": {"bapo/clip_low": 0.9, "bapo/clip_high": 3.0}, "rows_per_generation": 32}


def update(step, grad_norm, entropy, low, high, share, **values):
    bounds = {"bapo/clip_low": low, "bapo/clip_high": high}
    return {"step": step, "grad_norm": grad_norm, "entropy": entropy, "bapo/positive_share": share, **bounds, **values}


LOGS = [
    update(1, 2.0, 0.5, 0.6, 1.2, 0.4, **{"completions/mean_length": 10.0, "reward": 0.1, "time/scoring": 1.5}),
    update(2, 4.0, 0.4, 0.9, 3.0, None, **{"clock/wall_s": 5.0, "clock/cpu_s": 4.0}),  # no negative token, say
    {"step": 2, "eval_avg@2": 0.6, "eval_reward": 0.6},
    update(3, 20.0, 0.3, 0.9, 3.0, 0.5, **{"completions/mean_length": 12.0, "reward": 0.2}),
    update(4, float("nan"), 0.2, 0.9, 2.0, 0.6, **{"time/scoring": 0.25}),
    {"step": 4, "eval_avg@2": 0.52, "eval_reward": 0.5},
    {"step": 4, "train_runtime": 3.0},
]
RESULTS = {"before_avg@2": 0.1, "eval_avg@2": 0.5, "eval_pass@2": 0.7, "before_avg@2_stderr": 0.02,
           "eval_avg@2_stderr": 0.04, "eval_pass@2_stderr": 0.05}  # fmt: skip


def left_by_train(folder, logs=LOGS, results=RESULTS, facts=FACTS):
    for name, content in {
        "trainer_state.json": {"log_history": logs}, "eval_results.json": results,
        "run_settings.json": {"facts": facts},
    }.items():  # fmt: skip
        (folder / name).write_text(json.dumps(content))
    return folder


def test_a_row_has_the_values_for_the_tables(tmp_path):
    row = row_of(RUN, left_by_train(tmp_path), seconds=12.34)
    assert row == Row(
        "BAPO",
        {"steps": 16},
        3,
        {"steps": 16, "seed": 3},
        final=0.5,
        pass_at_k=0.7,
        curve=[(0, 0.1), (2, 0.6), (4, 0.5)],  # at the end, what was measured after the training
        costs=[
            {"wall": 0.0, "cpu": 0.0, "tokens": 0},
            {"wall": 5.0, "cpu": 4.0, "tokens": 320},
            {"wall": 5.0, "cpu": 4.0, "tokens": 704},
        ],
        phases={"scoring": 1.8},
        mean_accuracy=0.45,  # (0.1 + 0.6) / 2 over 2 updates, (0.6 + 0.5) / 2 over 2
        max_drawdown=0.1,
        gradient_peak=5.0,  # 20 over the median of 2, 4, 20
        entropy_ratio=0.4,  # 0.2 over 0.5
        share=0.5,
        at_limits=0.5,  # two of four updates
        generated_tokens=704,  # (10 + 12) * 32
        seconds=12.3,
        method="BAPO",
        errors={"start": 0.02, "final": 0.04, "pass_at_k": 0.05},
    )
    assert row.start == 0.1


@pytest.mark.parametrize(
    ("left", "values"),
    [
        ({"facts": {**FACTS, "limits": {}}}, {"at_limits": None}),
        ({"facts": {}}, {"at_limits": None, "method": None, "generated_tokens": None}),  # a run of TRL
        ({"results": {name: value for name, value in RESULTS.items() if name != "before_avg@2"}},
         {"curve": [(2, 0.6), (4, 0.5)], "mean_accuracy": 0.55, "start": None}),
        ({"logs": [log for log in LOGS if "eval_reward" not in log]},  # measured before and after alone
         {"curve": [(0, 0.1), (4, 0.5)], "mean_accuracy": None, "max_drawdown": None}),
    ],
)  # fmt: skip
def test_values_missing_in_a_run_are_missing_in_its_row(tmp_path, left, values):
    row = row_of(RUN, left_by_train(tmp_path, **left), 1.0)
    assert {name: getattr(row, name) for name in values} == values
