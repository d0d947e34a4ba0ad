"""FedFina, in clusters: the last four convolutions are shared, the others are each
client's; a baseline of GENE-FL.
"""

from __future__ import annotations

from hpcfed.methods._clusters import NamedLayers, State
from hpcfed.methods.parfed import global_row, init, personal, round, welcome

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(NamedLayers):
    usual = "layer4.0.conv1,layer4.0.conv2,layer4.1.conv1,layer4.1.conv2"
