"""The cells of a study: which there are, what each runs, and what it has found."""

import argparse
import glob
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.paper.measures import MEASURES
from benchmarks.paper.study import Study
from hpcfed import methods
from hpcfed.data import files
from hpcfed.errors import UserError, unknown
from hpcfed.options import RunConfig, Settings, check_unchanged, resolve, suggest_option
from hpcfed.results.run import RunRecord, mean_accuracy
from hpcfed.results.stored import check_start, read_seeds
from hpcfed.runtime.launcher import launched

OWN = (
    "method", "dataset", "clients", "seed", "seeds", "out", "overwrite", "data_root", "device",
)  # fmt: skip
"""Options that neither the file nor --set may give, because the study does."""
CHECKPOINT_MINUTES = 1.0
"""How old a cell's last checkpoint becomes, unless the study or --set says otherwise:
what is lost when all cells are killed.
"""


@dataclass(frozen=True)
class Cell:
    """One run of all seeds: a data set, a column and a method."""

    names: tuple[str, str, str]
    """The data set, the number of clients (or column), and the method's row."""
    study: Study
    folder: Path
    settings: Settings
    seeds: tuple[int, ...]
    words: tuple[str, ...]
    """The command line of a study of this cell alone."""

    def __str__(self) -> str:
        return "/".join(self.names)


@dataclass(frozen=True)
class Outcome:
    """What a cell has found; lists have a number per seed."""

    measured: dict[str, list[float]]
    """What the study measures, by the measure's name; NaN where a run never had it."""
    finals: dict[str, list[float]]
    """Accuracies in per cent that the method has judged at its end, by name."""
    seconds: float
    """Seconds from the first round to the end."""
    device: str
    stopped_at: int | None = None
    """The round that an unfinished cell has reached; None for a finished one."""
    unknown: frozenset[str] = frozenset()
    """Measures that runs ended too early to have."""
    seeds: tuple[int, ...] = ()
    """Whose values the lists hold, in their order."""


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
        if not fits(path, study.cells):
            continue
        every.append(path)
        dataset, _, row = names
        if row in wanted and fits(path, options.only):
            source = sources.get(dataset, dataset)
            cells.append(cell_of(study, names, changes, source, options))
    if not cells:
        raise UserError(
            f"--only {' '.join(options.only)} leaves no cell; they have names such as "
            f"{every[0]}"
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


def fits(path: str, patterns: Sequence[str]) -> bool:
    """Tell whether a cell's DATASET/CLIENTS/METHOD fits one of the patterns."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def pairs_of(flag: str, words: Sequence[str], example: str) -> dict[str, str]:
    """Split the NAME=VALUE words of a flag."""
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{flag} {word}: needs a value, as in {flag} {example}")
        pairs[name] = value
    return pairs


def flag_words(options: Mapping[str, str]) -> list[str]:
    """Return options as words of a command line; `true` and `false` are switches."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        # One word, since a value may begin with a minus.
        switches = {"true": f"--{flag}", "false": f"--no-{flag}"}
        words.append(switches.get(value, f"--{flag}={value}"))
    return words


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
    values: dict[str, Any] = {"checkpoint_minutes": CHECKPOINT_MINUTES}
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
    seeds = settings.config.seeds or ()
    words = _words(names, settings, options)
    return Cell(names, study, folder, settings, seeds, tuple(words))


def _words(
    names: tuple[str, str, str], settings: Settings, options: argparse.Namespace
) -> list[str]:
    """Return the command line of a study of one cell alone."""
    words = [str(options.study), "--only", glob.escape("/".join(names))]
    words += ["--out", str(options.out), "--seeds", options.seeds]
    words += ["--device", options.device]
    changes = []
    for word in options.set:
        name = word.partition("=")[0].replace("-", "_")
        # --set of an option that this cell's method lacks would be refused.
        if name in settings.flat():
            changes.append(word)
    if changes:
        words += ["--set", *changes]
    if options.data_root:
        words += ["--data-root", str(options.data_root)]
    if options.data:
        words += ["--data", *options.data]
    return words


def runnable(cells: Sequence[Cell]) -> list[Cell]:
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
            if name not in cell.study.optional or config.dataset != name:
                raise
            absent[name] = error
            continue
        try:
            check_start(cell.settings, launched())
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


def outcome(cell: Cell, *, unfinished: bool = False) -> Outcome | None:
    """Return what a cell has found; None unless every seed is complete.

    `unfinished` cells are looked at as far as they have come, too.
    """
    complete = complete_seeds(cell)
    if set(cell.seeds) <= set(complete):
        return _measured(cell, [complete[seed] for seed in cell.seeds])
    if not unfinished:
        return None
    begun = []
    for record in read_seeds(cell.folder):
        if record.facts["seed"] in cell.seeds and record.rounds_done:
            begun.append(record)
    if not begun:
        return None
    reached = min(record.rounds_done for record in begun)
    return replace(_measured(cell, begun), stopped_at=reached)


def _measured(cell: Cell, records: Sequence[RunRecord]) -> Outcome:
    """Take the study's measures of a cell's seeds."""
    measured: dict[str, list[float]] = {}
    unknown = set()
    for name in cell.study.all_measures:
        measured[name] = MEASURES[name].of_all(records)
        if MEASURES[name].unknown_of(records):
            unknown.add(name)
    finals: dict[str, list[float]] = {}
    in_all = set.intersection(*[set(record.finals) for record in records])
    for final in sorted(in_all):
        accuracies = [mean_accuracy(record.finals[final]) for record in records]
        finals[final] = [100 * accuracy for accuracy in accuracies]
    seconds = max(float(record.facts["seconds"]) for record in records)
    device = str(records[0].environment["ranks"][0]["device"])
    seeds = tuple(record.facts["seed"] for record in records)
    return Outcome(
        measured, finals, seconds, device, unknown=frozenset(unknown), seeds=seeds
    )
