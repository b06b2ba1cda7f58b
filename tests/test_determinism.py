"""`full_determinism`: nothing in the search is among what torch rejects to run deterministically on CUDA.

Without a CUDA device, the operations of a training run are traced on the CPU and held against the list in torch's
documentation of `use_deterministic_algorithms`.
"""

import os
import re

import pytest
import torch
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

from bapo_trl import BAPOTrainer
from bapo_trl.clip_bounds import MEASURES, BoundGrid, contributions, search_bounds
from tests.helpers.kernels import Kernels
from tests.helpers.toy import ON_GPU, toy_run, training_logs


def documented(listed: str, *without: str) -> set[str]:
    """Return the names, as in `torch.ops.aten`, of the operations that a part of torch's documentation lists."""
    items = re.split(r"(?=\* :\w+:`torch\.)", listed)
    items = [item for item in items if "CUDA" in item or "MPS" not in item]  # MPS is Apple's
    items = [item for item in items if not any(words in item for words in without)]
    names = [name for item in items for name in re.findall(r"^\* :\w+:`torch\.([\w.]+)`", item)]
    words = (re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.split(".")[-1]) for name in names)
    return {word.lower().rstrip("_") for word in words}


BOTH, _, THROWS = torch.use_deterministic_algorithms.__doc__.partition("operations will throw a\n")
REFUSED = documented(THROWS)
SLOWER = documented(BOTH.partition("operations will act\n")[2], "differentiate", "requires grad")


class Trace(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__.strip("_")
        if name != "cumsum" or args[0].is_floating_point():  # of integers it is deterministic
            self.operations.add(name)
        return operation(*args, **(kwargs or {}))


class Traced(BAPOTrainer):
    """Traces all that the trainer computes besides what GRPOTrainer does, the forward passes ahead included."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trace = Trace()

    def _reset_run_state(self):
        super()._reset_run_state()
        for name in ("begin", "observe", "close"):
            setattr(self.bounds_controller, name, self.traced(getattr(self.bounds_controller, name)))

    def traced(self, function):
        def run(*args, **kwargs):
            with self.trace:
                return function(*args, **kwargs)

        return run


@pytest.fixture
def determinism_ends_with_the_test():
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def test_the_documented_list_is_read():
    assert ("cumsum" in REFUSED) == (Version(torch.__version__) < Version("2.14"))  # deterministic since
    assert {"put", "nll_loss", "histc", "bincount", "median", "scatter_reduce", "avg_pool3d"} <= REFUSED
    assert not REFUSED & {"index_add", "scatter_add", "gather", "index_put"}  # these have a deterministic version


@pytest.mark.trainings
@pytest.mark.parametrize(
    "args",
    [
        {"search_scope": "batch", "contribution_measure": "surrogate"},
        {"search_scope": "micro_batch", "importance_sampling_level": "sequence"},
        {"search_scope": "carried_over", "negative_weight_min": 0.05, "contribution_weighting": "behavior_prob"},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.1, "delta": 3.5},
    ],
    ids=lambda args: "-".join(map(str, args.values())),
)
def test_the_search_uses_no_operation_that_raises_on_cuda(tmp_path, determinism_ends_with_the_test, args):
    trainer = toy_run(
        tmp_path, trainer_class=Traced, full_determinism=True, replay_fraction=0.5, positive_contribution_target=0.7,
        **args,
    )  # fmt: skip
    assert torch.are_deterministic_algorithms_enabled()
    sums = "embedding_bag_forward_only" if ON_GPU else "index_add"
    assert {sums, "argmax", "nansum"} <= trainer.trace.operations  # curves, search and log have been seen
    assert not trainer.trace.operations & REFUSED
    if trainer.args.search_scope != "batch":  # whose forward passes ahead are TRL's
        assert "local_scalar_dense" not in trainer.trace.operations  # the host waits for no number of the search
    assert any(log["bapo/search_steps"] > 0 for log in training_logs(trainer))


@pytest.mark.parametrize("measure", MEASURES)
def test_on_an_accelerator_the_search_is_deterministic_without_being_asked(measure):
    assert {"index_add", "scatter_add", "index_put"} <= SLOWER
    ratio, weights = torch.ones(2, 8, 64, device="meta")
    with Kernels() as kernels:
        curves = contributions(ratio, ratio[:, 0], weights, BoundGrid(), measure, delta=4.0)
        search_bounds(curves, BoundGrid(), 0.5, negative_weight_min=0.1)
    found = {name.strip("_") for name in kernels.names}
    assert {"embedding_bag_forward_only", "argmax"} <= found
    assert not found & (REFUSED | SLOWER)
