"""GENE-FL (Guo et al. 2025): clients send a learnGene, the layers that training on
their data has changed the least.

A client continues from its own row θ̃ (at first from its cluster's row Θ). Its loss has
two terms that pull it to Θ: λ1 ‖θ − Θ‖₂ (Eq. 4) and λ2 ‖M ⊙ (θ − Θ)‖₂ (Eq. 8). The text
before Eq. 4 wants a strength for each layer. One norm per layer is an option, but it
holds clients where they are: such a term pulls every layer equally hard, however near
it is. M marks where the Fisher information at θ̃, scaled to [0, 1], is at most ε. As
printed, the second term depends on θ̃ alone and would have no gradient; we take it as a
function of θ. The abstract wants parameters with high Fisher values: that is an option.
Min-max scaling leaves nearly all values far below ε: ranks and logarithms are options.

Layers are scored by cos(θ, θ̃) / dim (Eq. 9, literally), and the γ highest are sent.
The text calls low scores general, so the opposite order is an option. After a round
cosines are all close to 1, so it is 1 / dim that decides: the gene is the smallest
layers. To order layers by their cosines alone is another option. γ starts at all
layers and shrinks to three quarters of them, one at a time: the paper adapts it to
performance but does not say how. A layer is a convolution or linear layer with the
batch norm that follows it. Eq. 10: a cluster's layer is the mean over the clients that
sent it, all with the same weight. Clients without data have no weight: they would send
the row of their first round forever.

A new client starts from [θ0; Θ_G]. Θ_G are the layers that all of its cluster's last
participants have sent ("common to all participants"; layers that any of them has sent
are an option). θ0 are its own weights for the rest. If no layer is common, it gets
none.
"""

from dataclasses import dataclass, field, replace
from math import floor
from typing import Literal

import torch
import torch.nn.functional as F

from hpcfed.clients.pull import Pull, Strengths
from hpcfed.errors import UserError
from hpcfed.methods import IN_PLACE, OWNED, _clusters
from hpcfed.methods._clusters import aggregate, arrive, begin, cluster_rows, inherited
from hpcfed.methods._interface import Cohort, Federation, Layout, Positions, Tensor
from hpcfed.options import LocalWork, Need, RunConfig, check_layers, option

EXTENDS = _clusters

_ELASTIC = Need("a --lambda2 above 0", lambda run: run.lambda2 > 0)


class Options(_clusters.Options):
    weighs = "uniform"

    lambda1: float = option(
        0.5, "λ1, strength of the pull to the cluster's row; 0: none", ge=0
    )
    lambda2: float = option(
        0.05,
        "λ2, strength of the pull of parameters with little Fisher information; 0: none",
        ge=0,
    )
    epsilon: float = option(
        0.5,
        "ε, the most normalised Fisher information that λ2's term pulls",
        needs=_ELASTIC,
    )
    smooth: Literal["layers", "whole"] = option(
        "whole",
        "λ1's term: one norm of the whole row, or one for every layer",
        needs=Need("a --lambda1 above 0", lambda run: run.lambda1 > 0),
    )
    fisher: Literal["model", "layer"] = option(
        "model",
        "whether Fisher information is normalised over the whole model or within "
        "each layer",
        needs=_ELASTIC,
    )
    fisher_scale: Literal["minmax", "rank", "log"] = option(
        "minmax",
        "how Fisher information F is normalised: from its least and most to 0 and 1, "
        "its logarithm likewise (0 counts as the least value above 0), or by its rank",
        needs=_ELASTIC,
    )
    elastic: Literal["low", "high"] = option(
        "low", "what λ2's term pulls: parameters up to ε, or above it", needs=_ELASTIC
    )
    gene_layers: int | None = option(
        None,
        "γ, layers sent in the end (default: three quarters of them, 16 of ResNet-18's "
        "21)",
        ge=0,
        zero_was_unset=True,
    )
    gene_every: int = option(
        1, "rounds after which one layer fewer is sent, until γ are left", ge=1
    )
    gene_score: Literal["same", "changed", "cosine"] = option(
        "same",
        "what is sent: the highest cos / dim, the lowest (1 − cos) / dim, or the highest "
        "cos, whatever a layer's size",
    )
    gene_given: Literal["common", "any"] = option(
        "common",
        "what a new client is given: layers that all of its cluster's last participants "
        "sent, or any of them",
    )

    def local_work(self, config: RunConfig, layout: Layout) -> LocalWork:
        usual = super().local_work(config, layout)
        return replace(usual, fisher=1) if self.lambda2 else usual

    def check(self, config: RunConfig) -> None:
        super().check(config)
        data = config.data()
        if self.lambda2 and data.task != "classification":
            raise UserError(
                f"--lambda2 {self.lambda2:g} needs Fisher information of labels, but "
                f"{config.dataset} is for {data.task}; use --lambda2 0"
            )
        info = config.model_info()
        if info is not None:
            self._check_layers(info.layers, config.network())

    def check_layout(self, layout: Layout, network: str) -> None:
        self._check_layers(len(layout.blocks), network)
        if len(layout.block_spans) < len(layout.blocks):
            raise UserError(
                f"model {network} has layers that are not trained, which have no score ξ: "
                "leave out --send-frozen"
            )

    def _check_layers(self, most: int, network: str) -> None:
        check_layers("gene_layers", self.gene_layers, most, network)

    def num_sent(self, round: int, layers: int) -> int:
        """Return γ in a round."""
        three_quarters = -(-3 * layers // 4)
        least = self.gene_layers or three_quarters
        return max(least, layers - round // self.gene_every)


@dataclass(frozen=True)
class State(_clusters.State):
    rows: Tensor = field(metadata=OWNED | IN_PLACE)
    """θ̃: every client's own row after its last training."""
    trained: Tensor = field(metadata=OWNED)
    """[clients, 1], True for clients that have trained."""


def init(fed: Federation[Options]) -> State:
    common = begin(fed, group_of=fed.layout.block_of)
    rows = fed.initial_row().repeat(len(fed.clients), 1)
    trained = torch.zeros(len(rows), 1, dtype=torch.bool, device=fed.device)
    return State(**vars(common), rows=rows, trained=trained)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    options, here = fed.options, cohort.here
    # The client downloads Θ, and continues from its own θ̃.
    theta_cluster = fed.download(cluster_rows(fed, state, here), cohort)
    before = personal(fed, state, here)
    pull = _pull(fed, before, theta_cluster, cohort)
    rows = fed.train(before, cohort, pull=pull)

    # θ̃ of the next round.
    state.rows[here] = fed.revert_diverged(rows, before, cohort)
    # One bit per client: small enough to copy.
    trained = state.trained.clone()
    trained[here] = True

    # Eq. 9 scores the layers, and the γ highest are sent; Eq. 10 takes their means.
    sent = gene(options, scores(options, fed.layout, rows, before), cohort.round)
    # Add a group without columns that all clients send: its weight is then that of all
    # participants of a cluster.
    sent_and_all = F.pad(sent, (0, 1), value=True)
    after, weights = aggregate(fed, state, rows, cohort, sent=sent_and_all)
    layers, participants = weights[:, :-1], weights[:, -1:]
    given = layers > 0
    if options.gene_given == "common":
        # A difference below half of the lightest client's weight is a rounding error.
        lightest = cohort.weights[cohort.weights > 0].min(initial=1)
        given = participants - layers < 0.5 * lightest
    return replace(after, trained=trained, gene=inherited(state, layers, given))


def _pull(
    fed: Federation[Options], before: Tensor, theta_cluster: Tensor, cohort: Cohort
) -> "Pull | None":
    """Return the loss terms that pull a client to its cluster's row, Eqs. 4 and 8."""
    options = fed.options
    # Plain cross-entropy needs no reference row.
    if not options.lambda1 and not options.lambda2:
        return None
    by_layer = options.smooth == "layers"
    strengths = Strengths(
        layers=options.lambda1 if by_layer else 0.0,
        whole=0.0 if by_layer else options.lambda1,
        masked=options.lambda2,
    )
    mask = None
    if options.lambda2:
        mask = elastic(options, fed.layout, fed.fisher(before, cohort))
    return Pull(strengths, theta_cluster, mask)


def elastic(options: Options, layout: Layout, fisher: Tensor) -> Tensor:
    """Return M: where Fisher information, scaled to [0, 1], is ≤ ε, or above."""
    spans = [(0, layout.num_parameters)]
    if options.fisher == "layer":
        spans = list(layout.block_spans)
    mask = torch.zeros_like(fisher, dtype=torch.bool)
    for start, stop in spans:
        low = _is_low(options, fisher[:, start:stop])
        mask[:, start:stop] = low if options.elastic == "low" else ~low
    return mask


def _is_low(options: Options, values: Tensor) -> Tensor:
    """Return where a client's values, scaled to [0, 1], are at most ε."""
    if options.fisher_scale == "rank":
        # The rank is the number of smaller values, so equal values have equal ranks.
        ordered = values.sort(dim=1).values
        rank = torch.searchsorted(ordered, values.contiguous())
        # rank / (n − 1) ≤ ε; 0.29 × 100 is 28.999999999999996 in floating point.
        return rank <= floor(options.epsilon * (values.shape[1] - 1) + 1e-9)
    if options.fisher_scale == "log":
        values = _logarithm(values)
    least, most = values.aminmax(dim=1, keepdim=True)
    # (F − least) / (most − least) ≤ ε, without division by zero if all are equal.
    return values - least <= options.epsilon * (most - least)


def _logarithm(values: Tensor) -> Tensor:
    """Return log F, with each 0 replaced by the client's smallest positive value."""
    above = values.where(values > 0, float("inf")).amin(1, keepdim=True)
    # If all are 0, any number will do: they are all equal.
    return values.clamp(min=above.where(above.isfinite(), 1)).log()


def scores(options: Options, layout: Layout, after: Tensor, before: Tensor) -> Tensor:
    """Return the score ξ of every client and layer, Eq. 9. A client's scores have L1
    norm 1, and it sends the layers with the highest.
    """
    found = []
    for start, stop in layout.block_spans:
        one, other = after[:, start:stop], before[:, start:stop]
        cosine = _cosine(one, other)
        # The lowest (1 − cos) / dim first is the highest (cos − 1) / dim first.
        if options.gene_score == "changed":
            cosine = cosine - 1
        dim = 1 if options.gene_score == "cosine" else stop - start
        found.append(cosine / dim)
    return F.normalize(torch.stack(found, 1), p=1, dim=1)


def _cosine(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine of each pair of rows, in float64. A round turns a layer of
    ResNet-18 by 1e-6, which is less than the error of sums in float32: rounding would
    choose between layers of equal size.
    """
    product = (one * other).sum(1, dtype=torch.float64)
    squares = one.square().sum(1, dtype=torch.float64)
    squares = squares * other.square().sum(1, dtype=torch.float64)
    return product / squares.sqrt().clamp(min=1e-30)


def gene(options: Options, scores: Tensor, round: int) -> Tensor:
    """Return [clients, layers], True for layers to send; of equal scores the first."""
    count = options.num_sent(round, scores.shape[1])
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)


def adopt(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    """Let new clients continue from [θ0; Θ_G], as known ones do from θ̃."""
    arrived, rows = arrive(fed, state, cohort)
    trained = torch.ones(len(rows), 1, dtype=torch.bool, device=fed.device)
    return replace(arrived, rows=rows, trained=trained)


def personal(fed: Federation[Options], state: State, clients: Positions) -> Tensor:
    """Return θ̃, or the cluster's row for a client that has not trained yet."""
    rows, trained = state.rows[clients], state.trained[clients]
    return rows.where(trained, cluster_rows(fed, state, clients))


def global_row(state: State) -> None:
    return None  # clients predict with their own rows
