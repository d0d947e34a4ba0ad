"""ParFed (PartialFed, Sun et al. 2021), in clusters: a few layers set by hand are
shared, the others are each client's.

As GENE-FL's paper counts it: one convolution of each of ResNet-18's four stages. The
paper does not say which one; we take the last.
"""

from hpcfed.methods import Federation, _clusters, clustered_fedavg

EXTENDS = clustered_fedavg


class Options(_clusters.NamedLayers):
    usual = "layer1.1.conv2,layer2.1.conv2,layer3.1.conv2,layer4.1.conv2"


def init(fed: Federation[_clusters.NamedLayers]) -> _clusters.State:
    names = fed.options.names
    return _clusters.begin(fed, shared=fed.layout.mask(names))
