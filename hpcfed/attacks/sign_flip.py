"""Sign flip: w − strength × the attacker's own update, as if it climbed its loss."""

from torch import Tensor

from hpcfed.attacks.view import AttackView


def forge(view: AttackView) -> Tensor:
    # Needs to know nobody else: it works where all sampled clients are malicious.
    start, update = view.own_updates()
    return start - view.strength * update
