"""Snapshots of clients' rows, read back from the files of all ranks."""

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpcfed.errors import UserError
from hpcfed.results.folder import snapshots
from hpcfed.results.safe import check, readable


@dataclass(frozen=True)
class Parameters:
    """Clients' rows as their local training left them, and the global model."""

    round: int
    clients: np.ndarray
    """Ids, ascending."""
    rows: np.ndarray
    """[clients, columns]; NaN for clients that did not take part."""
    global_row: np.ndarray | None
    """[columns]; None for a method without a global model."""
    columns: dict[str, slice]
    """The columns of every tensor of the network, by its name."""

    def __getitem__(self, name: str) -> np.ndarray:
        """Return one tensor of all clients, flattened: [clients, numbers]."""
        if name not in self.columns:
            known = ", ".join(self.columns)
            raise KeyError(f"no tensor {name!r}; there are {known}")
        return self.rows[:, self.columns[name]]


def read_parameters(folder: Path, round: int | None = None) -> Parameters:
    """Read the rows of a round with a snapshot, counted from 1; of the last one unless
    a round is named.
    """
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
        with readable(path, "snapshots"), h5py.File(path, "r") as file:
            check(file)
            found.update((file["round"][file["taken"][()] == 1] + 1).tolist())
    return found


def _read_parameters(files: list[Path], round: int) -> Parameters:
    """Put the rows of all ranks' files together, in the order of clients."""
    clients, rows = [], []
    global_row = None
    for path in files:
        with readable(path, "snapshots"), h5py.File(path, "r") as file:
            check(file)
            wanted = (file["round"][()] == round - 1) & (file["taken"][()] == 1)
            # A resumed run may have gone on in another file.
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
