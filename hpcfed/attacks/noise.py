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
    noise = normal(view.keys(), update.shape[1]).to(update.dtype)
    return start + update + view.strength * view.own_sizes() * noise


def normal(keys: Tensor, count: int) -> Tensor:
    """Return `count` numbers of mean 0 and variance 1 for every key.

    By Box and Muller, two numbers of each hash: so they depend on the key alone, on
    every device.
    """
    bits = randomness.bits(keys, (count + 1) // 2)
    first = (bits >> 40 & 0xFFFFFF).double() * 2.0**-24
    second = (bits >> 8 & 0xFFFFFF).double() * 2.0**-24
    radius = (-2 * torch.log1p(-first)).sqrt()
    angle = 2 * math.pi * second
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count]
