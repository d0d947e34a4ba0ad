"""Inner-product manipulation (Xie et al. 2020): w − ε × the mean update of the benign
clients of the round.
"""

from torch import Tensor

from hpcfed.attacks.view import AttackView


def forge(view: AttackView) -> Tensor:
    start, _ = view.own_updates()
    # With ε = 1 and equally many attackers and benign clients, w does not move.
    update = view.benign_update()
    return start - view.strength * update
