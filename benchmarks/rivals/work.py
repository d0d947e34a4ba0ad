"""The work that hpcfed and its rivals do, their data, networks and clock."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring import synchronize
from benchmarks.speed.round import WORKS
from hpcfed.clients.job import Recipe
from hpcfed.data.datasets import SyntheticSize
from hpcfed.data.loading import load
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
    sgd: Recipe

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
        # So that 1, 2, 5 and 10 processes can share it.
        cohort = 10 * max(1, round(scale * cohort / 10))
    images = batch * max(1, round(scale * values["train_per_client"] / batch))
    sgd = Recipe(
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
        # Sleep may end a little late, so the last millisecond is waited out below.
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
        synchronize(self._device)
        self._begin = time.monotonic() if self._gate is None else self._gate.wait()

    def end(self) -> None:
        synchronize(self._device)
        self.seconds.append(time.monotonic() - self._begin)


def set_up(job: Job) -> torch.device:
    """Set the arithmetic that hpcfed uses too, share the cores, and return the device."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    # As hpcfed does with several ranks on a machine.
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
    images = dataset.inputs("train", index, device=device, dtype=torch.float32)
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


def batches(images: int, sgd: Recipe) -> Iterator[slice]:
    """Yield which images of a client each step sees; the order is the same in every
    epoch.
    """
    for _ in range(sgd.epochs):
        for start in range(0, images, sgd.batch_size):
            yield slice(start, start + sgd.batch_size)
