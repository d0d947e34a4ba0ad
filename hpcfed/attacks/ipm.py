"""Inner-product manipulation (Xie et al. 2020): w − ε × the mean update of the benign
clients of the round.
"""

from torch import Tensor

from hpcfed.attacks.view import AttackView


def forge(view: AttackView) -> Tensor:
    start, _ = view.own_updates()
    return start - view.strength * view.benign_update()
