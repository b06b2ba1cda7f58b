"""Kernels and memory of a computation, told on torch's `meta` device: no GPU needed."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Kernels(TorchDispatchMode):
    """
    Names the operations that run a kernel, all but views, and the most bytes that their results held at a time.

    What an operation returns counts, asked for or not; what was there before does not.
    """

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            self.names.append(operation.overloadpacket.__name__)
            before = {_key(tensor) for tensor in _tensors((args, kwargs))}
            for tensor in _tensors(results):
                if _key(tensor) not in before:
                    storage = tensor.untyped_storage()
                    self._alive[_key(tensor)] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return results


def _tensors(values) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
