"""What changes in a run and is neither weights nor optimizer: a resumed run has it as an uninterrupted one does."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback

from bapo_trl.checkpoints.files import MANIFEST
from bapo_trl.checkpoints.ref_model import FILES, FOLDER, ReferenceModel
from bapo_trl.errors import InputError
from tests.helpers.alike import TIMES, assert_same_tensors, assert_same_weights
from tests.helpers.commands import succeeded
from tests.helpers.forked import run_function
from tests.helpers.toy import toy_dataset, toy_model, toy_run


# A generation has four updates, a log line two: a checkpoint within a line would lose its first part
SYNCED = {
    "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25, "logging_steps": 2,
    "max_steps": 8, "save_strategy": "steps", "save_steps": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def synced(tmp_path_factory):
    """A run whose reference model follows the policy: its folder, with the model of its start, and its trainer."""
    folder = tmp_path_factory.mktemp("synced")
    toy_model().save_pretrained(folder / "model")
    return folder, toy_run(folder / "run", str(folder / "model"), **SYNCED)


def history(trainer):
    left_out = TIMES | {"train_loss"}  # transformers' mean over the updates since the resume
    return [{name: value for name, value in log.items() if name not in left_out} for log in trainer.state.log_history]


@pytest.mark.trainings
def test_a_checkpoint_holds_the_reference_model_as_it_was_synchronized(synced):
    folder, _ = synced
    expected = load_file(folder / "model" / "model.safetensors")
    for update in (2, 4):  # 3/4 of the reference before, 1/4 of the policy
        policy = load_file(folder / "run" / f"checkpoint-{update}" / "model.safetensors")
        expected = {name: values.mul(0.75).add(policy[name], alpha=0.25) for name, values in expected.items()}
    saved = FILES.read(FILES.path(folder / "run" / "checkpoint-4" / FOLDER, 0, 1))
    assert_same_tensors(saved, expected)


def test_a_resumed_run_is_the_uninterrupted_one_with_its_reference_and_its_logs(synced, tmp_path):
    folder, straight = synced
    resumed = toy_run(tmp_path, str(folder / "model"), resume=str(folder / "run" / "checkpoint-4"), **SYNCED)
    assert_same_weights(straight, resumed)
    assert_same_tensors(straight.ref_model.state_dict(), resumed.ref_model.state_dict())
    assert history(resumed) == history(straight)


@pytest.mark.trainings
@pytest.mark.parametrize("save_only_model", [False, True])
def test_a_checkpoint_without_the_reference_model_gives_a_warning(synced, tmp_path, save_only_model):
    folder, _ = synced
    if save_only_model:
        toy_run(tmp_path, str(folder / "model"), **{**SYNCED, "max_steps": 2}, save_only_model=True)
    else:  # of an earlier version
        shutil.copytree(folder / "run" / "checkpoint-2", tmp_path / "checkpoint-2")
        shutil.rmtree(tmp_path / "checkpoint-2" / FOLDER)
        (tmp_path / "checkpoint-2" / MANIFEST).unlink()
    with pytest.warns(UserWarning, match=r"checkpoint-2 has no reference model, which `sync_ref_model` had changed"):
        toy_run(tmp_path, str(folder / "model"), resume=True, **{**SYNCED, "max_steps": 3})


@pytest.mark.trainings
def test_the_reference_of_a_saved_adapter_is_the_one_that_it_started_from(tmp_path):
    lora = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(toy_model(), lora).save_pretrained(tmp_path / "adapter")
    saves = {"beta": 0.1, "logging_steps": 2, "max_steps": 8, "save_strategy": "steps", "save_steps": 4}

    def run(folder, resume=None):
        model = PeftModel.from_pretrained(toy_model(), tmp_path / "adapter", is_trainable=True)
        return toy_run(tmp_path / folder, model, resume=resume, **saves)

    straight = run("straight")
    resumed = run("resumed", str(tmp_path / "straight" / "checkpoint-4"))
    assert_same_weights(straight, resumed)
    assert history(resumed) == history(straight)
    start = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, weight in resumed.model.named_parameters():
        if ".ref." in name:
            assert torch.equal(weight.cpu(), start[name.replace(".ref.", ".")]), name


SAVED = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def optimized(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimized")
    for optim in ("adamw_torch", "sgd"):
        toy_run(folder / optim, optim=optim, **SAVED)
    return folder


@pytest.mark.trainings
@pytest.mark.parametrize(("before", "after"), [("adamw_torch", "sgd"), ("sgd", "adamw_torch"), ("sgd", "adafactor")])
def test_another_optimizer_is_named(optimized, tmp_path, before, after):
    checkpoint = str(optimized / before / "checkpoint-1")
    with pytest.raises(InputError, match=f"`optim` is '{after}'.*checkpoint-1 has the state of another"):
        toy_run(tmp_path, optim=after, resume=checkpoint, **{**SAVED, "max_steps": 2})


LORA = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}


def with_adapter(name: str = "default", **settings):
    return get_peft_model(toy_model(), LoraConfig(**{**LORA, **settings}), adapter_name=name)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Runs with an adapter, in the checkpoint's own folder and in a subfolder."""
    folder = tmp_path_factory.mktemp("adapted")
    for name in ("default", "mine"):
        toy_run(folder / name, with_adapter(name), **SAVED)
    return folder


@pytest.mark.trainings
@pytest.mark.parametrize("name", ["default", "mine"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_alpha", 16), ("use_rslora", True), ("r", 4), ("target_modules", ["q_proj"]), ("use_dora", True),
        ("alpha_pattern", {"q_proj": 4}), ("init_lora_weights", "pissa"),
    ],
)  # fmt: skip
def test_an_adapter_with_other_settings_is_rejected(adapted, tmp_path, name, field, value):
    resume = str(adapted / name / "checkpoint-1")
    with pytest.raises(InputError, match=f"`{field}` is .*, but it was "):
        toy_run(tmp_path, with_adapter(name, **{field: value}), resume=resume, **{**SAVED, "max_steps": 2})


@pytest.mark.trainings
def test_patience_is_not_renewed_by_a_resume(tmp_path):
    """Each evaluation finds reward 1: the first is the best, and updates 2, 3 and 4 find nothing better."""

    def run(folder, callbacks, resume=None):
        return toy_run(
            tmp_path / folder, reward_funcs=lambda completions, **kwargs: [1.0] * len(completions), max_steps=6,
            eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=6, save_strategy="steps", save_steps=1,
            metric_for_best_model="reward", greater_is_better=True, resume=resume,
            trainer_args={"eval_dataset": toy_dataset(2), "callbacks": callbacks},
        ).state.global_step  # fmt: skip

    assert run("straight", [EarlyStoppingCallback(3)]) == 4
    assert run("resumed", [EarlyStoppingCallback(3)], str(tmp_path / "straight" / "checkpoint-3")) == 4
    # With another patience, which is the user's: 2 + 2 evaluations
    assert run("patient", [EarlyStoppingCallback(4)], str(tmp_path / "straight" / "checkpoint-3")) == 5


def sharded(model, sharding: str):
    """Return the model as TRL's `prepare_fsdp` would, in parts on each of the two ranks."""
    if sharding == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def save_and_load_on_a_rank(folder: str, sharding: str) -> None:
    state = PartialState(cpu=True)
    assert state.num_processes == 2

    def reference(model):
        args, part = SimpleNamespace(should_save=state.is_main_process, sync_ref_model=True), ReferenceModel()
        part.reset(SimpleNamespace(ref_model=model, args=args, is_world_process_zero=lambda: state.is_main_process))
        return part

    settings = {"tie_word_embeddings": True, "torch_dtype": torch.bfloat16, "hidden_size": 18}
    whole = toy_model(0, **settings).to(torch.bfloat16)
    expected = {name: values.clone() for name, values in whole.named_parameters()}
    reference(sharded(whole, sharding)).save(folder, None)
    # Each rank begins with weights of its own
    other = sharded(toy_model(1 + state.process_index, **settings).to(torch.bfloat16), sharding)
    reference(other).load_together(folder)
    is_sharded = sharding == "fsdp2"
    found = {name: values.full_tensor() if is_sharded else values for name, values in other.named_parameters()}
    assert_same_tensors(found, expected)
    state.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_reference_model_over_two_ranks_is_saved_whole_and_loaded_on_both(tmp_path, sharding):
    succeeded(run_function(save_and_load_on_a_rank, tmp_path, sharding, ranks=2, timeout_s=120))
