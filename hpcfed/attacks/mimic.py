"""Mimic (Karimireddy et al. 2022): a copy of a benign upload, which then counts too
much.

Read here: every attacker draws the client that it copies anew in every round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.attacks.view import Scene


def forge(scene: Scene) -> Tensor:
    return scene.copies(scene.generator().choice(scene.benign, len(scene.attackers)))
