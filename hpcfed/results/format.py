"""The datasets of run.h5: names, shapes, units and meanings.

They are the file's format. Readers of older and newer versions rely on them, so
published names and units never change. Every dataset has chunks with checksums and
describes its contents. The group of the server's model is in `server.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, nan, prod
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from hpcfed.errors import UserError
from hpcfed.options.metrics import METRICS, PER_CLASS, of_clients
from hpcfed.results.safe import Reader
from hpcfed.results.series import RANK_SERIES, ROUND_SERIES, metric_series
from hpcfed.runtime.starting import FIGURES
from hpcfed.runtime.timer import PHASES

SCHEMA = 1
CHUNK = 2**16
"""Bytes of a chunk, or of one round if that is more."""
WIDE = 2**16
"""A round without figures is not written if it has at least this many bytes."""
EVALUATED = "evaluated"
RELOCATIONS = "moves"
NEW_ROUNDS = "new_rounds"
GUIDED = "random, guided"
"""A start of new clients from the random row, guided by the method."""
NEWCOMER_STARTS = ("random", "global model", "method", GUIDED)
CLASS_SERIES = {
    "accuracy": "clients on their own test data, taken together",
    "global_accuracy": "global model on the whole test set",
}
"""Accuracies by class, and of which model."""
MOST_CLOCK_ENTRIES = 2_000_000
"""A run records the clock table up to this many rounds times members: 72 MB."""
STACKS = "timing/stacked_seeds"
"""How many runs advanced together in each round: a resumed run may have others beside
it than before.
"""
CLOCK_COLUMNS = {
    "client": ("client", "id of the member; NaN: the round has no more", "f8"),
    "download": ("s", "virtual seconds of its downloads", "f4"),
    "train": ("s", "virtual seconds of its local steps", "f4"),
    "upload": ("s", "virtual seconds of its uploads", "f4"),
    "steps": ("1", "local steps that it has taken", "f4"),
    "arrival": ("s", "virtual time at which its upload came; NaN: it never did", "f8"),
    "arrived": ("1", "1 where its upload counted, else 0", "f4"),
}
"""What each member of a round took on the virtual clock: unit, meaning and type."""
AT_THE_END = {
    "energy": (
        "J",
        "energy of each rank's GPU from just before the first round to the end; NaN where "
        "it cannot be read",
    ),
    "cpu_energy": (
        "J",
        "energy of the CPUs and memory of each rank's host over the same time, with "
        "whatever else ran there, on the host's first rank; NaN where it cannot be read",
    ),
    "load_at_start": ("1", "load of each rank's host, over a minute, as the run began"),
    "load_at_end": ("1", "the same as it ended"),
    **FIGURES,
}
"""What each rank measures over a complete run: unit and meaning, under `timing/`."""
FINAL = "accuracy on the client's own test data at the end; NaN: not asked for"
FIGURE = "what the method measures of a client at the end; NaN: not asked for"
NEWCOMERS = (
    "accuracy of new clients on their own test data by local updates; NaN: not there"
)
NEWCOMER_BYTES = (
    "sent to a new client before its first local update, by the method's own accounting"
)
"""Meanings of what is not written round by round."""
DEPTHS = {
    "depth": ("steps", "steps of diffusion from which the server generates rows"),
    "signal": ("fraction", "√ᾱ: how much of a latent is still there at this depth"),
}
"""What is known about each depth of inversion: unit and meaning."""
AT_DEPTHS = {
    "accuracy": ("fraction", "accuracy of the generated row on the client's test data"),
    "own": (
        "1",
        "1 if the generated update has its client's own direction, else 0; NaN: the bank "
        "has no update of the client",
    ),
    "distance": (
        "1",
        "distance to the client's newest upload, relative to the length of its update",
    ),
}
"""What every client's row from each depth is like."""
CLIENT_UNITS = {
    "rank": "rank",
    "attacker": "1",
    EVALUATED: "client",
    "speed": "1",
    "downlink": "bytes/s",
    "uplink": "bytes/s",
}
"""Units of facts about clients; all others are numbers of samples."""
CLIENT_MEANINGS = {
    EVALUATED: "clients that are evaluated: the columns of metrics here",
    "classes": "training samples of each class that each client has",
}
"""Meanings of facts that are not one number per client."""


class Declared(NamedTuple):
    """A dataset to be created."""

    name: str
    shape: tuple[int, ...]
    dimensions: tuple[str, ...]
    unit: str
    meaning: str
    dtype: str = "f8"
    fill: float = nan
    """NaN means "missing" in every dataset of figures; 0 would be a figure."""


def create(
    file: h5py.File, declared: Declared, data: np.ndarray | None = None
) -> h5py.Dataset:
    """Create a dataset, with fill values or with `data`.

    It has chunks with checksums, so that a reader notices changed bytes.
    """
    name, shape, dimensions, unit, meaning, dtype, fill = declared
    more: dict[str, Any] = {"fillvalue": fill} if data is None else {"data": data}
    # HDF5 has neither chunks nor checksums for a scalar.
    if shape:
        # A chunk holds whole rounds, because they are written one after the other.
        length, *others = shape
        round_bytes = prod(others) * np.dtype(dtype).itemsize
        # Small figures share a chunk over many rounds: a chunk per round would bloat
        # the index.
        rounds = max(1, CHUNK // max(1, round_bytes))
        more["chunks"] = (min(length, rounds), *others)
        more["fletcher32"] = True
    dataset = file.create_dataset(name, shape, dtype, **more)
    dataset.attrs["units"] = unit
    dataset.attrs["description"] = meaning
    for axis, dimension in enumerate(dimensions):
        dataset.dims[axis].label = dimension
    return dataset


def create_names(file: h5py.File, name: str, names: Sequence[str]) -> None:
    """Store the names of the entries along another dataset's dimension."""
    file[name] = np.array(names, dtype=h5py.string_dtype())


def write_rounds(data: h5py.Dataset, array: np.ndarray, fresh: slice) -> None:
    """Write rounds to the file. Skip rounds that were not evaluated, which are NaN
    there already: for a million clients each would write 4 MB.
    """
    if array.ndim == 1 or array[0].nbytes < WIDE:
        # What h5py makes of data[fresh] takes three times as long.
        values = np.ascontiguousarray(array[fresh])
        place = data.id.get_space()
        place.select_hyperslab(
            (fresh.start, *(0 for _ in array.shape[1:])), values.shape
        )
        data.id.write(h5py.h5s.create_simple(values.shape), place, values)
        return
    for round in range(fresh.start, fresh.stop):
        if not np.isnan(array[round]).all():
            data[round] = array[round]


def round_arrays(rounds: int, ranks: int) -> Iterator[Declared]:
    """Yield the datasets that every run fills by round: series, and ranks' times."""
    for name, series in ROUND_SERIES.items():
        yield Declared(
            f"rounds/{name}", (rounds,), ("round",), series.unit, series.meaning
        )
    for name, of_ranks in RANK_SERIES.items():
        yield Declared(
            f"timing/{name}",
            (rounds, ranks),
            ("round", "rank"),
            of_ranks.unit,
            of_ranks.meaning,
        )
    yield Declared(
        "timing/phases",
        (rounds, ranks, len(PHASES)),
        ("round", "rank", "phase"),
        "s",
        f"seconds of each phase: {', '.join(PHASES)}",
    )
    meaning = "runs that advanced together, this one included, and share its times"
    yield Declared(STACKS, (rounds,), ("round",), "1", meaning)


def metric_arrays(
    metrics: Sequence[str], rounds: int, clients: int, classes: int
) -> Iterator[Declared]:
    """Yield these metrics' datasets: by round, by evaluated client, and by class."""
    shape = (rounds, clients)
    # Every file has it, even without an accuracy.
    yield Declared(
        "clients/accuracy",
        shape,
        ("round", "client"),
        "fraction",
        "accuracy on the client's own test data; NaN: not evaluated, or no test data",
        "f4",
    )
    for name in of_clients(metrics):
        if name != "accuracy":
            unit, meaning = METRICS[name].unit, METRICS[name].meaning
            meaning = f"on the client's own test data: {meaning}"
            where = f"clients/{name}"
            yield Declared(where, shape, ("round", "client"), unit, meaning, "f4")
    for series in metric_series(metrics):
        where = f"rounds/{series.name}"
        yield Declared(where, (rounds,), ("round",), series.unit, series.meaning)
    if PER_CLASS in metrics:
        for name, whose in CLASS_SERIES.items():
            yield Declared(
                f"classes/{name}",
                (rounds, classes),
                ("round", "class"),
                "fraction",
                f"accuracy of each class: {whose}",
            )


def clock_arrays(rounds: int, members: int) -> Iterator[Declared]:
    """Yield the clock table's datasets, unless the table would be too large."""
    if rounds * members > MOST_CLOCK_ENTRIES:
        return
    for name, (unit, meaning, dtype) in CLOCK_COLUMNS.items():
        shape, dimensions = (rounds, members), ("round", "member")
        yield Declared(f"clock/{name}", shape, dimensions, unit, meaning, dtype)


def take_down_clock(
    arrays: Mapping[str, np.ndarray], round: int, table: Mapping[str, np.ndarray]
) -> None:
    """Copy a round's members into the arrays of the clock table, if the run has one."""
    for name, values in table.items():
        array = arrays.get(f"clock/{name}")
        if array is not None:
            # With --sampling poisson a round may, very rarely, have more members.
            width = array.shape[1]
            array[round, : len(values)] = values[:width]


def finite_figures(arrays: Mapping[str, np.ndarray], round: int) -> dict[str, float]:
    """Return all finite figures of a round, those of ranks as means, maxima or sums."""
    found = {}
    for name, array in arrays.items():
        if name.startswith("rounds/"):
            found[name] = float(array[round])
    seconds = arrays["timing/phases"][round].mean(0)
    for phase, mean in zip(PHASES, seconds.tolist(), strict=True):
        # Most methods lack some phases; these took 0 seconds.
        # NaN, so that it is dropped below: trackers show no empty curves.
        found[f"phases/{phase}"] = mean or nan
    found["ranks/peak_memory"] = float(arrays["timing/peak_memory"][round].max())
    found["ranks/wire"] = float(arrays["timing/wire"][round].sum())
    return {name: value for name, value in found.items() if isfinite(value)}


def create_clients(file: h5py.File, facts: Mapping[str, np.ndarray]) -> None:
    """Store facts about each client: texts, numbers, or numbers by class."""
    for name, values in facts.items():
        where = f"clients/{name}"
        if values.dtype.kind == "U":
            create_names(file, where, values.tolist())
            continue
        unit = CLIENT_UNITS.get(name, "samples")
        meaning = CLIENT_MEANINGS.get(name, f"{name} of each client")
        dimensions = ("client", "class")[: values.ndim]
        declared = Declared(
            where, values.shape, dimensions, unit, meaning, values.dtype.str
        )
        create(file, declared, values)


def create_now_and_then(
    file: h5py.File,
    settings: Mapping[str, Any],
    *,
    relocations: int,
    finals: Sequence[str],
    figures: Sequence[str],
) -> None:
    """Create the groups that are not written round by round, as far as these settings
    need them. NaN and -1 mark what has not happened.
    """
    clients, new_clients = settings["clients"], settings.get("new_clients")
    if relocations:
        first = "the first round, from 0, after clients moved to other ranks"
        where = "rank of each client from then on"
        by_client = (relocations, clients), ("move", "client")
        for declared in (
            Declared("moves/round", (relocations,), ("move",), "round", first),
            Declared(
                "moves/seconds", (relocations,), ("move",), "s", "what the move took"
            ),
            Declared("moves/rank", *by_client, "rank", where, "i4", -1),
        ):
            create(file, declared)
    for group, entry, names, unit, meaning in (
        ("finals", "accuracy", finals, "fraction", FINAL),
        ("figures", "value", figures, "1", FIGURE),
    ):
        if names:
            create_names(file, f"{group}/name", names)
            by_name = (len(names), clients), ("name", "client")
            create(file, Declared(f"{group}/{entry}", *by_name, unit, meaning))
    for declared in _depths(len(settings.get("depth_sweep") or ()), clients):
        create(file, declared)
    if new_clients:
        create(file, Declared("newcomers/bytes", (), (), "bytes", NEWCOMER_BYTES))
    if new_clients and settings.get("new_rounds"):
        for declared in _new_rounds(settings["new_rounds"], new_clients):
            create(file, declared)
    elif new_clients:
        create_names(file, "newcomers/start", NEWCOMER_STARTS)
        # One more entry than updates: the first is the start.
        shape = (len(NEWCOMER_STARTS), settings["new_updates"] + 1, new_clients)
        by_update = shape, ("start", "update", "client")
        create(file, Declared("newcomers/accuracy", *by_update, "fraction", NEWCOMERS))


def _depths(depths: int, clients: int) -> Iterator[Declared]:
    """Yield the datasets of depths of inversion, if there are any."""
    if not depths:
        return
    for name, (unit, meaning) in DEPTHS.items():
        yield Declared(f"depths/{name}", (depths,), ("depth",), unit, meaning)
    shape, dimensions = (depths, clients), ("depth", "client")
    for name, (unit, meaning) in AT_DEPTHS.items():
        yield Declared(f"depths/{name}", shape, dimensions, unit, meaning)


def _new_rounds(rounds: int, clients: int) -> Iterator[Declared]:
    """Yield the datasets of rounds among new clients."""
    for name, meaning in {
        "accuracy": "accuracy of new clients on their own test data after a round, of "
        "all that have joined; NaN: not there or not evaluated",
        "trained_accuracy": "accuracy of the round's participants as their local "
        "training left them; NaN: took no part or not evaluated",
    }.items():
        where, shape = f"{NEW_ROUNDS}/{name}", (rounds, clients)
        yield Declared(where, shape, ("round", "client"), "fraction", meaning)
    for name, meaning in {
        "bytes_up": "sent by new clients in a round of theirs",
        "bytes_down": "sent to new clients in a round of theirs",
    }.items():
        yield Declared(f"{NEW_ROUNDS}/{name}", (rounds,), ("round",), "bytes", meaning)


def restore_entries(ours: h5py.File, old: Reader, group: str, rounds: int) -> int:
    """Copy a group's entries of the first rounds; return their number."""
    if group not in old or group not in ours:
        return 0
    # Entries are in order, then NaN: those before the round are a prefix.
    entry_rounds = old.numbers(f"{group}/round", ours[f"{group}/round"].shape)
    happened = int(np.count_nonzero(entry_rounds < rounds))
    for name, data in ours[group].items():
        where = f"{group}/{name}"
        kind = data.dims[0].label
        if where not in old or old.shape(where) != data.shape or not happened:
            continue
        # The label of the first dimension says how entries grow.
        if kind in ("move", "time"):
            data[:happened] = old.numbers(where, data.shape, happened)
        elif kind in ("upload", "axis"):  # these describe the last training only
            data[...] = old.numbers(where, data.shape)
    return happened


BEGUN_WITH = {"data": "other data", "base": "another base under its adapters"}
"""Facts that must stay as they were when a run began, and what it means if they do not."""


def check_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to continue with other samples, or another frozen network under adapters,
    than the run began with.
    """
    for fact, other in BEGUN_WITH.items():
        # Older files lack some.
        if before.get(fact) is not None and before[fact] != now.get(fact):
            raise UserError(
                f"{path} was begun with {other}: its fingerprint was {before[fact]}, and "
                f"is {now.get(fact)} now"
            )
