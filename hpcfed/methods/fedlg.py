"""FedLG (Wang et al. 2023), in clusters: each client sends the few layers in which
training has changed the most.

From every pool of layers a client sends those with the largest share of entries whose
update is above a threshold. Our reading: the threshold is a multiple of the row's mean
update. Clients take all layers of the pools from their cluster; other layers are
private. The pools of ResNet-18 match the counts in GENE-FL's paper: two convolutions of
the first stage and two of the last. All clients with data that send a layer have the
same weight. New clients get the layers that most of the last senders sent.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from hpcfed.methods import Cohort, Federation, Layout, Tensor, _clusters
from hpcfed.methods._clusters import State, aggregate, begin, download, inherited
from hpcfed.options import Choice, RunConfig, option

EXTENDS = _clusters
RESNET18_POOLS = (
    "layer1.0.conv1,layer1.0.conv2,layer1.1.conv1,layer1.1.conv2"
    "/layer4.0.conv2,layer4.1.conv1,layer4.1.conv2"
)


class Options(_clusters.Options):
    names_layers = True
    weighs = "uniform"
    whole_rows = False

    gene_pools: str = option(
        RESNET18_POOLS,
        "pools of layers, as in conv1,conv2/fc1,head; networks but resnet18 need others",
    )
    gene_each: int = option(
        2, "layers of every pool that a client sends, or all if there are fewer", ge=1
    )
    gene_threshold: float = option(
        1.0, "an update counts if it is above this many times the row's mean", ge=0
    )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        layers = _clusters.layers_of(config)
        if not layers:
            return
        convolutions = [name for name in layers if name.startswith("conv")]
        others = [name for name in layers if name not in convolutions]
        pools = [",".join(pool) for pool in (convolutions, others) if pool]
        yield Choice(
            "gene_pools",
            "/".join(pools),
            f"{config.network()} has none of ResNet-18's stages; --gene-pools takes "
            "other layers",
        )

    @property
    def pools(self) -> list[list[str]]:
        found = []
        for pool in self.gene_pools.split("/"):
            found.append([name.strip() for name in pool.split(",")])
        return found

    def check_layout(self, layout: Layout, network: str) -> None:
        for pool in self.pools:
            _clusters.require(pool, layout, network, flag="--gene-pools")


def init(fed: Federation[Options]) -> State:
    names = candidates(fed.options, fed.layout)
    # One group of columns per candidate, in the order of entries, as `mask` has them.
    groups = []
    for entry in fed.layout.entries:
        if entry.layer in names:
            width = entry.stop - entry.start
            groups.append(torch.full((width,), names.index(entry.layer)))
    return begin(fed, shared=fed.layout.mask(names), group_of=torch.cat(groups))


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    options, layout = fed.options, fed.layout
    start = download(fed, state, cohort)
    rows = fed.train(start, cohort)
    sent = chosen(options, layout, shares(options, layout, rows - start))
    state, weights = aggregate(fed, state, rows, cohort, sent=sent)
    # Rank a cluster's layers by the weight of their senders, with the same rule.
    popular = chosen(options, layout, weights)
    return replace(state, gene=inherited(state, weights, popular))


def candidates(options: Options, layout: Layout) -> list[str]:
    """Return the layers of all pools, in the network's order."""
    pooled: set[str] = set().union(*options.pools)
    return [layer for layer in layout.layers if layer in pooled]


def shares(options: Options, layout: Layout, updates: Tensor) -> Tensor:
    """Return the share of large updates in each layer: [clients, candidates]."""
    # Running statistics, which follow the parameters, have no gradient.
    sizes = updates[:, : layout.num_parameters].abs()
    # The mean over the whole row: layers compete by the same threshold.
    large = sizes > options.gene_threshold * sizes.mean(1, keepdim=True)
    found = []
    for name in candidates(options, layout):
        of_layer = []
        for entry in layout.entries:
            if entry.layer == name and entry.trainable:
                of_layer.append(large[:, entry.start : entry.stop])
        found.append(torch.cat(of_layer, 1).to(updates.dtype).mean(1))
    return torch.stack(found, 1)


def chosen(options: Options, layout: Layout, scores: Tensor) -> Tensor:
    """Choose each pool's candidates with the highest scores, [any, candidates]; among
    equal scores the first layer wins.
    """
    names = candidates(options, layout)
    found = torch.zeros_like(scores, dtype=torch.bool)
    for pool in options.pools:
        # In the network's order, because the stable sort keeps the first of equals.
        at = sorted(names.index(name) for name in pool)
        order = scores[:, at].argsort(dim=1, descending=True, stable=True)
        best = order[:, : options.gene_each]
        found.scatter_(1, best.new_tensor(at)[best], True)
    return found
