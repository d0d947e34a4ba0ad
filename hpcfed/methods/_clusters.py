"""Shared by methods that cluster the clients once, before training, and learn a row for
every cluster.

The clients of a cluster have similar data: their bases, which are the first left
singular vectors of their data, are similar. A client that joins later sends its basis,
too. It enters the cluster with the nearest mean basis, and gets what this one shares.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeVar

import numpy as np
import torch

from hpcfed import options
from hpcfed.errors import UserError, count
from hpcfed.federation.clustering import assign, nearest_in_turn
from hpcfed.federation.cohort import Sent
from hpcfed.methods import CLUSTERS, FIXED, _partial
from hpcfed.methods._interface import Cohort, Federation, Layout, Positions, Tensor
from hpcfed.models import MODELS
from hpcfed.options import Choice, Need, RunConfig, option
from hpcfed.runtime.device import on_device

_SEVERAL = Need("--clusters 2 or more", lambda run: run.clusters > 1)
_TURNS = (
    _SEVERAL,
    Need("--sampling fixed", lambda run: run.sampling == "fixed"),
    Need("--devices none", lambda run: run.devices == "none"),
)


class Options(options.Options):
    averages = False  # it takes a mean per cluster, and only of some columns

    clusters: int = option(
        4,
        "K, clusters of clients with similar data; 1: all clients together",
        ge=1,
        counts="clusters",
    )
    clustering: Literal["kmeans", "angles"] = option(
        "kmeans",
        "by K-Means on clients' bases, or by angles between bases of single classes "
        "with average linkage, as PACFL",
        needs=_SEVERAL,
    )
    basis: int = option(
        5,
        "d, left singular vectors of a client's data",
        ge=1,
        le=10_000,
        needs=_SEVERAL,
    )

    cluster_turns: bool = option(
        False,
        "let clusters take turns: a round's clients are drawn from one cluster alone",
        needs=_TURNS,
    )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        if self.clusters > config.clients:
            reason = "there are no more clients; --clients makes more"
            yield Choice("clusters", config.clients, reason)

    def check(self, config: RunConfig) -> None:
        if self.clusters > config.clients:
            clients = count(config.clients, "client")
            raise UserError(f"--clusters {self.clusters}, but there are {clients}")
        if self.clusters > 1:
            self._check_data(config)

    def _check_data(self, config: RunConfig) -> None:
        """Refuse data without a basis, and angles between classes without classes."""
        data = config.data()
        if data.vocabulary:
            raise UserError(
                f"method {config.method} clusters clients by singular vectors of "
                "their data, and tokens have none; --clusters 1 keeps all clients "
                "together"
            )
        if self.clustering == "angles" and data.task != "classification":
            raise UserError(
                f"--clustering angles are between classes, and {config.dataset} is for "
                f"{data.task}; use --clustering kmeans"
            )


class NamedLayers(Options):
    """Options of a method that shares a few layers of ResNet-18, or named ones."""

    names_layers = True
    whole_rows = False
    usual: ClassVar[str]
    """The layers of ResNet-18 that the method shares."""

    shared_layers: str = option(
        "",
        "layers that are shared, as in conv1,conv2; needed for networks but resnet18",
    )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        layers = layers_of(config)
        if not layers or self.shared_layers:
            return
        convolutions = [name for name in layers if name.startswith("conv")]
        shared = convolutions[-4:] or layers[:1]
        yield Choice(
            "shared_layers",
            ",".join(shared),
            f"{config.network()} has none of ResNet-18's stages; --shared-layers takes "
            "other layers",
        )

    @property
    def names(self) -> list[str]:
        named = self.shared_layers or self.usual
        return [name.strip() for name in named.split(",")]

    def check_layout(self, layout: Layout, network: str) -> None:
        require(self.names, layout, network, flag="--shared-layers")


def layers_of(config: RunConfig) -> list[str]:
    """Return the layers of a network without stages; none for networks of stages, such
    as ResNet-18, and for the user's own.
    """
    network = config.network()
    return list(MODELS[network].named) if network in MODELS else []


def require(names: list[str], layout: Layout, network: str, *, flag: str) -> None:
    """Refuse layers that the network does not have."""
    for name in names:
        if name not in layout.layers:
            raise UserError(
                f"model {network} has no layer '{name}'; name others, as in {flag} "
                f"{layout.blocks[0][0]}"
            )


@dataclass(frozen=True)
class State(_partial.State):
    """`shared` has a row for every cluster."""

    group_of: Tensor = field(metadata=FIXED)
    """The group of every shared column, such as its layer, which is sent whole."""
    gene: Tensor
    """[clusters, groups], True for groups that a joining client gets."""
    cluster: Tensor = field(metadata=CLUSTERS)
    """The cluster of every client of the federation."""
    centres: Tensor
    """The mean basis of every cluster."""
    members: Tensor
    """Number of clients with data in every cluster."""


S = TypeVar("S", bound=State)


def begin(
    fed: Federation[Options],
    *,
    shared: Tensor | None = None,
    group_of: Tensor | None = None,
) -> State:
    """Return the state before the first round: all clients have the common initial row
    and are clustered.

    By default all columns are shared and form one group.
    """
    clusters = fed.options.clusters
    if shared is None:
        shared = torch.ones(fed.layout.num_columns, dtype=torch.bool)
    columns = _partial.begin(fed, shared=shared)
    if group_of is None:
        group_of = torch.zeros(len(columns.shared_at), dtype=torch.int64)
    gene = torch.ones(clusters, int(group_of.max()) + 1, dtype=torch.bool)
    cluster, centres, members = _clustered(fed)
    return State(
        shared=columns.shared.repeat(clusters, 1),
        private=columns.private,
        shared_at=columns.shared_at,
        private_at=columns.private_at,
        group_of=group_of.to(fed.device),
        gene=gene.to(fed.device),
        cluster=cluster.to(fed.device),
        centres=centres,
        members=members,
    )


def _clustered(fed: Federation[Options]) -> tuple[Tensor, Tensor, Tensor]:
    """Return every client's cluster, the clusters' mean bases, and their sizes."""
    options = fed.options
    bases = judged = fed.bases(options.basis)
    if options.clustering == "angles":
        judged = fed.bases(options.basis, by_class=True)
    seed = int(fed.generator("clusters").integers(2**32))
    # `assign` numbers clusters independently of the order of clients and of ranks.
    found = assign(judged, options.clusters, how=options.clustering, seed=seed)
    # Ranks on different hardware may round differently: the first rank decides.
    cluster = torch.from_numpy(fed.agreed(found))
    # Newcomers are compared with mean bases, even if clustering was by angles.
    points = torch.from_numpy(bases.reshape(len(bases), -1))
    # Clients without data have basis 0: they are in a cluster but do not move its mean.
    members = torch.bincount(cluster[points.any(1)], minlength=options.clusters)
    sums = points.new_zeros(options.clusters, points.shape[1])
    # Dividing by members, not by all: bases of clients without data add 0.
    sums = sums.index_add(0, cluster, points)
    return cluster, sums / members.clamp(min=1)[:, None], members


def pool(fed: Federation[Options], state: State, round: int) -> np.ndarray | None:
    """Return the clients of the cluster whose turn it is, or None for all clients."""
    if not fed.options.cluster_turns:
        return None
    cluster = state.cluster.cpu().numpy()
    # A cluster whose clients have no data would waste its turn.
    filled = np.unique(cluster[fed.sizes > 0])
    return np.flatnonzero(cluster == filled[round % len(filled)])


def cluster_rows(fed: Federation, state: State, clients: Positions) -> Tensor:
    """Return the row of each client's cluster."""
    ids = on_device(fed.clients[clients], fed.device)
    return state.shared[state.cluster[ids]]


def join(state: State, shared: Tensor, private: Tensor) -> Tensor:
    """Join shared and private columns, if there are private ones."""
    if not len(state.private_at):
        return shared
    return _partial.join(state, shared, private)


def download(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    """Return rows at the start of a round: the cluster's and private columns."""
    theirs = cluster_rows(fed, state, cohort.here)
    shared = fed.download(theirs, cohort)
    return join(state, shared, state.private[cohort.here])


def aggregate(
    fed: Federation,
    state: S,
    rows: Tensor,
    cohort: Cohort,
    *,
    sent: Tensor | None = None,
) -> tuple[S, Tensor]:
    """Return the state after a round: the mean of every cluster's shared columns, and
    the private columns as each client trained them.

    `sent`, [members, groups], says what each client sends; everything by default. Also
    return the total weight of each group's senders: [clusters, groups].
    """
    if len(state.private_at):
        before = state.private[cohort.here]
        private = rows[:, state.private_at]
        # In place: private columns may take most of the memory (see IN_PLACE).
        state.private[cohort.here] = fed.revert_diverged(private, before, cohort)
        rows = rows[:, state.shared_at]
    choice = None if sent is None else Sent(sent, state.group_of)
    rows = fed.upload(rows, cohort, choice)
    shared, weights = fed.cluster_means(
        rows, cohort, state.cluster, state.shared, choice
    )
    return replace(state, shared=shared), weights


def inherited(state: State, weights: Tensor, gene: Tensor) -> Tensor:
    """Return the new gene of clusters with uploads this round; others keep theirs."""
    # A cluster without a participant in this round has no weight in any group.
    heard = (weights > 0).any(1, keepdim=True)
    return gene.where(heard, state.gene)


def personal(fed: Federation, state: State, clients: Positions) -> Tensor:
    return join(state, cluster_rows(fed, state, clients), state.private[clients])


def global_row(state: State) -> Tensor | None:
    # With one cluster and nothing private it is FedAvg, which has a global model.
    one_for_all = len(state.shared) == 1 and not len(state.private_at)
    return state.shared[0] if one_for_all else None


def welcome(fed: Federation[Options], state: State, cohort: Cohort) -> Tensor:
    """Give new clients the nearest cluster's gene; each draws the rest at random."""
    _, rows = arrive(fed, state, cohort)
    return rows


def adopt(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    """Return the state with which new clients continue from the clusters' rows."""
    arrived, _ = arrive(fed, state, cohort)
    return arrived


def arrive(fed: Federation[Options], state: S, cohort: Cohort) -> tuple[S, Tensor]:
    """Return the state with the new clients in place of the known ones, each in its
    nearest cluster, and their first rows.

    A method that adds fields with an entry per client must replace these itself.
    """
    state = _nearest(fed, state)
    rows = _first_rows(fed, state, cohort)
    # Clusters give different numbers of columns: count those of all new clients.
    columns_given = state.gene[:, state.group_of].sum(1)
    has_data = on_device(fed.sizes > 0, fed.device)
    # `has_data` covers the clients of all ranks, so every rank counts the same bytes.
    total = columns_given[state.cluster[has_data]].sum()
    fed.greet(rows, cohort, int(total))
    return replace(state, private=rows[:, state.private_at]), rows


def _nearest(fed: Federation[Options], state: S) -> S:
    """Assign every new client to a cluster, in the order in which they join. Each moves
    its cluster's mean (Eq. 12 of GENE-FL's paper, and below it).
    """
    bases = fed.bases(fed.options.basis)
    points = bases.reshape(len(bases), -1)
    # Ranks on different hardware may round differently: the first rank decides.
    cluster, centres, members = fed.agreed(
        nearest_in_turn(points, state.centres.numpy(), state.members.numpy())
    )
    return replace(
        state,
        cluster=torch.from_numpy(cluster).to(fed.device),
        centres=torch.from_numpy(centres),
        members=torch.from_numpy(members),
    )


def _first_rows(fed: Federation, state: State, cohort: Cohort) -> Tensor:
    """Return [θ0; Θ_G] of every new client here: its cluster's gene Θ_G, and random
    weights θ0 of its own elsewhere.
    """
    ids = fed.clients[cohort.here]
    cluster = state.cluster[on_device(ids, fed.device)]
    if not len(state.private_at) and bool(state.gene.all()):
        return state.shared[cluster]  # clusters give everything: nothing to draw
    given = state.gene[:, state.group_of]
    rows = state.shared.new_empty(len(ids), fed.layout.num_columns)
    # One by one: a second matrix of rows might not fit into memory.
    for row, client, k in zip(rows, ids.tolist(), cluster.tolist(), strict=True):
        row.copy_(fed.fresh_row(client))
        own = row[state.shared_at]
        row[state.shared_at] = state.shared[k].where(given[k], own)
    return rows
