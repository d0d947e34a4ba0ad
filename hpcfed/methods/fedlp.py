"""FedLP (Zhu et al. 2023), in clusters: each client sends each layer with probability
p; mean over what has come.

A layer is a convolution or linear layer with the batch norm that follows it. All
clients with data that send a layer have the same weight. The traffic in GENE-FL's paper
does not match one draw per upload; one draw for the whole run, or for every cluster,
are options.
"""

from typing import Literal

from hpcfed.methods import Cohort, Federation, Tensor, _clusters
from hpcfed.methods._clusters import State, aggregate, begin, download
from hpcfed.options import option
from hpcfed.runtime import randomness
from hpcfed.runtime.device import on_device

EXTENDS = _clusters


class Options(_clusters.Options):
    weighs = "uniform"

    send_probability: float = option(
        0.5, "p, the probability that a client sends a layer", ge=0, le=1
    )
    mask_per: Literal["upload", "cluster", "run"] = option(
        "upload",
        "how often the layers to send are drawn: for every upload, or once for all "
        "uploads of a cluster or of the run",
    )


def init(fed: Federation[Options]) -> State:
    return begin(fed, group_of=fed.layout.block_of)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows = download(fed, state, cohort)
    rows = fed.train(rows, cohort)
    sent = _drawn(fed, state, cohort) < fed.options.send_probability
    state, _ = aggregate(fed, state, rows, cohort, sent=sent)
    return state


def _drawn(fed: Federation[Options], state: State, cohort: Cohort) -> Tensor:
    """Draw a number in [0, 1) for every member here and layer, on any ranks."""
    clusters, num_layers = state.gene.shape
    if fed.options.mask_per == "upload":
        # By seed, round and client.
        return randomness.uniform(fed.keys("layers sent", cohort), num_layers)
    drawn = fed.generator("layers sent").random((clusters, num_layers))
    if fed.options.mask_per == "run":
        drawn[:] = drawn[0]
    ids = on_device(fed.clients[cohort.here], fed.device)
    return on_device(drawn, fed.device)[state.cluster[ids]]
