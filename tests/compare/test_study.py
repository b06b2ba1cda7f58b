"""A study's file: its runs and their flags, and errors in the file."""

from pathlib import Path

import pytest
import yaml

from bapo_trl.compare.study import read_study
from bapo_trl.errors import InputError


STUDY = {
    "base": {"config": "quickstart", "max_steps": 8},
    "arms": {"GRPO": {"method": "grpo"}, "BAPO, wide": {"method": "bapo", "ratio_upper_max": 4.0}},
    "over": {"steps_per_generation": [16, 64], "learning_rate": [1e-4]},
    "seeds": [3, 5],
    "measure": {"every": 4, "avg_at": 2},
}


def read(folder: Path, **changes):
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return read_study(str(path))


def test_runs_go_seed_by_seed_and_have_all_flags(tmp_path):
    runs = read(tmp_path).runs()
    assert [(run.seed, run.sweep["steps_per_generation"], run.arm) for run in runs] == [
        (seed, steps, arm) for seed in (3, 5) for steps in (16, 64) for arm in STUDY["arms"]
    ]
    run = runs[3]
    assert run.label == "BAPO, wide, steps_per_generation 64, learning_rate 0.0001, seed 3"
    flags = {
        "config": "quickstart", "max_steps": 8, "steps_per_generation": 64, "learning_rate": 1e-4, "method": "bapo",
        "ratio_upper_max": 4.0, "do_eval": True, "eval_strategy": "steps", "eval_steps": 4, "num_generations_eval": 2,
        "logging_steps": 1, "seed": 3, "save_strategy": "no", "report_to": "none",
    }  # fmt: skip
    assert flags.items() <= run.flags.items()
    assert "eval_dataset" not in run.flags
    assert "output_dir" not in run.flags


def test_settings_identify_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("learning_rate: 1.0e-4\n")
    base = {"config": "own.yaml"}
    keys = [run.key for run in read(tmp_path, base=base, over={}).runs()]
    assert len(set(keys)) == 4
    assert keys == [run.key for run in read(tmp_path, base=base, over={}).runs()]
    Path("own.yaml").write_text("learning_rate: 2.0e-4\n")  # the recipe's content counts
    others = [run.key for run in read(tmp_path, base=base, over={}).runs()]
    assert not set(keys) & set(others)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": None}, "`arms` is missing"),
        ({"arms": {"x": 3}}, "arm 'x' is 3: set it to a mapping of names to values"),
        ({"arm": {}}, "unknown key `arm`: a study has the keys base, arms"),
        ({"seeds": [1, 2, 1]}, r"`seeds` is \[1, 2, 1\]: set it to a list of distinct whole numbers"),
        ({"over": {"max_grad_norm": 1.0}}, "`over` has max_grad_norm: 1.0: set it to a list"),
        ({"over": {"max_steps": [8, 16]}}, "`max_steps` is in `over` and in `base`"),
        ({"measure": {"every": 4}}, "`measure` is {'every': 4}: set `every`, `avg_at` and"),
        ({"base": {"config": "quickstart", "seed": 1}}, "`base` has `seed`, which the study sets itself"),
    ],
)
def test_an_invalid_study_raises_an_error_with_the_fix(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, **changes).runs()
    assert "\n" not in str(caught.value)


def test_flags_are_read_as_train_reads_them_before_any_run(tmp_path, capsys):
    study = read(tmp_path, arms={"x": {"positive_contribution_target": 2.0}}, over={"num_iterations": [1]})
    with pytest.raises(InputError, match=r"arm 'x' \(num_iterations 1\): .*`positive_contribution_target`"):
        study.check()
    with pytest.raises(SystemExit):
        read(tmp_path, arms={"x": {"learning_rate_": 1}}).check()
    assert "arm 'x': error: unknown flag: --learning_rate_" in capsys.readouterr().err


def test_a_configuration_of_accelerate_is_part_of_a_run_and_counts_its_processes(tmp_path):
    """cpu_ddp has two processes: 2 x 4 samples are a group of 8, which one process could not fill."""
    base = {"config": "quickstart", "per_device_train_batch_size": 4, "steps_per_generation": 1,
            "gradient_accumulation_steps": 1, "num_generations": 8}  # fmt: skip
    alone = read(tmp_path, base=base, over={})
    with pytest.raises(InputError, match="num_generations"):
        alone.check()
    launched = read(tmp_path, base=base, over={}, accelerate="cpu_ddp")
    launched.check()
    assert not {run.key for run in alone.runs()} & {run.key for run in launched.runs()}
    with pytest.raises(InputError, match="`accelerate_config` is 'none'"):
        read(tmp_path, accelerate="none").check()


@pytest.mark.fuzz
@pytest.mark.parametrize("path", sorted(Path("benchmarks/studies").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_studies_of_the_benchmarks_can_be_read(path):
    study = read_study(str(path))
    study.check()
    assert len({run.key for run in study.runs()}) == len(study.runs())
