"""Gaussian noise on an honest upload, strength × as large as the attacker's update: so
any network suits it.
"""

import math

import torch
from torch import Tensor

from hpcfed.attacks.view import AttackView
from hpcfed.runtime import randomness


def forge(view: AttackView) -> Tensor:
    start, update = view.own_updates()
    noise = normal(view.keys(), update.shape[1])
    size = view.strength * view.own_sizes()
    return start + update + size * noise.to(update.dtype)


def normal(keys: Tensor, count: int) -> Tensor:
    """Return `count` numbers of mean 0 and variance 1 for every key.

    By Box and Muller, two numbers of each hash: so they depend on the key alone, on
    every device.
    """
    pairs = (count + 1) // 2
    bits = randomness.bits(keys, pairs)
    # Two uniform numbers in [0, 1) of 24 bits each, the upper and the middle ones.
    first = _uniform(bits >> 40)
    second = _uniform(bits >> 8)
    # log(1 − u), not log u: u may be 0, and is never 1.
    radius = (-2 * torch.log1p(-first)).sqrt()
    angle = 2 * math.pi * second
    both = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)
    return both[:, :count]


def _uniform(bits: Tensor) -> Tensor:
    """Return the lowest 24 bits as a number in [0, 1)."""
    return (bits & 0xFFFFFF).double() * 2.0**-24
