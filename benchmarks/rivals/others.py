"""The rivals that benchmarks/rivals/peers.py measures: pfl-research, a vmap loop and a plain
loop.
"""

import importlib
import multiprocessing
import os
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.rivals.work import (
    SEED,
    Data,
    Gate,
    Job,
    Laps,
    Report,
    Weights,
    batches,
    data_of,
    load_weights,
    loss_of,
    network_of,
    set_up,
    weights_of,
)
from hpcfed.clients.job import Recipe


def vmap_round(
    network: nn.Module,
    weights: Weights,
    data: Data,
    cohort: Tensor,
    sgd: Recipe,
    *,
    chunk: int = 0,
) -> Weights:
    """Train the cohort `chunk` clients at a time, and return the mean of their weights."""
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for members in cohort.split(chunk or len(cohort)):
        rows = train_stack(network, weights, data, members, sgd)
        for name, row in rows.items():
            # A running sum: the rows of all chunks may not fit beside each other.
            total[name] += row.sum(0)
    return {name: weight / len(cohort) for name, weight in total.items()}


def train_stack(
    network: nn.Module, weights: Weights, data: Data, members: Tensor, sgd: Recipe
) -> Weights:
    """Return the members' weights after local training, stacked."""

    def loss(own: Weights, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, own, (images,)), labels)

    # Dropout differs between clients.
    gradient = vmap(grad(loss), randomness="different")
    images, labels = data
    members = members.to(images.device)  # once, and not in every step
    rows = {
        name: torch.stack([weight] * len(members)) for name, weight in weights.items()
    }
    velocity = {}
    if sgd.momentum:
        velocity = {name: torch.zeros_like(row) for name, row in rows.items()}
    for batch in batches(images.shape[1], sgd):
        step = gradient(rows, images[members, batch], labels[members, batch])
        descend(rows, step, velocity, sgd)
    return rows


@torch.no_grad()
def descend(rows: Weights, gradient: Weights, velocity: Weights, sgd: Recipe) -> None:
    """Take one step of SGD in place."""
    for name, row in rows.items():
        step = gradient[name]
        if sgd.weight_decay:
            step = step.add(row, alpha=sgd.weight_decay)
        if sgd.momentum:
            step = velocity[name].mul_(sgd.momentum).add_(step)
        row.sub_(step, alpha=sgd.lr)


def loop_round(
    network: nn.Module, weights: Weights, data: Data, cohort: Tensor, sgd: Recipe
) -> Weights:
    """Train the cohort one by one in the same module, and return the mean of their
    weights.
    """
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for client in cohort.tolist():
        load_weights(network, weights)
        train_module(network, data[0][client], data[1][client], sgd)
        for name, parameter in network.named_parameters():
            total[name] += parameter.detach()
    return {name: weight / len(cohort) for name, weight in total.items()}


def train_module(
    network: nn.Module, images: Tensor, labels: Tensor, sgd: Recipe
) -> None:
    """Train the module on one client's data, as any tutorial does."""
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=sgd.lr,
        momentum=sgd.momentum,
        weight_decay=sgd.weight_decay,
    )
    for batch in batches(len(images), sgd):
        optimizer.zero_grad()
        F.cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()


def run_plain(job: Job) -> Report:
    """Measure the vmap loop or the plain loop."""
    device, work = set_up(job), job.work
    network = network_of(work, device)
    data = data_of(work, np.arange(work.clients), device)
    before = loss_of(network, *data)
    train = partial(vmap_round, chunk=job.chunk) if job.who == "vmap" else loop_round
    weights, random, laps = (
        weights_of(network),
        np.random.default_rng(SEED),
        Laps(device),
    )
    for _ in range(job.warmup + job.rounds):
        laps.begin()
        cohort = torch.from_numpy(
            random.choice(work.clients, work.cohort, replace=False)
        )
        weights = train(network, weights, data, cohort, work.sgd)
        laps.end()
    load_weights(network, weights)
    return Report(laps.seconds[job.warmup :], before, loss_of(network, *data))


def pfl(module: str) -> Any:
    """Import a module of pfl-research, which need not be installed."""
    return importlib.import_module(f"pfl.{module}")


class Classifier(nn.Module):
    """A network with the two functions that pfl-research calls."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.samples = 0
        """Samples trained on so far."""

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        self.samples += len(labels)
        return F.cross_entropy(self.network(images), labels)

    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return the loss; pfl-research always evaluates in its first round, which is
        warm-up.
        """
        loss = loss_of(self.network, images[None], labels[None])
        return {"loss": pfl("metrics").Weighted(loss * len(labels), len(labels))}


class Clock(Protocol):
    """Is told when rounds begin and end."""

    def begin(self) -> object: ...

    def end(self) -> None: ...


class LapsCallback:
    """Lets pfl-research say when a round begins and ends."""

    def __init__(self, laps: Clock) -> None:
        self._laps = laps
        self._nothing = pfl("metrics").Metrics

    def on_train_begin(self, *, model: Any) -> Any:
        self._laps.begin()
        return self._nothing()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        self._laps.end()
        self._laps.begin()
        return False, self._nothing()

    def on_train_end(self, *, model: Any) -> None:
        pass


def pfl_rounds(
    model: Classifier, data: Data, sgd: Recipe, *, cohort: int, rounds: int, laps: Clock
) -> None:
    """Train with pfl-research's FederatedAveraging on its simulated backend."""
    device = data[0].device
    # Otherwise it looks for a GPU in every step.
    os.environ["PFL_PYTORCH_DEVICE"] = str(device)
    users = [
        pfl("data.dataset").Dataset(raw_data=user) for user in zip(*data, strict=True)
    ]
    sampler = pfl("data.sampling").get_user_sampler(
        "minimize_reuse", list(range(len(users)))
    )
    # The same Dataset comes back each time, so its batches are cut only once.
    dataset = pfl("data.federated_dataset").FederatedDataset(users.__getitem__, sampler)
    local_optimizer = partial(
        torch.optim.SGD,
        momentum=sgd.momentum,
        weight_decay=sgd.weight_decay,
        fused=device.type == "cuda",
    )
    pfl("algorithm.federated_averaging").FederatedAveraging().run(
        algorithm_params=pfl("algorithm.base").NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        backend=pfl("aggregate.simulate").SimulatedBackend(
            training_data=dataset, val_data=dataset
        ),
        model=pfl("model.pytorch").PyTorchModel(
            model=model,
            local_optimizer_create=local_optimizer,
            central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        ),
        model_train_params=pfl("hyperparam.base").NNTrainHyperParams(
            local_num_epochs=sgd.epochs,
            local_learning_rate=sgd.lr,
            local_batch_size=sgd.batch_size,
        ),
        callbacks=[LapsCallback(laps)],
        send_metrics_to_platform=False,
    )


def run_pfl(job: Job, rank: int, gate: Gate | None) -> Report:
    """Measure one of the processes of pfl-research, which has its own share of the
    users.
    """
    # pfl-research sets itself up, when imported, only in a process of this name.
    multiprocessing.current_process().name = "MainProcess"
    np.random.seed(SEED + rank)  # noqa: NPY002 (pfl-research draws from it)
    device, work = set_up(job), job.work
    data = data_of(work, np.arange(rank, work.clients, job.processes), device)
    model, laps = Classifier(network_of(work, device)), Laps(device, gate)
    before = loss_of(model.network, *data)
    rounds, cohort = job.warmup + job.rounds, work.cohort // job.processes
    pfl_rounds(model, data, work.sgd, cohort=cohort, rounds=rounds, laps=laps)
    work.check(model.samples * job.processes / rounds)
    return Report(laps.seconds[job.warmup :], before, loss_of(model.network, *data))
