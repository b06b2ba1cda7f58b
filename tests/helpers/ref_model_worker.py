"""Saves a sharded reference model and loads it into another: `-m tests.helpers.ref_model_worker FOLDER KIND`."""

import sys
from types import SimpleNamespace

import torch
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bapo_trl.checkpoints.ref_model import load_ref_model, save_ref_model
from tests.helpers.toy import toy_model


def sharded(model, sharding: str):
    """Return the model as TRL's `prepare_fsdp` would, in parts on each of the two ranks."""
    if sharding == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def trainer_with(model, is_main: bool):
    args = SimpleNamespace(should_save=is_main, sync_ref_model=True)
    return SimpleNamespace(ref_model=model, args=args, is_world_process_zero=lambda: is_main)


def main(folder: str, sharding: str) -> None:
    state = PartialState(cpu=True)
    assert state.num_processes == 2
    settings = {"tie_word_embeddings": True, "torch_dtype": torch.bfloat16, "hidden_size": 18}
    whole = toy_model(0, **settings).to(torch.bfloat16)
    expected = {name: values.clone() for name, values in whole.named_parameters()}
    save_ref_model(trainer_with(sharded(whole, sharding), state.is_main_process), folder)
    # Each rank begins with weights of its own
    other = sharded(toy_model(1 + state.process_index, **settings).to(torch.bfloat16), sharding)
    load_ref_model(trainer_with(other, state.is_main_process), folder)
    is_sharded = sharding == "fsdp2"
    found = {name: values.full_tensor() if is_sharded else values for name, values in other.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    state.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
