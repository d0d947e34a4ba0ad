"""LG-FedAvg (Liang et al. 2020): the head is shared, each client has its own body; both
are trained together.

Here training starts from scratch; the authors' experiments on images start from a model
that FedAvg has trained.
"""

from hpcfed.methods import Federation, _partial, fedper, no_finals

EXTENDS = fedper
PRIVATE_MEAN = True
FINALS = ()
finals = no_finals


class Options(_partial.Options):
    pass


def init(fed: Federation[Options]) -> _partial.State:
    # FedPer with body and head swapped; training and aggregation are the same.
    _, head = _partial.body_and_head(fed)
    return _partial.begin(fed, shared=head)
