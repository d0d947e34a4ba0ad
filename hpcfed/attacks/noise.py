"""Gaussian noise on an honest upload, strength × as large as the attacker's update, so
that one strength suits any network.
"""

from torch import Tensor

from hpcfed.attacks.view import AttackView
from hpcfed.runtime.randomness import normal


def forge(view: AttackView) -> Tensor:
    start, update = view.own_updates()
    noise = normal(view.keys(), update.shape[1])
    size = view.strength * view.own_sizes()
    return start + update + size * noise.to(update.dtype)
