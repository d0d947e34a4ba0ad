"""ParFed (PartialFed, Sun et al. 2021), in clusters: a few layers set by hand are
shared, the others are each client's.

As GENE-FL's paper counts it: one convolution of each of ResNet-18's four stages. Which
one it does not say; read here as the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hpcfed.methods._clusters import NamedLayers, State, begin
from hpcfed.methods.clustered_fedavg import global_row, personal, round, welcome

if TYPE_CHECKING:
    from hpcfed.federation.federation import Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(NamedLayers):
    usual = "layer1.1.conv2,layer2.1.conv2,layer3.1.conv2,layer4.1.conv2"


def init(fed: Federation) -> State:
    return begin(fed, shared=fed.layout.mask(cast(NamedLayers, fed.options).names))
