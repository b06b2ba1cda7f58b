"""Where the time of a run went, in the report's last line and in its figure."""

from contextlib import nullcontext

import pytest
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from bapo_trl import phase_clock
from bapo_trl.report.command import write_report
from bapo_trl.report.facts import facts_of
from bapo_trl.report.runs import Logs, read_runs
from bapo_trl.report.times import PHASES, largest_savings, seconds_of, time_line
from bapo_trl.script import preparation
from bapo_trl.vllm_server import mismatch
from tests.helpers.fake_vllm import FakeVLLM
from tests.helpers.passing_time import Time
from tests.helpers.script_runs import fill_folder, run
from tests.helpers.toy import toy_trainer
from tests.report.made_logs import made_logs, save_run


def times(**seconds):
    return {f"time/{name}": seconds.get(name, 0.0) for name in PHASES}


def test_the_phases_are_those_of_the_trainer():
    assert PHASES == phase_clock.PHASES


def test_the_seconds_are_those_of_all_updates_of_a_log_line():
    logs = Logs(
        [{"step": 4, "loss": 0.1, **times(training=2)}, {"step": 10, "loss": 0.1, **times(training=1, other=3)}]
    )
    assert seconds_of(logs) == {**dict.fromkeys(PHASES, 0.0), "training": 14, "other": 18}


@pytest.mark.parametrize(
    ("facts", "savings"),
    [
        ({}, {}),
        ({"can_overlap": True}, {"overlap_generation": 40}),
        ({"can_use_sampler_logps": True, "can_overlap": True}, {"overlap_generation": 40, "use_sampler_logps": 10}),
        ({"can_carry_over": True, "can_refill": True},
         {"partial_rollout_oversampling": 60 * 0.75, "replay_zero_advantage": 60 * 0.1}),
    ],
)  # fmt: skip
def test_what_a_setting_could_save_is_at_most_what_was_measured(facts, savings):
    lengths = {"completions/mean_length": 25, "completions/max_length": 100}
    generated = {**lengths, "frac_reward_zero_std": 0.1, **times(generation=60, training=20, scoring=10)}
    logs = [{"step": 1, "loss": 0.1, **generated}, {"step": 2, "loss": 0.1, **times(training=10)}]
    found = largest_savings(Logs(logs), facts)
    assert found == savings
    assert list(found.values()) == sorted(found.values(), reverse=True)
    logs[0] |= times(generation=20, training=60, scoring=10)
    if "can_overlap" in facts:
        assert largest_savings(Logs(logs), facts)["overlap_generation"] == 20


@pytest.mark.figures
@pytest.mark.trainings
def test_a_run_over_a_server_is_told_what_its_settings_could_save(tmp_path, monkeypatch, capsys):
    """Time passes in generations and forward passes alone."""
    time = Time(monkeypatch)
    fill_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", FakeVLLM)
    monkeypatch.setattr(preparation, "check_packages", lambda settings: None)  # of which vllm is one
    monkeypatch.setattr(mismatch, "client_for", lambda *args: nullcontext())
    for owner, name, seconds in (
        (FakeVLLM, "generate", 50),
        (GRPOTrainer, "_get_per_token_logps_and_entropies", 5),
    ):
        monkeypatch.setattr(owner, name, time.passing(getattr(owner, name), seconds))
    run(dataset_name="train.jsonl", max_steps=2, use_vllm=True, vllm_mode="server", vllm_logp_tolerance="none")
    said = " ".join(capsys.readouterr().out.split())
    # Two forward passes try the padding, two score 12 samples, and two train on them
    assert "Time: 2 updates took 80 s, without evaluations and saves: generation 62%, scoring 25%, training 12%." in (
        said
    )
    assert "The most that a setting could save: overlap_generation 38%, use_sampler_logps 25%" in said


def test_the_line_names_the_largest_part_first():
    logs = Logs(made_logs(**times(generation=5, training=4, scoring=1)))
    line = time_line(logs, {"can_overlap": True})
    assert line == (
        "Time: 20 updates took 200 s, without evaluations and saves: generation 50%, training 40%, scoring 10%. The "
        "most that a setting could save: overlap_generation 50%."
    )
    assert time_line(Logs([{"step": 1, "loss": 0.1}]), {}) == ""


@pytest.mark.figures
def test_the_report_ends_with_it_and_draws_the_phases(tmp_path):
    run = save_run(tmp_path / "run", made_logs(size=3, first=4, every=4))
    text = write_report(read_runs([run]), tmp_path / "report.png")
    assert text.splitlines()[-1].startswith("Time: 12 updates took 120 s")


def test_a_run_without_vllm_is_told_of_no_setting_that_needs_it(tmp_path):
    facts = facts_of(toy_trainer(tmp_path).args)
    assert not facts["can_overlap"]
    assert not facts["can_use_sampler_logps"]
