"""A run on disk, as tables and arrays.

Rounds are counted from 1 here, as in the progress display.
"""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from itertools import chain
from math import isnan
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.analysis.labels import all_series
from hpcfed.analysis.render.show import status as status_line
from hpcfed.analysis.render.show import title
from hpcfed.errors import UserError, shown
from hpcfed.options.metrics import text_of
from hpcfed.results.as_json import run_summary
from hpcfed.results.folder import MODEL, records, runs
from hpcfed.results.run import RunRecord
from hpcfed.results.safe import readable
from hpcfed.results.sandbox import try_out
from hpcfed.results.snapshots import Parameters, read_parameters
from hpcfed.results.stored import read_clock, read_run, read_test_samples
from hpcfed.runtime.timer import PHASES

# Tables for Python: a DataFrame if pandas is installed, else numpy's structured array
# with the same columns.


Columns = Mapping[str, np.ndarray]
"""A table's columns by name, all of the same length."""


def table(columns: Columns) -> Any:
    """Return a DataFrame; without pandas an array whose fields are the columns."""
    if find_spec("pandas") is not None:
        import pandas

        return pandas.DataFrame(dict(columns))
    kinds = [(name, values.dtype) for name, values in columns.items()]
    length = len(next(iter(columns.values()), ()))
    array = np.empty(length, kinds)
    for name, values in columns.items():
        array[name] = values
    return array


def table_of(
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str] = (),
    *,
    unknown: float | None = None,
) -> Any:
    """Return a table of rows; without rows, an empty one with columns of these names."""
    columns = {}
    for name in dict.fromkeys(chain(names, *rows)):
        columns[name] = np.array([row.get(name, unknown) for row in rows])
    return table(columns)


def stacked(tables: Sequence[tuple[int, Columns]]) -> Columns:
    """Stack the tables of several seeds, with a first column `seed`."""
    if len(tables) == 1:
        return tables[0][1]
    seeds = []
    for seed, columns in tables:
        rows = len(next(iter(columns.values())))
        seeds.append(np.full(rows, seed))
    joined = {"seed": np.concatenate(seeds)}
    for name in tables[0][1]:
        joined[name] = np.concatenate([columns[name] for _, columns in tables])
    return joined


def open(folder: str | PathLike[str]) -> "Run":
    """Open a run's folder; anything else is a one-line error."""
    path = path_of(folder, "hpcfed.open")
    # A damaged record can crash HDF5: a child process opens it first.
    try_out(records(path))
    run = Run(path)
    run.refresh()
    return run


def path_of(given: Any, where: str, wanted: str = "a folder or a run") -> Path:
    """Return the path that a program passes in: text, a path, a run or a study."""
    if not isinstance(given, str | PathLike):
        kind = type(given).__name__
        raise UserError(f"{where} takes {wanted}, got {shown(given)} ({kind})")
    return Path(given)


class Run:
    """The results of a run, or of several seeds of it.

    Tables are DataFrames if pandas is installed, else numpy's structured arrays. With
    several seeds they have a column `seed`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Where it is on disk."""
        self._read: list[RunRecord] | None = None

    def __fspath__(self) -> str:
        """Return its folder, so that a run can be used wherever a path can."""
        return str(self.folder)

    @property
    def records(self) -> list[RunRecord]:
        """What was recorded, one entry for each seed."""
        if self._read is None:
            self.refresh()
        assert self._read is not None
        return self._read

    def refresh(self) -> None:
        """Read it again, for example while it is still running elsewhere."""
        self._read = [read_run(folder) for folder in runs(self.folder)]

    @property
    def seeds(self) -> list["Run"]:
        """A run for each seed; the run itself if there is only one."""
        found = runs(self.folder)
        return [self] if found == [self.folder] else [Run(path) for path in found]

    @property
    def status(self) -> str:
        """complete, running, stopped or failed; with several seeds, that of the first
        one that is not complete.
        """
        for record in self.records:
            if record.status != "complete":
                return record.status
        return "complete"

    @property
    def error(self) -> str:
        """Why it failed; empty if it did not."""
        return next((record.error for record in self.records if record.error), "")

    @property
    def config(self) -> dict[str, Any]:
        """All options, as resolved; with several seeds, those of the first."""
        return dict(self.records[0].config)

    @property
    def environment(self) -> dict[str, Any]:
        """Hosts, devices, versions, source, and checksums of the user's own files."""
        return dict(self.records[0].environment)

    @property
    def rounds(self) -> Any:
        """A row per round: accuracy, losses, bytes, seconds …; NaN if not evaluated."""
        return self._table(_rounds)

    @property
    def clients(self) -> Any:
        """A row per evaluated round and client: metrics, and numbers of samples."""
        return self._table(_clients)

    @property
    def timing(self) -> Any:
        """A row per round and rank: wall time, and the seconds of every phase."""
        return self._table(_timing)

    @property
    def clock(self) -> Any:
        """A row per round and invited client, in runs with --devices: virtual seconds
        of its downloads, local steps and uploads, and whether its upload counted.
        """
        return self._table(_clock)

    def parameters(self, round: int | None = None) -> Parameters:
        """Read the rows of a round that has a snapshot, by default the last one; only
        runs with snapshot_every have snapshots.
        """
        if len(self.records) > 1:
            raise UserError(f"{self.folder} has several seeds; use run.seeds[0]")
        return read_parameters(runs(self.folder)[0], round)

    @property
    def model(self) -> dict[str, np.ndarray]:
        """The global model after the last round: an array for each tensor, by name."""
        if len(self.records) > 1:
            raise UserError(f"{self.folder} has several seeds; use run.seeds[0]")
        # A single seed of --seeds has a folder of its own.
        folder = runs(self.folder)[0]
        path = folder / MODEL
        if not path.is_file():
            raise UserError(
                f"{folder} has no {MODEL}. A run writes it when it completes, if its "
                "method has a global model."
            )
        with readable(path, "a model"), np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}

    def summary(self) -> dict[str, Any]:
        """Return plain values, as `hpcfed show --json` prints them."""
        summaries = [run_summary(record) for record in self.records]
        return summaries[0] if len(summaries) == 1 else {"seeds": summaries}

    def _table(self, columns_of: Any) -> Any:
        tables = []
        for record in self.records:
            tables.append((int(record.facts["seed"]), columns_of(record)))
        return table(stacked(tables))

    def __repr__(self) -> str:
        first = self.records[0]
        return f"<{title(first)}; {status_line(first)}; {self.folder}>"

    def _repr_html_(self) -> str:
        """Show the run in a notebook."""
        lines = []
        for record in self.records:
            words = [f"seed {record.facts['seed']}", status_line(record)]
            for name in ("accuracy", *record.metrics):
                for series in all_series(name):
                    last = record.last(series)
                    if not isnan(last):
                        told = text_of(name, last)
                        words.append(f"{series.replace('_', ' ')} {told}")
            lines.append(f"<li>{escape(', '.join(words))}</li>")
        heading = escape(title(self.records[0]))
        where = escape(str(self.folder))
        return f"<b>{heading}</b><ul>{''.join(lines)}</ul><code>{where}</code>"


def _rounds(record: RunRecord) -> Columns:
    numbers = np.arange(1, record.rounds_done + 1)
    return {"round": numbers, **record.rounds}


def _clients(record: RunRecord) -> Columns:
    metrics = {"accuracy": record.client_accuracy, **record.client_metrics}
    # A round that was not evaluated has NaN for every client.
    known = np.zeros(record.rounds_done, bool)
    for values in metrics.values():
        known |= ~np.isnan(values).all(1)
    evaluated = np.flatnonzero(known)
    times, ids = len(evaluated), record.evaluated
    columns = {
        "round": np.repeat(evaluated + 1, len(ids)),
        "client": np.tile(ids, times),
    }
    for name, values in metrics.items():
        columns[name] = values[evaluated].ravel()
    train = record.train_samples.astype(np.int64)
    columns["train_samples"] = np.tile(train[ids], times)
    columns["test_samples"] = np.tile(read_test_samples(record)[ids], times)
    return columns


def _clock(record: RunRecord) -> Columns:
    return read_clock(record.folder, record.rounds_done)


def _timing(record: RunRecord) -> Columns:
    # All ranks of one round after the other, as `ravel` lays them out.
    rounds, ranks = record.wall.shape
    columns = {
        "round": np.repeat(np.arange(1, rounds + 1), ranks),
        "rank": np.tile(np.arange(ranks), rounds),
        "wall": record.wall.ravel(),
    }
    for number, phase in enumerate(PHASES):
        columns[phase] = record.phases[..., number].ravel()
    return columns
