"""How good the clients' rows and the global model are, on all ranks together."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.objective import (
    CLASSES,
    OBJECTIVES,
    Sums,
    Wanted,
    class_accuracy,
    metric,
    wanted_sums,
)
from hpcfed.experiment.assemble import Setup
from hpcfed.federation.cohort import lost_clients, lost_model
from hpcfed.federation.federation import Federation
from hpcfed.options import RunConfig
from hpcfed.options.metrics import METRICS, PER_CLASS, global_name, of_clients
from hpcfed.results.results import ResultsWriter
from hpcfed.results.run import mean_accuracy
from hpcfed.results.target import at_target
from hpcfed.runtime.device import on_device

PERSONAL_FLOATS = 2**28
"""Rows are evaluated in groups of clients with at most this many floats."""


@dataclass(frozen=True)
class Evaluation:
    """What all ranks know after evaluating a state."""

    accuracy: float
    """The mean over clients with test data; NaN if answers are not right or wrong."""
    client_accuracy: np.ndarray
    """The accuracy of every evaluated client."""
    global_accuracy: float
    """NaN for a method without a global model; so is its loss."""
    global_loss: float
    trained_accuracy: float = float("nan")
    """The mean over the round's participants, as their local training left them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further series of the round, by name."""
    client_metrics: dict[str, np.ndarray] = field(default_factory=dict)
    """Further metrics of every evaluated client."""
    class_accuracy: dict[str, np.ndarray] = field(default_factory=dict)
    """Accuracy of each class, if asked for: of the clients' rows on their own data,
    pooled, and of the global model.
    """
    lost: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Ids of evaluated clients whose rows have a loss that is not finite."""
    lost_global: bool = False
    """Whether there is a global model whose loss is not finite."""

    def reaches(self, target: float | None) -> bool:
        """Tell whether the accuracy reaches `target` per cent, alike on all ranks."""
        if target is None:
            return False
        return bool(at_target(self.accuracy, self.global_accuracy, target))

    def check_finite(self, round: int) -> None:
        """Raise an error if a loss is not finite. In earlier rounds the next local
        training detects that, but nothing follows the last one. All ranks raise, or
        none.
        """
        if self.lost_global:
            raise lost_model(round)
        if len(self.lost):
            raise lost_clients(self.lost, round)


class AfterTraining:
    """Judges the participants of a round on their own test data, after their local
    training: the round's log passes their rows in.

    If a client's row is passed several times, the last one counts. If a method never
    passes one, the client is not judged.
    """

    def __init__(self, setup: Setup, fed: Federation) -> None:
        """`fed` is the federation of the round: the run's, or that of new clients."""
        self._setup = setup
        self._fed = fed
        # What this rank knows: ids of clients, and the accuracy of each.
        self._ids = np.empty(0, np.int64)
        self._accuracy = torch.empty(0, dtype=torch.float64, device=fed.device)

    def __call__(self, here: np.ndarray, rows: Tensor) -> None:
        """Judge these clients' rows now: the method may change them afterwards."""
        if "accuracy" not in self._setup.metrics:
            return
        fed = self._fed
        with self._setup.timer.phase("evaluate"):
            score = fed.evaluate(rows, here)
            ids = fed.clients[here]
            accuracy = metric("accuracy", score.sums)
            has_data = fed.sizes[ids] > 0
            # A cohort without any data stays as drawn, but has not trained.
            if not has_data.all():
                accuracy = accuracy.where(on_device(has_data, fed.device), torch.nan)
            # A method may finish a client's training in several calls: the last one
            # counts.
            if len(self._ids):
                others = np.flatnonzero(~np.isin(self._ids, ids))
                earlier = self._accuracy[on_device(others, fed.device)]
                ids = np.concatenate([self._ids[others], ids])
                accuracy = torch.cat([earlier, accuracy])
            self._ids, self._accuracy = ids, accuracy

    def totals(self) -> Tensor:
        """Return the sum of the accuracies of this rank's participants with test data,
        and their number, as a pair on the device.
        """
        known = ~self._accuracy.isnan()
        return torch.stack([self._accuracy.nansum(), known.sum().double()])

    def accuracy(self) -> np.ndarray:
        """Return the accuracy of every client of the federation; NaN for clients that
        did not take part or have no test data. All ranks call it together.
        """
        total = len(self._fed.sizes)
        ones = torch.ones_like(self._accuracy)
        return _by_client(self._setup, total, [(self._ids, self._accuracy, ones)])


def is_due(round: int, config: RunConfig) -> bool:
    """Tell whether a round ends with an evaluation; the last one always does."""
    done = round + 1
    is_last = done == config.rounds
    return is_last or done % config.evaluate_every == 0


def evaluate(
    setup: Setup, state: Any, trained: AfterTraining | None = None
) -> Evaluation:
    """Evaluate the clients' personal rows on their own test data, and the global model
    on all test data; `trained` has already judged the round's participants.
    """
    wanted = wanted_sums(setup.metrics, setup.num_outputs)
    names = of_clients(setup.metrics)
    device = setup.federation.device
    with setup.timer.phase("evaluate"):
        # One small allreduce for everything: metrics of each client, answers by class,
        # then the sums of the global model and of the participants. Every rank fills in
        # what it knows.
        by_client = torch.zeros(
            len(names), len(setup.evaluated), dtype=torch.float64, device=device
        )
        by_class = torch.zeros(
            1, *wanted.get(CLASSES, (0,)), dtype=torch.float64, device=device
        )
        lost = torch.zeros(len(setup.evaluated), dtype=torch.float64, device=device)
        _add_personal(setup, state, wanted, by_client, by_class, lost)
        row = setup.method.global_row(state)
        of_global = _global_sums(setup, row, wanted)
        parts = [by_client, by_class, lost, *of_global.values()]
        if trained is not None:
            parts.append(trained.totals())
        summed = setup.collectives.allreduce(torch.cat([p.flatten() for p in parts]))
        # One copy to the host for all figures: each makes the host wait.
        found = _split(summed.cpu(), parts)
    participants = float("nan")
    if trained is not None:
        total, count = found.pop()
        participants = float(total / count)
    by_client, by_class, lost, *sums = found
    of_global = dict(zip(of_global, sums, strict=True))
    if "count" not in of_global:
        # In samples, which every rank already knows.
        of_global["count"] = torch.tensor([setup.global_test_size])
    # Zeros were summed in its place; NaN says that there is no global model.
    if row is None:
        of_global = {name: torch.nan * values for name, values in of_global.items()}
    evaluation = _evaluation(setup, names, by_client, {CLASSES: by_class}, of_global)
    has_global = row is not None and bool(of_global["count"] > 0)
    return replace(
        evaluation,
        trained_accuracy=participants,
        lost=setup.evaluated[lost.numpy() > 0],
        lost_global=has_global and not isfinite(evaluation.global_loss),
    )


def _split(vector: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Split a vector into pieces with the shapes of these tensors."""
    pieces = vector.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _add_personal(
    setup: Setup,
    state: Any,
    wanted: Wanted,
    by_client: Tensor,
    by_class: Tensor,
    lost: Tensor,
) -> None:
    """Fill in the metrics of this rank's clients, mark with 1 the clients whose loss is
    not finite, and add up their answers by class.
    """
    fed = setup.federation
    here = _evaluated_here(setup, fed)
    names = of_clients(setup.metrics)
    for members in in_groups(setup, here):
        rows = setup.method.personal(fed, state, members)
        score = fed.evaluate(rows, members, wanted)
        # From this rank's positions to columns of the record, whose ids ascend.
        places = np.searchsorted(setup.evaluated, fed.clients[members])
        at = _in_place(places, fed.device)
        for values, name in zip(by_client, names, strict=True):
            values[at] = metric(name, score.sums)
        # NaN is not below anything.
        lost[at] = (~(score.loss.abs() < inf)).double()
        if CLASSES in wanted:
            by_class += score.sums[CLASSES].sum(0)


def _in_place(places: np.ndarray, device: torch.device) -> Tensor | slice:
    """Return ascending places on the device, or a slice if none is left out between."""
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return slice(first, last + 1)
    return on_device(places, device)


def in_groups(setup: Setup, clients: np.ndarray) -> Iterator[np.ndarray]:
    """Split clients of this rank into groups whose rows fit into memory."""
    # A method may build personal rows just for the evaluation, so limit them. Stacked
    # seeds do this at the same time.
    row_floats = setup.federation.layout.num_columns * setup.stacked
    size = max(1, PERSONAL_FLOATS // row_floats)
    for start in range(0, len(clients), size):
        yield clients[start : start + size]


def _evaluated_here(setup: Setup, fed: Federation) -> np.ndarray:
    """Return the positions of this rank's evaluated clients."""
    is_evaluated = np.zeros(len(setup.clients.rank), bool)
    is_evaluated[setup.evaluated] = True
    return np.flatnonzero(is_evaluated[fed.clients])


def _global_sums(setup: Setup, row: Tensor | None, wanted: Wanted) -> Sums:
    """Return the global model's sums over this rank's test samples, float64, or 0."""
    objective = OBJECTIVES[setup.global_test.task]
    if row is None:
        like = setup.federation.initial_row()
        sums = objective.zeros(1, like, wanted)
    else:
        # Only their names and order count.
        sums = objective.zeros(0, row, wanted)
        # The engine only knows clients: the test set is the data of client 0.
        client = np.zeros(1, np.int64)
        rows = row.unsqueeze(0)
        score = setup.engine.evaluate(rows, setup.global_test, client, wanted)
        # In the same order on every rank.
        sums = {name: score.sums[name] for name in sums}
    return {name: values.double() for name, values in sums.items()}


def _evaluation(
    setup: Setup, names: list[str], by_client: Tensor, pooled: Sums, of_global: Sums
) -> Evaluation:
    """Return all metrics, computed from the sums of all ranks."""
    clients = dict(zip(names, by_client.numpy(), strict=True))
    series = {}
    for name in setup.metrics:
        if name == PER_CLASS:
            continue
        if METRICS[name].pooled:
            series[name] = float(metric(name, pooled))
        else:
            series[name] = mean_accuracy(clients[name])
        series[global_name(name)] = float(metric(name, of_global))
    by_class = {}
    if PER_CLASS in setup.metrics:
        by_class["accuracy"] = class_accuracy(pooled)[0].numpy()
        by_class["global_accuracy"] = class_accuracy(of_global)[0].numpy()
    # These three are in every record.
    unknown = np.full(len(setup.evaluated), np.nan)
    series.pop("global_loss", None)
    return Evaluation(
        accuracy=series.pop("accuracy", float("nan")),
        client_accuracy=clients.pop("accuracy", unknown),
        global_accuracy=series.pop("global_accuracy", float("nan")),
        global_loss=float(metric("loss", of_global)),
        metrics=series,
        client_metrics=clients,
        class_accuracy=by_class,
    )


def evaluate_finals(setup: Setup, state: Any, results: ResultsWriter | None) -> None:
    """Evaluate what a method wants at the end, beyond a round's evaluation."""
    fed = setup.federation
    here = _evaluated_here(setup, fed)
    total = len(setup.clients.rank)
    for name, rows in setup.method.finals(fed, state, here):
        accuracy = client_accuracy(setup, fed, rows, here, total)
        if results is not None:
            results.write_final(name, accuracy)
    for name, values in setup.method.figures(fed, state, here):
        everyones = _everyones(setup, values, here)
        if results is not None:
            results.write_figure(name, everyones)
    for number, found in enumerate(setup.method.depths(fed, state, here)):
        entry = {
            "depth": found.depth,
            "signal": found.signal,
            "accuracy": client_accuracy(setup, fed, found.rows, here, total),
            "own": _everyones(setup, found.recognised, here),
            "distance": _everyones(setup, found.distance, here),
        }
        if results is not None:
            results.write_depth(number, entry)


def _everyones(setup: Setup, values: Tensor, here: np.ndarray) -> np.ndarray:
    """Return a number for each client; `values` are those of these clients of this
    rank. NaN for clients that no rank knows.
    """
    known = setup.federation.clients[here], values, torch.ones_like(values)
    return _by_client(setup, len(setup.clients.rank), [known])


def _by_client(
    setup: Setup, total: int, known: Iterable[tuple[np.ndarray, Tensor, Tensor]]
) -> np.ndarray:
    """Return a quotient for each of `total` clients, from what every rank knows: ids of
    clients, dividends and divisors.
    """
    # Every rank fills in its own clients and leaves the others' entries 0. 0 / 0 is NaN
    # for clients that no rank knows.
    device = setup.federation.device
    sums = torch.zeros(2, total, dtype=torch.float64, device=device)
    for ids, dividends, divisors in known:
        at = on_device(ids, device)
        sums[0, at] = dividends.double()
        sums[1, at] = divisors.double()
    dividend, divisor = setup.collectives.allreduce(sums).cpu()
    quotient: np.ndarray = (dividend / divisor).numpy()
    return quotient


def client_accuracy(
    setup: Setup, fed: Federation, rows: Tensor, members: np.ndarray, total: int
) -> np.ndarray:
    """Return the accuracy of all `total` clients of a federation on their own test
    data; `rows` are those of this rank's members. NaN for clients without a row on any
    rank.
    """
    return _accuracy_of(setup, fed, [(members, rows)], total)


def standing_accuracy(
    setup: Setup, fed: Federation, state: Any, members: np.ndarray
) -> np.ndarray:
    """Return the accuracy of all clients of a federation with their rows in this state;
    NaN for clients that are not in `members` on any rank.
    """
    # Rows are built group by group: those of all members may not fit into memory.
    groups = (
        (group, setup.method.personal(fed, state, group))
        for group in in_groups(setup, members)
    )
    return _accuracy_of(setup, fed, groups, len(fed.sizes))


def _accuracy_of(
    setup: Setup,
    fed: Federation,
    groups: Iterable[tuple[np.ndarray, Tensor]],
    total: int,
) -> np.ndarray:
    """Return the accuracy of all clients, from groups of this rank's rows."""
    if "accuracy" not in setup.metrics:
        return np.full(total, np.nan)

    def scored() -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
        for members, rows in groups:
            score = fed.evaluate(rows, members)
            yield fed.clients[members], score.correct, score.count

    with setup.timer.phase("evaluate"):
        return _by_client(setup, total, scored())
