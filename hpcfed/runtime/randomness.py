"""Random streams keyed by their purpose: never by rank, order, device or engine.

Decisions on the host (partition, cohort, initial weights) draw from numpy generators
keyed by (seed, purpose, …). Numbers per client on the device (order of samples,
dropout) come from a counter-based hash of integers. So one vectorised expression serves
all clients of a rank, and a client sees the same numbers wherever it runs: on the CPU
or a GPU, alone or in a stack.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# 2^64 / golden ratio. It and the factors of _mix are signed, because torch has no
# unsigned integer arithmetic.
_GOLDEN = -0x61C8864680B583EB

FEW = 2**12
"""Up to so many numbers numpy is faster than torch, which takes longer to begin."""
mix_on_gpu: Callable[[Tensor], Tensor | None] | None = None
"""Does the same as `_mix`, if it can; `kernels` sets it when imported."""


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return numpy's generator for a purpose: `generator(seed, "cohort", round)`."""
    return np.random.default_rng(_words(seed, purpose, *numbers))


def client_keys(seed: int, purpose: str, round: int, clients: Tensor) -> Tensor:
    """Return one 64-bit key per client id, for `bits` and `uniform`."""
    # Neighbouring ids give unrelated keys: splitmix64 with the id as its counter.
    if _is_small(clients):
        rounds = range(round, round + 1)
        keys = client_keys_of_rounds(seed, purpose, rounds, clients.numpy())
        return torch.from_numpy(keys[0])
    return _mix(clients.to(torch.int64) * _GOLDEN + _start(seed, purpose, round))


def client_keys_of_rounds(
    seed: int, purpose: str, rounds: range, clients: np.ndarray
) -> np.ndarray:
    """Return the keys of several rounds, [rounds, clients], on the host."""
    starts = np.array([_start(seed, purpose, round) for round in rounds])
    keys: np.ndarray = _finalised(clients.astype(np.int64) * _GOLDEN + starts[:, None])
    return keys


def _start(seed: int, purpose: str, round: int) -> int:
    """Return the counter from which the clients' ids count in a round."""
    sequence = np.random.SeedSequence(_words(seed, purpose, round))
    return int(sequence.generate_state(1, np.uint64).view(np.int64)[0])


def bits(keys: Tensor, count: int, offset: int = 0) -> Tensor:
    """Return `count` random 64-bit integers for every key: [*keys.shape, count]."""
    counter = torch.arange(offset + 1, offset + count + 1, device=keys.device)
    return _mix(keys.unsqueeze(-1) + counter * _GOLDEN)


def uniform(keys: Tensor, count: int, offset: int = 0) -> Tensor:
    """Return `count` float32 numbers in [0, 1) for every key."""
    # The upper 24 bits: a float32 holds exactly that many.
    upper = bits(keys, count, offset) >> 40 & 0xFFFFFF
    return upper.to(torch.float32) * 2.0**-24


def normal(keys: Tensor, count: int) -> Tensor:
    """Return `count` numbers of mean 0 and variance 1 for every key.

    By Box-Muller, two numbers from each hash. So they depend only on the key, on every
    device.
    """
    pairs = (count + 1) // 2
    both = bits(keys, pairs)
    # Two uniform numbers in [0, 1) with 24 bits each, from the upper and the middle
    # bits.
    first = _lowest_bits(both >> 40)
    # Disjoint from the first 24 bits, so the two numbers are independent.
    second = _lowest_bits(both >> 8)
    # log(1 − u), not log u: u may be 0, and is never 1.
    radius = (-2 * torch.log1p(-first)).sqrt()
    angle = 2 * math.pi * second
    found = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)
    return found[:, :count]


def _lowest_bits(numbers: Tensor) -> Tensor:
    """Return the lowest 24 bits as a number in [0, 1)."""
    return (numbers & 0xFFFFFF).double() * 2.0**-24


def child_keys(keys: Tensor, number: int | Tensor) -> Tensor:
    """Return keys for one part of a key's purpose, such as a step or a layer.

    Children are the same numbers that `bits` draws, so use a key for only one of the
    two.
    """
    return _mix(keys + _signed((number + 1) * _GOLDEN))


def _words(seed: int, purpose: str, *numbers: int) -> list[int] | np.ndarray:
    # CRC 32, because Python's own hash of a string differs between processes.
    words = [seed, zlib.crc32(purpose.encode()), *numbers]
    # The same words as an array are taken in in half the time. Python's larger integers
    # become several words.
    return np.array(words, np.uint32) if max(words) < 2**32 else words


def _signed(number: int | Tensor) -> int | Tensor:
    """Wrap a Python integer to 64 signed bits; tensors wrap by themselves."""
    return number if isinstance(number, Tensor) else (number + 2**63) % 2**64 - 2**63


def _mix(x: Tensor) -> Tensor:
    """Return splitmix64's finaliser of each number.

    Masks turn torch's arithmetic shifts into logical ones; products wrap.
    """
    if x.is_cuda and mix_on_gpu is not None:
        mixed = mix_on_gpu(x)
        if mixed is not None:
            return mixed
    elif _is_small(x):
        return torch.from_numpy(_finalised(x.numpy()))
    return _finalised(x)


def _is_small(x: Tensor) -> bool:
    """Whether numpy is faster than torch; its scalars would warn that they overflow."""
    return x.device.type == "cpu" and x.dim() > 0 and x.numel() <= FEW


def _finalised(x: Any) -> Any:
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 0x1FFFFFFFF)
