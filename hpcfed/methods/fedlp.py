"""FedLP (Zhu et al. 2023), in clusters: each client sends each layer with probability
p; mean over what has come.

A layer is a convolution or linear layer with the batch norm that follows it. All
clients with data that send a layer have the same weight. The traffic in GENE-FL's paper
does not match one draw per upload; one draw for the whole run is an option. Layers that
nobody ever sends are then each client's own.
"""

from typing import Literal

import torch

from hpcfed.errors import UserError, count
from hpcfed.methods import Cohort, Federation, Tensor, _clusters
from hpcfed.methods._clusters import State, aggregate, begin, download
from hpcfed.options import RunConfig, option
from hpcfed.runtime import randomness

EXTENDS = _clusters


class Options(_clusters.Options):
    weighs = "uniform"

    send_probability: float = option(
        0.5, "p, the probability that a client sends a layer", ge=0, le=1
    )
    mask_per: Literal["upload", "run"] = option(
        "upload",
        "how often the layers to send are drawn: for every upload, or once for the "
        "run, where clients keep the other layers to themselves",
    )

    def check(self, config: RunConfig) -> None:
        super().check(config)
        packed = "powersgd" in (config.compress, config.compress_down)
        if self.mask_per == "run" and (packed or config.clip_per == "layer"):
            raise UserError(
                "--mask-per run sends only some columns, but powersgd and --clip-per "
                "layer need whole rows"
            )


def init(fed: Federation[Options]) -> State:
    if fed.options.mask_per == "upload":
        return begin(fed, group_of=fed.layout.block_of)
    num_layers = len(fed.layout.blocks)
    drawn = torch.from_numpy(fed.generator("layers sent").random(num_layers))
    shared = drawn < fed.options.send_probability
    if not shared.any():
        raise UserError(
            f"--mask-per run draws none of {count(num_layers, 'layer')} to be sent; "
            "a larger --send-probability, or another --seed, draws some"
        )
    return begin(fed, shared=shared[fed.layout.block_of])


def round(fed: Federation[Options], state: State, cohort: Cohort) -> State:
    rows = download(fed, state, cohort)
    rows = fed.train(rows, cohort)
    state, _ = aggregate(fed, state, rows, cohort, sent=_sent(fed, cohort))
    return state


def _sent(fed: Federation[Options], cohort: Cohort) -> Tensor | None:
    """Return which layers every member here sends; None if all that are shared."""
    if fed.options.mask_per == "run":
        return None
    # By seed, round and client: the same on any ranks.
    keys = fed.keys("layers sent", cohort)
    drawn = randomness.uniform(keys, len(fed.layout.blocks))
    return drawn < fed.options.send_probability
