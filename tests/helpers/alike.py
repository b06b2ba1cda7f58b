"""Whether two runs are the same, bit for bit."""

import torch

from bapo_trl.phase_clock import PHASES
from tests.helpers.toy import training_logs


TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"}
TIMES |= {f"time/{name}" for name in PHASES} | {"tokens/generated_per_s", "tokens/trained_per_s"}


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of a model's weights."""
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def assert_same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def assert_same_states(left: dict, right: dict) -> None:
    """See that two state dicts hold the same tensors, bit for bit, and the same of all else."""
    tensors, others = ({key for key in left if isinstance(left[key], torch.Tensor) is kind} for kind in (True, False))
    assert left.keys() == right.keys()
    for name in tensors:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name].nan_to_num(1.0), right[name].nan_to_num(1.0)), name
    assert {name: left[name] for name in others} == {name: right[name] for name in others}


def assert_same_weights(left, right) -> None:
    """See that the models of two trainers have the same weights."""
    assert_same_tensors(left.model.state_dict(), right.model.state_dict())


def assert_same_logs(left, right, last: int = 0) -> None:
    """See that two trainers logged the same at their updates, or at the last ones of these, but for the times."""
    for one, other in zip(training_logs(left)[-last:], training_logs(right)[-last:], strict=True):
        names = one.keys() - TIMES
        assert {name: one[name] for name in names} == {name: other[name] for name in names}
