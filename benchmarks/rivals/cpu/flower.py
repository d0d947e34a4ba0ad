"""Flower's rounds, in its simulation engine on Ray.

A worker keeps its network and all data, so that a round loads nothing.
"""

import os
import sys
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.rivals.cpu.work import (
    CLASSES,
    LR,
    MOMENTUM,
    SEED,
    WEIGHT_DECAY,
    WORKS,
    Part,
    Turns,
    data_of,
    part_of,
)
from hpcfed.models.networks import build


@cache
def network_of(name: str) -> nn.Module:
    """Return this worker's network."""
    return build(name, shape=WORKS[name].shape, classes=CLASSES, seed=SEED)


@cache
def tensors_of(name: str) -> tuple[Tensor, Tensor]:
    """Return all clients' images and labels."""
    images, labels = data_of(WORKS[name])
    return torch.from_numpy(images), torch.from_numpy(labels)


def train(message: Message, context: Context) -> Message:
    """Train one client, as Flower's tutorials do."""
    config = message.content["config"]
    work = WORKS[str(config["work"])]
    torch.set_num_threads(int(config["threads"]))
    network = network_of(work.model)
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    images, labels = (tensor[client] for tensor in tensors_of(work.model))
    optimizer = torch.optim.SGD(
        network.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    network.train()
    for own in torch.randperm(work.images).split(work.batch):
        optimizer.zero_grad()
        cross_entropy(network(images[own]), labels[own]).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(network.state_dict()),
        "metrics": MetricRecord({"num-examples": work.images}),
    }
    return Message(content=RecordDict(content), reply_to=message)


class TimedFedAvg(FedAvg):
    """Waits for its turn before a round, and answers after it."""

    def __init__(self, turns: Turns, **options: Any) -> None:
        super().__init__(**options)
        self._turns = turns

    def configure_train(self, *arguments: Any, **keywords: Any) -> Any:
        self._turns.begin()
        return super().configure_train(*arguments, **keywords)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        if any(reply.has_error() for reply in replies):
            raise RuntimeError("a client of Flower's has failed")
        found = super().aggregate_train(server_round, replies)
        self._turns.end()
        return found


def run(part: Part, turns: Turns) -> None:
    """Train with its FedAvg, one client at a time in each worker."""
    work = part.work
    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(train)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = TimedFedAvg(
            turns,
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=work.clients,
            min_available_nodes=work.clients,
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(network_of(work.model).state_dict()),
            train_config=ConfigRecord({"work": work.model, "threads": part.threads}),
            num_rounds=part.rounds,
        )

    names = ", ".join(f"{name} {version(name)}" for name in ("flwr", "ray", "torch"))
    turns.tell(version=names)
    cores = len(os.sched_getaffinity(0))
    run_simulation(
        server_app,
        client_app,
        num_supernodes=work.clients,
        backend_config={
            "init_args": {"num_cpus": cores, "include_dashboard": False},
            "client_resources": {"num_cpus": cores // part.processes, "num_gpus": 0},
        },
    )


if __name__ == "__main__":
    # From the module and not from this program: Ray's workers import it by its name.
    from benchmarks.rivals.cpu import flower

    flower.run(part_of(sys.argv[1:]), Turns())
