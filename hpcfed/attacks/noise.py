"""Gaussian noise on an honest upload, strength × as large as the attacker's update: so
any network suits it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.attacks.view import Scene


def forge(scene: Scene) -> Tensor:
    start, update = scene.own()
    return (
        start
        + update
        + scene.strength
        * scene.own_size()
        * normal(scene.keys(), update.shape[1]).to(update.dtype)
    )


def normal(keys: Tensor, count: int) -> Tensor:
    """`count` numbers of mean 0 and variance 1 for every key, by Box and Muller: two of
    each hash.
    """
    import torch

    from hpcfed.runtime import randomness

    bits = randomness.bits(keys, (count + 1) // 2)
    first, second = (
        (bits >> shift & 0xFFFFFF).double() * 2.0**-24 for shift in (40, 8)
    )
    radius, angle = (-2 * torch.log1p(-first)).sqrt(), 2 * math.pi * second
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count]
