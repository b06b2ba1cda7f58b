"""DDP and DeepSpeed ZeRO-3 in two processes, with the replay queue on: same bounds, same weights, exact resume."""

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bapo_trl.checkpoints.ref_model import FILES, FOLDER
from bapo_trl.clip_bounds.update_log import UPDATE_METRICS
from tests.e2e.launching import ENGINES, fork, launch
from tests.helpers.adapter_worker import assert_all_sent, send_an_adapter
from tests.helpers.alike import TIMES
from tests.helpers.commands import accelerate_launcher, calling, run_command, succeeded
from tests.helpers.faults import SaveEvents
from tests.helpers.forked import run_python
from tests.helpers.ranks import finish, read_ranks
from tests.helpers.scripted import Scripted
from tests.helpers.toy import toy_dataset, toy_model, toy_run, toy_trainer


# Workers, which run on each rank


def train_scripted(out: str, micro_batches: str, kind: str, checkpoint: str = "", *kill: str) -> None:
    """
    Train with the replay queue on scripted completions, so that every engine and sharding sees the same rows: all
    weights ("full"), also in TRL's micro-batches ("padded"), or an adapter ("lora").
    """
    # A pass is one update on a whole generation, drawn from the queue: the same rows however they are sharded.
    folder = Path(out)
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    # SGD: Adam would turn the rounding of a tiny gradient into a full step
    settings = {"learning_rate": 2.0, "search_scope": "carried_over"}
    if kind == "lora":
        settings = {"learning_rate": 0.2, "search_scope": "batch"}
    if kind == "padded":
        settings["micro_batch_layout"] = "padded"
    trainer = toy_trainer(
        folder, trainer_class=Scripted, optim="sgd", max_grad_norm=0.0,
        gradient_accumulation_steps=int(micro_batches), steps_per_generation=int(micro_batches),
        per_device_train_batch_size=2, num_generations=4, num_iterations=2, replay_fraction=1.0, max_steps=6,
        save_strategy="steps", save_steps=4,
        trainer_args={"train_dataset": toy_dataset(8), "peft_config": lora if kind == "lora" else None},
        **settings,
    )  # fmt: skip
    if kill:
        rank, event, tears = kill
        if trainer.accelerator.process_index == int(rank):
            SaveEvents(6, event, tears == "tears").watch(trainer)
    trainer.train(resume_from_checkpoint=checkpoint == "true" or checkpoint or None)
    trainer.save_model(str(folder / "final"))
    finish(trainer, folder, optimizer=type(trainer.optimizer).__name__)


def train_with_reference(out: str, model: str, checkpoint: str | None = None) -> None:
    """Train with a reference model that follows the policy."""
    trainer = toy_run(
        out, model, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.25,
        num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=1, steps_per_generation=2,
        num_iterations=1, logging_steps=2, max_steps=4, save_strategy="steps", save_steps=2, resume=checkpoint,
    )  # fmt: skip
    finish(trainer, out)


# Tests


BOUNDS = ("bapo/clip_low", "bapo/clip_high", "bapo/search_steps")


class Runs:
    """Scripted runs, each made once: by engine (`None` for one process), with or without LoRA, resumed or straight."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, engine, uses_lora=False, resumes=False):
        lora = "lora" if uses_lora else "full"
        out = self.folder / f"{engine}-{lora}-{'resumed' if resumes else 'straight'}"
        if not out.exists():
            checkpoint = []
            if resumes:
                self(engine, uses_lora)
                checkpoint = [str(self.folder / f"{engine}-{lora}-straight" / "checkpoint-4")]
            worker = calling(train_scripted, out, 4 if engine else 8, lora, *checkpoint)
            if engine is None:
                succeeded(run_python(worker))
            else:
                fork(engine, worker)
        return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("scripted"))


def logs_of(out, num_processes=2):
    return read_ranks(out, num_processes)[0]["logs"]


def weights(out, name="model"):
    return load_file(out / "final" / f"{name}.safetensors")


def assert_close(left, right, atol):
    assert left.keys() == right.keys()
    for key in left:
        torch.testing.assert_close(left[key], right[key], rtol=0, atol=atol)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("uses_lora", [False, True], ids=["full", "lora"])
def test_two_processes_of_the_engine_choose_the_bounds_of_one(runs, engine, uses_lora):
    logs = read_ranks(runs(engine, uses_lora), **ENGINES[engine])[0]["logs"]
    expected = logs_of(runs(None, uses_lora), 1)
    assert len(logs) == len(expected) == 6
    assert [[log[name] for name in BOUNDS] for log in logs] == [[log[name] for name in BOUNDS] for log in expected]
    assert len({log["bapo/clip_low"] for log in logs} | {log["bapo/clip_high"] for log in logs}) > 2  # they move
    assert max(log["staleness/max"] for log in logs) > 1
    for log, expected_log in zip(logs, expected, strict=True):
        for name in UPDATE_METRICS:
            assert log[name] == pytest.approx(expected_log[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("uses_lora", [False, True], ids=["full", "lora"])
def test_zero3_ends_with_the_weights_of_ddp(runs, uses_lora):
    name = "adapter_model" if uses_lora else "model"
    ddp, zero3 = (weights(runs(engine, uses_lora), name) for engine in ENGINES)
    assert_close(ddp, zero3, atol=1e-5)
    start = load_file(runs("cpu_ddp", uses_lora) / "checkpoint-4" / f"{name}.safetensors")
    assert max((ddp[key] - start[key]).abs().max() for key in ddp) > 1e-3  # they moved


@pytest.mark.parametrize("engine", ENGINES)
def test_the_layout_of_micro_batches_changes_no_weight(runs, engine, tmp_path):
    fork(engine, calling(train_scripted, tmp_path, 4, "padded"))
    assert_close(weights(tmp_path), weights(runs(engine)), atol=1e-5)
    computed = [sum(log["padding/computed"] for log in logs_of(out)) for out in (runs(engine), tmp_path)]
    assert computed[0] < computed[1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("uses_lora", [False, True], ids=["full", "lora"])
def test_a_resumed_run_equals_the_straight_one(runs, engine, uses_lora):
    straight, resumed = runs(engine, uses_lora), runs(engine, uses_lora, resumes=True)
    name = "adapter_model" if uses_lora else "model"
    assert_close(weights(straight, name), weights(resumed, name), atol=0)
    for log, expected in zip(logs_of(resumed)[-2:], logs_of(straight)[-2:], strict=True):
        names = [*UPDATE_METRICS, "replay/size", "replay/fraction", "grad_norm", "loss"]
        assert {key: log.get(key) for key in names} == {key: expected.get(key) for key in names}


@pytest.mark.parametrize("bits", ["16", "4"])
def test_zero3_sends_merged_copies_of_an_adapter_and_keeps_the_base(tmp_path, bits):
    fork("cpu_zero3", calling(send_an_adapter, tmp_path, "", bits))
    assert_all_sent(tmp_path, **ENGINES["cpu_zero3"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reference_model_that_follows_the_policy_is_resumed(tmp_path, engine):
    toy_model().save_pretrained(tmp_path / "model")
    straight = tmp_path / "straight"
    fork(engine, calling(train_with_reference, straight, tmp_path / "model"))
    fork(engine, calling(train_with_reference, tmp_path / "resumed", tmp_path / "model", straight / "checkpoint-2"))
    straight, resumed = (read_ranks(tmp_path / name, **ENGINES[engine]) for name in ("straight", "resumed"))
    for one, other in zip(straight, resumed, strict=True):
        assert len(one["logs"]) == 2
        for log, expected in zip(one["logs"], other["logs"], strict=True):
            assert {name: log[name] for name in log.keys() - TIMES} == {
                name: expected[name] for name in expected.keys() - TIMES
            }

    def policy(update):
        return load_file(tmp_path / "straight" / f"checkpoint-{update}" / "model.safetensors")

    expected = load_file(tmp_path / "model" / "model.safetensors")
    for update in (2, 4):  # 3/4 of the reference before, 1/4 of the policy
        expected = {name: values.mul(0.75).add(policy(update)[name], alpha=0.25) for name, values in expected.items()}
    for name in ("straight", "resumed"):
        saved = FILES.read(FILES.path(tmp_path / name / "checkpoint-4" / FOLDER, 0, 1))
        assert_close({key.removeprefix("module."): values for key, values in saved.items()}, expected, atol=0)


@pytest.mark.parametrize(
    "kill",
    [
        ["0", "os.rename checkpoint-6", ""],  # all is written, also the manifest
        ["1", "safetensors replay_queue_00001_of_00002.safetensors", "tears"],  # within the rank's own shard
    ],
    ids=["before-rename", "within-shard"],
)
def test_zero3_that_is_killed_in_a_save_goes_on_without_a_hand(tmp_path, runs, kill):
    worker = calling(train_scripted, tmp_path, 4, "full")
    killed = run_command([sys.executable, *accelerate_launcher("cpu_zero3"), *worker, "", *kill], timeout_s=400)
    assert "exitcode  : -9" in killed.stderr, killed.stderr[-8000:]
    assert {path.name for path in tmp_path.glob("*checkpoint-*")} == {"checkpoint-4"}
    assert list(tmp_path.glob("_unfinished-*/checkpoint-6/global_step6/*zero_pp_rank_1*"))
    fork("cpu_zero3", [*worker, "true"])
    assert len(logs_of(tmp_path)) == 6
    assert_close(weights(runs("cpu_zero3")), weights(tmp_path), atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_script_trains_and_resumes(tmp_path, engine):
    arguments = ["train_bapo.py", "--config", "quickstart", "--replay_fraction", "0.5", "--num_iterations", "2"]
    arguments += ["--gradient_accumulation_steps", "1", "--steps_per_generation", "2", "--logging_steps", "1"]
    arguments += ["--save_steps", "4"]
    arguments += ["--per_device_train_batch_size", "16", "--output_dir", str(tmp_path)]
    launch(engine, [*arguments, "--max_steps", "4"])
    launch(engine, [*arguments, "--max_steps", "6", "--resume_from_checkpoint", "true"])
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [log["step"] for log in history if "bapo/clip_low" in log] == [1, 2, 3, 4, 5, 6]
    assert next(log for log in history if log["step"] == 5)["replay/fraction"] == 0.5
    trained = load_file(tmp_path / "model.safetensors")
    assert {tensor.ndim for tensor in trained.values()} == {1, 2}  # not the empty shards of ZeRO-3
    AutoModelForCausalLM.from_pretrained(tmp_path)
