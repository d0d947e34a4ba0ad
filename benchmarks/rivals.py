"""The rivals that benchmarks/peers.py measures: pfl-research, a vmap loop and a plain
loop.
"""

import importlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from round import WORKS
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from hpcfed.clients.job import Sgd
from hpcfed.data.datasets import SyntheticSize, load
from hpcfed.models.networks import build

SHAPE, CLASSES, SEED = (3, 32, 32), 10, 0
HEAD_START = 0.02
"""Seconds from the last process's arrival to the common start of a round."""
JUDGED_CLIENTS = 20
"""Clients whose data tells the loss before and after."""

Weights = dict[str, Tensor]
Data = tuple[Tensor, Tensor]
"""Images and labels of clients, by client."""


@dataclass(frozen=True)
class Work:
    """One piece of work, maybe scaled down."""

    name: str
    model: str
    clients: int
    cohort: int
    images: int
    """Images of each client."""
    sgd: Sgd

    @property
    def samples(self) -> int:
        """Samples that a round trains on."""
        return self.cohort * self.images * self.sgd.epochs

    def check(self, samples: float) -> None:
        """Raise unless a round was trained on as many samples as it should."""
        if samples != self.samples:
            raise RuntimeError(
                f"trained on {samples:,.1f} samples a round, not {self.samples:,}"
            )


def work_of(name: str, scale: float) -> Work:
    """Return the named work, with cohort and images shrunk by `scale`.

    The cohort stays a multiple of 10, and images stay a multiple of the batch.
    """
    values = WORKS[name]
    batch = values["batch_size"]
    cohort = round(values["participation"] * values["clients"])
    if scale < 1:
        cohort = 10 * max(1, round(scale * cohort / 10))
    images = batch * max(1, round(scale * values["train_per_client"] / batch))
    sgd = Sgd(
        epochs=values["epochs"],
        batch_size=batch,
        lr=values["lr"],
        momentum=values["momentum"],
        weight_decay=values.get("weight_decay", 0.0),
    )
    clients = round(cohort / values["participation"])
    return Work(name, values["model"], clients, cohort, images, sgd)


@dataclass(frozen=True)
class Job:
    """One line of the table."""

    work: Work
    who: str
    device: str
    rounds: int
    warmup: int
    processes: int = 1
    chunk: int = 0
    """Clients that vmap trains together; 0: the cohort."""

    @property
    def label(self) -> str:
        return f"{self.who} {self.chunk}" if self.chunk else self.who


@dataclass(frozen=True)
class Report:
    """What one process measured."""

    seconds: list[float]
    """Seconds of each counted round."""
    loss_before: float | None = None
    loss_after: float | None = None


# ---- what all rivals share


class Gate:
    """Lets several processes go at one instant of the clock that they share.

    A barrier alone releases them one by one: of ten processes on two cores, the last
    started 50 to 80 ms after the first.
    """

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._barrier = context.Barrier(processes)
        self._instant = context.Value("d", 0.0)

    def wait(self) -> float:
        """Return at the agreed instant, or as soon after as there is a core; return the
        instant.
        """
        if self._barrier.wait() == 0:
            self._instant.value = time.monotonic() + HEAD_START
        self._barrier.wait()
        instant = float(self._instant.value)
        time.sleep(max(0.0, instant - time.monotonic() - 0.001))
        while time.monotonic() < instant:  # sleep would wake up a little late
            pass
        return instant


class Laps:
    """Times rounds, which several processes start together if there is a gate."""

    def __init__(self, device: torch.device, gate: Gate | None = None) -> None:
        self.seconds: list[float] = []
        self._device = device
        self._gate = gate
        self._begin = 0.0

    def begin(self) -> None:
        self._synchronize()
        self._begin = time.monotonic() if self._gate is None else self._gate.wait()

    def end(self) -> None:
        self._synchronize()
        self.seconds.append(time.monotonic() - self._begin)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def set_up(job: Job) -> torch.device:
    """Set the arithmetic that hpcfed uses too, share the cores, and return the device."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.processes))
    torch.manual_seed(SEED)
    return torch.device("cuda", 0) if job.device == "cuda" else torch.device("cpu")


def data_of(work: Work, clients: np.ndarray, device: torch.device) -> Data:
    """Return images [clients, images, *SHAPE] and labels [clients, images] of some
    clients.
    """
    total = work.clients * work.images
    size = SyntheticSize(shape=SHAPE, classes=CLASSES, train=total, test=1)
    dataset = load("synthetic", root=None, download=False, seed=SEED, synthetic=size)
    index = (clients[:, None] * work.images + np.arange(work.images)).ravel()
    images = dataset.images("train", index, device=device, dtype=torch.float32)
    labels = torch.from_numpy(dataset.labels("train")[index]).to(device)
    shape = (len(clients), work.images)
    return images.view(*shape, *SHAPE), labels.view(shape)


def network_of(work: Work, device: torch.device) -> nn.Module:
    return build(work.model, shape=SHAPE, classes=CLASSES, seed=SEED).to(device)


def weights_of(network: nn.Module) -> Weights:
    return {
        name: weight.detach().clone() for name, weight in network.named_parameters()
    }


@torch.no_grad()
def load_weights(network: nn.Module, weights: Weights) -> None:
    for name, parameter in network.named_parameters():
        parameter.copy_(weights[name])


@torch.no_grad()
def loss_of(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the mean loss on the data of the first clients, without dropout."""
    network.eval()
    logits = network(images[:JUDGED_CLIENTS].flatten(0, 1))
    loss = F.cross_entropy(logits, labels[:JUDGED_CLIENTS].flatten())
    network.train()
    return float(loss)


def batches(images: int, sgd: Sgd) -> Iterator[slice]:
    """Yield which images of a client each step sees; the order is the same in every
    epoch.
    """
    for _ in range(sgd.epochs):
        for start in range(0, images, sgd.batch_size):
            yield slice(start, start + sgd.batch_size)


# ---- torch.func.vmap


def vmap_round(
    network: nn.Module,
    weights: Weights,
    data: Data,
    cohort: Tensor,
    sgd: Sgd,
    *,
    chunk: int = 0,
) -> Weights:
    """Train the cohort `chunk` clients at a time, and return the mean of their weights."""
    total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for members in cohort.split(chunk or len(cohort)):
        rows = train_stack(network, weights, data, members, sgd)
        for name, row in rows.items():
            total[name] += row.sum(0)
    return {name: weight / len(cohort) for name, weight in total.items()}


def train_stack(
    network: nn.Module,
    weights: Weights,
    data: Data,
    members: Tensor,
    sgd: Sgd,
) -> Weights:
    """Return the members' weights after local training, stacked."""

    def loss(own: Weights, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, own, (images,)), labels)

    gradient = vmap(
        grad(loss), randomness="different"
    )  # dropout differs between clients
    images, labels = data
    members = members.to(images.device)  # once, and not in every step
    rows = {
        name: torch.stack([weight] * len(members)) for name, weight in weights.items()
    }
    velocity = (
        {name: torch.zeros_like(row) for name, row in rows.items()}
        if sgd.momentum
        else {}
    )
    for batch in batches(images.shape[1], sgd):
        step = gradient(rows, images[members, batch], labels[members, batch])
        descend(rows, step, velocity, sgd)
    return rows


@torch.no_grad()
def descend(rows: Weights, gradient: Weights, velocity: Weights, sgd: Sgd) -> None:
    """Take one step of SGD in place."""
    for name, row in rows.items():
        step = gradient[name]
        if sgd.weight_decay:
            step = step.add(row, alpha=sgd.weight_decay)
        if sgd.momentum:
            step = velocity[name].mul_(sgd.momentum).add_(step)
        row.sub_(step, alpha=sgd.lr)


# ---- one client after the other


def loop_round(
    network: nn.Module,
    weights: Weights,
    data: Data,
    cohort: Tensor,
    sgd: Sgd,
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


def train_module(network: nn.Module, images: Tensor, labels: Tensor, sgd: Sgd) -> None:
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


# ---- pfl-research


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


class LapsCallback:
    """Lets pfl-research say when a round begins and ends."""

    def __init__(self, laps: Laps) -> None:
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
    model: Classifier,
    data: Data,
    sgd: Sgd,
    *,
    cohort: int,
    rounds: int,
    laps: Laps,
) -> None:
    """Train with pfl-research's FederatedAveraging on its simulated backend."""
    device = data[0].device
    os.environ["PFL_PYTORCH_DEVICE"] = str(
        device
    )  # else it looks for a GPU in every step
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
