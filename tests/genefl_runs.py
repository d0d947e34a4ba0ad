"""Settings and small federations of GENE-FL and its family."""

from typing import Any

import torch
from torch import Tensor

from hpcfed.clients.pull import Pull
from hpcfed.experiment.assemble import Setup
from hpcfed.federation.federation import Federation
from hpcfed.models.networks import build
from hpcfed.runtime import randomness
from tests.federations import assembled

SHARDS: dict[str, Any] = {
    "partition": "sharding",
    "classes_per_client": 2,
    "clients": 6,
    "participation": 0.7,
}
SMALL: dict[str, Any] = {
    **SHARDS,
    "model": "cnn-bn",
    "epochs": 1,
    "batch_size": 40,
    "clusters": 2,
}
NAMED: dict[str, dict[str, Any]] = {
    "parfed": {"shared_layers": "conv2"},
    "fedfina": {"shared_layers": "conv1,conv2"},
    "fedlg": {"gene_pools": "conv1,conv2/fc1,head", "gene_each": 1},
    "fedlps": {"prune_ratio": 0.5},
}
"""What stands for layers of ResNet-18 in the small network."""


def small(method: str, **values: Any) -> Setup:
    return assembled(method=method, **SMALL | NAMED.get(method, {}) | values)


def fresh(s: Setup, client: int) -> Tensor:
    """The weights that a new client draws: a network of another seed."""
    draw = randomness.generator(s.settings.config.seed, "fresh weights", client)
    seed = int(draw.integers(2**32))
    network = build("cnn-bn", shape=(1, 8, 8), classes=10, seed=seed)
    return s.federation.layout.row(network, dtype=torch.float64)


def trained(
    fed: Federation, row: Tensor, client: int, round: int, pull: Pull | None
) -> Tensor:
    return fed.train_alone(row, client, round, pull=pull)
