"""Mimic (Karimireddy et al. 2022): upload a copy of a benign upload, which then has too
much weight.

Our reading: in every round each attacker draws anew which client it copies.
"""

from torch import Tensor

from hpcfed.attacks.view import AttackView


def forge(view: AttackView) -> Tensor:
    # All ranks draw the same numbers: an attacker may copy a client of another rank.
    victims = view.generator().choice(view.benign, len(view.attackers))
    return view.copies(victims)
