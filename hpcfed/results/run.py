"""A run's results in memory, and figures derived from them."""

from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.options.metrics import METRICS, SERIES, metric_of
from hpcfed.results.learnings import LearningRecord
from hpcfed.results.pace import WARMUP, counted, per_round
from hpcfed.results.stacks import first_alike
from hpcfed.results.target import Reached, first_round, judged_series, stays_from
from hpcfed.runtime.timer import PHASES

LAST_UPDATES = 10
"""Newcomers' last accuracy is a mean over this number of local updates or rounds."""


@dataclass(frozen=True)
class NewRounds:
    """Rounds among new clients, after the rounds of the known ones."""

    accuracy: np.ndarray
    """Accuracy of all clients that have joined, as they are: [rounds, new clients]. NaN
    before a client joins or if a round was not evaluated.
    """
    trained_accuracy: np.ndarray
    """Accuracy of a round's participants after their training; NaN for others."""
    bytes_up: np.ndarray
    """Sent by new clients in every round; NaN in future rounds."""
    bytes_down: np.ndarray

    def curve(self, name: str) -> np.ndarray:
        """Return the mean over clients after every round; NaN if not evaluated."""
        values: np.ndarray = getattr(self, name)
        return np.array([mean_accuracy(of_round) for of_round in values])

    @property
    def rounds_done(self) -> int:
        return int(np.isfinite(self.bytes_up).sum())

    def latest(self, name: str) -> np.ndarray:
        """Return the curve in the last ten rounds that are done, as far as evaluated."""
        values = self.curve(name)[: self.rounds_done][-LAST_UPDATES:]
        return values[~np.isnan(values)]

    def last(self, name: str) -> float:
        """Return the mean of the curve over the last ten rounds."""
        return mean_accuracy(self.latest(name))


@dataclass(frozen=True)
class DepthSweep:
    """What the server's last model generates from several depths of inversion."""

    depth: np.ndarray
    """Steps of diffusion, rising: [depths]."""
    signal: np.ndarray
    """How much of a latent is still there: [depths]."""
    accuracy: np.ndarray
    """Accuracy of every client: [depths, clients]."""
    own: np.ndarray
    """1 for updates that have their own client's direction, else 0; NaN for unknown
    clients. In older records 1 for those nearest to their own client's mean.
    """
    distance: np.ndarray
    """To the client's newest upload, relative to the length of its update."""

    def means(self) -> dict[str, list[float]]:
        """Return the means over clients by name, for each depth."""
        found = {}
        for name in ("accuracy", "own", "distance"):
            found[name] = [mean_accuracy(values) for values in getattr(self, name)]
        return found


@dataclass(frozen=True)
class RunRecord:
    """A run's results, up to the last finished round."""

    folder: Path
    status: str
    error: str
    facts: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    rounds: dict[str, np.ndarray]
    """Each series of `ROUND_SERIES`: [rounds done]."""
    phases: np.ndarray
    """Seconds: [rounds done, ranks, phases]."""
    wall: np.ndarray
    """Seconds: [rounds done, ranks]."""
    stacks: np.ndarray
    """Runs that advanced together in each round, and share its times: [rounds done]."""
    peak_memory: np.ndarray
    """Bytes: [ranks]."""
    client_accuracy: np.ndarray
    """[rounds done, evaluated clients]."""
    train_samples: np.ndarray
    """Training samples of every client."""
    energy: float | None
    """Joules of all workers' GPUs; None while the run is active, NaN if not counted."""
    moves: tuple[int, ...]
    """Rounds, counted from 0, before which clients were relocated to other ranks."""
    finals: dict[str, np.ndarray]
    """What the method evaluated at the end: every client's accuracy, by name."""
    newcomers: dict[str, np.ndarray]
    """New clients' accuracy by their starting point: [local updates, new clients]."""
    learnings: tuple[LearningRecord, ...]
    """All trainings of the server's model."""
    evaluated: np.ndarray
    """Ids of the evaluated clients: all clients, or a sample."""
    client_metrics: dict[str, np.ndarray]
    """Further metrics by name: [rounds done, evaluated clients]."""
    class_accuracy: dict[str, np.ndarray]
    """Accuracy by class of clients' and global models, if any: [rounds, classes]."""
    figures: dict[str, np.ndarray] = field(default_factory=dict)
    """What the method measured at the end: a number for each client, by name."""
    depths: DepthSweep | None = None
    """What the server generates from several depths, with --depth-sweep."""
    newcomer_bytes: float = float("nan")
    """Bytes sent to a new client at its start; NaN without new clients."""
    new_rounds: NewRounds | None = None
    """Rounds of new clients, in runs that have them."""
    cpu_energy: float | None = None
    """Joules of the CPUs of workers' hosts and their memory; None and NaN as in `energy`."""
    starting: dict[str, np.ndarray] = field(default_factory=dict)
    """What each rank did to get started, by the names of `runtime.starting.FIGURES`:
    [ranks]; empty while the run is active, and in older records.
    """

    @property
    def rounds_done(self) -> int:
        return len(self.wall)

    @property
    def stacked_seeds(self) -> int:
        """Runs that began together, or were resumed together: seeds, or points."""
        all_rounds = self.facts.get("stacked_seeds", 1)
        return int([*self.stacks[self.first_alike :], all_rounds][0])

    @property
    def first_alike(self) -> int:
        """The first of the last rounds that the same runs began together."""
        return first_alike(self.stacks, self.facts.get("resumed", ()))

    @property
    def learns_seldom(self) -> bool:
        """Whether the server's model is trained only in some rounds."""
        return 0 < len(self.learnings) < self.rounds_done

    def last(self, name: str) -> float:
        """Return the latest value of a series that is not NaN; NaN if it has none."""
        known = self._evaluations(name)
        return float(known[-1]) if len(known) else float("nan")

    def mean(self, name: str) -> float:
        """Return the mean of a series over rounds; NaN if it has no value."""
        known = self._evaluations(name)
        return float(known.mean()) if len(known) else float("nan")

    def best(self, name: str) -> float:
        """Return the best value of a series, the smallest of a loss; NaN if none."""
        known = self._evaluations(name)
        if not len(known):
            return float("nan")
        metric = METRICS.get(metric_of(name))
        if metric is not None and metric.lower_is_better:
            return float(known.min())
        return float(known.max())

    def _evaluations(self, name: str) -> np.ndarray:
        """Return a series without NaN of unevaluated rounds; empty if unknown."""
        values = self.rounds.get(name, np.empty(0))
        return values[~np.isnan(values)]

    @property
    def task(self) -> str:
        """The task that clients learn."""
        return str(self.facts.get("task", "classification"))

    @property
    def metrics(self) -> list[str]:
        """Metrics besides accuracy that the run recorded in every round."""
        names = [metric.name for metric in SERIES if metric.name in self.rounds]
        return [name for name in names if name != "accuracy"]

    @property
    def last_client_accuracy(self) -> np.ndarray:
        """Every client's accuracy at the last evaluation. NaN for clients without test
        data or that are not evaluated; empty if there was no evaluation.
        """
        # A round that was not evaluated has NaN for every client.
        unknown = np.isnan(self.client_accuracy).all(1)
        evaluated = np.flatnonzero(~unknown)
        if not len(evaluated):
            return np.empty(0)
        everyones = np.full(self.config["clients"], np.nan)
        everyones[self.evaluated] = self.client_accuracy[evaluated[-1]]
        return everyones

    @property
    def target(self) -> float | None:
        """The target accuracy in per cent; None if the run has none."""
        target = self.config.get("target_accuracy")
        return None if target is None else float(target)

    @property
    def judged_series(self) -> str:
        """The accuracy that the target is for."""
        return judged_series(self.rounds["global_accuracy"])

    def judged(self) -> np.ndarray:
        """Return the accuracy that the target is for; NaN where not evaluated."""
        return self.rounds[self.judged_series]

    def reached(self) -> Reached | None:
        """Return the cost of first reaching the target; None if it never was."""
        if self.target is None:
            return None
        return self._spent_by(first_round(self.judged(), self.target))

    def stays(self) -> Reached | None:
        """Return the cost up to the round from which on the run is at its target; None
        if it does not end there, or if that is unknown (`ended_at_target`).
        """
        if self.target is None or self.ended_at_target:
            return None
        return self._spent_by(stays_from(self.judged(), self.target))

    @property
    def ended_at_target(self) -> bool:
        """Whether reaching the target ended the run, so that it is unknown whether it
        would have stayed there.
        """
        reached = self.reached() if self.config.get("stop_at_target") else None
        # One that was made longer goes on after its target.
        return reached is not None and reached.rounds == self.rounds_done

    def _spent_by(self, rounds: int | None) -> Reached | None:
        """Return what these first rounds have cost."""
        if rounds is None:
            return None
        seconds = float(self.rounds["seconds"][:rounds].sum())
        sent = float(self.sent[:rounds].sum())
        # The clock is cumulative: nothing to add up.
        virtual = float(self.rounds["virtual_seconds"][rounds - 1])
        return Reached(rounds, seconds, sent, virtual)

    @property
    def sent(self) -> np.ndarray:
        """Bytes sent by and to clients in every round."""
        return self.rounds["bytes_up"] + self.rounds["bytes_down"]

    @property
    def has_clock(self) -> bool:
        """Whether the run has recorded virtual time."""
        return not np.isnan(self.last("virtual_seconds"))

    def arrived_share(self) -> float:
        """Return the share of uploads that counted; NaN if no client could be late, and
        for methods without rounds, whose rounds are only what has arrived.
        """
        if not isnan(self.mean("staleness")):
            return float("nan")
        arrived, cohort = self.rounds["arrived"], self.rounds["cohort"]
        known = np.isfinite(arrived)
        invited = float(cohort[known].sum())
        return float(arrived[known].sum()) / invited if invited else float("nan")

    @property
    def untimed(self) -> int:
        """First rounds whose times do not count: on other ranks, or beside other runs."""
        unknown = np.isnan(self.phases).any((1, 2))
        # Rounds restored by a resumed run come first.
        return max(0 if unknown.all() else int(unknown.sum()), self.first_alike)

    def counted_seconds(self, warmup: int = WARMUP) -> np.ndarray:
        """Return the seconds of the counted rounds, each on its slowest rank."""
        # Times of the rounds before do not compare with these.
        return counted(self.rounds["seconds"][self.untimed :], warmup)

    def timed_seconds(self) -> float:
        """Return the seconds of all rounds whose times count, on their slowest ranks."""
        return float(np.nansum(self.rounds["seconds"][self.untimed :]))

    def counted_phases(self, warmup: int = WARMUP) -> np.ndarray:
        """Return the phases of the counted rounds: [rounds, ranks, phases]."""
        return counted(self.phases[self.untimed :], warmup)

    def phase_seconds(self, warmup: int = WARMUP) -> dict[str, float]:
        """Return the seconds per round of each phase; NaN if no round is done."""
        of_rounds = per_round(self.counted_phases(warmup).mean(1))
        return dict(zip(PHASES, of_rounds.tolist(), strict=True))

    def phase_totals(self) -> dict[str, float]:
        """Return the seconds of each phase in all timed rounds: means over ranks."""
        totals = self.phases[self.untimed :].mean(1).sum(0)
        return dict(zip(PHASES, totals.tolist(), strict=True))

    def rounds_to(self, share: float) -> int | None:
        """Return the rounds up to this share of the clients' peak; None if unknown."""
        goal = share * self.best("accuracy")
        # NaN, as of rounds that were not evaluated, is not above anything.
        there = np.flatnonzero(self.rounds["accuracy"] >= goal)
        return int(there[0]) + 1 if len(there) else None

    def newcomers_first(self, start: str) -> float:
        """Return new clients' mean accuracy, each at the time of joining."""
        accuracy = self.newcomers[start]
        # NaN before a client joins: argmin finds its first update that is not NaN.
        joined = np.argmin(np.isnan(accuracy), axis=0)
        clients = np.arange(accuracy.shape[1])
        return mean_accuracy(accuracy[joined, clients])

    def newcomers_last(self, start: str) -> float:
        """Return new clients' mean accuracy over their last ten local updates."""
        # Entry 0 is the start, before any update.
        updates = self.newcomers[start][1:]
        return mean_accuracy(updates[-LAST_UPDATES:])

    def printed_comm(self) -> float:
        """Return bytes by the formula printed in GENE-FL's paper: twice a mean upload
        for every round.

        The paper's tables hold what all clients have sent, `bytes_up`.
        """
        # A round whose clients have no data sends nothing.
        senders = np.maximum(self.rounds["cohort"], 1)
        mean_upload = self.rounds["bytes_up"] / senders
        return float(2 * mean_upload.sum())

    def imbalance(self) -> float:
        """Return the slowest rank's train seconds by the mean: median over the rounds on
        these ranks.
        """
        # The median, because the first round warms up and others may be disturbed.
        values = self.rounds["imbalance"][self.untimed :]
        known = values[~np.isnan(values)]
        return float(np.median(known)) if len(known) else float("nan")

    def last_class_accuracy(self) -> dict[str, np.ndarray]:
        """Return the accuracy of each class at the last evaluation, by model."""
        last = {}
        for name, values in self.class_accuracy.items():
            evaluated = np.flatnonzero(~np.isnan(values).all(1))
            if len(evaluated):
                last[name] = values[evaluated[-1]]
        return last


def mean_accuracy(accuracy: np.ndarray) -> float:
    """Return the mean over the clients that have test data; NaN if none has."""
    unknown = np.isnan(accuracy)
    if unknown.all():
        return float("nan")
    # As nanmean computes it, in a fraction of its time.
    return float(np.where(unknown, 0, accuracy).sum() / (~unknown).sum())
