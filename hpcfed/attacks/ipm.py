"""Inner-product manipulation (Xie et al. 2020): w − ε × the mean update of the benign
clients of the round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.attacks.view import Scene


def forge(scene: Scene) -> Tensor:
    start, _ = scene.own()
    return start - scene.strength * scene.benign_update()
