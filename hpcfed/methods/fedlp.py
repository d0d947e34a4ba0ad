"""FedLP (Zhu et al. 2023), in clusters: each client sends each layer with probability
p; mean over what has come.

A layer is a convolution or linear layer with the batch norm that follows it. Every
client that sends one counts alike, unless it has no data.
"""

from hpcfed.config import option
from hpcfed.methods import Cohort, Federation, _clusters
from hpcfed.methods._clusters import State, aggregate, begin, download

EXTENDS = _clusters


class Options(_clusters.Options):
    send_probability: float = option(
        0.5, "p, with which a client sends a layer", ge=0, le=1
    )


def init(fed: Federation[Options]) -> State:
    return begin(fed, group_of=fed.layout.block_of)


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    from hpcfed.runtime import randomness

    rows = download(fed, state, cohort)
    rows = fed.train(rows, cohort)
    num_layers = state.gene.shape[1]
    # Drawn by seed, round and client: the same on any number of ranks.
    drawn = randomness.uniform(fed.keys("layers sent", cohort), num_layers)
    sent = drawn < fed.options.send_probability
    state, _ = aggregate(fed, state, rows, cohort.equally_with_data(), sent=sent)
    return state
