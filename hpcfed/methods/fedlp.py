"""FedLP (Zhu et al. 2023), in clusters: each client sends each layer with probability
p; mean over what has come.

A layer is a convolution or linear layer with the batch norm that follows it. Every
client that sends one counts alike, unless it has no data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hpcfed.config import option
from hpcfed.methods import _clusters
from hpcfed.methods._clusters import (
    State,
    begin,
    download,
    global_row,
    personal,
    upload,
    welcome,
)

if TYPE_CHECKING:
    from hpcfed.federation.federation import Cohort, Federation

__all__ = ["Options", "State", "global_row", "init", "personal", "round", "welcome"]


class Options(_clusters.Options):
    send_probability: float = option(
        0.5, "p, with which a client sends a layer", ge=0, le=1
    )


def init(fed: Federation) -> State:
    return begin(fed, part_of=fed.layout.block_of)


def round(fed: Federation, state: State, cohort: Cohort) -> State:
    from hpcfed.runtime import randomness

    rows = fed.train(download(fed, state, cohort), cohort)
    drawn = randomness.uniform(fed.keys("layers sent", cohort), state.gene.shape[1])
    parts = drawn < cast(Options, fed.options).send_probability
    return upload(fed, state, rows, cohort.equally_with_data(), parts=parts)[0]
