"""How good the clients' rows and the global model are, on all ranks together."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.placement import Clients
from hpcfed.config import RunConfig
from hpcfed.experiment.assemble import Setup
from hpcfed.federation.federation import Federation
from hpcfed.record.results import ResultsWriter
from hpcfed.record.run import at_target, mean_accuracy
from hpcfed.runtime.device import on_device

PERSONAL_FLOATS = 2**28
"""Rows are evaluated in groups of clients that hold at most this many floats."""


@dataclass(frozen=True)
class Evaluation:
    """What all ranks know after they have evaluated a state."""

    accuracy: float
    """The mean over clients with test data."""
    client_accuracy: np.ndarray
    global_accuracy: float
    """NaN for a method without a global model, as is its loss."""
    global_loss: float

    def reaches(self, target: float | None) -> bool:
        """Tell whether the accuracy is this many per cent; all ranks find the same."""
        if target is None:
            return False
        return bool(at_target(self.accuracy, self.global_accuracy, target))


def is_due(round: int, config: RunConfig) -> bool:
    """Tell whether a round ends with an evaluation; the last one always does."""
    done = round + 1
    is_last = done == config.rounds
    return is_last or done % config.evaluate_every == 0


def evaluate(setup: Setup, state: Any) -> Evaluation:
    """Evaluate every client's personal row on its own test data, and the global model
    on all of it.
    """
    total = len(setup.clients.rank)
    with setup.timer.phase("evaluate"):
        # One small allreduce for everything: each client's correct answers, then the
        # global model's correct answers and its loss.
        device = setup.federation.device
        sums = torch.zeros(total + 2, dtype=torch.float64, device=device)
        _add_personal(setup, state, sums)
        row = setup.method.global_row(state)
        if row is not None:
            _add_global(setup, row, sums[total:])
        summed = setup.collectives.allreduce(sums)
        answers = summed.cpu().numpy()
    accuracy = _accuracies(answers[:total], setup.clients)
    # Without a global model its figures are 0 / NaN, which is NaN.
    samples = float(setup.global_test_size)
    if row is None:
        samples = float("nan")
    correct, loss = answers[total:]
    return Evaluation(
        accuracy=mean_accuracy(accuracy),
        client_accuracy=accuracy,
        global_accuracy=float(correct / samples),
        global_loss=float(loss / samples),
    )


def _add_personal(setup: Setup, state: Any, sums: Tensor) -> None:
    """Put the correct answers of this rank's clients at their ids."""
    fed = setup.federation
    # A method may build personal rows only to have them judged, so not all at once.
    # Stacked seeds do it at the same time.
    row_floats = fed.layout.num_columns * setup.stacked
    group = max(1, PERSONAL_FLOATS // row_floats)
    count = len(fed.clients)
    for start in range(0, count, group):
        members = np.arange(start, min(start + group, count))
        rows = setup.method.personal(fed, state, members)
        score = fed.evaluate(rows, members)
        ids = on_device(fed.clients[members], fed.device)
        sums[ids] = score.correct.double()


def _add_global(setup: Setup, row: Tensor, sums: Tensor) -> None:
    """Put the global model's correct answers and loss on this rank's share of the test
    set into the two sums.
    """
    # The engine knows clients alone: the test set is the data of one, client 0.
    client = np.zeros(1, np.int64)
    rows = row.unsqueeze(0)
    score = setup.engine.evaluate(rows, setup.global_test, client)
    sums[0] = score.correct.double().sum()
    sums[1] = score.loss.double().sum()


def evaluate_finals(setup: Setup, state: Any, results: ResultsWriter | None) -> None:
    """Evaluate what a method asks for at the end, beyond a round's evaluation."""
    fed = setup.federation
    everyone = np.arange(len(fed.clients))
    for name, rows in setup.method.finals(fed, state, everyone):
        accuracy = client_accuracy(setup, fed, rows, setup.clients)
        if results is not None:
            results.write_final(name, accuracy)


def client_accuracy(
    setup: Setup, fed: Federation, rows: Tensor, clients: Clients
) -> np.ndarray:
    """Return the accuracy of every client of a federation on its own test data; `rows`
    are those of this rank's clients.
    """
    with setup.timer.phase("evaluate"):
        total = len(clients.rank)
        sums = torch.zeros(total, dtype=torch.float64, device=fed.device)
        everyone = np.arange(len(fed.clients))
        score = fed.evaluate(rows, everyone)
        # Every rank fills in its own clients; the others' entries stay 0.
        ids = on_device(fed.clients, fed.device)
        sums[ids] = score.correct.double()
        summed = setup.collectives.allreduce(sums)
    return _accuracies(summed.cpu().numpy(), clients)


def _accuracies(correct: np.ndarray, clients: Clients) -> np.ndarray:
    """Return correct answers by test samples; NaN for clients without test data."""
    samples = clients.test_samples
    share = correct / np.maximum(samples, 1)
    return np.where(samples > 0, share, np.nan)
