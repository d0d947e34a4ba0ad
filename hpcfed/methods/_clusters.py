"""What methods have in common that cluster the clients once, before training, and learn
a row for every cluster.

The clients of a cluster have similar data, judged by the first left singular vectors of
it, their basis. A client that joins later tells its basis too, belongs to the cluster
whose mean is nearest, and is given what the cluster shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from hpcfed import config
from hpcfed.config import Choice, Switch, option
from hpcfed.errors import UserError, count
from hpcfed.methods import CLUSTERS, FIXED, _parts
from hpcfed.models import MODELS

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from hpcfed.federation.federation import Cohort, Federation
    from hpcfed.models.layout import Layout


class Options(config.Options):
    averages = False  # a row for every cluster, and of parts of uploads

    clusters: int = option(
        4, "K, clusters of clients with similar data; 1: all clients together", ge=1
    )
    clustering: Literal["kmeans", "angles"] = option(
        "kmeans",
        "by K-Means on clients' bases, or by angles between bases of single classes "
        "with average linkage, as PACFL",
    )
    basis: int = option(
        5, "d, left singular vectors of a client's data", ge=1, le=10_000
    )

    def fit(self, config: config.RunConfig, ranks: int) -> Iterable[Choice]:
        if self.clusters > config.clients:
            yield Choice(
                "clusters",
                config.clients,
                "there are no more clients; --clients makes more",
            )

    def switches(self, config: config.RunConfig) -> Iterable[Switch]:
        yield Switch("clustering", "--clusters 2 or more", self.clusters > 1)
        yield Switch("basis", "--clusters 2 or more", self.clusters > 1)

    def check(self, config: config.RunConfig) -> None:
        if self.clusters > config.clients:
            raise UserError(
                f"--clusters {self.clusters}, but there are {count(config.clients, 'client')}"
            )


class NamedLayers(Options):
    """Of a method that shares a few layers of ResNet-18, or others that the user names."""

    names_layers = True
    usual: ClassVar[str]

    shared_layers: str = option(
        "",
        "layers that are shared, as in conv1,conv2; needed for networks but resnet18",
    )

    def fit(self, config: config.RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        layers = MODELS[config.network()].named if config.network() in MODELS else ()
        if layers and not self.shared_layers:
            convolutions = [name for name in layers if name.startswith("conv")] or [
                layers[0]
            ]
            reason = f"{config.network()} has none of ResNet-18's stages; --shared-layers takes other layers"
            yield Choice("shared_layers", ",".join(convolutions[-4:]), reason)

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in (self.shared_layers or self.usual).split(",")]

    def check_layout(self, layout: Layout, network: str) -> None:
        require(self.names, layout, network, flag="--shared-layers")


def require(names: list[str], layout: Layout, network: str, *, flag: str) -> None:
    for name in names:
        if name not in layout.layers:
            raise UserError(
                f"model {network} has no layer '{name}'; name others, as in {flag} "
                f"{layout.blocks[0][0]}"
            )


@dataclass(frozen=True)
class State(_parts.State):
    """`shared` has a row for every cluster."""

    part_of: Tensor = field(metadata=FIXED)
    """The part of the shared columns that each belongs to: what clients may choose to
    send is made of parts.
    """
    gene: Tensor
    """[clusters, parts], True for what a client that joins the cluster is given."""
    cluster: Tensor = field(metadata=CLUSTERS)
    """Of every client of the federation."""
    centres: Tensor
    """The mean basis of every cluster."""
    members: Tensor
    """Clients of every cluster that have data."""


def begin(
    fed: Federation, *, shared: Tensor | None = None, part_of: Tensor | None = None
) -> State:
    """All clients have the common initial row, and a cluster. All columns are shared,
    as one part, unless given.
    """
    import torch

    from hpcfed.federation.clustering import assign

    options = cast(Options, fed.options)
    if shared is None:
        shared = torch.ones(fed.layout.num_columns, dtype=torch.bool)
    parts = _parts.begin(fed, shared=shared)
    bases = fed.bases(options.basis)
    judged = (
        bases
        if options.clustering == "kmeans"
        else fed.bases(options.basis, by_class=True)
    )
    seed = int(fed.generator("clusters").integers(2**32))
    cluster = torch.from_numpy(
        fed.agreed(assign(judged, options.clusters, how=options.clustering, seed=seed))
    )
    told = torch.from_numpy(bases.reshape(len(bases), -1))
    members = torch.bincount(cluster[told.any(1)], minlength=options.clusters)
    centres = told.new_zeros(options.clusters, told.shape[1]).index_add(
        0, cluster, told
    )
    if part_of is None:
        part_of = torch.zeros(len(parts.shared_at), dtype=torch.int64)
    return State(
        shared=parts.shared.repeat(options.clusters, 1),
        own=parts.own,
        shared_at=parts.shared_at,
        own_at=parts.own_at,
        part_of=part_of.to(fed.device),
        gene=torch.ones(
            options.clusters,
            int(part_of.max()) + 1,
            dtype=torch.bool,
            device=fed.device,
        ),
        cluster=cluster.to(fed.device),
        centres=centres / members.clamp(min=1)[:, None],
        members=members,
    )


def theirs(fed: Federation, state: State, clients: np.ndarray) -> Tensor:
    """The row of the cluster of each of these clients of the rank."""
    from hpcfed.runtime.device import on_device

    return state.shared[state.cluster[on_device(fed.clients[clients], fed.device)]]


def join(state: State, shared: Tensor, own: Tensor) -> Tensor:
    return _parts.join(state, shared, own) if len(state.own_at) else shared


def download(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    """The cohort's rows at the start of a round: the cluster's columns, and what each
    client kept.
    """
    return join(
        state,
        fed.download(theirs(fed, state, cohort.here), cohort),
        state.own[cohort.here],
    )


def upload(
    fed: Federation,
    state: State,
    rows: Tensor,
    cohort: Cohort,
    *,
    parts: Tensor | None = None,
) -> tuple[State, Tensor]:
    """The state after a round: the mean of every cluster's shared columns, and every
    client's own as it trained them.

    `parts` says what each client sends, all of it unless given. Beside the state: who
    sent what, by cluster and weight.
    """
    from hpcfed.federation.federation import Sent

    if len(state.own_at):
        # In place: all clients' rows may fill half of the memory.
        state.own[cohort.here] = fed.revert_diverged(
            rows[:, state.own_at], state.own[cohort.here], cohort
        )
        rows = rows[:, state.shared_at]
    sent = None if parts is None else Sent(parts, state.part_of)
    rows = fed.upload(rows, cohort, sent)
    shared, weights = fed.cluster_means(rows, cohort, state.cluster, state.shared, sent)
    return replace(state, shared=shared), weights


def inherited(state: State, weights: Tensor, gene: Tensor) -> Tensor:
    """The gene of clusters that had somebody in the round; others keep theirs."""
    return gene.where((weights > 0).any(1, keepdim=True), state.gene)


def personal(fed: Federation, state: State, clients: np.ndarray) -> Tensor:
    return join(state, theirs(fed, state, clients), state.own[clients])


def global_row(state: State) -> Tensor | None:
    return state.shared[0] if len(state.shared) == 1 and not len(state.own_at) else None


def welcome(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    """A new client: the gene of the nearest cluster, and the rest from the common
    initial row.
    """
    import torch

    from hpcfed.federation.clustering import nearest_in_turn

    bases = fed.bases(cast(Options, fed.options).basis)
    found = nearest_in_turn(
        bases.reshape(len(bases), -1), state.centres.numpy(), state.members.numpy()
    )
    cluster = torch.from_numpy(fed.agreed(found)).to(fed.device)
    first = fed.initial_row()
    own = cluster[torch.from_numpy(fed.clients[cohort.here])]
    rows = join(
        state, state.shared[own], first[state.own_at].expand(len(own), -1)
    ).clone()
    given = state.gene[:, state.part_of]
    rows[:, state.shared_at] = state.shared[own].where(
        given[own], first[state.shared_at]
    )
    holders = torch.from_numpy(fed.sizes > 0).to(fed.device)
    return fed.greet(rows, cohort, int(given.sum(1)[cluster[holders]].sum()))
