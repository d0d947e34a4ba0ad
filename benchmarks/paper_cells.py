"""The cells of a study: which there are, what each runs, and what it has found; for
benchmarks/paper.py.
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from paper_study import MEASURES, Study

from hpcfed import methods
from hpcfed.config import (
    RunConfig,
    Settings,
    check,
    check_unchanged,
    resolve,
    suggest_option,
)
from hpcfed.data import files
from hpcfed.errors import UserError, unknown
from hpcfed.experiment.stored import read_seeds
from hpcfed.record.run import RunRecord, mean_accuracy
from hpcfed.runtime.launcher import launched

OWN = (
    "method",
    "dataset",
    "clients",
    "seed",
    "seeds",
    "out",
    "overwrite",
    "data_root",
    "device",
)
"""Options that neither the file nor --set may give, because the study does."""


@dataclass(frozen=True)
class Cell:
    """One run of all seeds: a data set, a column and a method."""

    names: tuple[str, str, str]
    """The data set, the number of clients (or column), and the method's row."""
    folder: Path
    settings: Settings
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        return "/".join(self.names)


@dataclass(frozen=True)
class Outcome:
    """What a finished cell has found; lists have a number per seed."""

    accuracy: dict[str, list[float]]
    """By the method's row what the study measures first, and by the name of every final
    its accuracy in per cent.
    """
    further: dict[str, list[float]]
    """What else the study measures, by the measure's name."""
    seconds: float
    """Seconds from the first round to the end."""
    device: str


Outcomes = Mapping[tuple[str, str, str], Outcome]


def plan(study: Study, options: argparse.Namespace) -> list[Cell]:
    """Return the cells that were asked for, in the order of the study."""
    wanted = options.methods.split(",") if options.methods else list(study.methods)
    for method in wanted:
        if method not in study.methods:
            raise unknown("method", method, study.methods)
    changes = {}
    for name, value in pairs_of("--set", options.set, "rounds=3").items():
        changes[name.replace("-", "_")] = value
    sources = pairs_of("--data", options.data, "svhn=file:svhn.npz")
    for name in sources:
        if name not in study.datasets:
            raise UserError(f"--data: {unknown('data set', name, study.datasets)}")
    every, cells = [], []
    for names in itertools.product(study.datasets, study.across, study.methods):
        path = "/".join(names)
        if not any(fnmatchcase(path, pattern) for pattern in study.cells):
            continue
        every.append(path)
        dataset, _, row = names
        if row in wanted and fnmatchcase(path, options.only):
            source = sources.get(dataset, dataset)
            cells.append(cell_of(study, names, changes, source, options))
    if not cells:
        raise UserError(
            f"--only {options.only} leaves no cell; they have names such as {every[0]}"
        )
    known: set[str] = set()
    for cell in cells:
        known.update(cell.settings.flat())
    for name in changes:
        if name not in known:
            raise UserError(
                f"--set {name}: unknown option{suggest_option(name, known)}"
            )
    return cells


def pairs_of(flag: str, words: Sequence[str], example: str) -> dict[str, str]:
    """Split the NAME=VALUE words of a flag."""
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{flag} {word}: needs a value, as in {flag} {example}")
        pairs[name] = value
    return pairs


def cell_of(
    study: Study,
    names: tuple[str, str, str],
    changes: dict[str, str],
    source: str,
    options: argparse.Namespace,
) -> Cell:
    """Return the cell of these names; a `source` may stand for its data set.

    Options of the method win over those of the column, these over those of the data
    set, and these over common ones; --set wins over all.
    """
    dataset, column, row = names
    row_options = dict(study.methods[row])
    method = row_options.pop("method", row)
    kind = methods.load(method).Options
    column_table = "clients" if study.clients else "columns"
    tables = {
        "common": study.common,
        f"datasets.{dataset}": study.datasets[dataset],
        f"{column_table}.{column}": study.across[column],
        f"methods.{row}": row_options,
    }
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for table, given in tables.items():
        values |= given
        for name in given:
            sources[name] = f"{options.study}: {table}.{name}"
    for name, value in changes.items():
        # An option that only other methods have is not for this one.
        if name in RunConfig.model_fields or name in kind.model_fields:
            values[name], sources[name] = value, f"--set {name}={value}"
    for name in OWN:
        allowed = name == "clients" and not study.clients
        if name in values and not allowed:
            raise UserError(f"{sources[name]}: the study gives it to every cell itself")
    folder = options.out.joinpath(*names)
    values |= {"dataset": source, "method": method, "out": folder, "overwrite": True}
    values |= {
        "seeds": options.seeds,
        "device": options.device,
        "data_root": options.data_root,
    }
    sources |= {
        "seeds": f"--seeds {options.seeds}",
        "dataset": f"--data {dataset}={source}",
    }
    if study.clients:
        values["clients"] = column
        sources["clients"] = f"{options.study}: clients.{column}"
    # Tables are for all methods. A method that has no use for one of their options
    # must not be refused for it.
    shared = set(values) - set(row_options) - set(changes)
    settings = resolve(values, sources, kind, shared=shared)
    return Cell(names, folder, settings, settings.config.seeds or ())


def runnable(cells: Sequence[Cell], study: Study) -> list[Cell]:
    """Return the cells without those whose optional data set is missing; refuse what
    cannot run, or would spoil what is there.
    """
    absent: dict[str, UserError] = {}
    for cell in cells:
        config, name = cell.settings.config, cell.names[0]
        try:
            files.require(config.dataset, root=config.root, download=config.download)
        except UserError as error:
            # What --data named by hand should be there.
            if name not in study.optional or config.dataset != name:
                raise
            absent[name] = error
            continue
        try:
            check(cell.settings, launched())
        except UserError as error:
            raise UserError(f"{cell}: {error}") from None
        check_folder(cell)
    for dataset, reason in absent.items():
        print(f"{dataset} is left out: {reason}", flush=True)
    return [cell for cell in cells if cell.names[0] not in absent]


def check_folder(cell: Cell) -> None:
    """Refuse to overwrite finished seeds, or to mix runs of different options."""
    complete = complete_seeds(cell)
    lost = sorted(set(complete) - set(cell.seeds))
    if lost and not set(cell.seeds) <= set(complete):
        raise UserError(
            f"{cell.folder} holds seed {lost[0]}, which a run would remove; "
            "name another --out"
        )
    for seed, record in complete.items():
        check_unchanged(cell.folder, record.config, cell.settings.of_seed(seed).flat())


def complete_seeds(cell: Cell) -> dict[int, RunRecord]:
    """Return the records of the cell's finished seeds, by seed."""
    complete = {}
    for record in read_seeds(cell.folder):
        if record.status == "complete":
            complete[record.facts["seed"]] = record
    return complete


def outcome(cell: Cell, study: Study) -> Outcome | None:
    """Return what a cell has found; None unless every seed is complete."""
    complete = complete_seeds(cell)
    if not set(cell.seeds) <= set(complete):
        return None
    records = [complete[seed] for seed in cell.seeds]
    measured: dict[str, list[float]] = {}
    for name in study.measures:
        measured[name] = [MEASURES[name].value(record) for record in records]
    accuracy = {cell.names[2]: measured.pop(study.measures[0])}
    for final in records[0].finals:
        accuracy[final] = [
            100 * mean_accuracy(record.finals[final]) for record in records
        ]
    seconds = max(float(record.facts["seconds"]) for record in records)
    device = str(records[0].environment["ranks"][0]["device"])
    return Outcome(accuracy, measured, seconds, device)
