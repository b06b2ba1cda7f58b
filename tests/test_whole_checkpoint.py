"""Checkpoints through `train()`: complete or not there, under transformers' names, resumed from without a hand."""

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trl import GRPOConfig, GRPOTrainer

from bapo_trl import BAPOConfig, BAPOTrainer
from bapo_trl.checkpoints.files import MANIFEST, UNFINISHED, find_defect
from bapo_trl.checkpoints.run_lock import LOCK
from bapo_trl.checkpoints.stop_signals import StopSignals
from bapo_trl.errors import InputError
from tests.helpers.commands import run_command, succeeded
from tests.helpers.faults import Start, kill_and_resume, names
from tests.helpers.forked import run_function
from tests.helpers.hub import push_to_stand_in
from tests.helpers.toy import InUpdate, terminate, toy_dataset, toy_run, toy_trainer
from tests.replay.test_mixer import REPLAY


SAVING = {**REPLAY, "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
# A few in every run; or every event from one save to the next, and 20 of a whole run: BAPO_TRL_SAVE_KILLS=all
SAVE_KILLS = os.environ.get("BAPO_TRL_SAVE_KILLS", "few")


@pytest.mark.parametrize(
    ("kind", "which", "count", "ranks"),
    [
        pytest.param("replay", "one", 1, {1}, marks=pytest.mark.processes),
        *(
            pytest.param(*case, marks=pytest.mark.kills)
            for case in (
                ("replay", SAVE_KILLS, 9, {1, 2}),
                ("partial", SAVE_KILLS, 7, {1, 2}),
                ("reference", SAVE_KILLS, 3, {1}),  # a reference model that follows the policy
                ("anywhere", SAVE_KILLS, 4, {2}),  # at random moments of a whole run
            )
        ),
    ],
)
def test_a_run_that_is_killed_goes_on_without_a_hand(tmp_path, kind, which, count, ranks):
    """Within a save, in a round of a generation, between two updates."""
    timeout_s = 3600 if which == "all" else 400
    printed = succeeded(run_function(kill_and_resume, tmp_path, kind, which, timeout_s=timeout_s))
    kills = [json.loads(line) for line in printed.splitlines()]
    assert len(kills) == count if which != "all" else len(kills) >= 20
    assert {kill["ranks"] for kill in kills} == ranks
    assert not [kill for kill in kills if kill["wrong"]]


def saved(folder, trainer_class=BAPOTrainer, resume_from=None, **args):
    is_plain = not issubclass(trainer_class, BAPOTrainer)
    settings = {key: value for key, value in {**SAVING, **args}.items() if not (is_plain and key.startswith("replay"))}
    config_class = GRPOConfig if is_plain else BAPOConfig
    parts = {"trainer_class": trainer_class, "config_class": config_class}
    return toy_run(folder, trainer_args={"eval_dataset": toy_dataset(6)}, **parts, **settings, resume=resume_from)


@pytest.fixture(scope="module")
def of_six_updates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    saved(folder)
    return folder


@pytest.fixture
def run(of_six_updates, tmp_path) -> Path:
    """A copy of the folder of a run, with its checkpoints 2, 4 and 6."""
    return shutil.copytree(of_six_updates, tmp_path / "run")


def resume(folder, checkpoint, **args) -> int:
    """Resume for two updates; return the update that the run went on from."""
    start = Start()
    settings = {**SAVING, "max_steps": 8, **args}
    toy_run(folder, trainer_args={"callbacks": [start]}, **settings, resume=checkpoint)
    return start.update


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.trainings
@pytest.mark.parametrize("args", [{}, {"save_only_model": True}], ids=str)
def test_the_manifest_lists_what_the_parents_save_and_nothing_else_is_left(tmp_path, args):
    saved(tmp_path / "plain", GRPOTrainer, max_steps=2, **args)
    saved(tmp_path / "whole", max_steps=2, **args)
    assert names(tmp_path / "whole") == names(tmp_path / "plain") == {"checkpoint-2"}
    states = () if "save_only_model" in args else ("replay_queue", "carried_curves", "data_place")
    ours = {f"{name}_00000_of_00001.safetensors" for name in states}
    listed = json.loads((tmp_path / "whole" / "checkpoint-2" / MANIFEST).read_text())
    assert listed.keys() == names(tmp_path / "whole" / "checkpoint-2") - {MANIFEST}
    assert listed.keys() == names(tmp_path / "plain" / "checkpoint-2") | ours


def test_all_files_are_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    fsync, rename, flushed, named = os.fsync, os.rename, set(), []

    def watched_fsync(descriptor):
        fsync(descriptor)
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    def watched_rename(source, target):
        named.append(os.path.basename(target))
        assert {str(path) for path in (source, *Path(source).rglob("*"))} <= flushed
        rename(source, target)
        flushed.discard(str(tmp_path))

    monkeypatch.setattr("os.fsync", watched_fsync)
    monkeypatch.setattr("os.rename", watched_rename)
    saved(tmp_path, max_steps=4)
    assert named == ["checkpoint-2", "checkpoint-4"]
    assert str(tmp_path) in flushed  # after the last rename


def test_true_takes_the_newest_complete_checkpoint_and_names_what_it_skips(run, recwarn):
    (run / "checkpoint-6" / "rng_state.pth").unlink()
    cut_in_half(run / "checkpoint-4" / "optimizer.pt")
    (run / "checkpoint-12").mkdir()  # as a trainer without manifests leaves it when it is killed
    assert resume(run, True, max_steps=3) == 2
    skipped = [str(warning.message) for warning in recwarn if "skipped" in str(warning.message)]
    assert [message.replace(f"{run}/", "") for message in skipped] == [
        "checkpoint-12 is not complete and was skipped: trainer_state.json is missing.",
        "checkpoint-6 is not complete and was skipped: rng_state.pth is missing.",
        f"checkpoint-4 is not complete and was skipped: {skipped[2].split('skipped: ')[1]}",
    ]
    assert "optimizer.pt has" in skipped[2]


def test_a_folder_that_is_not_complete_is_rejected_with_what_is_missing(run):
    checkpoint = run / "checkpoint-6"
    with pytest.raises(ValueError, match="checkpoint-5 is not complete: there is no such folder"):
        resume(run, str(run / "checkpoint-5"))
    (checkpoint / "scheduler.pt").unlink()
    cut_in_half(checkpoint / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"model.safetensors has \d+ bytes, not \d+; scheduler.pt is missing.*newest that is complete"
    ):
        resume(run, str(checkpoint))


def test_a_folder_has_one_live_run(tmp_path):
    """A second one is started in the middle of a save of the first, and rejected."""
    first, rejected = toy_trainer(tmp_path, **{**SAVING, "max_steps": 2}), []
    save_state = first._save_rng_state

    def saving(folder):
        second = toy_trainer(tmp_path, **SAVING)
        with pytest.raises(InputError, match=rf"`output_dir` is {tmp_path}, where another run is training"):
            second.train(True)
        rejected.append(second)
        save_state(folder)

    first._save_rng_state = saving
    first.train()
    assert len(rejected) == 1
    assert names(tmp_path) == {"checkpoint-2"}
    assert find_defect(tmp_path / "checkpoint-2") is None
    del first._save_rng_state
    first.train(resume_from_checkpoint=True)  # the lock is free again


def test_a_run_that_is_killed_keeps_no_other_out(tmp_path):
    lock = "import os, sys; from bapo_trl.checkpoints.run_lock import RunLock; RunLock(sys.argv[1]).acquire(); "
    killed = run_command([sys.executable, "-c", lock + "os.kill(os.getpid(), 9)", str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    assert names(tmp_path) == {LOCK}
    saved(tmp_path, max_steps=2)
    assert names(tmp_path) == {"checkpoint-2"}


def test_a_checkpoint_of_an_earlier_run_is_replaced_as_a_whole(run):
    earlier = load_file(run / "checkpoint-2" / "model.safetensors")
    (run / "checkpoint-2" / "replay_queue_00000_of_00002.safetensors").touch()  # of more ranks
    trainer = saved(run, max_steps=2, learning_rate=1e-3)
    assert names(run) == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    manifest = json.loads((run / "checkpoint-2" / MANIFEST).read_text())
    assert names(run / "checkpoint-2") == manifest.keys() | {MANIFEST}
    later = load_file(run / "checkpoint-2" / "model.safetensors")
    assert any(not torch.equal(earlier[key], later[key]) for key in later)
    assert all(torch.equal(trainer.model.state_dict()[key].cpu(), later[key]) for key in later)


SCORED = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 6,
    "metric_for_best_model": "score",
    "greater_is_better": True,
}


def scored(base: type, scores: dict[int, float]) -> type:
    class Scored(base):
        def evaluate(self, *args, **kwargs):
            metrics = {"eval_score": scores[self.state.global_step]}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    return Scored


@pytest.mark.trainings
@pytest.mark.parametrize(
    ("strategy", "limit", "scores"),
    [
        ("steps", None, {2: 1, 4: 3, 6: 2}),
        ("steps", 1, {2: 3, 4: 2, 6: 1}),
        ("best", 2, {2: 1, 4: 3, 6: 2}),
    ],
    ids=str,
)
def test_the_best_checkpoint_is_that_of_transformers_under_its_name(tmp_path, strategy, limit, scores):
    def run(name, base):
        args = {"save_strategy": strategy, "save_total_limit": limit, "load_best_model_at_end": True}
        return saved(tmp_path / name, scored(base, scores), **SCORED, **args)

    plain, whole = run("plain", GRPOTrainer), run("whole", BAPOTrainer)
    best = max(scores, key=scores.get)
    assert whole.state.best_model_checkpoint == str(tmp_path / "whole" / f"checkpoint-{best}")
    assert names(tmp_path / "whole") == names(tmp_path / "plain")
    for checkpoint in (tmp_path / "whole").glob("checkpoint-*"):
        states = [
            json.loads((tmp_path / name / checkpoint.name / "trainer_state.json").read_text())
            for name in ("plain", "whole")
        ]
        recorded = [state["best_model_checkpoint"].split("/")[-2:] for state in states]
        assert recorded == [["plain", recorded[0][1]], ["whole", recorded[0][1]]]
    kept = load_file(tmp_path / "whole" / f"checkpoint-{best}" / "model.safetensors")
    assert all(torch.equal(whole.model.state_dict()[key], kept[key]) for key in kept)
    assert plain.state.best_global_step == whole.state.best_global_step == best


@pytest.mark.parametrize(("stopped_in", "pushed"), [(None, [2, 4, 6]), (3, [2]), (6, [2, 4])])
def test_a_push_takes_complete_checkpoints_under_their_names_and_nothing_of_a_run_that_stops(
    tmp_path, monkeypatch, stopped_in, pushed
):
    hub = push_to_stand_in(monkeypatch, lambda folder, name: (folder, name, names(folder)))
    callbacks = [] if stopped_in is None else [StopSignals(), InUpdate(stopped_in, terminate)]
    settings = {"push_to_hub": True, "hub_strategy": "all_checkpoints", **SAVING}
    trainer = toy_trainer(tmp_path, trainer_args={"callbacks": callbacks}, **settings)
    trainer._finish_current_push = lambda: None
    trainer.train()
    if stopped_in is not None:
        assert (tmp_path / f"checkpoint-{stopped_in}").is_dir()
    checkpoints = [(path, name, files) for path, name, files in hub.uploads if name is not None]
    assert checkpoints == [
        (str(tmp_path / name), name, names(tmp_path / name)) for name in (f"checkpoint-{update}" for update in pushed)
    ]
    assert len(hub.uploads) == 2 * len(pushed)


@pytest.mark.trainings
def test_a_flush_that_finds_no_room_leaves_the_checkpoints_before_it(tmp_path, monkeypatch):
    fsync = os.fsync

    def full(descriptor):
        if "checkpoint-4" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    trainer = toy_trainer(tmp_path, **{**SAVING, "save_total_limit": 1})
    explained = (
        rf"No space left on device\ncheckpoint-4 could not be saved in {tmp_path}\. checkpoint-2, saved before, is "
        r"complete: resume with `resume_from_checkpoint=True`"
    )
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=explained):
        trainer.train()
    monkeypatch.undo()
    assert find_defect(tmp_path / "checkpoint-2") is None
    assert names(tmp_path) == {"checkpoint-2", UNFINISHED}
    with pytest.warns(UserWarning, match=r"left by an interrupted save.*checkpoint-4"):
        trainer.train(resume_from_checkpoint=True)
    assert names(tmp_path) == {"checkpoint-6"}
