"""Federations that tests assemble in this process, and rounds of them in plain torch,
client by client.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hpcfed import methods
from hpcfed.clients.job import Recipe
from hpcfed.experiment.assemble import Setup, assemble
from hpcfed.federation.log import RoundLog
from hpcfed.models.networks import build
from hpcfed.options import resolve
from hpcfed.runtime import randomness
from hpcfed.runtime import world as worlds
from hpcfed.runtime.timer import Timer
from tests.naive import naive

HARSH = {
    "momentum": 0.9,
    "weight_decay": 0.02,
    "clip": 1.5,
    "lr_decay": 0.9,
    "participation": 0.5,
    "batch_size": 60,
}
"""Whatever could move a column that must stay, and half of the clients in a round."""

Weights = dict[str, Tensor]


def assembled(**values: Any) -> Setup:
    values = {
        "model": "mlp",
        "clients": 4,
        "precision": "fp64",
        "device": "cpu",
        "batch_size": 64,  # two epochs of some steps each, the last one with a short batch
        **values,
    }
    options = methods.load(values.get("method", "fedavg")).Options
    settings = resolve(values, {name: name for name in values}, options)
    world = worlds.enter(device="cpu")
    return assemble(settings, world, Timer(world.device))


def trained_alone(s: Setup, row: Tensor, client: int, round: int) -> Tensor:
    """One client's row after its local training when it is trained alone."""
    return s.federation.train_alone(row, client, round)


def initial(s: Setup) -> Weights:
    network = build("mlp", shape=(1, 8, 8), classes=10, seed=s.settings.config.seed)
    return {
        name: tensor.detach().double() for name, tensor in network.named_parameters()
    }


def trained(
    s: Setup,
    weights: Weights,
    client: int,
    purpose: str,
    round: int,
    sgd: Recipe,
    part: str = "",
) -> Weights:
    """One client alone, in plain torch; only tensors whose name starts with `part` are
    trained.
    """
    network = build("mlp", shape=(1, 8, 8), classes=10, seed=0).double()
    network.load_state_dict(weights)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith(part))
    key = randomness.client_keys(
        s.settings.config.seed, purpose, round, torch.tensor([client])
    )[0]
    network = naive(network, s.federation.training.train_data, client, sgd, key)
    return {name: tensor.detach() for name, tensor in network.named_parameters()}


def usual(s: Setup, round: int, epochs: int) -> Recipe:
    c = s.settings.config
    return Recipe(
        epochs,
        c.batch_size,
        c.lr * c.lr_decay**round,
        c.momentum,
        c.weight_decay,
        c.clip,
    )


def flat(weights: Weights) -> Tensor:
    return torch.cat(
        [
            weights[name].flatten()
            for name in ("fc1.weight", "fc1.bias", "head.weight", "head.bias")
        ]
    )


def close(rows: Tensor, expected: list[Weights]) -> None:
    torch.testing.assert_close(
        rows,
        torch.stack([flat(weights) for weights in expected]),
        rtol=1e-10,
        atol=1e-12,
    )


def rounds(
    s: Setup, count: int, logs: list[RoundLog] | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield each round's number and the state after it; `logs` takes the log of each."""
    state = s.method.init(s.federation)
    for round in range(count):
        cohort = s.federation.sample(round)
        state = s.method.round(s.federation, state, cohort)
        if logs is not None:
            logs.append(cohort.log)
        yield round, state


def traffic(logs: list[RoundLog]) -> tuple[int, int, int]:
    """Bytes up, bytes up of this rank's clients, and bytes down of all rounds."""
    return (
        sum(log.bytes_up for log in logs),
        sum(int(log.bytes_up_here) for log in logs),
        sum(log.bytes_down for log in logs),
    )
