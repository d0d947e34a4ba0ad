"""`run.h5`: everything that a run measured, readable with h5ls, h5py or h5web as it
stands.

The file is built in memory with all its datasets from the start and published whole, so
a reader never sees a torn one. A finished round costs only a copy into arrays; bringing
them into the file and publishing it takes at most 1 % of the time, because the next
publishing waits a hundred times as long as the last one took.
"""

import json
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import h5py
import numpy as np

from hpcfed.errors import UserError
from hpcfed.record.publish import publish
from hpcfed.record.safe import Reader, readable, reading
from hpcfed.record.series import RANK_SERIES, ROUND_SERIES
from hpcfed.record.timing import PHASES
from hpcfed.server.options import NETWORKS

SCHEMA = 1
CHUNK = 2**16
"""Bytes of a chunk, or a round where that is more."""
PAUSE = 100
"""How many times longer than publishing the pause before the next publishing is."""


class Series(NamedTuple):
    unit: str
    description: str


SERVER_PHASES = (
    "collect",
    "prepare",
    "autoencoder",
    "encode",
    "denoiser",
    "invert",
    "return",
)
"""`prepare`: building networks, optimisers and DeepSpeed's engines."""
NEWCOMER_STARTS = ("random", "global model", "method")


class ServerSize(NamedTuple):
    """How often the server's model learns, on how many ranks, with how many steps of
    each network.
    """

    times: int
    ranks: int
    steps: dict[str, int]


class Learning(Protocol):
    """What is told of one time of learning; the server's own `Learnt`."""

    rows: int
    losses: dict[str, np.ndarray]
    seconds: dict[str, float]
    samples: dict[str, int]
    parameters: dict[str, int]
    flops: dict[str, float]
    peak_memory: list[float]
    kept: float

    def utilisation(self, network: str) -> float: ...


class ResultsWriter:
    """Written by one rank. Rounds come in order. `clients` are facts of every client as
    the run starts.

    Clients may move to other ranks `moves` times.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: dict[str, Any],
        environment: dict[str, Any],
        clients: dict[str, np.ndarray],
        ranks: int,
        facts: dict[str, Any],
        moves: int = 0,
        server: ServerSize | None = None,
        finals: Sequence[str] = (),
        resumed: bool = False,
    ) -> None:
        """`finals` are the names of what will be judged at the end.

        Where a run is `resumed`, the file on disk stays as it is until `restore` has
        read it, or `begin_anew` is told not to.
        """
        self._path = folder / "run.h5"
        # In memory, but HDF5 refuses a name twice, and a process may have several runs
        # in work.
        self._file = h5py.File(self._path, "w", driver="core", backing_store=False)
        self._next_publish = 0.0
        self._arrays: dict[str, np.ndarray] = {}
        self._done = self._in_file = 0  # rounds
        self.moves = 0
        """How often clients have moved to other ranks."""
        self._started = time.time()
        self._seconds_before = 0.0
        self._reading = resumed
        self._environment = environment
        rounds, num_clients = settings["rounds"], settings["clients"]
        file = self._file
        file.attrs.update(
            format="hpcfed run",
            schema=SCHEMA,
            status="running",
            rounds_done=0,
            started=_clock(self._started),
            ranks=ranks,
        )
        file.attrs.update(
            {key: settings[key] for key in ("method", "dataset", "clients", "seed")}
            | facts
        )
        file["config"] = json.dumps(settings, indent=1)
        file["environment"] = json.dumps(environment, indent=1)
        for name, values in clients.items():
            unit = {"rank": "rank", "attacker": "1"}.get(name, "samples")
            data = self._make(
                f"clients/{name}", values.shape, values.dtype, data=values
            )
            _describe(data, Series(unit, f"{name} of each client"), "client")
        for name, figure in ROUND_SERIES.items():
            series = Series(figure.unit, figure.meaning)
            self._create(f"rounds/{name}", (rounds,), series, "round")
        accuracy = Series(
            "fraction",
            "accuracy on the client's own test data; NaN: not evaluated, or no test data",
        )
        self._create(
            "clients/accuracy",
            (rounds, num_clients),
            accuracy,
            "round",
            "client",
            dtype="f4",
        )
        for name, rank_figure in RANK_SERIES.items():
            series = Series(rank_figure.unit, rank_figure.meaning)
            self._create(f"timing/{name}", (rounds, ranks), series, "round", "rank")
        phases = Series("s", "seconds of each phase: " + ", ".join(PHASES))
        self._create(
            "timing/phases",
            (rounds, ranks, len(PHASES)),
            phases,
            "round",
            "rank",
            "phase",
        )
        if moves:
            self._create_moves(moves, num_clients)
        if finals:
            self._create_finals(finals, num_clients)
        if settings.get("new_clients"):
            self._create_newcomers(settings["new_updates"] + 1, settings["new_clients"])
        self._learnings = 0
        if server is not None:
            self._create_server(server)
        file["timing/phase_names"] = np.array(PHASES, dtype=h5py.string_dtype())
        if not resumed:
            self._mark()

    def _make(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: str | np.dtype = "f8",
        **more: Any,
    ) -> h5py.Dataset:
        """In chunks with checksums, so that a reader notices when bytes have changed on
        their way.
        """
        if not shape:
            return self._file.create_dataset(name, shape, dtype, **more)
        row = max(1, prod(shape[1:]) * np.dtype(dtype).itemsize)
        chunk = (min(shape[0], max(1, CHUNK // row)), *shape[1:])
        return self._file.create_dataset(
            name, shape, dtype, chunks=chunk, fletcher32=True, **more
        )

    def _create(
        self,
        name: str,
        shape: tuple[int, ...],
        series: Series,
        *dimensions: str,
        dtype: str = "f8",
    ) -> None:
        _describe(self._make(name, shape, dtype, fillvalue=np.nan), series, *dimensions)
        self._arrays[name] = np.full(shape, np.nan, dtype)

    def _create_moves(self, moves: int, num_clients: int) -> None:
        """Small datasets, written as it happens; NaN and -1 stand for moves that have
        not come.
        """
        shapes = {
            "round": (
                (moves,),
                Series(
                    "round",
                    "the first round, from 0, after clients moved to other ranks",
                ),
                "f8",
            ),
            "seconds": ((moves,), Series("s", "what the move took"), "f8"),
            "rank": (
                (moves, num_clients),
                Series("rank", "rank of each client from then on"),
                "i4",
            ),
        }
        for name, (shape, series, dtype) in shapes.items():
            fill = np.nan if dtype == "f8" else -1
            _describe(
                self._make(f"moves/{name}", shape, dtype, fillvalue=fill),
                series,
                *("move", "client")[: len(shape)],
            )

    def write_move(self, round: int, rank: np.ndarray, seconds: float) -> None:
        """Clients have moved before this round; on disk with the next rounds."""
        for name, value in {"round": round, "seconds": seconds, "rank": rank}.items():
            self._file[f"moves/{name}"][self.moves] = value
        self.moves += 1

    def _create_small(
        self, name: str, shape: tuple[int, ...], series: Series, *dimensions: str
    ) -> None:
        """A dataset that is written as it happens, and on disk with the next rounds;
        NaN where nothing has come.
        """
        _describe(self._make(name, shape, fillvalue=np.nan), series, *dimensions)

    def _create_names(self, name: str, names: Sequence[str]) -> None:
        self._file[name] = np.array(names, dtype=h5py.string_dtype())

    def _create_finals(self, finals: Sequence[str], num_clients: int) -> None:
        self._finals = list(finals)
        self._create_names("finals/name", finals)
        series = Series(
            "fraction",
            "accuracy on the client's own test data at the end; NaN: not asked for",
        )
        self._create_small(
            "finals/accuracy", (len(finals), num_clients), series, "name", "client"
        )

    def write_final(self, name: str, accuracy: np.ndarray) -> None:
        """Every client's accuracy with what the method calls so."""
        self._file["finals/accuracy"][self._finals.index(name)] = accuracy

    def _create_newcomers(self, updates: int, num_clients: int) -> None:
        self._create_names("newcomers/start", NEWCOMER_STARTS)
        series = Series(
            "fraction",
            "accuracy of new clients on their own test data by local updates; NaN: not there",
        )
        shape = (len(NEWCOMER_STARTS), updates, num_clients)
        self._create_small(
            "newcomers/accuracy", shape, series, "start", "update", "client"
        )
        given = Series(
            "bytes",
            "sent to a new client before its first local update, by the method's own accounting",
        )
        self._create_small("newcomers/bytes", (), given)

    def write_newcomers(self, start: str, update: int, accuracy: np.ndarray) -> None:
        self._file["newcomers/accuracy"][NEWCOMER_STARTS.index(start), update] = (
            accuracy
        )

    def write_newcomer_bytes(self, given: float) -> None:
        self._file["newcomers/bytes"][()] = given

    def _create_server(self, size: ServerSize) -> None:
        times = size.times
        self._create_names("server/phase_names", SERVER_PHASES)
        self._create_names("server/network_names", NETWORKS)
        self._create_small(
            "server/round",
            (times,),
            Series("round", "the round, from 0, after which it learnt"),
            "time",
        )
        self._create_small(
            "server/rows",
            (times,),
            Series("rows", "uploads that it learnt from"),
            "time",
        )
        kept = Series(
            "fraction",
            "clients whose generated row is nearest to the mean latent of their own uploads",
        )
        self._create_small("server/kept", (times,), kept, "time")
        seconds = Series("s", "seconds of each phase: " + ", ".join(SERVER_PHASES))
        self._create_small(
            "server/seconds", (times, len(SERVER_PHASES)), seconds, "time", "phase"
        )
        for name, unit, description in (
            (
                "samples_per_second",
                "1/s",
                "samples that a network saw in a second of its learning",
            ),
            ("parameters", "1", "parameters of a network"),
            (
                "flops",
                "1",
                "floating-point operations of all its steps, forward and backward",
            ),
            (
                "utilisation",
                "fraction",
                "model FLOPs by the peak of the server ranks' devices; NaN: peak not known",
            ),
        ):
            self._create_small(
                f"server/{name}",
                (times, len(NETWORKS)),
                Series(unit, description),
                "time",
                "network",
            )
        memory = Series("bytes", "largest memory so far of a server rank")
        self._create_small(
            "server/peak_memory", (times, size.ranks), memory, "time", "server rank"
        )
        for network, steps in size.steps.items():
            series = Series("1", f"mean loss of each of the {network}'s steps")
            self._create_small(
                f"server/{network}_loss", (times, steps), series, "time", "step"
            )

    def write_server(self, round: int, learning: Learning) -> None:
        """The server's model has learnt after this round."""
        file, at = self._file, self._learnings
        file["server/round"][at] = round
        file["server/rows"][at] = learning.rows
        file["server/kept"][at] = learning.kept
        file["server/seconds"][at] = [
            learning.seconds.get(phase, 0.0) for phase in SERVER_PHASES
        ]
        file["server/peak_memory"][at] = learning.peak_memory
        for i, network in enumerate(NETWORKS):
            file["server/samples_per_second"][at, i] = (
                learning.samples[network] / learning.seconds[network]
            )
            file["server/parameters"][at, i] = learning.parameters[network]
            file["server/flops"][at, i] = learning.flops[network]
            file["server/utilisation"][at, i] = learning.utilisation(network)
            file[f"server/{network}_loss"][at] = learning.losses[network]
        self._learnings += 1

    def write_round(
        self,
        round: int,
        values: dict[str, float],
        *,
        client_accuracy: np.ndarray | None,
        rank_values: dict[str, np.ndarray],
        phases: np.ndarray,
    ) -> bool:
        """Takes down a finished round; True when it, and all before it, are now on
        disk.
        """
        arrays = self._arrays
        for name, value in values.items():
            arrays[f"rounds/{name}"][round] = value
        if client_accuracy is not None:
            arrays["clients/accuracy"][round] = client_accuracy
        for name, by_rank in rank_values.items():
            arrays[f"timing/{name}"][round] = by_rank
        arrays["timing/phases"][round] = phases
        self._done = round + 1
        last = self._done == len(arrays["rounds/seconds"])
        if time.monotonic() < self._next_publish and not last:
            return False
        self._publish()
        return True

    def finish(
        self, status: str, *, error: str = "", energy: np.ndarray | None = None
    ) -> None:
        """Marks the run `complete`, `stopped` or `failed`, and publishes a last time."""
        if self._reading:  # what is on disk is more than is known here
            self._file.close()
            return
        self._file.attrs.update(status=status, finished=_clock(time.time()))
        if error:
            self._file.attrs["error"] = error
        if energy is not None:
            data = self._make("timing/energy", energy.shape, data=energy)
            _describe(
                data,
                Series(
                    "J",
                    "energy of each rank's GPU over the run; NaN where it cannot be read",
                ),
                "rank",
            )
        self._publish()
        self._file.close()

    def publish(self) -> None:
        """All rounds so far are on disk when this returns."""
        self._publish()

    def begin_anew(self) -> None:
        """Nothing is restored: what is on disk is replaced."""
        self._reading = False
        self._mark()

    def _mark(self) -> None:
        """Makes the folder known as a run's from its first moment on; the first round
        waits for nothing.
        """
        self._publish()
        self._next_publish = 0.0

    def restore(self, path: Path, rounds: int) -> None:
        """What another writer had put down of the first rounds, as far as it has the
        same shape.
        """
        with readable(path, "a run"), reading(path) as old:
            facts = old.facts()
            self._check_data(path, facts.get("data"))
            for name, array in self._arrays.items():
                if name in old and old.shape(name) == array.shape:
                    array[:rounds] = old.numbers(name, array.shape, rounds)
            for name in ("moves", "server"):
                self._restore_small(old, name, rounds)
            self._restore_command(old.text("environment"))
            self._file.attrs["started"] = str(facts["started"])
            self._file.attrs["resumed"] = [*map(int, facts.get("resumed", ())), rounds]
            counted = float(np.nansum(self._arrays["rounds/seconds"][:rounds]))
            self._seconds_before = float(facts.get("seconds", counted))
        self._done = rounds
        self._reading = False

    def _check_data(self, path: Path, before: Any) -> None:
        """Refuses to go on with other samples than the run began with."""
        now = self._file.attrs.get("data")
        if before is not None and before != now:
            raise UserError(
                f"{path} was begun with other data: its fingerprint was {before}, and is {now} now"
            )

    def _restore_command(self, text: str) -> None:
        """The command that began the run is the one that makes it anew; those that went
        on stand beside it.
        """
        before = json.loads(text)
        resumed = [*before.get("resumed_by", ()), self._environment["command"]]
        self._environment = {
            **self._environment,
            "command": before["command"],
            "resumed_by": resumed,
        }
        del self._file["environment"]
        self._file["environment"] = json.dumps(self._environment, indent=1)

    def _restore_small(self, old: Reader, group: str, rounds: int) -> None:
        """What happened now and then, in these rounds."""
        if group not in old or group not in self._file:
            return
        own = self._file[group]
        happened = int(
            np.count_nonzero(old.numbers(f"{group}/round", own["round"].shape) < rounds)
        )
        for name, data in own.items():
            where = f"{group}/{name}"
            if (
                data.dims[0].label in ("move", "time")
                and where in old
                and old.shape(where) == data.shape
            ):
                data[:happened] = old.numbers(where, data.shape, happened)
        if group == "moves":
            self.moves = happened
        else:
            self._learnings = happened

    def _publish(self) -> None:
        begin = time.monotonic()
        self._file.attrs["seconds"] = self._seconds_before + time.time() - self._started
        fresh = slice(self._in_file, self._done)
        for name, array in self._arrays.items():
            self._file[name][fresh] = array[fresh]
        self._file.attrs["rounds_done"] = self._in_file = self._done
        self._file.flush()
        publish(self._file.id.get_file_image(), self._path)
        now = time.monotonic()
        self._next_publish = now + PAUSE * (now - begin)


def _describe(dataset: h5py.Dataset, series: Series, *dimensions: str) -> None:
    dataset.attrs["units"] = series.unit
    dataset.attrs["description"] = series.description
    for axis, name in enumerate(dimensions):
        dataset.dims[axis].label = name


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
