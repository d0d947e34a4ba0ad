"""What methods have in common whose clients train at their own pace, in virtual time.

There are no rounds in which all wait for the slowest. So many clients as --concurrency
says train at any time. When an upload arrives, the server takes it in, and invites
another client, which starts from the version of the server's row that there is then
(`_timetable` has the rules). By the time an upload arrives, it may be some versions
behind: that is its staleness.

A round of the record is as many uploads as a cohort has clients, in the order of their
arrival; a client may be among them several times. Who starts when, from which version,
does not depend on what is learnt. So uploads are computed in waves: the longest runs of
arrivals whose starts exist train together, as rows of one call. Each has the number of
its wave in the round as the phase of its random numbers.

Clients that are lost (--dropout-rate) have been sent a row, and never train here. The
server keeps only those versions that somebody who trains has started from.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hpcfed import config
from hpcfed.config import Choice, RunConfig, Switch, option
from hpcfed.errors import UserError, count
from hpcfed.methods import fedavg
from hpcfed.methods._interface import VARIES, Cohort, Federation, Tensor

if TYPE_CHECKING:
    import numpy as np

    from hpcfed.clients.pull import Pull
    from hpcfed.methods._timetable import Arrival, Pace, Timetable, Training

Versions = Mapping[int, Tensor]
"""Rows of the server by the number of their version."""


class Options(config.Options):
    averages = False
    asynchronous = True

    concurrency: int | None = option(
        None,
        "clients that train at any time, as in 100 (default: as many as a round has "
        "uploads)",
        ge=0,
    )
    staleness: Literal["constant", "hinge", "polynomial"] = option(
        "polynomial",
        "what an upload weighs that is d versions behind: constant: 1; hinge: 1 up to d "
        "= b, then 1 / (a (d − b) + 1); polynomial: (1 + d)^−a",
    )
    staleness_a: float = option(
        0.5, "a of --staleness: how fast the weight falls, as in 0.5", ge=0
    )
    staleness_b: int = option(
        4, "b of --staleness hinge: how far behind an upload counts in full", ge=0
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

    def switches(self, config: RunConfig) -> Iterable[Switch]:
        yield from super().switches(config)
        weighs = self.staleness != "constant"
        yield Switch("staleness_a", "--staleness polynomial or hinge", weighs)
        yield Switch("staleness_b", "--staleness hinge", self.staleness == "hinge")

    def check(self, config: RunConfig) -> None:
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
                    f"{flag}: method {config.method} waits for nobody, so there is no "
                    "round to end early"
                )
        if self.concurrency is not None and self.concurrency > config.clients:
            raise UserError(
                f"--concurrency {self.concurrency}, but there are "
                f"{count(config.clients, 'client')}"
            )

    def weights(self, staleness: "np.ndarray") -> "np.ndarray":
        """Return s(d) of uploads that are d versions behind."""
        if self.staleness == "constant":
            return 1.0 + 0 * staleness
        if self.staleness == "polynomial":
            return (1.0 + staleness) ** -self.staleness_a
        too_far = (staleness - self.staleness_b).clip(min=0)
        return 1 / (self.staleness_a * too_far + 1)


@dataclass(frozen=True)
class State(fedavg.State):
    versions: Tensor = field(metadata=VARIES)
    """The rows that clients which train have started from, oldest first."""
    training: Tensor = field(metadata=VARIES)
    """Those that train, whether lost or not, as `Training` has them; float64."""
    received: Tensor
    """Uploads so far."""
    now: Tensor
    """Virtual time at which the last of them arrived, float64."""


def begin(fed: Federation) -> State:
    """Return the state before anybody was invited."""
    import torch

    w = fed.initial_row()
    return State(
        w,
        versions=w.new_empty(0, len(w)),
        # On the host, as all that decides who trains: nobody waits for the device.
        training=torch.empty(0, 4, dtype=torch.float64),
        received=torch.tensor(0),
        now=torch.tensor(0.0, dtype=torch.float64),
    )


@dataclass(frozen=True)
class Wave:
    """Uploads that follow one another, and are computed together."""

    number: int
    """Its number in the round."""
    cohort: Cohort
    """The clients, each once, in the order of ids."""
    versions: "np.ndarray"
    """The version that each has started from."""
    weights: "np.ndarray"
    """s(d) of each."""
    order: "np.ndarray"
    """Which of the clients arrives first, second and so on."""
    first: int
    """Uploads that the server had received before."""
    needed: frozenset[int]
    """Versions that somebody starts from who arrives later."""


@dataclass(frozen=True)
class Plan:
    """All that is known of a round before anybody trains."""

    waves: list[Wave]
    versions: Versions
    """The rows that the round begins with."""
    table: "Timetable"
    """As the round leaves it."""


def plan(
    fed: Federation[Options], state: State, cohort: Cohort, *, buffer: int
) -> Plan:
    """Return who arrives in a round; the server makes a version of every `buffer`
    uploads. What the timetable says of the round goes to its log.
    """
    from hpcfed.methods._timetable import Timetable, waves

    with fed.timed("sample"):
        training = _read(state, fed)
        received = int(state.received)
        pace = _pace(fed, cohort, buffer)
        table = Timetable(pace, training, now=float(state.now), received=received)
        versions = _rows_of(state, training) | {table.version: state.w}
        draw = _numbers(fed.generator("invitations", cohort.round)).__next__
        uploads = fed.config.cohort_among(len(fed.sizes))
        arrivals = table.receive(uploads, draw)
        runs = list(waves(arrivals, received=received, buffer=buffer))
        _note(fed, cohort, arrivals, table)
        return Plan(_waves(fed, cohort, runs, received, table), versions, table)


def upload(
    fed: Federation, wave: Wave, versions: Versions, mu: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return what the wave's clients on this rank have started from, and what the
    server receives of them; with `mu` their starts draw them as in FedProx.
    """
    cohort, log = wave.cohort, wave.cohort.log
    # To the parts of the way every wave is one upload of its clients, not a second one.
    log.downloads = log.uploads = 0
    norms = log.update_norms
    starts = fed.download(_starts(wave, versions), cohort)
    rows = fed.train(starts, cohort, phase=wave.number, pull=_pull(starts, mu))
    rows = fed.upload(rows, cohort)
    if norms is not None and log.update_norms is not None:
        log.update_norms = _joined(norms, log.update_norms)
    return starts, rows


def end(
    plan: Plan, fed: Federation, cohort: Cohort, versions: Versions, heard: int
) -> dict[str, Tensor]:
    """Return the fields of `State` after a round but w; raise if none of its uploads was
    finite.
    """
    import torch

    from hpcfed.federation.exclusion import divergence

    table = plan.table
    if not heard:
        assert cohort.log.arrived is not None
        raise divergence(cohort.log.arrived, cohort.round)
    wanted = _wanted(table.training)
    rows = [versions[number] for number in wanted]
    empty = fed.initial_row()[None][:0]
    return {
        "versions": torch.stack(rows) if rows else empty,
        "training": torch.tensor(table.training, dtype=torch.float64).reshape(-1, 4),
        "received": torch.tensor(table.received),
        "now": torch.tensor(table.now, dtype=torch.float64),
    }


def kept(versions: Versions, wave: Wave) -> Versions:
    """Return the versions that are needed after a wave."""
    return {number: versions[number] for number in versions if number in wave.needed}


def _numbers(generator: "np.random.Generator") -> Iterator[float]:
    """Yield random numbers one by one; drawing them singly takes ten times as long."""
    while True:
        yield from generator.random(256).tolist()


def _pace(fed: Federation[Options], cohort: Cohort, buffer: int) -> "Pace":
    import numpy as np

    from hpcfed.clients.schedule import num_steps
    from hpcfed.methods._timetable import Pace

    devices = fed.way.devices
    assert devices is not None, "a run has devices where its method needs them"
    holders = np.flatnonzero(fed.sizes)
    steps = num_steps(fed.sizes[holders], fed.recipe(cohort.round).length)
    row, up = fed.initial_row(), fed.way.upload_bytes
    down = _row_bytes(fed)
    uploads = fed.config.cohort_among(len(fed.sizes))
    return Pace(
        holders,
        devices.seconds(holders, steps, down, down if up is None else up(row)),
        places=fed.options.concurrency or uploads,
        buffer=buffer,
        dropout_rate=fed.config.dropout_rate,
        presence=devices.presence(holders),
    )


def _row_bytes(fed: Federation) -> int:
    row = fed.initial_row()
    return len(row) * row.element_size()


def _read(state: State, fed: Federation) -> list["Training"]:
    """Return those that train; refuse what a checkpoint of something else has left."""
    import numpy as np

    from hpcfed.methods._timetable import Training

    training = []
    for seconds, client, version, lost in state.training.tolist():
        training.append(Training(seconds, int(client), int(version), bool(lost)))
    clients = np.array([one.client for one in training], np.int64)
    known = np.isin(clients, np.flatnonzero(fed.sizes)).all()
    twice = len(np.unique(clients)) < len(clients)
    if not known or twice or len(_wanted(training)) != len(state.versions):
        raise UserError("the checkpoint's timetable is not of this run")
    return training


def _wanted(training: list["Training"]) -> list[int]:
    """Return the versions from which those have started whose uploads will come."""
    return sorted({one.version for one in training if not one.lost})


def _rows_of(state: State, training: list["Training"]) -> dict[int, Tensor]:
    return dict(zip(_wanted(training), state.versions.unbind(), strict=True))


def _waves(
    fed: Federation[Options],
    cohort: Cohort,
    runs: list[list["Arrival"]],
    received: int,
    table: "Timetable",
) -> list[Wave]:
    """Return the waves of a round, the first after so many uploads were `received`."""
    import numpy as np

    found = []
    needed = frozenset(_wanted(table.training))
    first = table.received
    # The last one first: what is needed later is known then.
    for number in reversed(range(len(runs))):
        run = runs[number]
        first -= len(run)
        ids = np.array([arrival.client for arrival in run])
        by_id = np.argsort(ids)
        versions = np.array([arrival.version for arrival in run])
        weights = fed.options.weights(np.array([one.staleness for one in run]))
        wave = Wave(
            number,
            fed.instead_of(cohort, ids[by_id]),
            versions=versions[by_id],
            weights=weights[by_id],
            # The inverse of a permutation.
            order=np.argsort(by_id),
            first=first,
            needed=needed,
        )
        found.append(wave)
        needed |= frozenset(versions.tolist())
    assert first == received
    return found[::-1]


def _note(
    fed: Federation, cohort: Cohort, arrivals: list["Arrival"], table: "Timetable"
) -> None:
    """Tell the round's log who has arrived, and when."""
    import numpy as np

    log = cohort.log
    log.arrived = np.array([arrival.client for arrival in arrivals])
    log.cohort_size = len(arrivals)
    log.staleness = float(np.mean([arrival.staleness for arrival in arrivals]))
    log.virtual_seconds = table.now
    log.times = {
        "client": log.arrived,
        "arrival": np.array([arrival.seconds for arrival in arrivals]),
        "arrived": np.ones(len(arrivals)),
    }
    log.bytes_down += table.lost * _row_bytes(fed)


def _starts(wave: Wave, versions: Versions) -> Tensor:
    """Return the row that each of the wave's clients on this rank has started from."""
    import torch

    chosen = wave.versions[wave.cohort.chosen].tolist()
    if len(set(chosen)) > 1:
        return torch.stack([versions[number] for number in chosen])
    # A view: the row of all is in memory once. No client here gives no row.
    one = chosen[0] if chosen else int(wave.versions[0])
    return versions[one].expand(len(chosen), -1)


def _pull(starts: Tensor, mu: float) -> "Pull | None":
    from hpcfed.clients.pull import Pull, Strengths

    return Pull(Strengths(squared=mu), reference=starts) if mu else None


def _joined(some: Tensor, more: Tensor) -> Tensor:
    import torch

    return torch.cat([some, more])
