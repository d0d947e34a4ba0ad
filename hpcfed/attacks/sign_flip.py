"""Sign flip: w − strength × the attacker's own update, as if it climbed its loss."""

from torch import Tensor

from hpcfed.attacks.view import AttackView


def forge(view: AttackView) -> Tensor:
    start, update = view.own_updates()
    return start - view.strength * update
