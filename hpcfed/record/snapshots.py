"""`params-<rank>.h5`: rows of this rank's clients, as their local training left them, every N rounds.

All datasets exist, with their full size on disk, before the first snapshot: a disk that is too small says so at the
start, and afterwards only numbers are written, never the file's own structure, so a killed run leaves a readable file.
Rows of clients that did not take part are NaN.
"""

from math import prod
from pathlib import Path

import h5py
import numpy as np

from hpcfed.errors import UserError
from hpcfed.models.layout import Layout
from hpcfed.record.guarded import SLACK, Reader, check, readable


class SnapshotWriter:
    def __init__(
        self, path: Path, *, clients: np.ndarray, layout: Layout, rounds: np.ndarray, dtype: np.dtype, with_global: bool
    ) -> None:
        """`rounds` are the rounds after which snapshots will be taken; `with_global` adds the global row."""
        self._rounds = rounds
        if path.exists():
            self._go_on(path, clients, (len(rounds), layout.num_columns), with_global=with_global)
            return
        self._file = h5py.File(path, "w")  # not libver="latest": its files refuse to open after their writer was killed
        file = self._file
        file.attrs.update(format="hpcfed params", schema=1, columns=layout.num_columns)
        file["client"] = clients
        file["round"] = rounds
        file["column_names"] = np.array([e.name for e in layout.entries], dtype=h5py.string_dtype())
        file["column_starts"] = np.array([e.start for e in layout.entries])
        shape = (len(rounds), len(clients), layout.num_columns)
        self._rows = self._create("rows", shape, dtype, "snapshot", "client", "column")
        self._taken = file.create_dataset("taken", (len(rounds),), "u1", fillvalue=0)
        self._taken.attrs["description"] = "1 once the snapshot is whole"
        self._global = None
        if with_global:
            self._global = self._create("global", (len(rounds), layout.num_columns), dtype, "snapshot", "column")
        file.flush()

    def _go_on(self, path: Path, clients: np.ndarray, wide: tuple[int, int], *, with_global: bool) -> None:
        """With the file of a run that is resumed; `wide` are the numbers of snapshots and columns."""
        with readable(path, "this run's snapshots"):
            self._file = h5py.File(path, "r+")
            try:
                check(self._file)
                known = Reader(self._file, [SLACK])
                if not np.array_equal(known.numbers("client", (None,)), clients):
                    raise UserError(f"{path} holds rows of other clients; resume with as many ranks as before")
                shapes = {"rows": (wide[0], len(clients), wide[1]), "taken": wide[:1]}
                for name, shape in (shapes | ({"global": wide} if with_global else {})).items():
                    if known.shape(name) != shape or self._file[name].dtype.kind not in "fu":
                        raise ValueError(f"{name} has another shape or type")
                    if name != "taken" and self._file[name].id.get_num_chunks() != prod(shape[:-1]):
                        raise ValueError(f"{name} has lost some of its rows")
            except BaseException:
                self._file.close()
                raise
        self._rows, self._taken, self._global = (self._file.get(name) for name in ("rows", "taken", "global"))

    def _create(self, name: str, shape: tuple[int, ...], dtype: np.dtype, *dimensions: str) -> h5py.Dataset:
        chunk = (*[1] * (len(shape) - 1), shape[-1])
        creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        data = self._file.create_dataset(
            name, shape, dtype, chunks=chunk, fletcher32=True, fillvalue=np.nan, dcpl=creation
        )
        data.attrs["units"] = "parameter"
        for axis, dimension in enumerate(dimensions):
            data.dims[axis].label = dimension
        return data

    def due(self, round: int) -> bool:
        return bool(np.isin(round, self._rounds))

    def write_rows(self, round: int, positions: np.ndarray, rows: np.ndarray) -> None:
        """Rows of the clients at these positions; called again in the same round, the later rows stay."""
        snapshot = int(np.searchsorted(self._rounds, round))
        for position, row in zip(positions, rows, strict=True):
            self._rows[snapshot, int(position)] = row

    def close_round(self, round: int, global_row: np.ndarray | None) -> None:
        snapshot = int(np.searchsorted(self._rounds, round))
        if self._global is not None and global_row is not None:
            self._global[snapshot] = global_row
        self._file.flush()
        self._taken[snapshot] = 1
        self._file.flush()

    def close(self) -> None:
        self._file.close()
