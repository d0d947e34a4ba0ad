"""Random streams keyed by what they are for: never by rank, order, device or engine.

Host decisions (partition, cohort, initial weights) draw from numpy generators keyed by
(seed, purpose, …). Per-client numbers on the device (order of samples, dropout) come
from a counter-based hash of integers, so that one vectorised expression serves all
clients of a rank, and a client sees the same numbers wherever it lives: on the CPU or a
GPU, alone or in a stack.
"""

import zlib

import numpy as np
import torch
from torch import Tensor

_GOLDEN = (
    -0x61C8864680B583EB
)  # 2^64 / golden ratio, as a signed integer: torch has no unsigned arithmetic


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """A numpy generator for one purpose, e.g. `generator(seed, "cohort", round)`."""
    return np.random.default_rng(_words(seed, purpose, *numbers))


def client_keys(seed: int, purpose: str, round: int, clients: Tensor) -> Tensor:
    """One 64-bit key per client id, for `bits` and `uniform`."""
    base = (
        np.random.SeedSequence(_words(seed, purpose, round))
        .generate_state(1, np.uint64)
        .view(np.int64)[0]
    )
    return _mix(clients.to(torch.int64) * _GOLDEN + int(base))


def bits(keys: Tensor, count: int, offset: int = 0) -> Tensor:
    """`count` random 64-bit integers for every key: [*keys.shape, count]."""
    counter = torch.arange(offset + 1, offset + count + 1, device=keys.device)
    return _mix(keys.unsqueeze(-1) + counter * _GOLDEN)


def uniform(keys: Tensor, count: int, offset: int = 0) -> Tensor:
    """`count` float32 numbers in [0, 1) for every key."""
    return (bits(keys, count, offset) >> 40 & 0xFFFFFF).to(torch.float32) * 2.0**-24


def child_keys(keys: Tensor, number: int | Tensor) -> Tensor:
    """Keys for a part of what the keys are for, such as one step or one layer."""
    return _mix(keys + _signed((number + 1) * _GOLDEN))


def _words(seed: int, purpose: str, *numbers: int) -> list[int]:
    return [seed, zlib.crc32(purpose.encode()), *numbers]


def _signed(number: int | Tensor) -> int | Tensor:
    """A Python integer wrapped to 64 signed bits; tensors wrap by themselves."""
    return number if isinstance(number, Tensor) else (number + 2**63) % 2**64 - 2**63


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; masks turn torch's arithmetic shifts into logical
    ones, products wrap.
    """
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 0x1FFFFFFFF)
