"""What travels between clients and server: downloads, uploads, and who is on time."""

from dataclasses import replace

import numpy as np
from torch import Tensor

from hpcfed.errors import UserError
from hpcfed.federation.channel.channel import Channel, Download, Upload
from hpcfed.federation.cohort import Cohort, Sent, member_rows, shares, update_norms
from hpcfed.federation.log import Downloaded, RoundInFlight
from hpcfed.federation.participants import Participants
from hpcfed.options import RunConfig


class Exchange:
    """Carries rows through the channel, and counts their bytes and time."""

    def __init__(self, members: Participants, channel: Channel) -> None:
        self.channel = channel
        self._members = members
        self._collectives = members.collectives
        self._timer = members.timer

    def download(
        self,
        row: Tensor,
        cohort: Cohort,
        *,
        everyone: bool = False,
        beside: str = "",
        columns: np.ndarray | None = None,
    ) -> Tensor:
        """Return the row, or some columns of it, for every member of the cohort on this
        rank; `row` may hold a row for each of them.

        With `everyone`, clients that are not sampled get it, too. `beside` names what
        is sent in addition to the model, such as control variates. `upload` looks it up
        by this name. If members are sent different parts of the row, `columns` counts
        those of every member on any rank, and the method ignores the others.
        """
        with self._timer.phase("download"):
            log, in_flight = cohort.log, cohort.in_flight
            dense = row.shape[-1] * row.element_size()
            size, sizes = self._receivers(cohort, everyone) * dense, None
            if columns is not None:
                assert not everyone, "only members have a part of their own"
                has_data = self._members.sizes[cohort.clients] > 0
                sizes = np.where(has_data, columns * row.element_size(), 0)
                size = int(sizes.sum())
            download = Download(row, cohort, everyone, in_flight.downloads, size, sizes)
            if self.channel.packing is not None:
                download = self.channel.packing(download)
            in_flight.downloads += 1
            self.channel.downloads += 1
            if not beside:
                # Of the model only: votes and central noise are relative to this row.
                in_flight.sent_row = row if row.dim() == 1 else None
            log.bytes_down += download.size
            if in_flight.clock is not None:
                each = dense if download.sizes is None else download.sizes
                unpacked = dense if sizes is None else sizes
                in_flight.clock.download(cohort.clients, each, unpacked)
            # A view: the server's row is in memory once.
            rows = download.rows.expand(len(cohort.here), -1)
            # Without packing clients have exactly the server's row, so nothing is to be
            # put back.
            servers = None if self.channel.packing is None else row
            in_flight.downloaded[beside] = Downloaded(rows, servers)
            return rows

    def _receivers(self, cohort: Cohort, everyone: bool) -> int:
        """Return how many clients with training data are sent a row."""
        if everyone:
            return self._members.num_holders
        return self._members.num_holders_in(cohort)

    def upload(
        self,
        rows: Tensor,
        cohort: Cohort,
        sent: Sent | None = None,
        *,
        columns: Tensor | slice | None = None,
        beside: str = "",
    ) -> Tensor:
        """Return what the server receives of the cohort's rows. Each member sends whole
        rows unless `sent` says otherwise.

        An update is a row minus what its member was sent: by the last download, or the
        last one with the name `beside`. If members send only some columns of what they
        were sent, `columns` says which. What has a name under which members were sent
        nothing is an update as a whole.
        """
        log, in_flight = cohort.log, cohort.in_flight
        config = self._members.config
        # Clipping only bounds whole rows relative to what was sent.
        if sent is not None or columns is not None:
            refuse_if_private(config, "sends some columns of a row")
        if beside:
            refuse_if_private(config, "uploads more than rows")
        size: Tensor | int | None = None
        # Before any stage: attacks, clipping and packing all act on the update, rows −
        # start.
        start = _start(rows, in_flight, columns, beside)
        if self.channel.stages:
            if start is None and not beside:
                raise UserError(
                    f"method {config.method} uploads rows in a round in which it has "
                    "downloaded none, and this run's channel acts on their difference; "
                    "call fed.download(row, cohort) first, or name what is not a model, "
                    'as in fed.upload(updates, cohort, beside="updates")'
                )
            received = self._pass_stages(rows, cohort, sent, start)
            rows, size = received.rows, received.size
        in_flight.uploads += 1
        self.channel.uploads += 1
        with self._timer.phase("upload"):
            self._count_bytes(cohort, _member_bytes(rows, sent, size))
            if start is not None:
                if not beside:
                    log.update_norms = update_norms(start.received, rows, sent)
                rows = _from_servers(rows, start)
            if not self.channel.stages:
                # It may be a row for each member; only stages need it again.
                in_flight.downloaded.pop(beside, None)
        if config.privacy != "none":
            # `ServerSide.mean` accepts this very tensor and no other, so it must not be
            # copied.
            in_flight.received = rows
        return rows

    def _pass_stages(
        self, rows: Tensor, cohort: Cohort, sent: Sent | None, start: Downloaded | None
    ) -> Upload:
        """Return what the server receives of an upload."""
        begun = rows.new_zeros(rows.shape[1]) if start is None else start.received
        begun = begun.expand(len(rows), -1)
        upload = Upload(rows, begun, cohort, sent, cohort.in_flight.uploads)
        for stage in self.channel.stages:
            with self._timer.phase(stage.phase):
                upload = stage(upload)
        return upload

    def _count_bytes(self, cohort: Cohort, size: Tensor | int) -> None:
        """Count what members send; `size` is the bytes of each."""
        log, clock = cohort.log, cohort.in_flight.clock
        senders = self._members.num_holders_in(cohort)
        # One size for all clients: every rank knows the total. If each client chooses
        # what it sends, only its rank's device knows the size, and reading it would
        # wait.
        if isinstance(size, int):
            log.bytes_up += senders * size
        elif senders:
            log.bytes_up_here = log.bytes_up_here + size.sum()
        if clock is not None:
            clock.upload(cohort.clients, self._everyones(size, cohort))

    def _everyones(self, size: Tensor | int, cohort: Cohort) -> np.ndarray | int:
        """Return how much each member on any rank sends."""
        if isinstance(size, int):
            return size
        found = np.empty(len(cohort.clients))
        of_ranks = self._collectives.allgather(size.cpu().numpy())
        for members, sizes in zip(cohort.per_rank, of_ranks, strict=True):
            found[members] = sizes
        return found

    def arrived(self, rows: Tensor, cohort: Cohort) -> tuple[Tensor, Cohort]:
        """Return the rows of the members whose uploads arrived in time, and the cohort
        of these members; all of them without a virtual clock.

        `mean`, `select`, `cluster_means` and `bank` call it. A method that computes
        with uploads itself calls it after its last upload, for everything that has a
        row per member. The first call closes the round: what members do later takes no
        time.
        """
        came = self._came(cohort)
        if came is None:
            return rows, cohort
        return member_rows(rows, cohort, np.flatnonzero(came))

    def _came(self, cohort: Cohort) -> np.ndarray | None:
        """Return which members' uploads arrived in time; None: all."""
        log, clock = cohort.log, cohort.in_flight.clock
        if clock is None:
            return None
        self.close_round(cohort)
        assert log.arrived is not None
        # The usual case: all came, and nothing has to be looked up.
        if len(log.arrived) == log.cohort_size:
            return None
        came = clock.came(cohort.clients)
        return None if came.all() else came

    def in_time(self, cohort: Cohort) -> Cohort:
        """Return the cohort of the members whose uploads arrived in time."""
        came = self._came(cohort)
        if came is None:
            return cohort
        _, fewer = cohort.only(np.flatnonzero(came))
        return fewer

    def late_at_zero(self, cohort: Cohort) -> Cohort:
        """Return the cohort with weight 0 for late members: no row is copied."""
        came = self._came(cohort)
        if came is None:
            return cohort
        return replace(cohort, weights=shares(cohort.weights * came))

    def close_round(self, cohort: Cohort) -> None:
        """Let the clock decide whose uploads count and when the round ends, once."""
        clock, log = self.channel.clock, cohort.log
        # A collective: every rank closes every round, also without a clock.
        if self.channel.spending is not None:
            log.epsilon = self.channel.spending.epsilon()
        if clock is None or log.arrived is not None:
            return
        log.arrived = np.empty(0, np.int64)
        members = cohort.in_flight.clock
        if members is None:
            clock.skip()
        else:
            log.arrived = clock.end(members)
            log.times = members.table()
        log.virtual_seconds = clock.now

    @property
    def is_deserted(self) -> bool:
        """Whether no client will ever be available again, by the virtual clock."""
        clock = self.channel.clock
        return clock is not None and clock.is_over

    def greet(self, rows: Tensor, cohort: Cohort, columns: int | None = None) -> Tensor:
        """Count the rows that joining clients start with, or the number of `columns`
        that all of them get together, and return the rows.

        Clients without training data are not counted, as in a round.
        """
        if columns is None:
            columns = rows.shape[-1] * self._members.num_holders
        cohort.log.bytes_down += columns * rows.element_size()
        return rows

    def hears(self, cohort: Cohort) -> bool:
        """Return whether the server gets anything to step by in this round: updates of
        clients with data, or the noise that hides whether there were any.
        """
        return cohort.log.cohort_size > 0 or self.channel.after_mean is not None


def refuse_if_private(config: RunConfig, deed: str) -> None:
    """Refuse an action that a method with PRIVATE_MEAN has promised to avoid."""
    if config.privacy != "none":
        raise UserError(
            f"--privacy {config.privacy} would not hold: method {config.method} "
            f"{deed}, although its file says PRIVATE_MEAN; the server may use uploads "
            "only by fed.mean(fed.upload(rows, cohort), cohort)"
        )


def _member_bytes(
    rows: Tensor, sent: Sent | None, size: Tensor | int | None
) -> Tensor | int:
    """Return the bytes that each member sends; `size` if rows are packed."""
    if size is not None:
        return size
    if sent is None:
        return rows.shape[1] * rows.element_size()
    return sent.columns().sum(1) * rows.element_size()


def _start(
    rows: Tensor, in_flight: RoundInFlight, columns: Tensor | slice | None, beside: str
) -> Downloaded | None:
    """Return what members were sent of these columns; None if nothing was."""
    start = in_flight.downloaded.get(beside)
    if start is None:
        return None
    start = start.only(columns)
    if start.received.shape != rows.shape:
        # Going on would treat the rows as updates from zero, which clipping, packing
        # and attacks act on.
        raise ValueError(
            f"the upload is {len(rows)} clients × {rows.shape[1]} columns, but the "
            f"download was {len(start.received)} × {start.received.shape[1]}: say "
            "which columns are sent, fed.upload(rows, cohort, columns=…), or, if "
            "they were not part of the download, name them: beside=NAME"
        )
    return start


def _from_servers(rows: Tensor, start: Downloaded) -> Tensor:
    """Return uploads as if members had started from the server's row instead of a lossy
    packed download. So the server adds their updates to its own row, which keeps what
    it could not send yet.
    """
    if start.servers is None:
        return rows
    # The update first: if it is 0, the server's number stays exact to the last bit, and
    # rounding cannot influence votes.
    return (rows - start.received).add_(start.servers)
