"""The federation as a method sees it: clients of this rank, rows, and a few verbs. No
MPI, no CUDA, no file.

`Participants` says who takes part in a round, `LocalTraining` what clients do, and
`Federation` what travels between them and the server, and what the server does.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.job import RowEngine
from hpcfed.clients.placement import Clients
from hpcfed.data.shards import Shard
from hpcfed.errors import UserError
from hpcfed.federation import exclusion
from hpcfed.federation.aggregation import Aggregation, cluster_means, with_groups
from hpcfed.federation.channel.channel import Channel, Download, Upload
from hpcfed.federation.clustering import left_vectors
from hpcfed.federation.cohort import Cohort, Sent, member_rows, shares, update_norms
from hpcfed.federation.log import Downloaded, RoundLog
from hpcfed.federation.participants import MethodOptions
from hpcfed.federation.selection import best_finite, scores_of
from hpcfed.federation.training import LocalTraining
from hpcfed.options import RunConfig
from hpcfed.runtime.collectives import Collectives
from hpcfed.runtime.device import on_device
from hpcfed.runtime.timer import Timer
from hpcfed.server.client import ServerClient

T = TypeVar("T")


class Federation(LocalTraining[MethodOptions]):
    """What one rank knows and can do."""

    def __init__(
        self,
        config: RunConfig,
        options: MethodOptions,
        *,
        clients: Clients,
        train_data: Shard,
        test_data: Shard,
        engine: RowEngine,
        first_row: Tensor,
        collectives: Collectives,
        timer: Timer,
        server: ServerClient | None = None,
        generated: Tensor | None = None,
        validation: Shard | None = None,
        channel: Channel | None = None,
    ) -> None:
        """`generated` are the positions of the columns that the server's model is
        about. `validation` is the server's own data, the whole of it on every rank, as
        the data of one client. `channel` is what lies between clients and the server.
        """
        self.channel = channel or Channel()
        super().__init__(
            config,
            options,
            clients=clients,
            collectives=collectives,
            timer=timer,
            clock=self.channel.clock,
            train_data=train_data,
            test_data=test_data,
            engine=engine,
            first_row=first_row,
        )
        self._server = server
        self._generated = generated
        self.validation = validation
        self._aggregation = Aggregation(config, collectives)

    @property
    def server(self) -> ServerClient:
        """The server's model, for methods that have one."""
        assert self._server is not None
        return self._server

    @property
    def generated(self) -> Tensor:
        """Positions of the columns that the server's model is about."""
        assert self._generated is not None
        return self._generated

    def download(
        self, row: Tensor, cohort: Cohort, *, everyone: bool = False, beside: str = ""
    ) -> Tensor:
        """Return the row, or some columns of it, for every member of the cohort on this
        rank; `row` may be a row for each of them.

        With `everyone` clients that are not sampled get it, too. `beside` names what is
        no model but goes beside it, as control variates do: `upload` finds it again by
        the name.
        """
        with self._timer.phase("download"):
            log = cohort.log
            receivers = self.num_holders if everyone else self._num_sending(cohort)
            size = receivers * row.shape[-1] * row.element_size()
            download = Download(row, cohort, everyone, log.downloads, size)
            if self.channel.packing is not None:
                download = self.channel.packing(download)
            log.downloads += 1
            if not beside:
                log.sent_row = row if row.dim() == 1 else None
            log.bytes_down += download.size
            if log.clock is not None:
                dense = row.shape[-1] * row.element_size()
                each = dense if download.sizes is None else download.sizes
                log.clock.download(cohort.clients, each, dense)
            # A view: the server's row is in memory once.
            rows = download.rows.expand(len(cohort.here), -1)
            servers = None if self.channel.packing is None else row
            log.downloaded[beside] = Downloaded(rows, servers)
            return rows

    def upload(
        self,
        rows: Tensor,
        cohort: Cohort,
        sent: Sent | None = None,
        *,
        columns: Tensor | slice | None = None,
        beside: str = "",
    ) -> Tensor:
        """Return what the server receives of the cohort's rows; each member sends all of
        them unless `sent` says otherwise.

        An update is a row less what its member was sent: by the last download, or the
        last one with this name `beside` models. Where members send only some columns of
        what they were sent, `columns` says which. What was never sent is an update as a
        whole.
        """
        log = cohort.log
        # Clipping bounds whole rows beside what was sent, and nothing else.
        if sent is not None or columns is not None:
            self._refuse_if_private("sends some columns of a row")
        if beside:
            self._refuse_if_private("uploads more than rows")
        size: Tensor | int | None = None
        start = _start(rows, log, columns, beside)
        if self.channel.stages:
            received = self._pass_stages(rows, cohort, sent, start)
            rows, size = received.rows, received.size
        log.uploads += 1
        with self._timer.phase("upload"):
            self._count_bytes(cohort, _member_bytes(rows, sent, size))
            if start is not None:
                if not beside:
                    log.update_norms = update_norms(start.received, rows, sent)
                rows = _from_servers(rows, start)
            if not self.channel.stages:
                # It may be a row for each member; only stages need it again.
                log.downloaded.pop(beside, None)
        if self._is_private:
            log.received = rows
        return rows

    @property
    def _is_private(self) -> bool:
        """Whether this run promises that noise hides each client's uploads."""
        return self.config.privacy != "none"

    def _refuse_if_private(self, deed: str) -> None:
        """Refuse what a method with `private_mean` has promised not to do."""
        if self._is_private:
            raise UserError(
                f"--privacy {self.config.privacy} would not hold: method "
                f"{self.config.method} {deed}, although its Options say private_mean; "
                "all that its server may learn of uploads is "
                "fed.mean(fed.upload(rows, cohort), cohort)"
            )

    def _pass_stages(
        self, rows: Tensor, cohort: Cohort, sent: Sent | None, start: Downloaded | None
    ) -> Upload:
        """Return what the server receives of an upload."""
        begun = rows.new_zeros(rows.shape[1]) if start is None else start.received
        begun = begun.expand(len(rows), -1)
        upload = Upload(rows, begun, cohort, sent, cohort.log.uploads)
        for stage in self.channel.stages:
            with self._timer.phase(stage.phase):
                upload = stage(upload)
        return upload

    def _count_bytes(self, cohort: Cohort, size: Tensor | int) -> None:
        """Count what members send: `size` is what each does."""
        log, senders = cohort.log, self._num_sending(cohort)
        # The same for all clients, so every rank knows it for all of them. What each
        # client chooses only its rank knows, and the device: reading it would wait.
        if isinstance(size, int):
            log.bytes_up += senders * size
        elif senders:
            log.bytes_up_here = log.bytes_up_here + size.sum()
        if log.clock is not None:
            log.clock.upload(cohort.clients, self._everyones(size, cohort))

    def _everyones(self, size: Tensor | int, cohort: Cohort) -> np.ndarray | int:
        """Return what each member of all ranks sends."""
        if isinstance(size, int):
            return size
        found = np.empty(len(cohort.clients))
        of_ranks = self._collectives.allgather(size.cpu().numpy())
        for members, sizes in zip(cohort.per_rank, of_ranks, strict=True):
            found[members] = sizes
        return found

    def arrived(self, rows: Tensor, cohort: Cohort) -> tuple[Tensor, Cohort]:
        """Return the rows of the members whose uploads the server has, and the cohort of
        them alone; all of them where no virtual clock runs.

        `mean`, `select`, `cluster_means` and `bank` call it. A method that computes with
        uploads by itself calls it after its last upload, for all that has a row per
        member. The first call closes the round: what members do later takes no time.
        """
        came = self._came(cohort)
        if came is None:
            return rows, cohort
        return member_rows(rows, cohort, np.flatnonzero(came))

    def _came(self, cohort: Cohort) -> np.ndarray | None:
        """Return which members' uploads the server has; None: those of all."""
        log = cohort.log
        if log.clock is None:
            return None
        self.close_round(cohort)
        assert log.arrived is not None
        if len(log.arrived) == log.cohort_size:
            return None
        came = log.clock.came(cohort.clients)
        return None if came.all() else came

    def _in_time(self, cohort: Cohort) -> Cohort:
        """Return the cohort of the members whose uploads the server has."""
        came = self._came(cohort)
        if came is None:
            return cohort
        _, fewer = cohort.only(np.flatnonzero(came))
        return fewer

    def _late_at_zero(self, cohort: Cohort) -> Cohort:
        """Return the cohort with a weight of 0 for members that come late: to leave out
        their rows would copy all others.
        """
        came = self._came(cohort)
        if came is None:
            return cohort
        return replace(cohort, weights=shares(cohort.weights * came))

    def close_round(self, cohort: Cohort) -> None:
        """Let the virtual clock decide whose uploads count and when the round ends, if
        it has not done so yet.
        """
        clock, log = self._clock, cohort.log
        if self.channel.spending is not None:
            log.epsilon = self.channel.spending.epsilon()
        if clock is None or log.arrived is not None:
            return
        log.arrived = np.empty(0, np.int64)
        if log.clock is None:
            clock.skip()
        else:
            log.arrived = clock.end(log.clock)
            log.times = log.clock.table()
        log.virtual_seconds = clock.now

    @property
    def is_deserted(self) -> bool:
        """Whether no client will be there any more, by the virtual clock."""
        return self._clock is not None and self._clock.is_over

    def greet(self, rows: Tensor, cohort: Cohort, columns: int | None = None) -> Tensor:
        """Count the rows that clients who join are given to begin with, or so many
        `columns` of all of them together, and return the rows.

        Clients without training data count for nothing, as in a round.
        """
        if columns is None:
            columns = rows.shape[-1] * self.num_holders
        cohort.log.bytes_down += columns * rows.element_size()
        return rows

    def hears(self, cohort: Cohort) -> bool:
        """Return whether the server gets anything to step by in this round: updates of
        clients with data, or the noise that hides whether there were any.
        """
        return cohort.log.cohort_size > 0 or self.channel.after_mean is not None

    def select(self, rows: Tensor, cohort: Cohort, count: int) -> tuple[Tensor, Cohort]:
        """Return the uploads that do best on the server's validation set, and the
        cohort of their clients; fewer than `count` where fewer are finite.
        """
        self._refuse_if_private("selects uploads")
        rows, cohort = self.arrived(rows, cohort)
        with self._timer.phase("server"):
            selected = best_finite(self._validated(rows, cohort), count)
            clients = cohort.clients[selected]
            cohort.log.selected = clients[self.sizes[clients] > 0]
        with self._timer.phase("aggregate"):
            return member_rows(rows, cohort, selected)

    def mean(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Return Σ weightᵢ rowᵢ over all members, or what --aggregation makes of their
        rows; the same on every rank.
        """
        # The very tensor: any other was not clipped, or was changed since.
        if rows is not cohort.log.received:
            self._refuse_if_private(
                "takes a second mean in a round, or one of other rows than it uploaded"
            )
        # No longer kept alive: it may be half of the memory.
        cohort.log.received = None
        with self._timer.phase("aggregate"):
            # A robust rule would bear diverged rows, and nobody would hear of them.
            is_plain = self.config.aggregation == "mean"
            if is_plain:
                row = self._aggregated(rows, self._late_at_zero(cohort))
            # Look at the row that was made, the same on every rank: looking at all rows
            # would cost a pass over them.
            if not is_plain or not bool(torch.isfinite(row).all()):
                row, cohort = self._mean_of_finite(rows, cohort)
            if self.channel.after_mean is not None:
                row = self.channel.after_mean(row, self._in_time(cohort))
            return row

    def _mean_of_finite(self, rows: Tensor, cohort: Cohort) -> tuple[Tensor, Cohort]:
        """Return what --aggregation makes of the rows that have arrived and are finite,
        and the cohort of their clients.
        """
        rows, cohort = self.arrived(rows, cohort)
        rows, cohort = self._finite_only(rows, cohort)
        row = self._aggregated(rows, cohort)
        if not bool(torch.isfinite(row).all()):
            raise ArithmeticError(
                f"all updates of round {cohort.round + 1} are finite, but not what is "
                "made of them"
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

        `cluster` is that of every client of the federation. A group of columns that
        nobody has sent stays as it was in `previous`, [clusters, columns]. Beside the
        means: [clusters, groups], the weight of those who sent a group; without `sent`
        there is one group.
        """
        self._refuse_if_private("takes means of clusters")
        with self._timer.phase("aggregate"):
            if sent is None:
                groups = rows.new_ones(len(rows), 1, dtype=torch.bool)
                sent = Sent(groups, cluster.new_zeros(rows.shape[1]))
            rows = with_groups(rows, sent)
            in_time = self._late_at_zero(cohort)
            totals = self._cluster_sums(rows, in_time, cluster, len(previous))
            # As in `mean`: look at the sums first, at all rows only if they tell.
            if not bool(torch.isfinite(totals).all()):
                rows, cohort = self.arrived(rows, cohort)
                rows, cohort = self._finite_only(rows, cohort)
                totals = self._cluster_sums(rows, cohort, cluster, len(previous))
            return cluster_means(totals, previous, sent.group_of)

    def exclude(self, bad: set[int], cohort: Cohort, *, all_of_them: bool) -> None:
        """Count clients of this rank whose updates are not finite as excluded, where a
        method has found that out by itself; ends the run where --on-bad-update says so,
        and where no update of the round is left. The same call on every rank.
        """
        stop = self._stops_at_divergence or all_of_them
        exclusion.exclude(bad, cohort, self._collectives, stop=stop)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return Σ over the ranks of what each has summed over its own clients, on every
        rank; may overwrite its argument.
        """
        self._refuse_if_private("sums over clients")
        with self._timer.phase("aggregate"):
            return self._collectives.allreduce(tensor)

    def bases(self, vectors: int, *, by_class: bool = False) -> np.ndarray:
        """Return left singular vectors of every client's training data, [clients,
        features, vectors], on every rank.
        """
        self._refuse_if_private("looks at clients' data")
        if self.channel.spending is not None:
            raise UserError(
                f"--sample-noise would not hold: method {self.config.method} looks at "
                "clients' data, to which nothing adds noise"
            )
        data = self.config.data()
        # Where samples have no classes, all of them are alike.
        by_class = by_class and data.task == "classification"
        classes = data.classes if by_class else None
        here = left_vectors(self.train_data, vectors, classes=classes)
        # Every rank fills in its own clients; the sum over ranks has all of them.
        everyones = here.new_zeros(len(self.sizes), *here.shape[1:])
        everyones[on_device(self.clients, here.device)] = here
        return self._collectives.allreduce(everyones).cpu().numpy()

    def agreed(self, value: T) -> T:
        """Return the first rank's value on every rank, so that no rounding can make
        ranks decide differently.
        """
        answer: T = self._collectives.bcast(value)
        return answer

    def bank(
        self, columns: Tensor, cohort: Cohort, starts: Tensor | None = None
    ) -> None:
        """Hand generated columns to the server, which keeps them for learning: the
        cohort's updates, or its uploads and what they started from.
        """
        self._refuse_if_private("lets a server learn from uploads")
        if starts is not None:
            starts, _ = self.arrived(starts, cohort)
        columns, cohort = self.arrived(columns, cohort)
        with self._timer.phase("server"):
            here = self.clients[cohort.here]
            self.server.bank(cohort.round, here, columns, starts)

    def learn(self, cohort: Cohort) -> None:
        """Let the server's model learn from what was banked; all workers wait."""
        with self._timer.phase("server"):
            cohort.log.server_report = self.server.learn()

    def invert(self, cohort: Cohort, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return columns that the server generates from the clients' newest uploads, and
        which of the clients it knows. What it measures goes to the round's report.
        """
        with self._timer.phase("server"):
            inversion = self.server.invert(clients)
        report = cohort.log.server_report
        if report is not None:
            cohort.log.server_report = report.with_inversion(inversion)
        return inversion.rows, inversion.known

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Count what a method computes by itself, such as a server's model, as time of
        this phase.
        """
        return self._timer.phase(phase)

    def _aggregated(self, rows: Tensor, cohort: Cohort) -> Tensor:
        """Make one row of the cohort's; of nobody's rows, the row that was sent."""
        sent_row = cohort.log.sent_row
        if not len(cohort.clients) and sent_row is not None:
            return sent_row
        return self._aggregation(rows, cohort)

    def _finite_only(self, rows: Tensor, cohort: Cohort) -> tuple[Tensor, Cohort]:
        """Return the rows that are finite, and the cohort of their clients; others count
        as excluded.
        """
        stop = self._stops_at_divergence
        members = exclusion.finite_members(rows, cohort, self._collectives, stop=stop)
        return member_rows(rows, cohort, members)

    def _cluster_sums(
        self, rows: Tensor, cohort: Cohort, cluster: Tensor, count: int
    ) -> Tensor:
        members = cluster[on_device(cohort.clients, self.device)]
        return self._aggregation.cluster_sums(rows, cohort, members, count)

    def _validated(self, rows: Tensor, cohort: Cohort) -> np.ndarray:
        """Return the right answers of all uploads on the server's data."""
        assert self.validation is not None
        stop = self._stops_at_divergence
        finite = exclusion.finite_members(rows, cohort, self._collectives, stop=stop)
        # To the engine the validation set is the data of client 0, and every row is
        # judged on it: rows stay on their ranks, and only counts travel.
        one_client = np.zeros(len(rows), np.int64)
        score = self._engine.evaluate(rows, self.validation, one_client)
        return scores_of(score, finite, cohort, self._collectives)


def _member_bytes(
    rows: Tensor, sent: Sent | None, size: Tensor | int | None
) -> Tensor | int:
    """Return the bytes that each member sends: `size` where rows are packed."""
    if size is not None:
        return size
    if sent is None:
        return rows.shape[1] * rows.element_size()
    return sent.columns().sum(1) * rows.element_size()


def _start(
    rows: Tensor, log: RoundLog, columns: Tensor | slice | None, beside: str
) -> Downloaded | None:
    """Return what members have been sent of the columns that they send; None where they
    send what they were never sent.
    """
    start = log.downloaded.get(beside)
    if start is None:
        return None
    start = start.only(columns)
    if start.received.shape != rows.shape:
        # To go on would take the rows for updates from zero, which clipping, packing
        # and attacks act on.
        raise ValueError(
            f"an upload of {rows.shape[1]} columns by {len(rows)} clients, who were sent "
            f"{start.received.shape[1]} columns, {len(start.received)} clients in all: "
            "say which columns are sent, fed.upload(rows, cohort, columns=…), or, where "
            "they are none of the download's, name them: beside=NAME"
        )
    return start


def _from_servers(rows: Tensor, start: Downloaded) -> Tensor:
    """Return uploads as if members had started from the server's row, not from what a
    packed download has left of it: so the server adds their updates to its own row, and
    what it could not send yet stays in it.
    """
    if start.servers is None:
        return rows
    # The update first: where there is none, the server's number stays to the last bit,
    # and no rounding has a say in votes.
    return (rows - start.received).add_(start.servers)
