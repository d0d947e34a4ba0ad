"""Options with which a run is FedAvg: methods with everything switched off, and stages
between client and server that change nothing.

Which methods these are follows from their papers. What a method weighs clients by, its
own declaration says.
"""

from dataclasses import dataclass, field
from typing import Any

Options = dict[str, Any]


@dataclass(frozen=True)
class Neutral:
    """Options that change nothing about FedAvg."""

    options: Options
    """What the run gets."""
    both: Options = field(default_factory=dict)
    """What the run and FedAvg must get for the two to be equal."""
    fedavg: Options = field(default_factory=dict)
    """What FedAvg must get in place of these."""


HUGE = 1e30
UNIFORM: Options = {"weights": "uniform"}
ALL: Options = {"participation": 1.0, "sampling": "fixed"}
# GenFed's validation set is taken from the training data.
VALIDATING: Options = {**ALL, "validation": 100}
ONE_STEP: Options = {"batch_size": 4096, "epochs": 1}
"""A client's samples are one batch."""
ONE_CLUSTER: Options = {"clusters": 1}

METHODS: dict[str, Neutral] = {
    # w takes the steps of FedAvg, beside the personal rows.
    "apfl": Neutral({"local_steps": 1}, ONE_STEP),
    "ditto": Neutral({}),
    "fedavg-ft": Neutral({}),
    "fedavgm": Neutral({"server_momentum": 0.0, "server_lr": 1.0}),
    "fedprox": Neutral({"prox_mu": 0.0}),
    # Steps that all clients make alike need no normalising.
    "fednova": Neutral({"prox_mu": 0.0}, {"batch_size": 4096}),
    "fedper": Neutral({"head_layers": 0}),
    "lg-fedavg": Neutral({"head_layers": 2}),
    # Whoever takes part in every round has no old update, and no interval to make up.
    "fedumf": Neutral({}, ALL),
    "fedau": Neutral({}, ALL),
    "genfed": Neutral({"schedule": "constant", "rho_max": 5}, VALIDATING),
    "genfedumf": Neutral({"schedule": "constant", "rho_max": 5}, VALIDATING),
    "genfedau": Neutral({"schedule": "constant", "rho_max": 5}, VALIDATING),
    "clustered-fedavg": Neutral(ONE_CLUSTER),
    "fedbn": Neutral(ONE_CLUSTER),
    "fedfina": Neutral({**ONE_CLUSTER, "shared_layers": "fc1,head"}),
    "parfed": Neutral({**ONE_CLUSTER, "shared_layers": "fc1,head"}),
    "fedlp": Neutral({**ONE_CLUSTER, "send_probability": 1.0}),
    "fedlg": Neutral({**ONE_CLUSTER, "gene_pools": "fc1/head", "gene_each": 1}),
    "hetlora": Neutral({"client_ranks": "2", "rank_mean": "holders"}, {"lora": 2}),
    # Without variates of earlier rounds.
    "scaffold": Neutral({"local_steps": 0}, {"rounds": 1, "momentum": 0.0}),
    # The server learns, and generates nothing that clients would be sent.
    "pfedgpa": Neutral({}),
}
"""The options of a method that switch off what tells it from FedAvg."""

_CLIPPED: Options = {"noise_multiplier": 0.0, "clip_norm": HUGE}
STAGES: tuple[Neutral, ...] = (
    Neutral({"attack": "noise", "attack_strength": 0.0}),
    Neutral({"privacy": "central", **_CLIPPED}, {"sampling": "fixed"}, UNIFORM),
    Neutral({"privacy": "local", **_CLIPPED}, fedavg=UNIFORM),
    Neutral({"sample_noise": 0.0, "sample_clip": HUGE}),
    Neutral({"clip": HUGE}),
    Neutral({"compress": "topk", "keep": 1.0}),
    Neutral({"compress": "topk", "keep": 1.0, "ef21": True}),
    Neutral({"compress": "randomk", "keep": 1.0}),
    Neutral({"compress": "powersgd", "compress_rank": 64}),
    Neutral({"compress_down": "topk", "keep": 1.0}),
    Neutral({"compress_down": "randomk", "keep": 1.0}),
    Neutral({"devices": "lognormal"}),
    Neutral({"devices": "uniform", "deadline": HUGE, "partial": True}),
    Neutral({"aggregation": "trimmed-mean", "tolerance": 0.0}, fedavg=UNIFORM),
    Neutral({"aggregation": "multi-krum", "tolerance": 0.0}),
    Neutral({"lr_schedule": "step", "lr_step_size": 1, "lr_step_factor": 1.0}),
    Neutral({"lr_schedule": "cosine", "lr_min": 0.05}, {"lr": 0.05}),
    Neutral({"engine": "loop"}),
    Neutral({"engine": "vmap"}),
    Neutral({"deterministic": True}),
)
"""Stages of training, channel and aggregation that change nothing. Options that change
nothing by their declaration are not listed: the swarm asks for them.
"""
