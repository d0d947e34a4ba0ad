"""FedFina, in clusters: the last four convolutions are shared, the others are each
client's; a baseline of GENE-FL.
"""

from hpcfed.methods import _clusters, parfed

EXTENDS = parfed


class Options(_clusters.NamedLayers):
    usual = "layer4.0.conv1,layer4.0.conv2,layer4.1.conv1,layer4.1.conv2"
