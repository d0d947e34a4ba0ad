"""FedLG (Wang et al. 2023), in clusters: each client sends the few layers in which
training has changed the most.

Of every pool of layers a client sends those with the largest share of entries whose
update is above a threshold, which is read here as a multiple of the row's mean update.
Clients take all layers of the pools from their cluster; others are their own. The pools
of ResNet-18 give what GENE-FL's paper counts: two convolutions of the first stage and
two of the last. Every client with data that sends a layer counts alike. New clients get
the layers that most of the last senders sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from hpcfed.config import Choice, RunConfig, option
from hpcfed.methods import _clusters
from hpcfed.methods._clusters import (
    State,
    begin,
    download,
    global_row,
    inherited,
    personal,
    require,
    upload,
    welcome,
)
from hpcfed.models import MODELS

if TYPE_CHECKING:
    from torch import Tensor

    from hpcfed.federation.federation import Cohort, Federation
    from hpcfed.models.layout import Layout

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(_clusters.Options):
    names_layers = True

    gene_pools: str = option(
        "layer1.0.conv1,layer1.0.conv2,layer1.1.conv1,layer1.1.conv2/layer4.0.conv2,layer4.1.conv1,layer4.1.conv2",
        "pools of layers, as in conv1,conv2/fc1,head; networks but resnet18 need others",
    )
    gene_each: int = option(
        2, "layers of every pool that a client sends, or all if there are fewer", ge=1
    )
    gene_threshold: float = option(
        1.0, "an update counts above so many times the row's mean", ge=0
    )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        layers = MODELS[config.network()].named if config.network() in MODELS else ()
        if layers:
            convolutions = [name for name in layers if name.startswith("conv")]
            pools = [
                pool
                for pool in (
                    convolutions,
                    [name for name in layers if name not in convolutions],
                )
                if pool
            ]
            reason = f"{config.network()} has none of ResNet-18's stages; --gene-pools takes other layers"
            yield Choice(
                "gene_pools", "/".join(",".join(pool) for pool in pools), reason
            )

    @property
    def pools(self) -> list[list[str]]:
        return [
            [name.strip() for name in pool.split(",")]
            for pool in self.gene_pools.split("/")
        ]

    def check_layout(self, layout: Layout, network: str) -> None:
        require(
            [name for pool in self.pools for name in pool],
            layout,
            network,
            flag="--gene-pools",
        )


def init(fed: Federation) -> State:
    import torch

    names = candidates(cast(Options, fed.options), fed.layout)
    numbers = [
        torch.full((e.stop - e.start,), names.index(e.layer))
        for e in fed.layout.entries
        if e.layer in names
    ]
    return begin(fed, shared=fed.layout.mask(names), part_of=torch.cat(numbers))


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    options, start = cast(Options, fed.options), download(fed, state, cohort)
    rows = fed.train(start, cohort)
    parts = chosen(options, fed.layout, shares(options, fed.layout, rows - start))
    state, weights = upload(fed, state, rows, cohort.equally_with_data(), parts=parts)
    return replace(
        state, gene=inherited(state, weights, chosen(options, fed.layout, weights))
    )


def candidates(options: Options, layout: Layout) -> list[str]:
    """The layers of all pools, in the network's order."""
    named = {name for pool in options.pools for name in pool}
    return [layer for layer in layout.layers if layer in named]


def shares(options: Options, layout: Layout, updates: Tensor) -> Tensor:
    """[clients, candidates]: the share of a layer's entries whose update is large."""
    import torch

    sizes = updates[:, : layout.num_parameters].abs()
    large = sizes > options.gene_threshold * sizes.mean(1, keepdim=True)
    found = []
    for name in candidates(options, layout):
        own = [
            large[:, e.start : e.stop]
            for e in layout.entries
            if e.layer == name and e.trainable
        ]
        found.append(torch.cat(own, 1).to(updates.dtype).mean(1))
    return torch.stack(found, 1)


def chosen(options: Options, layout: Layout, scores: Tensor) -> Tensor:
    """Of every pool the candidates with the highest scores [any, candidates]; of equal
    ones the first.
    """
    import torch

    names, found = (
        candidates(options, layout),
        torch.zeros_like(scores, dtype=torch.bool),
    )
    for pool in options.pools:
        at = sorted(names.index(name) for name in pool)
        best = scores[:, at].argsort(dim=1, descending=True, stable=True)[
            :, : options.gene_each
        ]
        found.scatter_(1, best.new_tensor(at)[best], True)
    return found
