"""Mimic (Karimireddy et al. 2022): a copy of a benign upload, which then counts too
much.

Read here: every attacker draws the client that it copies anew in every round.
"""

from torch import Tensor

from hpcfed.attacks.view import AttackView


def forge(view: AttackView) -> Tensor:
    # One generator for all ranks: attackers of one rank may copy clients of another.
    victims = view.generator().choice(view.benign, len(view.attackers))
    return view.copies(victims)
