"""
A made-up accelerator without memory: tensors on it have a shape and a type, and no values. Mixing devices raises, each
read by the host and each copy is noted. It stands on private names of torch: for the pinned version alone.
"""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.commands import ROOT


NAME = "rehearsal"
aten = torch.ops.aten


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def device(self, *_):
        return nullcontext()

    stream = device

    def get_rng_state(self, *_):
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, *_):
        pass


def register() -> torch.device:
    """Make the accelerator known to torch, once in a process, and return it."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    # Under autocast, products are in half precision, and all else is as it is
    autocast = "AutocastPrivateUse1"
    _LIBRARIES.extend([torch.library.Library("_", "IMPL", autocast), torch.library.Library("aten", "IMPL", autocast)])
    _LIBRARIES[0].fallback(torch.library.fallthrough_kernel)
    for name in ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention"):
        _LIBRARIES[1].impl(name, partial(_in_half, getattr(torch.ops.aten, name)))
    return torch.device(NAME, 0)


_LIBRARIES: list[torch.library.Library] = []  # held as long as the process lives


def _in_half(product, *args, **kwargs):
    def halved(each):
        is_real = isinstance(each, torch.Tensor) and each.is_floating_point()
        return each.to(torch.bfloat16) if is_real else each

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return product(*map(halved, args), **{name: halved(each) for name, each in kwargs.items()})


def is_there(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == NAME


class Watch(TorchDispatchMode):
    """
    Answers reads by the host (`answer`, and `True` for a truth), and notes them with copies from and to the
    accelerator, by the innermost function of ours or TRL's. `phase` is put before each note.
    """

    def __init__(self):
        super().__init__()
        self.phase, self.answer = "", 0
        self.reads: list[tuple[str, str]] = []
        self.copies_up: list[tuple[str, str]] = []
        self.copies_down: list[tuple[str, str]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is aten._local_scalar_dense.default and is_there(args[0]):
            self.reads.append((self.phase, _line()))
            is_truth, is_real = args[0].dtype == torch.bool, args[0].dtype.is_floating_point
            return True if is_truth else float(self.answer) if is_real else self.answer
        if function in (aten.nonzero.default, aten.equal.default) and any(map(is_there, args)):
            self.reads.append((self.phase, _line()))
        if function is aten._to_copy.default:
            source, target = args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type
            if source != target:
                (self.copies_up if target == NAME else self.copies_down).append((self.phase, _line()))
            if source == "cpu" and target == NAME:
                return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"])
            if source == NAME and target == "cpu":
                with unset_fake_temporarily():
                    return torch.full(args[0].shape, self.answer, dtype=kwargs.get("dtype") or args[0].dtype)
        if torch.device(kwargs.get("device") or "cpu").type == "cpu" and not _has_fake((args, kwargs)):
            with unset_fake_temporarily():  # what lies on the CPU has values
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def _has_fake(values: object) -> bool:
    return any(isinstance(each, FakeTensor) for each in tree_leaves(values))


def _line() -> str:
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT / "bapo_trl"):
            return f"{path.relative_to(ROOT)}:{frame.name}"
        if "/trl/" in frame.filename:
            return f"trl/{path.name}:{frame.name}"
    return "torch"


class Rehearsal:
    """Tensors of a training on the accelerator, and what became of them."""

    def __init__(self, device: torch.device):
        self.device, self.watch = device, Watch()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def place(self, tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return a tensor on the accelerator like this one, of another shape if one is given."""
        with self._mode:
            if shape is not None:
                return torch.empty(shape, dtype=tensor.dtype, device=self.device)
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def place_module(self, module: torch.nn.Module) -> None:
        """Put all parameters and buffers there, tied ones once."""
        placed: dict[int, torch.Tensor] = {}
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in placed:
                        there = self.place(tensor.detach())
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        placed[id(tensor)] = (
                            torch.nn.Parameter(there, requires_grad=tensor.requires_grad) if is_parameter else there
                        )
                    tensors[name] = placed[id(tensor)]

    @contextmanager
    def running(self) -> Iterator[Watch]:
        """Compute there, and note it."""
        with _numbers_there(), self._mode, self.watch:
            yield self.watch

    def alive(self) -> tuple[int, set[tuple[int, ...]]]:
        """Return the bytes of all storages there that something holds, and the shapes of the tensors in them."""
        gc.collect()
        there = [each for each in gc.get_objects() if type(each) is FakeTensor and is_there(each)]
        storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in there}
        return sum(storages.values()), {tuple(each.shape) for each in there}


@contextmanager
def _numbers_there() -> Iterator[None]:
    """Make tensors of Python numbers on the accelerator: the fake mode has no kernel to fold such constants."""
    tensor, as_tensor, to_list = torch.tensor, torch.as_tensor, FakeTensor.tolist

    def made(data, *args, device=None, **kwargs):
        made_here = tensor(data, *args, **kwargs)
        if device is None or torch.device(device).type != NAME:
            return made_here if device is None else made_here.to(device)
        return torch.zeros(made_here.shape, dtype=made_here.dtype, device=device)

    def taken(data, *args, device=None, **kwargs):
        if isinstance(data, torch.Tensor):
            return as_tensor(data, *args, **({} if device is None else {"device": device}), **kwargs)
        return made(data, *args, device=device, **kwargs)

    def listed(self):  # one copy to the host, and not a read for each number
        return self.cpu().tolist() if is_there(self) else to_list(self)

    torch.tensor, torch.as_tensor, FakeTensor.tolist = made, taken, listed
    try:
        yield
    finally:
        torch.tensor, torch.as_tensor, FakeTensor.tolist = tensor, as_tensor, to_list
