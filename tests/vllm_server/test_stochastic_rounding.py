"""Rounding at random: to one of the two neighbors, on average to the value, and the same for the same seed."""

import math

import pytest
import torch

from bapo_trl.vllm_server import stochastic_rounding
from bapo_trl.vllm_server.stochastic_rounding import noise_seed, round_stochastically


TYPES = {torch.bfloat16: (8, -133), torch.float16: (11, -24)}  # digits, and the exponent of the smallest step
VALUES = [0.0, 1.0, -1.5, 1.001, -1.001, 1.9999, 0.3, -0.3, 3.14159e-3, 250.7, -65503.0, 5e-5, -3.3e-6, 1e-8, 6.104e-5]
DRAWS = 2000


def neighbors(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the closest numbers of a type at or below a value, and one step above that."""
    digits, smallest = TYPES[dtype]
    step = 2.0 ** max(math.frexp(value)[1] - digits, smallest)
    low = math.floor(value / step) * step
    return low, low + step


@pytest.mark.parametrize("chunk", [stochastic_rounding.CHUNK_SIZE, 4], ids=["whole", "chunks"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_values_go_to_their_neighbors_and_are_right_on_average(monkeypatch, dtype, chunk):
    monkeypatch.setattr(stochastic_rounding, "CHUNK_SIZE", chunk)
    values = torch.tensor(VALUES).view(3, 5)
    draws = torch.stack([round_stochastically(values, dtype, seed) for seed in range(DRAWS)])
    assert draws.dtype == dtype
    for value, drawn in zip(values.flatten().tolist(), draws.double().view(DRAWS, -1).T, strict=True):
        low, high = neighbors(value, dtype)
        assert set(drawn.tolist()) <= ({low, high} if low < value else {value})
        up = (value - low) / (high - low)
        deviation = math.sqrt(max(up * (1 - up), 1e-3) / DRAWS)
        assert (drawn == high).double().mean().item() == pytest.approx(up, abs=4.5 * deviation)


def test_what_is_no_number_stays():
    values = torch.tensor([math.nan, math.inf, -math.inf])
    values = torch.cat([values, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)])  # NaN of CUDA
    rounded = round_stochastically(values, torch.bfloat16, seed=0)
    assert torch.equal(rounded.isnan(), values.isnan())
    assert rounded[1:3].tolist() == [math.inf, -math.inf]


def test_the_seed_is_that_of_version_and_name():
    values = torch.rand(1000)

    def draw(version, name):
        return round_stochastically(values, torch.bfloat16, noise_seed(version, name))

    assert torch.equal(draw(3, "a"), draw(3, "a"))
    assert not torch.equal(draw(3, "a"), draw(4, "a"))
    assert not torch.equal(draw(3, "a"), draw(3, "b"))
    assert (
        noise_seed(3, "a") == 0x51B2E9FB199927A0
    )  # in any process: the start of what `printf '3 a' | sha256sum` prints
