"""The states of the random number generators of a process."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomStates:
    """The states of the generators that a checkpoint of transformers holds: Python's, NumPy's and PyTorch's."""

    python: tuple
    numpy: Any
    cpu: torch.Tensor
    cuda: list[torch.Tensor]

    @classmethod
    def current(cls) -> "RandomStates":
        """Return the states as they are."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Put the generators back into these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state_all(self.cuda)
