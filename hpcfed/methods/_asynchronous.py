"""Shared by methods whose clients train at their own pace, in virtual time.

There are no rounds in which all wait for the slowest. At any time --concurrency clients
train. When an upload arrives, the server uses it and invites another client, which
starts from the current version of the server's row (`_timetable` has the rules). When
an upload arrives, its start may be some versions old: that is its staleness.

A round of the record has as many uploads as a cohort has clients, in the order of
arrival; a client may upload several times. Who starts when, and from which version,
does not depend on training. So uploads are computed in waves: the longest sequences of
arrivals whose starting rows exist train together, as rows of one call. The wave's
number in the round is the phase of their random numbers.

Lost clients (--dropout-rate) are sent a row but never train here. The server keeps only
the versions from which a client in training has started. The host does not wait for the
device before the end of a round; meanwhile it works out the next round.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from hpcfed import options
from hpcfed.clients.schedule import num_steps
from hpcfed.errors import UserError, count
from hpcfed.federation.log import RoundLog
from hpcfed.methods import _timetable, fedavg
from hpcfed.methods._interface import FIXED, VARIES, Cohort, Federation, Tensor
from hpcfed.methods._timetable import InTraining, Pace, Timetable
from hpcfed.options import Choice, Need, RunConfig, option

Versions = Mapping[int, Tensor]
"""Rows of the server by version number."""

STALENESS = Need(
    "--staleness polynomial or hinge", lambda run: run.staleness != "constant"
)
"""The need of options that shape the weight of stale uploads."""


class Options(options.Options):
    averages = False
    asynchronous = True

    concurrency: int | None = option(
        None,
        "clients that train at any time, as in 100 (default: as many as a round has "
        "uploads)",
        ge=0,
        counts="uploads",
    )
    staleness: Literal["constant", "hinge", "polynomial"] = option(
        "polynomial",
        "what an upload weighs that is d versions behind: constant: 1; hinge: 1 up to d "
        "= b, then 1 / (a (d − b) + 1); polynomial: (1 + d)^−a",
    )
    staleness_a: float = option(
        0.5,
        "a of --staleness: how fast the weight falls, as in 0.5",
        ge=0,
        needs=STALENESS,
    )
    staleness_b: int = option(
        4,
        "b of --staleness hinge: how far behind an upload counts in full",
        ge=0,
        needs=Need("--staleness hinge", lambda run: run.staleness == "hinge"),
    )

    def fit(self, config: RunConfig, ranks: int) -> Iterable[Choice]:
        yield Choice(
            "devices",
            "lognormal",
            f"clients of {config.method} train at their own pace; --devices takes others",
        )
        if self.staleness == "hinge":
            yield Choice(
                "staleness_a", 10.0, "the paper's for hinge; --staleness-a takes others"
            )

    def check(self, config: RunConfig) -> None:
        super().check(config)
        if config.devices == "none":
            raise UserError(
                f"--devices none, but clients of method {config.method} train at their "
                "own pace; use --devices lognormal"
            )
        ends_rounds = {
            "--deadline": config.deadline is not None,
            "--oversample": config.oversample > 1,
            "--partial": config.partial,
        }
        for flag, given in ends_rounds.items():
            if given:
                raise UserError(
                    f"{flag}: method {config.method} waits for no client, so there is no "
                    "round to end early"
                )
        if config.sampling != "fixed":
            raise UserError(
                f"--sampling {config.sampling}: method {config.method} invites clients "
                "one by one, as places become free"
            )
        if self.concurrency is not None and self.concurrency > config.clients:
            raise UserError(
                f"--concurrency {self.concurrency}, but there are "
                f"{count(config.clients, 'client')}"
            )

    def staleness_weights(self, staleness: np.ndarray) -> np.ndarray:
        """Return the weights s(d) of uploads of staleness d."""
        if self.staleness == "constant":
            return 1.0 + 0 * staleness
        if self.staleness == "polynomial":
            return (1.0 + staleness) ** -self.staleness_a
        too_far = (staleness - self.staleness_b).clip(min=0)
        return 1 / (self.staleness_a * too_far + 1)


@dataclass(frozen=True)
class State(fedavg.State):
    versions: Tensor = field(metadata=VARIES)
    """Older rows from which clients in training have started, oldest first."""
    due: Tensor = field(metadata=VARIES)
    """Uploads of the next round in the order of arrival, including lost ones: float64,
    with the fields of `InTraining` as columns.
    """
    training: Tensor = field(metadata=VARIES)
    """Clients that are still in training then, in the same format."""
    received: Tensor
    """Uploads so far."""
    seconds: Tensor = field(metadata=FIXED)
    """Virtual seconds of a client to download, train and upload: [3, clients]."""


@dataclass(frozen=True)
class Wave:
    """Consecutive uploads that are computed together."""

    number: int
    """Its number in the round."""
    cohort: Cohort
    """The clients, each once, in the order of ids."""
    versions: np.ndarray
    """The version from which each has started."""
    weights: np.ndarray
    """s(d) of each."""
    order: np.ndarray
    """Which of the clients arrives first, second and so on."""
    first: int
    """The number of uploads that the server had received before the wave."""
    needed: frozenset[int]
    """Versions from which a client starts that arrives later."""


# The timetable


def begin(fed: Federation[Options], *, buffer: int) -> State:
    """Return the first state; `buffer` uploads make a new version."""
    w = fed.initial_row()
    # On the host, like everything that decides who trains: no wait for the device.
    nobody = torch.empty(0, 4, dtype=torch.float64)
    state = State(
        w,
        versions=w.new_empty(0, len(w)),
        due=nobody,
        training=nobody,
        received=torch.tensor(0),
        seconds=torch.from_numpy(_seconds(fed, w)),
    )
    if not fed.num_holders:
        return state
    # Before the first round: its uploads are known as soon as clients are invited.
    due, training = following(fed, state, 0, buffer=buffer)
    return State(w, state.versions, due, training, state.received, state.seconds)


def following(
    fed: Federation[Options], state: State, round: int, *, buffer: int
) -> tuple[Tensor, Tensor]:
    """Return `due` and `training` of this round, which follows the state's `due`."""
    with fed.timed("sample"):
        # The round before ended with its last arrival.
        now = float(state.due[-1, 0]) if len(state.due) else 0.0
        received = int(state.received) + _num_uploads(state)
        pace, training = _pace(fed, state, buffer), _read(state.training)
        table = Timetable(pace, training, now=now, received=received)
        # Keyed by round, so that a resumed run invites the same clients.
        draw = _numbers(fed.generator("invitations", round)).__next__
        due = table.receive(fed.config.cohort_among(len(fed.sizes)), draw)
        return _table(due), _table(table.training)


def waves(
    fed: Federation[Options], state: State, cohort: Cohort, *, buffer: int
) -> list[Wave]:
    """Return the waves of a round, and record in its log who arrives when."""
    with fed.timed("sample"):
        check_timetable(fed, state, buffer=buffer)
        received = int(state.received)
        due = state.due.numpy()
        coming = due[due[:, 3] == 0]
        positions, versions = coming[:, 1:3].astype(np.int64).T
        # The timetable numbers only clients with data.
        clients = np.flatnonzero(fed.sizes)[positions]
        # The version that each upload finds when it arrives.
        made = (received + np.arange(len(coming))) // buffer
        staleness = made - versions
        _note(cohort.log, state, clients, staleness)
        cohort.log.times = _times(fed, state, clients, coming)
        runs = _timetable.waves(
            positions.tolist(), versions.tolist(), received=received, buffer=buffer
        )
        weights = fed.options.staleness_weights(staleness)
        needed = frozenset(_versions_of(state.training))
        found = []
        # Backwards, because a wave must know which versions later waves need.
        for number, run in reversed(list(enumerate(runs))):
            by_id = run.start + np.argsort(clients[run.start : run.stop])
            wave = Wave(
                number,
                fed.instead_of(cohort, clients[by_id]),
                versions=versions[by_id],
                weights=weights[by_id],
                # The inverse of a permutation.
                order=np.argsort(by_id),
                first=received + run.start,
                needed=needed,
            )
            found.append(wave)
            # For the waves before this one, which come later in this loop.
            needed |= frozenset(wave.versions.tolist())
        return found[::-1]


def check_timetable(fed: Federation, state: State, *, buffer: int) -> None:
    """Refuse a timetable from the checkpoint of another run."""
    training = state.training.numpy()
    rows = np.concatenate([state.due.numpy(), training])
    positions = rows[:, 1]
    known = (positions >= 0) & (positions < fed.num_holders)
    once = len(np.unique(training[:, 1])) == len(training)
    older = older_versions(state, buffer=buffer)
    fits = len(older) == len(state.versions) and _num_uploads(state) > 0
    if not (fits and once and np.isfinite(rows).all() and known.all()):
        raise UserError("the checkpoint's timetable is not of this run")


def older_versions(state: State, *, buffer: int) -> list[int]:
    """Return the older versions from which pending uploads have started, without the
    newest. The state holds their rows, in this order.
    """
    newest = int(state.received) // buffer
    started = _versions_of(state.due) | _versions_of(state.training)
    return sorted(version for version in started if version < newest)


def rows_of(state: State, *, buffer: int) -> dict[int, Tensor]:
    """Return the rows of all versions that the state holds, by version number."""
    newest = int(state.received) // buffer
    older = older_versions(state, buffer=buffer)
    return {**dict(zip(older, state.versions, strict=True)), newest: state.w}


def _seconds(fed: Federation, row: Tensor) -> np.ndarray:
    """Return the seconds of every client with data to download, train and upload."""
    devices = fed.channel.devices
    assert devices is not None, "a run has devices where its method needs them"
    holders = np.flatnonzero(fed.sizes)
    size, packed = _bytes_of(row), fed.channel.upload_bytes
    sent = size if packed is None else packed(row)
    download = devices.seconds(holders, 0, size, 0)
    train = devices.seconds(holders, _num_steps(fed, holders), 0, 0)
    upload = devices.seconds(holders, 0, 0, sent)
    return np.stack([download, train, upload])


def _num_steps(fed: Federation, clients: np.ndarray) -> np.ndarray:
    # The same in all rounds: only learning rates change.
    return num_steps(fed.sizes[clients], fed.recipe(0).length)


def _pace(fed: Federation[Options], state: State, buffer: int) -> Pace:
    devices = fed.channel.devices
    assert devices is not None
    uploads = fed.config.cohort_among(len(fed.sizes))
    return Pace(
        state.seconds.sum(0).numpy(),
        places=fed.options.concurrency or uploads,
        buffer=buffer,
        dropout_rate=fed.config.dropout_rate,
        presence=devices.presence(np.flatnonzero(fed.sizes)),
    )


def _bytes_of(row: Tensor) -> int:
    return len(row) * row.element_size()


def _numbers(generator: "np.random.Generator") -> Iterator[float]:
    """Yield random numbers one by one, drawn in blocks: that is ten times as fast."""
    while True:
        yield from generator.random(256).tolist()


def _read(table: Tensor) -> Iterator[InTraining]:
    seconds, positions, versions, lost = table.T
    columns = (
        seconds.tolist(),
        positions.long().tolist(),
        versions.long().tolist(),
        lost.bool().tolist(),
    )
    return map(InTraining, *columns)


def _table(training: list[InTraining]) -> Tensor:
    # An empty list would have only one dimension.
    return torch.tensor(training, dtype=torch.float64).reshape(-1, 4)


def _num_uploads(state: State) -> int:
    """Return the number of uploads of the next round that are not lost."""
    return len(state.due) - int(state.due[:, 3].sum())


def _versions_of(training: Tensor) -> set[int]:
    """Return the versions from which clients started whose uploads are not lost."""
    coming = training[training[:, 3] == 0]
    return {int(version) for version in coming[:, 2].tolist()}


def _note(
    log: RoundLog, state: State, clients: np.ndarray, staleness: np.ndarray
) -> None:
    """Record in the round's log who has arrived, and when."""
    log.arrived = clients
    log.cohort_size = len(clients)
    log.staleness = float(staleness.mean())
    log.virtual_seconds = float(state.due[-1, 0])
    lost = len(state.due) - len(clients)
    # Lost clients were sent a row; those that arrive are counted when they download.
    log.bytes_down += lost * _bytes_of(state.w)


def _times(
    fed: Federation, state: State, clients: np.ndarray, coming: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the columns that are recorded of a round's uploads."""
    positions = coming[:, 1].astype(np.int64)
    download, train, upload = state.seconds.numpy()[:, positions]
    return {
        "client": clients,
        "download": download,
        "train": train,
        "upload": upload,
        "steps": _num_steps(fed, clients),
        "arrival": coming[:, 0],
        "arrived": np.ones(len(clients)),
    }


def after(
    state: State, versions: Versions, due: Tensor, training: Tensor, *, buffer: int
) -> dict[str, Tensor]:
    """Return the fields of `State` after a round, except w."""
    fields = {
        "due": due,
        "training": training,
        "received": state.received + _num_uploads(state),
        "seconds": state.seconds,
    }
    new = State(state.w, state.versions, **fields)
    rows = [versions[number] for number in older_versions(new, buffer=buffer)]
    # `stack` refuses an empty list.
    none = state.versions[:0]
    return {**fields, "versions": torch.stack(rows) if rows else none}
