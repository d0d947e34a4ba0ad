"""`params-<rank>.h5`: rows of this rank's clients after their local training, every N
rounds.

All datasets exist, with their full size on disk, before the first snapshot. So a disk
that is too small fails at the start. Afterwards only numbers are written, never the
file's structure, so a killed run leaves a readable file. Rows of clients that did not
take part are NaN.

A resumed run continues in new files, `params-<rank>-after-<rounds>.h5`, if its ranks
have other clients, because the number of ranks has changed, or if it has become longer.
Taken together, the files that have `taken` a snapshot hold every client once.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import h5py
import numpy as np

from hpcfed.errors import UserError
from hpcfed.models.layout import Layout
from hpcfed.results.folder import snapshot_file, snapshots, snapshots_of_rank
from hpcfed.results.publish import check_limit, hdf5_writing
from hpcfed.results.safe import SLACK, Reader, checked, readable

KIND = "this run's snapshots"
PER_ROW, PER_FILE = 160, 2**17
"""Most bytes that HDF5 adds to a row (checksum, index) and to a file (headers)."""


class SnapshotWriter:
    """Writes the rows of one rank's clients."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        clients: np.ndarray,
        layout: Layout,
        rounds: np.ndarray,
        dtype: np.dtype,
        root: bool,
    ) -> None:
        """`rounds` are those with a snapshot; the `root` also writes the global row."""
        self._folder = folder
        self._rank = rank
        self._root = root
        self._clients = clients
        self._layout = layout
        self._dtype = dtype
        self._rounds = rounds
        """Rounds of future snapshots, once the first round is known."""
        self._file: h5py.File | None = None

    def begin(self, first: int, barrier: Callable[[], None]) -> None:
        """Open this rank's file for rounds from `first` on; all ranks call this."""
        if self._root:
            _rewind(self._folder, first)
        # The root removes snapshots that will be made again, in the files of all ranks:
        # the number of ranks may have changed. A rank must not look for files that the
        # root is about to remove.
        barrier()
        self._rounds = self._rounds[self._rounds >= first]
        if not len(self._rounds):
            return
        # With the same clients as before, continue in the file that has them.
        for path in snapshots_of_rank(self._folder, self._rank):
            if path.exists() and self._go_on(path):
                return
        path = snapshot_file(self._folder, self._rank)
        if path.exists():
            path = snapshot_file(self._folder, self._rank, after=first)
        self._start(path)

    def _start(self, path: Path) -> None:
        """Create a file with room for all future snapshots."""
        columns = self._layout.num_columns
        times = len(self._rounds)
        clients = len(self._clients)
        row_bytes = columns * self._dtype.itemsize + PER_ROW
        # The root has one more row, for the global model.
        rows = times * (clients + self._root)
        check_limit(path, rows * row_bytes + PER_FILE)
        # Under its name once it is whole: a run that is resumed would go on in it.
        hidden = path.with_name(f".{path.name}.new.tmp")
        try:
            self._create_file(hidden, times, clients)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise
        os.replace(hidden, path)

    def _create_file(self, path: Path, times: int, clients: int) -> None:
        columns, entries = self._layout.num_columns, self._layout.entries
        with hdf5_writing(path):
            # Not libver="latest": such files do not open after their writer was killed.
            self._file = file = h5py.File(path, "w")
            file.attrs.update(format="hpcfed params", schema=1, columns=columns)
            file["client"] = self._clients
            file["round"] = self._rounds
            names = [entry.name for entry in entries]
            file["column_names"] = np.array(names, dtype=h5py.string_dtype())
            file["column_starts"] = np.array([entry.start for entry in entries])
            self._create(
                "rows", (times, clients, columns), "snapshot", "client", "column"
            )
            taken = file.create_dataset("taken", (times,), "u1", fillvalue=0)
            taken.attrs["description"] = "1 once the snapshot is whole"
            if self._root:
                self._create("global", (times, columns), "snapshot", "column")
            file.flush()

    def _create(self, name: str, shape: tuple[int, ...], *dimensions: str) -> None:
        """Create a dataset of rows, each a chunk with a checksum, allocated at once."""
        assert self._file is not None
        ones = [1] * (len(shape) - 1)
        chunk = (*ones, shape[-1])
        # Early: disk space is allocated now, so a full disk fails now.
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        data = self._file.create_dataset(
            name,
            shape,
            self._dtype,
            chunks=chunk,
            fletcher32=True,
            fillvalue=np.nan,
            dcpl=creation,
        )
        data.attrs["units"] = "parameter"
        for axis, dimension in enumerate(dimensions):
            data.dims[axis].label = dimension

    def _go_on(self, path: Path) -> bool:
        """Continue in a file of the resumed run; False if it is for other clients."""
        check_limit(path, path.stat().st_size)
        with checked(path, KIND) as file:
            fits = self._fits(file)
        if fits:
            with readable(path, KIND):
                self._file = h5py.File(path, "r+")
        return fits

    def _fits(self, file: h5py.File) -> bool:
        """Tell whether a file has this rank's clients; refuse one without room."""
        known = Reader(file, [SLACK])
        if not np.array_equal(known.numbers("client", (None,)), self._clients):
            return False
        rounds = known.numbers("round", (None,))
        if rounds[-1] < self._rounds[-1]:
            # The run has become longer, and the file has no room for more.
            return False
        to_come = rounds[-len(self._rounds) :]
        if not np.array_equal(to_come, self._rounds):
            raise ValueError("round has other rounds")
        times, columns = len(rounds), self._layout.num_columns
        shapes: dict[str, tuple[int, ...]] = {
            "rows": (times, len(self._clients), columns),
            "taken": (times,),
        }
        if self._root:
            shapes["global"] = (times, columns)
        for name, shape in shapes.items():
            data = file[name]
            if known.shape(name) != shape or data.dtype.kind not in "fu":
                raise ValueError(f"{name} has another shape or type")
            if name == "taken":
                continue
            # All rows were allocated at the start: writing must not extend the file.
            rows = prod(shape[:-1])
            if data.id.get_num_chunks() != rows:
                raise ValueError(f"{name} has lost some of its rows")
        return True

    def due(self, round: int) -> bool:
        """Tell whether a snapshot is taken after a round."""
        return bool(np.isin(round, self._rounds))

    def write_rows(self, round: int, positions: np.ndarray, rows: np.ndarray) -> None:
        """Write rows of clients at these positions; a later call overwrites them."""
        file, snapshot = self._entry(round)
        with hdf5_writing(Path(file.filename)):
            # Each row is its own chunk, so writing several at once gains nothing.
            for position, row in zip(positions, rows, strict=True):
                file["rows"][snapshot, int(position)] = row

    def close_round(self, round: int, global_row: np.ndarray | None) -> None:
        """Write the global model, if there is one, and mark the snapshot as whole."""
        file, snapshot = self._entry(round)
        with hdf5_writing(Path(file.filename)):
            if self._root and global_row is not None:
                file["global"][snapshot] = global_row
            # The mark must not reach the disk before the rows.
            file.flush()
            file["taken"][snapshot] = 1
            file.flush()

    def _entry(self, round: int) -> tuple[h5py.File, int]:
        """Return the file, and the index of a round's snapshot in it."""
        assert self._file is not None
        earlier = len(self._file["round"]) - len(self._rounds)
        number = int(np.searchsorted(self._rounds, round))
        return self._file, earlier + number

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _rewind(folder: Path, first: int) -> None:
    """Remove snapshots from round `first` on, and files without earlier ones."""
    for path in snapshots(folder):
        check_limit(path, path.stat().st_size)
        with checked(path, KIND, "r+") as file:
            known = Reader(file, [SLACK])
            rounds = known.numbers("round", (None,))
            taken = known.numbers("taken", rounds.shape)
            still_valid = np.where(rounds < first, taken, 0)
            if not np.array_equal(still_valid, taken):
                file["taken"][()] = still_valid
        if not still_valid.any():
            path.unlink()


# Snapshots of clients' rows, read back from the files of all ranks.


@dataclass(frozen=True)
class Parameters:
    """Clients' rows after their local training, and the global model."""

    round: int
    clients: np.ndarray
    """Ids, ascending."""
    rows: np.ndarray
    """[clients, columns]; NaN for clients that did not take part."""
    global_row: np.ndarray | None
    """[columns]; None for a method without a global model."""
    columns: dict[str, slice]
    """The columns of each tensor of the network, by name."""

    def __getitem__(self, name: str) -> np.ndarray:
        """Return one tensor of all clients, flattened: [clients, numbers]."""
        if name not in self.columns:
            known = ", ".join(self.columns)
            raise KeyError(f"no tensor {name!r}; there are {known}")
        return self.rows[:, self.columns[name]]


def read_parameters(folder: Path, round: int | None = None) -> Parameters:
    """Read the rows of a round with a snapshot, counted from 1; by default the last."""
    files = snapshots(folder)
    if not files:
        raise UserError(
            f"{folder} has no rows of clients; run it with snapshot_every=N"
        )
    taken = sorted(_rounds_taken(files))
    if round is None and taken:
        round = taken[-1]
    if round not in taken:
        known = ", ".join(map(str, taken)) or "no round yet"
        raise UserError(f"{folder} has no rows of round {round}; it has {known}")
    return _read_parameters(files, round)


def _rounds_taken(files: list[Path]) -> set[int]:
    """Return the rounds whose snapshot is whole, counted from 1."""
    found: set[int] = set()
    for path in files:
        with checked(path, "snapshots") as file:
            found.update((file["round"][file["taken"][()] == 1] + 1).tolist())
    return found


def _read_parameters(files: list[Path], round: int) -> Parameters:
    """Combine the rows of all ranks' files, in the order of clients."""
    clients, rows = [], []
    global_row = None
    for path in files:
        with checked(path, "snapshots") as file:
            wanted = (file["round"][()] == round - 1) & (file["taken"][()] == 1)
            # A resumed run may have continued in another file.
            if not wanted.any():
                continue
            snapshot = int(np.flatnonzero(wanted)[0])
            clients.append(file["client"][()])
            rows.append(file["rows"][snapshot])
            if "global" in file:
                global_row = file["global"][snapshot]
            names = file["column_names"].asstr()[()]
            starts = file["column_starts"][()]
    every = np.concatenate(clients)
    order = np.argsort(every)
    joined = np.concatenate(rows)[order]
    if global_row is not None and np.isnan(global_row).all():
        global_row = None
    stops = np.append(starts[1:], joined.shape[1])
    columns = {}
    for name, start, stop in zip(names, starts, stops, strict=True):
        columns[str(name)] = slice(int(start), int(stop))
    return Parameters(round, every[order], joined, global_row, columns)
