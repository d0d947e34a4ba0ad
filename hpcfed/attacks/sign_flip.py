"""Sign flip: w − strength × the attacker's own update, as if it climbed its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.attacks.view import Scene


def forge(scene: Scene) -> Tensor:
    start, update = scene.own()
    return start - scene.strength * update
