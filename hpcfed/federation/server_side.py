"""What the server does with uploads: means, selection, clusters, and its own model."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpcfed.data.shards import Shard
from hpcfed.errors import UserError
from hpcfed.federation.aggregation import (
    Aggregation,
    best_finite,
    cluster_means,
    right_answers_or_loss,
    scores_of,
    with_groups,
)
from hpcfed.federation.clustering import left_vectors
from hpcfed.federation.cohort import (
    Cohort,
    Sent,
    all_finite,
    count_excluded,
    finite_members,
    member_rows,
)
from hpcfed.federation.exchange import Exchange, refuse_if_private
from hpcfed.federation.participants import Participants
from hpcfed.federation.training import LocalTraining
from hpcfed.results.server import RowsUse
from hpcfed.runtime.device import on_device
from hpcfed.runtime.timer import Timer

if TYPE_CHECKING:  # most runs have no server's model, and do not load its code
    from hpcfed.federation.late_rows import Generation, LateRows
    from hpcfed.server.client import ServerClient


class ServerSide:
    """Computes the server's rows from what the exchange has delivered."""

    def __init__(
        self,
        members: Participants,
        training: LocalTraining,
        exchange: Exchange,
        *,
        model: "ServerClient | None" = None,
        validation: Shard | None = None,
    ) -> None:
        """`model` is the server's own, for methods that have one. `validation` is the
        server's own data, in full on every rank, stored as the data of one client.
        """
        self._model = model
        self.validation = validation
        self._config = members.config
        self._members = members
        self._training = training
        self._exchange = exchange
        self._aggregation = Aggregation(members.config, members.collectives)
        self._collectives = members.collectives
        self._timer = members.timer
        self.late = None if model is None else _late_rows(model, exchange, self._timer)
        """Rows that the server generates while clients go on; None without a model."""
        self.means = 0
        """Means that the method has taken so far, by whatever rule."""

    def select(
        self, rows: Tensor, cohort: Cohort, count: int, *, ties_by_loss: bool = False
    ) -> tuple[Tensor, Cohort]:
        """Return the uploads that do best on the server's validation set, and the
        cohort of their clients; fewer than `count` if fewer are finite. The lowest id
        wins ties, or the smallest loss.
        """
        refuse_if_private(self._config, "selects uploads")
        rows, cohort = self._exchange.arrived(rows, cohort)
        with self._timer.phase("server"):
            scores = self.validated(rows, cohort, ties_by_loss=ties_by_loss)
            selected = best_finite(scores, count)
            clients = cohort.clients[selected]
            cohort.log.selected = clients[self._members.sizes[clients] > 0]
        with self._timer.phase("aggregate"):
            return member_rows(rows, cohort, selected)

    def mean(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Return Σ weightᵢ rowᵢ, or what --aggregation makes of the rows."""
        # Compare identity: any other tensor was not clipped, or was changed since.
        if rows is not cohort.in_flight.received:
            refuse_if_private(
                self._config,
                "takes a second mean in a round, or one of other rows than it uploaded",
            )
        # Drop the reference: the rows may take half of the memory.
        cohort.in_flight.received = None
        self.means += 1
        with self._timer.phase("aggregate"):
            # A robust rule tolerates diverged rows, so they would go unreported.
            is_plain = self._config.aggregation == "mean"
            # A weight of 0 drops a late row without a copy, but 0 × NaN is NaN: a late
            # row that has diverged is caught below.
            if is_plain:
                row = self._aggregated(rows, self._exchange.late_at_zero(cohort))
            # Check the resulting row, which is the same on every rank: checking all
            # rows would cost a pass over them.
            if not is_plain or not all_finite(row):
                row, cohort = self._mean_of_finite(rows, cohort)
            if self._exchange.channel.after_mean is not None:
                row = self._exchange.channel.after_mean(
                    row, self._exchange.in_time(cohort)
                )
            return row

    def _mean_of_finite(self, rows: Tensor, cohort: Cohort) -> tuple[Tensor, Cohort]:
        """Return what --aggregation makes of the rows that have arrived and are finite,
        and the cohort of their clients.
        """
        rows, cohort = self._exchange.arrived(rows, cohort)
        rows, cohort = self._finite_only(rows, cohort)
        row = self._aggregated(rows, cohort)
        if not all_finite(row):
            raise ArithmeticError(
                f"all updates of round {cohort.round + 1} are finite, but their "
                "aggregate is not"
            )
        return row, cohort

    def cluster_means(
        self,
        rows: Tensor,
        cohort: Cohort,
        cluster: Tensor,
        previous: Tensor,
        sent: Sent | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean of every cluster's uploads, by the cohort's weights, on every
        rank; one collective for all clusters.

        `cluster` has the cluster of every client of the federation. A group of columns
        that no client has sent stays as in `previous`, [clusters, columns]. Also return
        [clusters, groups], the weight of the clients that sent each group; without
        `sent` there is one group.
        """
        refuse_if_private(self._config, "takes means of clusters")
        with self._timer.phase("aggregate"):
            if sent is None:
                groups = rows.new_ones(len(rows), 1, dtype=torch.bool)
                sent = Sent(groups, cluster.new_zeros(rows.shape[1]))
            # The groups become columns of their own, so that one all-reduce sums rows
            # and weights.
            rows = with_groups(rows, sent)
            in_time = self._exchange.late_at_zero(cohort)
            totals = self._cluster_sums(rows, in_time, cluster, len(previous))
            # As in `mean`: check the sums first, and all rows only if the sums are bad.
            if not bool(torch.isfinite(totals).all()):
                rows, cohort = self._exchange.arrived(rows, cohort)
                rows, cohort = self._finite_only(rows, cohort)
                totals = self._cluster_sums(rows, cohort, cluster, len(previous))
            return cluster_means(totals, previous, sent.group_of)

    def exclude(self, bad: set[int], cohort: Cohort, *, all_of_them: bool) -> None:
        """Count clients of this rank as excluded, if a method has found by itself that
        their updates are not finite. End the run if --on-bad-update says so, or if no
        update of the round is left. The same call on every rank.
        """
        stop = self._members.stops_at_divergence or all_of_them
        count_excluded(bad, cohort, self._collectives, stop=stop)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks, on every rank, of what each rank has summed
        over its own clients; may overwrite its argument.
        """
        refuse_if_private(self._config, "sums over clients")
        with self._timer.phase("aggregate"):
            return self._collectives.allreduce(tensor)

    def bases(self, vectors: int, *, by_class: bool = False) -> np.ndarray:
        """Return every client's left singular vectors, [clients, features, vectors]."""
        refuse_if_private(self._config, "looks at clients' data")
        if self._exchange.channel.spending is not None:
            raise UserError(
                f"--sample-noise would not hold: method {self._config.method} looks "
                "at clients' data, and no noise is added to it"
            )
        data = self._config.data()
        # If samples have no classes, treat all of them as one class.
        by_class = by_class and data.task == "classification"
        classes = data.classes if by_class else None
        here = left_vectors(self._training.train_data, vectors, classes=classes)
        # Every rank fills in its own clients; the sum over ranks has all of them.
        everyones = here.new_zeros(len(self._members.sizes), *here.shape[1:])
        everyones[on_device(self._members.clients, here.device)] = here
        return self._collectives.allreduce(everyones).cpu().numpy()

    def bank(
        self, columns: Tensor, cohort: Cohort, starts: Tensor | None = None
    ) -> None:
        """Hand generated columns to the server, which keeps them to learn from: the
        cohort's updates, or its uploads and the rows that they started from.
        """
        refuse_if_private(self._config, "lets a server learn from uploads")
        # First, because `cohort` is replaced by that of the arrived members below.
        if starts is not None:
            starts, _ = self._exchange.arrived(starts, cohort)
        columns, cohort = self._exchange.arrived(columns, cohort)
        with self._timer.phase("server"):
            here = self._members.clients[cohort.here]
            self.server.bank(cohort.round, here, columns, starts)

    def learn(self, cohort: Cohort) -> None:
        """Let the server's model learn from what was banked; all workers wait."""
        with self._timer.phase("server"):
            cohort.log.server_report = self.server.learn()

    def invert(self, cohort: Cohort, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return columns that the server generates from the clients' newest uploads,
        and which of the clients it knows. Its measurements go to the round's report.
        """
        with self._timer.phase("server"):
            inversion = self.server.invert(clients)
        report = cohort.log.server_report
        if report is not None:
            cohort.log.server_report = report.with_inversion(inversion)
        return inversion.rows, inversion.known

    def begin_learning(self, cohort: Cohort, *, starts: Tensor, row: Tensor) -> None:
        """Let the server's model learn from what was banked, and generate columns for
        this rank's clients; workers go on. What it generates is added to `starts`;
        `row` has the generated columns of the server's row, for comparison later.
        """
        assert self.late is not None, "the method has no model on the server"
        with self._timer.phase("server"):
            clients = self._members.clients
            self.late.begin(clients, after=cohort.round, starts=starts, row=row)

    def finish_learning(self, cohort: Cohort) -> "Generation":
        """Return what the learning has generated that began some rounds ago; all
        workers wait for it. Its measurements go to the round's log.
        """
        assert self.late is not None, "the method has no model on the server"
        with self._timer.phase("server"):
            made = self.late.take(self._training.device)
        report, waited = self.late.recordable()
        cohort.log.server_report = report
        cohort.log.rows_use = RowsUse(waited, first=cohort.round + 1)
        return made

    @property
    def server(self) -> "ServerClient":
        """The server's model."""
        assert self._model is not None, "the method has no model on the server"
        return self._model

    def _aggregated(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Combine the cohort's rows into one; an empty cohort keeps its row."""
        sent_row = cohort.in_flight.sent_row
        if not len(cohort.clients) and sent_row is not None:
            return sent_row
        return self._aggregation(rows, cohort)

    def _finite_only(self, rows: Tensor, cohort: Cohort) -> tuple[Tensor, Cohort]:
        """Return the finite rows and their cohort; the others count as excluded."""
        stop = self._members.stops_at_divergence
        members = finite_members(rows, cohort, self._collectives, stop=stop)
        return member_rows(rows, cohort, members)

    def _cluster_sums(
        self, rows: Tensor, cohort: Cohort, cluster: Tensor, count: int
    ) -> Tensor:
        members = cluster[on_device(cohort.clients, self._training.device)]
        return self._aggregation.cluster_sums(rows, cohort, members, count)

    def validated(
        self, rows: Tensor, cohort: Cohort, *, ties_by_loss: bool = False
    ) -> np.ndarray:
        """Return the scores of all uploads on the server's data: their correct answers,
        or also their losses, which then tell equal ones apart.
        """
        assert self.validation is not None
        stop = self._members.stops_at_divergence
        finite = finite_members(rows, cohort, self._collectives, stop=stop)
        # The engine treats the validation set as the data of client 0, and judges every
        # row on it: rows stay on their ranks, and only counts travel.
        one_client = np.zeros(len(rows), np.int64)
        score = self._training.engine.evaluate(rows, self.validation, one_client)
        judged = right_answers_or_loss(score, ties_by_loss=ties_by_loss)
        return scores_of(judged, finite, cohort, self._collectives)


def _late_rows(model: "ServerClient", exchange: Exchange, timer: Timer) -> "LateRows":
    from hpcfed.federation.late_rows import LateRows

    return LateRows(model, exchange.channel.memory, timer)
