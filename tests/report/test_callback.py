"""The report that a training run keeps up to date."""

import json
import warnings
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from bapo_trl import ReportCallback
from bapo_trl.report.command import save_report
from tests.helpers.toy import toy_trainer


pytestmark = pytest.mark.figures


SAVES = {"save_strategy": "steps", "save_steps": 2}


class Drawn:
    """Notes up to which update each report goes, and after each save what the latest was."""

    def __init__(self, monkeypatch):
        self.updates, self.at_saves = [], []
        monkeypatch.setattr("bapo_trl.report.callback.save_report", self.save_report)

    def save_report(self, logs, path):
        self.updates.append(max(log["step"] for log in logs))
        return save_report(logs, path)

    def watch(self) -> TrainerCallback:
        seen = self

        class Watch(TrainerCallback):
            def on_save(self, args, state, control, **kwargs):
                seen.at_saves.append((state.global_step, seen.updates[-1]))

        return Watch()


class Clock(TrainerCallback):
    """Stands for the clock of the callback: shows the seconds that are given for each update."""

    def __init__(self, monkeypatch, seconds):
        self.seconds, self.update = seconds, 0
        monkeypatch.setattr(
            "bapo_trl.report.callback.time", SimpleNamespace(monotonic=lambda: self.seconds[self.update])
        )

    def on_step_end(self, args, state, control, **kwargs):
        self.update = state.global_step


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        ([0, 100, 130, 159.9, 160], [1, 1, 1, 4]),
        ([0, 100, 160, 219, 300], [1, 2, 2, 4]),
    ],
)
def test_a_report_is_written_once_a_minute_and_at_the_end(tmp_path, monkeypatch, seconds, written):
    drawn = Drawn(monkeypatch)
    trainer = toy_trainer(tmp_path, save_strategy="steps", save_steps=1)
    for callback in (Clock(monkeypatch, seconds), ReportCallback(), drawn.watch()):
        trainer.add_callback(callback)
    trainer.train()
    assert drawn.at_saves == list(enumerate(written, start=1))
    assert drawn.updates == sorted({*written, 4})  # none twice
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_settings_are_saved_by_a_list_without_secrets_and_all_count_in_the_fingerprint(tmp_path):
    hidden = "s3cret" * 3

    def written(name, settings, **args) -> dict:
        trainer = toy_trainer(tmp_path / name, max_steps=1, **args)
        ReportCallback(settings).on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
        text = (tmp_path / name / "run_settings.json").read_text()
        assert hidden not in text
        return json.loads(text)

    secret = {"model_init_kwargs": {"token": hidden}, "vllm_server_base_url": f"http://me:{hidden}@node-7:8000"}
    own = {"dataset_name": "toy", "api_key": hidden}
    saved = written("a", own, seed=1, **secret)
    assert (saved["seed"], saved["dataset_name"], saved["max_completion_length"]) == (1, "toy", 7)
    assert saved["facts"]["method"] == "BAPO"
    assert written("b", own, seed=2, **secret)["fingerprint"] == saved["fingerprint"]
    others = [written("c", {**own, "api_key": hidden[::-1]}, **secret), written("d", own, weight_decay=0.5, **secret)]
    assert len({saved["fingerprint"], *(other["fingerprint"] for other in others)}) == 3


def test_a_report_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    trainer = toy_trainer(tmp_path, **SAVES)
    trainer.add_callback(ReportCallback())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    (said,) = (str(each.message) for each in caught if "The report is not written" in str(each.message))
    assert "matplotlib is not installed (pip install 'bapo-trl[plots]')" in said
    assert (tmp_path / "checkpoint-4").is_dir()
    assert not (tmp_path / "report.png").exists()
