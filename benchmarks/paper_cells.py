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
    names: tuple[str, str, str]
    """Data set, clients, method."""
    folder: Path
    settings: Settings
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        return "/".join(self.names)


@dataclass(frozen=True)
class Outcome:
    """Of a finished cell."""

    accuracy: dict[str, list[float]]
    """Of every seed: by the method's name what the study measures first, and per cent
    by the name of every final.
    """
    further: dict[str, list[float]]
    """What else the study measures."""
    seconds: float
    """From the first round to the end."""
    device: str


Outcomes = Mapping[tuple[str, str, str], Outcome]


def plan(study: Study, options: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for, in order."""
    wanted = options.methods.split(",") if options.methods else list(study.methods)
    for method in wanted:
        if method not in study.methods:
            raise unknown("method", method, study.methods)
    changes = {
        name.replace("-", "_"): value
        for name, value in pairs_of("--set", options.set, "rounds=3").items()
    }
    sources = pairs_of("--data", options.data, "svhn=file:svhn.npz")
    for name in sources:
        if name not in study.datasets:
            raise UserError(f"--data: {unknown('data set', name, study.datasets)}")
    every = [
        names
        for names in itertools.product(study.datasets, study.across, study.methods)
        if any(fnmatchcase("/".join(names), pattern) for pattern in study.cells)
    ]
    chosen = [
        names
        for names in every
        if names[2] in wanted and fnmatchcase("/".join(names), options.only)
    ]
    if not chosen:
        raise UserError(
            f"--only {options.only} leaves no cell; they have names such as {'/'.join(every[0])}"
        )
    cells = [
        cell_of(study, names, changes, sources.get(names[0], names[0]), options)
        for names in chosen
    ]
    known = {name for cell in cells for name in cell.settings.flat()}
    for name in changes:
        if name not in known:
            raise UserError(
                f"--set {name}: unknown option{suggest_option(name, known)}"
            )
    return cells


def pairs_of(flag: str, words: Sequence[str], example: str) -> dict[str, str]:
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
    dataset, column, row = names
    own = dict(study.methods[row])
    method = own.pop("method", row)
    kind = methods.load(method).Options
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for table, given in {
        "common": study.common,
        f"datasets.{dataset}": study.datasets[dataset],
        f"{'clients' if study.clients else 'columns'}.{column}": study.across[column],
        f"methods.{row}": own,
    }.items():
        values |= given
        sources |= {name: f"{options.study}: {table}.{name}" for name in given}
    for name, value in changes.items():
        if (
            name in RunConfig.model_fields or name in kind.model_fields
        ):  # what other methods have is not for this one
            values[name], sources[name] = value, f"--set {name}={value}"
    for name in OWN if study.clients else [name for name in OWN if name != "clients"]:
        if name in values:
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
        values["clients"], sources["clients"] = (
            column,
            f"{options.study}: clients.{column}",
        )
    # The tables are for all methods, of which some have no use for some of their
    # options.
    shared = set(values) - set(own) - set(changes)
    settings = resolve(values, sources, kind, shared=shared)
    return Cell(names, folder, settings, settings.config.seeds or ())


def runnable(cells: Sequence[Cell], study: Study) -> list[Cell]:
    """Without those whose data may be missing and is; refuses what cannot run, or would
    spoil what is there.
    """
    absent: dict[str, UserError] = {}
    for cell in cells:
        config, name = cell.settings.config, cell.names[0]
        try:
            files.require(config.dataset, root=config.root, download=config.download)
        except UserError as error:
            if (
                name not in study.optional or config.dataset != name
            ):  # what was named by hand should be there
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
    complete = complete_seeds(cell)
    lost = sorted(set(complete) - set(cell.seeds))
    if lost and not set(cell.seeds) <= set(complete):
        raise UserError(
            f"{cell.folder} holds seed {lost[0]}, which a run would remove; name another --out"
        )
    for seed, record in complete.items():
        check_unchanged(cell.folder, record.config, cell.settings.of_seed(seed).flat())


def complete_seeds(cell: Cell) -> dict[int, RunRecord]:
    return {
        record.facts["seed"]: record
        for record in read_seeds(cell.folder)
        if record.status == "complete"
    }


def outcome(cell: Cell, study: Study) -> Outcome | None:
    """None unless every seed is complete."""
    complete = complete_seeds(cell)
    if not set(cell.seeds) <= set(complete):
        return None
    records = [complete[seed] for seed in cell.seeds]
    first, *others = (
        [MEASURES[name].value(record) for record in records] for name in study.measures
    )
    accuracy, further = (
        {cell.names[2]: first},
        dict(zip(map(str, study.measures[1:]), others, strict=True)),
    )
    for final in records[0].finals:
        accuracy[final] = [
            100 * mean_accuracy(record.finals[final]) for record in records
        ]
    seconds = max(float(record.facts["seconds"]) for record in records)
    return Outcome(
        accuracy, further, seconds, str(records[0].environment["ranks"][0]["device"])
    )
