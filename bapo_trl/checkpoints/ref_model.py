"""The reference model in a checkpoint: `sync_ref_model` changes it, and TRL up to 1.16 at least saves it nowhere."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from .rank_errors import on_main_process
from .rank_files import RankFiles


FOLDER = "ref_model"
"""Folder in a checkpoint: beside the model, vLLM would read the file for some of its weights."""

FILES = RankFiles("ref model", "1", "resume from another checkpoint")


@torch.no_grad()
def save_ref_model(trainer: Any, checkpoint: str | Path) -> None:
    """Write the parameters of the reference model, gathered one by one. All ranks make this call together."""
    saved = {}
    with _unsharded(trainer.ref_model, is_changed=False):
        for name, parameter in trainer.ref_model.named_parameters():
            with _whole(parameter, is_changed=False) as values:
                if trainer.args.should_save:
                    saved[name] = values.to("cpu", copy=True).contiguous()
    if trainer.args.should_save:
        FILES.write(Path(checkpoint, FOLDER), 0, 1, saved)


@torch.no_grad()
def load_ref_model(trainer: Any, checkpoint: str | Path) -> None:
    """
    Restore the reference model, on all ranks as the main process finds it. All ranks make this call together.

    Warns if it is not there although `sync_ref_model` changes it. A file that is damaged, or of another model, is an
    `InputError`.
    """
    with _unsharded(trainer.ref_model, is_changed=True):
        is_there = _load(trainer, checkpoint)
    if not is_there and trainer.args.sync_ref_model and trainer.is_world_process_zero():
        warnings.warn(
            f"The checkpoint {checkpoint} holds no reference model, which `sync_ref_model` had changed: the run "
            "continues with that of its start, so that the KL penalty (`beta`) differs."
        )


def _load(trainer: Any, checkpoint: str | Path) -> bool:
    """Return whether there is a reference model, which the ranks have then."""
    path = FILES.path(Path(checkpoint, FOLDER), 0, 1)
    parameters: dict[str, Any] = dict(trainer.ref_model.named_parameters())
    saved: dict[str, torch.Tensor] = {}

    def read() -> bool:
        if not path.parent.is_dir():
            return False
        saved.update(FILES.read(path))
        shapes = {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in parameters.items()}
        if {name: tuple(values.shape) for name, values in saved.items()} != shapes:
            raise FILES.damaged(path, ValueError("its parameters are not those of the model"))
        return True

    if not on_main_process(read):
        return False
    for name, parameter in parameters.items():
        with _whole(parameter, is_changed=True) as values:
            if saved:
                values.copy_(saved[name])
            broadcast(values)
    return True


def _unsharded(model: torch.nn.Module, is_changed: bool) -> AbstractContextManager:
    """Give all parameters of FSDP1 their names and shapes, for as long as the context lasts."""
    if not isinstance(model, FullyShardedDataParallel):
        return nullcontext()
    return FullyShardedDataParallel.summon_full_params(model, writeback=is_changed)


@contextmanager
def _whole(parameter: Any, is_changed: bool) -> Iterator[torch.Tensor]:
    """Give the whole of a parameter on all ranks; if it `is_changed`, to the same on all of them, keep that."""
    if hasattr(parameter, "ds_id"):
        import deepspeed  # which is there with ZeRO-3

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if is_changed else None):
            yield parameter.data
    elif isinstance(parameter, DTensor):
        values = parameter.full_tensor()
        yield values
        if is_changed:
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.copy_(distribute_tensor(values, mesh, placements, src_data_rank=None))
    else:
        yield parameter.data
