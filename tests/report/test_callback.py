"""The report that a training run keeps up to date."""

import json
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from bapo_trl.report.callback import ReportCallback
from bapo_trl.report.command import main
from tests.helpers.hub import push_to_stand_in
from tests.helpers.toy import toy_trainer


pytestmark = pytest.mark.figures


SAVES = {"save_strategy": "steps", "save_steps": 2}


def last_update(page: Path) -> int:
    return int(re.search(r"last update logged</th><td>(\d+)</td>", page.read_text())[1])


class Watch(TrainerCallback):
    """Notes after each save up to which update the page goes."""

    def __init__(self):
        self.seen = []

    def on_save(self, args, state, control, **kwargs):
        page = Path(args.output_dir, "report.html")
        self.seen.append((state.global_step, last_update(page)))


class Clock(TrainerCallback):
    """Stands for the clock of the callback: shows the seconds that are given for each update."""

    def __init__(self, monkeypatch, seconds):
        self.seconds, self.update = seconds, 0
        monkeypatch.setattr(
            "bapo_trl.report.callback.time", SimpleNamespace(monotonic=lambda: self.seconds[self.update])
        )

    def on_step_end(self, args, state, control, **kwargs):
        self.update = state.global_step


MINUTES = range(0, 600, 60)  # each update takes one


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (range(0, 50, 10), [1, 1, 1, 1]),
        ([0, 100, 130, 159.9, 160], [1, 1, 1, 4]),
        ([0, 100, 160, 219, 300], [1, 2, 2, 4]),
    ],
)
def test_a_report_is_written_once_a_minute_and_at_the_end(tmp_path, monkeypatch, seconds, written):
    watch, drawn = Watch(), []

    def save_report(logs, path):
        drawn.append(max(log["step"] for log in logs))
        path.with_suffix(".html").write_text(f"last update logged</th><td>{drawn[-1]}</td>")

    monkeypatch.setattr("bapo_trl.report.callback.save_report", save_report)
    trainer = toy_trainer(tmp_path, save_strategy="steps", save_steps=1)
    for callback in (Clock(monkeypatch, seconds), ReportCallback(), watch):
        trainer.add_callback(callback)
    trainer.train()
    assert watch.seen == list(enumerate(written, start=1))
    assert drawn == sorted({*written, 4})  # none twice


@pytest.mark.parametrize("args", [{"loss_type": "vespo"}, {"replay_fraction": 0.25}])
def test_a_training_run_has_a_report_at_each_save(tmp_path, monkeypatch, args):
    trainer = toy_trainer(tmp_path, **SAVES, **args)
    assert trainer.args.gradient_checkpointing
    watch = Watch()
    trainer.add_callback(Clock(monkeypatch, MINUTES))
    trainer.add_callback(ReportCallback({"dataset_name": "toy"}))
    trainer.add_callback(watch)
    trainer.train()
    assert watch.seen == [(2, 2), (4, 4)]
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
    settings = json.loads((tmp_path / "run_settings.json").read_text())
    assert (settings["seed"], settings["dataset_name"], settings["max_completion_length"]) == (42, "toy", 7)
    page = (tmp_path / "report.html").read_text()
    assert ("Clip bounds" in page) == (args.get("loss_type") != "vespo")
    assert ("Samples in the replay queue" in page) == ("replay_fraction" in args)
    assert "<th>dataset_name</th><td>toy</td>" in page


def file_states(folder: Path) -> list[tuple[int, int]]:
    states = [(folder / name).stat() for name in ("report.png", "report.html")]
    return [(state.st_size, state.st_mtime_ns) for state in states]


@pytest.mark.parametrize(("strategy", "pushed"), [("every_save", [2, 4]), ("end", [])])
def test_a_report_stays_as_it_is_while_an_upload_reads_it(tmp_path, monkeypatch, strategy, pushed):
    def note(folder, name):
        return last_update(Path(folder, "report.html")), file_states(Path(folder))

    hub, watch, after = push_to_stand_in(monkeypatch, note), Watch(), []

    class AfterSave(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            after.append((state.global_step, file_states(tmp_path)))

    trainer = toy_trainer(tmp_path, push_to_hub=True, hub_strategy=strategy, **SAVES)
    for callback in (Clock(monkeypatch, MINUTES), ReportCallback(), watch, AfterSave()):
        trainer.add_callback(callback)
    trainer.train()
    assert watch.seen == [(2, 2), (4, 4)]
    assert hub.uploads == [each for each in after if each[0] in pushed]


HIDDEN = "s3cret" * 3
SHAPES = {
    f"http://me:{HIDDEN}@node-7:8000/": "http://<SECRET>@node-7:8000/",
    f"https://{HIDDEN}@node-7:8000": "https://<SECRET>@node-7:8000",
    f"http://node-7/?access_token={HIDDEN}&x=1": "http://node-7/?access_token=<SECRET>&x=1",
    f"hf_{HIDDEN}": "<SECRET>",
    f"Bearer {HIDDEN}": "Bearer <SECRET>",
    f'{{"deep": {{"api_key": "{HIDDEN}"}}}}': '{"deep": {"api_key": "<SECRET>"}}',
    f"WANDB_API_KEY={HIDDEN} python train.py": "WANDB_API_KEY=<SECRET> python train.py",
}


KEPT = {
    "dataset_name": "org/hf_datasets-of-tokens@main",
    "url": "http://node-7:8000/?mail=me@node-7",
    "prompt_template": "{prompt}\nThe token is: a word. Basic arithmetic, sk-learn.",
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "reward_funcs": ["my_rewards.no_secret"],
    "use_auth_token": True,
}


def test_no_secret_is_written_into_the_settings_and_all_else_is(tmp_path):
    load = {"token": HIDDEN, "proxies": {"http": f"http://me:{HIDDEN}@proxy"}, "attn_implementation": "eager"}
    settings = {
        "deep": [{"headers": {"Authorization": HIDDEN, "X-Api-Key": HIDDEN}}, ({"auth": ["me", HIDDEN]}, *SHAPES)],
        "object": Path(f"hf_{HIDDEN}"),
        "api_key": HIDDEN,
    }
    server = f"http://me:{HIDDEN}@node-7:8000"
    trainer = toy_trainer(tmp_path, max_steps=1, vllm_server_base_url=server, model_init_kwargs=load)
    trainer.add_callback(ReportCallback({**settings, **KEPT}))
    trainer.train()
    text = (tmp_path / "run_settings.json").read_text()
    assert HIDDEN not in text
    written = json.loads(text)
    assert written["vllm_server_base_url"] == "http://<SECRET>@node-7:8000"
    assert written["model_init_kwargs"] == {
        "token": "<TOKEN>", "proxies": {"http": "http://<SECRET>@proxy"}, "attn_implementation": "eager",
    }  # fmt: skip
    assert written["deep"][1] == [{"auth": "<AUTH>"}, *SHAPES.values()]
    plain = {**json.loads(json.dumps(trainer.args.to_dict(), default=str)), **KEPT}
    masked = {"vllm_server_base_url", "model_init_kwargs"}
    assert {name: written[name] for name in plain if name not in masked} == {
        name: value for name, value in plain.items() if name not in masked
    }


def test_seeds_of_a_training_are_one_band_and_another_setting_is_not(tmp_path):
    runs = {"a": {"seed": 1}, "b": {"seed": 2}, "c": {"seed": 3, "learning_rate": 1e-3}}
    for name, args in runs.items():
        trainer = toy_trainer(tmp_path / name, max_steps=2, **SAVES, **args)
        trainer.add_callback(ReportCallback())
        trainer.train()
    main([*(str(tmp_path / name) for name in runs), "--output", str(tmp_path / "all")])
    page = (tmp_path / "all" / "report.html").read_text()
    assert f"<th>{tmp_path.name} (2 seeds)</th><th>c</th>" in page
    assert "<th>learning_rate</th><td>0.02</td><td>0.001</td>" in page


def test_a_resumed_run_goes_on_with_its_report(tmp_path):
    for steps, resume in ((2, None), (4, True)):
        trainer = toy_trainer(tmp_path, max_steps=steps, **SAVES)
        trainer.add_callback(ReportCallback())
        trainer.train(resume_from_checkpoint=resume)
    assert last_update(tmp_path / "report.html") == 4


@pytest.mark.parametrize("is_installed", [False, True])
def test_a_report_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path, monkeypatch, is_installed):
    if is_installed:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # broken
    else:
        monkeypatch.setattr("bapo_trl.report.write.has_matplotlib", lambda: False)
    trainer = toy_trainer(tmp_path, **SAVES)
    trainer.add_callback(ReportCallback())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    said = [str(warning.message) for warning in caught if "The report is not written" in str(warning.message)]
    assert len(said) == 1
    assert ("matplotlib is not installed (pip install 'bapo-trl[plots]')" in said[0]) == (not is_installed)
    assert trainer.state.global_step == 4
    assert (tmp_path / "checkpoint-4").is_dir()
    assert not (tmp_path / "report.html").exists()


def test_only_the_main_process_writes(tmp_path):
    trainer = toy_trainer(tmp_path, **SAVES)
    callback = ReportCallback()
    trainer.state.is_world_process_zero = False
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    trainer.state.log_history = [{"loss": 0.1, "step": 1}]
    callback.on_save(trainer.args, trainer.state, trainer.control)
    assert not list(tmp_path.iterdir())
