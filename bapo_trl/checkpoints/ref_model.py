"""Save the reference model in checkpoints: `sync_ref_model` changes it, and TRL, up to 1.16 at least, has no copy."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from ..parts import Part
from .rank_errors import on_main_process
from .rank_files import RankFiles


FOLDER = "ref_model"
"""Subfolder of a checkpoint: in the checkpoint folder itself, vLLM would load the file as part of the model."""

FILES = RankFiles("ref model", "1", "resume from another checkpoint")


class ReferenceModel(Part):
    """The reference model of a trainer, which `sync_ref_model` changes. Its parameters are gathered one by one."""

    def reset(self, run):
        self._run = run

    @torch.no_grad()
    def save(self, folder, clock):
        args, model = self._run.args, self._run.ref_model
        if not args.sync_ref_model:
            return
        saved = {}
        with _unsharded(model, is_changed=False):
            for name, parameter in model.named_parameters():
                with _whole(parameter, is_changed=False) as values:
                    if args.should_save:
                        saved[name] = values.to("cpu", copy=True).contiguous()
        if args.should_save:
            FILES.write(Path(folder, FOLDER), 0, 1, saved)

    @torch.no_grad()
    def load_together(self, folder):
        """
        Restore the reference model on all ranks, as read by the main process.

        Warns if the checkpoint has none although `sync_ref_model` is on. Raises an `InputError` for a file that is
        damaged or belongs to another model.
        """
        model = self._run.ref_model
        if model is None:
            return
        with _unsharded(model, is_changed=True):
            is_there = _load(model, FILES.path(Path(folder, FOLDER), 0, 1))
        if not is_there and self._run.args.sync_ref_model and self._run.is_world_process_zero():
            warnings.warn(
                f"The checkpoint {folder} has no reference model, which `sync_ref_model` had changed: the run "
                "continues with the initial reference model, so the KL penalty (`beta`) differs."
            )


def _load(model: torch.nn.Module, path: Path) -> bool:
    """Load the reference model on all ranks; return whether the checkpoint has one."""
    parameters: dict[str, Any] = dict(model.named_parameters())
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
    """Restore the original names and shapes of all FSDP1 parameters inside this context."""
    if not isinstance(model, FullyShardedDataParallel):
        return nullcontext()
    return FullyShardedDataParallel.summon_full_params(model, writeback=is_changed)


@contextmanager
def _whole(parameter: Any, is_changed: bool) -> Iterator[torch.Tensor]:
    """Yield the full parameter on all ranks; with `is_changed`, keep its new value, the same on all ranks."""
    if hasattr(parameter, "ds_id"):
        import deepspeed  # installed if ZeRO-3 is used

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
