"""Sign flip: w − strength × the attacker's own update, as if it maximised its loss."""

from torch import Tensor

from hpcfed.attacks.view import AttackView


def forge(view: AttackView) -> Tensor:
    # It needs no other client, so it works even if all sampled clients are malicious.
    start, update = view.own_updates()
    return start - view.strength * update
