"""HetLoRA (Cho et al. 2024): clients have adapters of different ranks; the server
averages them padded with zeros, and each client takes back the components of its rank.

--rank-mean norms is the paper's (Section 3.2): client i counts by pᵢ ‖Bᵢ Aᵢ‖, and zeros
count as values. With holders, a component is averaged over the clients that have it: Σ
pᵢ xᵢ / Σ pᵢ. With padded, clients count by pᵢ alone. The paper's pruning of ranks in
training is left out.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from hpcfed.federation.cohort import shares
from hpcfed.methods import Cohort, Federation, Tensor, _ranks
from hpcfed.methods._adapters import RANK, adapters
from hpcfed.methods._ranks import State, trained
from hpcfed.options import Choice, RunConfig, option

EXTENDS = _ranks


class Options(_ranks.Options):
    averages = False  # it takes a mean of some columns

    rank_mean: Literal["holders", "padded", "norms"] = option(
        "norms",
        "whom a component is averaged over: clients that have it, or all, padded with "
        "zeros; norms: all, weighted by the norm of B A, too",
    )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield from super().fit(config, ranks)
        if not self.client_ranks:
            most = config.lora or RANK
            dealt = dict.fromkeys((max(1, most // 4), max(1, most // 2), most))
            reason = "hetlora's clients differ; --client-ranks takes others"
            yield Choice("client_ranks", ",".join(map(str, dealt)), reason)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows, sent = trained(fed, state, cohort)
    if fed.options.rank_mean == "norms":
        cohort = _by_norms(fed, rows, cohort)
    only = sent if fed.options.rank_mean == "holders" else None
    everyone = torch.zeros(len(fed.sizes), dtype=torch.int64, device=fed.device)
    means, _ = fed.cluster_means(rows, cohort, everyone, state.w[None], only)
    return replace(state, w=means[0])


def _by_norms(fed: Federation[Options], rows: Tensor, cohort: Cohort) -> Cohort:
    """Return the cohort with weights in proportion to the norms of the products, too."""
    squares = rows.new_zeros(len(rows), dtype=torch.float64)
    for adapter in adapters(fed.layout):
        squares += adapter.products(rows).double().square().sum(1)
    norms = squares.new_zeros(len(cohort.clients))
    norms[torch.from_numpy(cohort.chosen).to(norms.device)] = squares.sqrt()
    # Not 0 for a row that has diverged: the mean must see it to leave it out.
    everyones = np.nan_to_num(fed.sum(norms).cpu().numpy(), nan=1.0, posinf=1.0)
    return replace(cohort, weights=shares(cohort.weights * everyones))
