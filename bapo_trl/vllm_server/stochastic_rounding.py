"""Stochastic rounding to a smaller floating-point type: exact on average."""

import hashlib

import torch


CHUNK_SIZE = 2**22
"""Number of elements that are rounded at a time, which limits the memory for random bits."""

# Mantissa bits that the type lacks compared to float32, and its smallest normal number if float32 has smaller ones
_FORMATS = {torch.bfloat16: (16, 0.0), torch.float16: (13, 2.0**-14)}


def round_stochastically(values: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """
    Round float32 values to bfloat16 or float16, up or down at random, such that the expected value is unchanged.

    A value between two neighbors of `dtype` becomes the upper one with a probability of its distance to the lower one
    divided by the distance of the two. The same values, seed and device type give the same result.
    """
    dropped, smallest = _FORMATS[dtype]
    generator = torch.Generator(values.device).manual_seed(seed)
    rounded = torch.empty_like(values, dtype=dtype, memory_format=torch.contiguous_format)
    for chunk, out in zip(values.flatten().split(CHUNK_SIZE), rounded.view(-1).split(CHUNK_SIZE), strict=True):
        # Below the smallest normal number, neighbors have the same distance as just above it
        shift = torch.where(chunk.abs() < smallest, chunk.sign() * smallest, 0.0)
        noise = torch.randint(2**dropped, chunk.shape, generator=generator, device=chunk.device, dtype=torch.int32)
        bits = ((chunk + shift).view(torch.int32) + noise) >> dropped << dropped
        out.copy_(torch.where(chunk.isfinite(), bits.view(torch.float32) - shift, chunk))
    return rounded


def noise_seed(version: int, name: str) -> int:
    """Return the seed of a tensor at a policy version, the same in a resumed run."""
    return int.from_bytes(hashlib.sha256(f"{version} {name}".encode()).digest()[:8], "big")
