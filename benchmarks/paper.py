"""A paper's tables, computed anew and set beside its figures.

A study file names data sets, numbers of clients and methods, each with its options. Every combination is a cell: one
run of all seeds at once, in the folder OUT/DATASET/CLIENTS/METHOD. Cells whose seeds are all complete are not run
again, so a study that was stopped goes on where it was. A cell that fails is told in one line, the others go on, and
the exit code is 1; a mistake in the file or in the flags ends everything before it begins, with 2.

After every cell comes a line: accuracy of the clients on their own test data (per cent, mean ± standard error over
seeds), the paper's, the difference, seconds. At the end come the tables, in Markdown: `ours ± error (paper)`.

examples:
  python benchmarks/paper.py benchmarks/paper/pfedgpa.toml --data-root data --out runs/paper
  python benchmarks/paper.py benchmarks/paper/pfedgpa.toml --out runs/paper --only 'cifar10/100/*' --budget 540
  python benchmarks/paper.py benchmarks/paper/pfedgpa.toml --out runs/try --methods fedavg,pfedgpa --seeds 0 \\
      --set rounds=3 bank_rounds=3
  python benchmarks/paper.py benchmarks/paper/pfedgpa.toml --out runs/paper --table
"""

import argparse
import gc
import itertools
import math
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError

from hpcfed import methods
from hpcfed.config import RunConfig, Settings, check, resolve
from hpcfed.data import files
from hpcfed.errors import UserError, count, did_you_mean, one_line, unknown
from hpcfed.record.reading import RunRecord, mean_accuracy, read_seeds
from hpcfed.runtime.launcher import launched

CLOSE = 2.0
"""Points within which a baseline counts as reproduced."""
OWN = ("method", "dataset", "clients", "seed", "seeds", "out", "overwrite", "data_root", "device")
"""Options that neither the file nor --set may give, because the study does."""
ANYWHERE = ("out", "overwrite", "data_root", "download", "device")
"""Options that may differ between calls on one --out, because no figure depends on them."""


class Ablation(BaseModel):
    """A second table: what one method has judged at the end, by data set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = ""
    clients: str = ""
    finals: tuple[str, ...] = ()
    figures: dict[str, dict[str, float]] = {}


class Study(BaseModel):
    """What is in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    datasets: dict[str, dict[str, Any]]
    clients: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    common: dict[str, Any] = {}
    ours: str = ""
    """The paper's own method; the others are its baselines."""
    rival: str = ""
    """The baseline that it is compared with."""
    optional: tuple[str, ...] = ()
    """Data sets that are left out where their files are not there."""
    rows: dict[str, tuple[str, ...]] = {}
    """Finals that stand in the table for a method, in place of its accuracy after the last round."""
    figures: dict[str, dict[str, dict[str, float]]] = {}
    """The paper's: data set, method, clients."""
    ablation: Ablation = Ablation()

    def rows_of(self, method: str) -> tuple[str, ...]:
        return self.rows.get(method, (method,))

    def figure(self, dataset: str, clients: str, method: str) -> float | None:
        return self.figures.get(dataset, {}).get(method, {}).get(clients)


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
    """Per cent, of every seed: by the method's name after the last round, and by the name of every final."""
    seconds: float
    """From the first round to the end."""
    device: str


Outcomes = Mapping[tuple[str, str, str], Outcome]


def read_study(path: Path) -> Study:
    try:
        study = Study.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    except ValidationError as failure:
        first = failure.errors()[0]
        *_, key = first["loc"]
        guess = did_you_mean(str(key), [*Study.model_fields, *Ablation.model_fields])
        reason = f"unknown key{guess}" if first["type"] == "extra_forbidden" else first["msg"]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {reason}") from None
    figures, own = study.figures.values(), study.ablation
    named: dict[str, tuple[Mapping[str, Any], Sequence[str]]] = {
        "data set": (study.datasets, [*study.optional, *study.figures, *own.figures]),
        "method": (study.methods, [study.ours, study.rival, own.method, *study.rows, *itertools.chain(*figures)]),
        "number of clients": (study.clients, [own.clients, *(n for of in figures for row in of.values() for n in row)]),
    }
    for kind, (known, names) in named.items():  # a slip here would be a missing figure, without a word
        for name in names:
            if name and name not in known:
                raise UserError(f"{path}: {unknown(kind, name, known)}")
    return study


def plan(study: Study, options: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for, in order."""
    wanted = options.methods.split(",") if options.methods else list(study.methods)
    for method in wanted:
        if method not in study.methods:
            raise unknown("method", method, study.methods)
    changes: dict[str, str] = {}
    for word in options.set:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--set {word}: needs a value, as in --set rounds=3")
        changes[name.replace("-", "_")] = value
    every = list(itertools.product(study.datasets, study.clients, study.methods))
    chosen = [names for names in every if names[2] in wanted and fnmatchcase("/".join(names), options.only)]
    if not chosen:
        raise UserError(f"--only {options.only} leaves no cell; they have names such as {'/'.join(every[0])}")
    cells = [_cell(study, names, changes, options) for names in chosen]
    known = {name for cell in cells for name in cell.settings.flat()}
    for name in changes:
        if name not in known:
            raise UserError(f"--set {name}: unknown option{did_you_mean(name, known)}")
    return cells


def _cell(study: Study, names: tuple[str, str, str], changes: dict[str, str], options: argparse.Namespace) -> Cell:
    dataset, clients, method = names
    kind = methods.load(method).Options
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for table, given in {
        "common": study.common,
        f"datasets.{dataset}": study.datasets[dataset],
        f"clients.{clients}": study.clients[clients],
        f"methods.{method}": study.methods[method],
    }.items():
        values |= given
        sources |= {name: f"{options.study}: {table}.{name}" for name in given}
    for name, value in changes.items():
        if name in RunConfig.model_fields or name in kind.model_fields:  # what other methods have is not for this one
            values[name], sources[name] = value, f"--set {name}={value}"
    for name in OWN:
        if name in values:
            raise UserError(f"{sources[name]}: the study gives it to every cell itself")
    folder = options.out.joinpath(*names)
    values |= {"dataset": dataset, "clients": clients, "method": method, "out": folder, "overwrite": True}
    values |= {"seeds": options.seeds, "device": options.device, "data_root": options.data_root}
    sources |= {"clients": f"{options.study}: clients.{clients}", "seeds": f"--seeds {options.seeds}"}
    settings = resolve(values, sources, kind)
    return Cell(names, folder, settings, settings.config.seeds or ())


def runnable(cells: Sequence[Cell], study: Study) -> list[Cell]:
    """Without those whose data may be missing and is; refuses what cannot run, or would spoil what is there."""
    absent: dict[str, UserError] = {}
    for cell in cells:
        config = cell.settings.config
        try:
            files.require(config.dataset, root=config.root, download=config.download)
        except UserError as error:
            if config.dataset not in study.optional:
                raise
            absent[config.dataset] = error
            continue
        try:
            check(cell.settings, launched())
        except UserError as error:
            raise UserError(f"{cell}: {error}") from None
        _check_folder(cell)
    for dataset, reason in absent.items():
        print(f"{dataset} is left out: {reason}", flush=True)
    return [cell for cell in cells if cell.settings.config.dataset not in absent]


def _check_folder(cell: Cell) -> None:
    complete = _complete(cell)
    lost = sorted(set(complete) - set(cell.seeds))
    if lost and not set(cell.seeds) <= set(complete):
        raise UserError(f"{cell.folder} holds seed {lost[0]}, which a run would remove; name another --out")
    for seed, record in complete.items():
        for name, value in cell.settings.of_seed(seed).flat().items():
            had = record.config.get(name, value)
            if had != value and name not in ANYWHERE:
                raise UserError(f"{cell.folder} was run with {name} {had}, not {value}; name another --out")


def _complete(cell: Cell) -> dict[int, RunRecord]:
    return {record.facts["seed"]: record for record in read_seeds(cell.folder) if record.status == "complete"}


def outcome(cell: Cell) -> Outcome | None:
    """None unless every seed is complete."""
    complete = _complete(cell)
    if not set(cell.seeds) <= set(complete):
        return None
    records = [complete[seed] for seed in cell.seeds]
    accuracy = {cell.names[2]: [100 * record.last("accuracy") for record in records]}
    for final in records[0].finals:
        accuracy[final] = [100 * mean_accuracy(record.finals[final]) for record in records]
    seconds = max(float(record.facts["seconds"]) for record in records)
    return Outcome(accuracy, seconds, str(records[0].environment["ranks"][0]["device"]))


def go(cells: Sequence[Cell], study: Study, *, budget: float) -> int:
    """Runs what is not finished; the number of cells that failed."""
    failed, begin = 0, time.monotonic()
    with _data_read_once():
        for number, cell in enumerate(cells):
            started = time.monotonic()
            done, reason = outcome(cell), None
            if done is None and started - begin >= budget:
                print(f"--budget {budget:g} is spent; cells not looked at: {len(cells) - number}", flush=True)
                break
            there = done is not None
            if not there:
                reason = _attempt(cell)
                _clear()
                done = outcome(cell)
            failed += done is None
            text = f"failed: {reason}" if done is None else _texts(cell, study, done)
            seconds = "there already" if there else f"{time.monotonic() - started:.1f} s"
            print(f"{cell!s:28} {text}  {seconds}", flush=True)
    return failed


def _attempt(cell: Cell) -> str | None:
    """Runs a cell; the reason when it fails."""
    from hpcfed.run import run

    try:
        run(cell.settings)
    except UserError as error:
        return str(error)
    except SystemExit as end:  # the traceback has been shown, and is in the folder
        return one_line(end.__context__ or end)
    return None


def _clear() -> None:
    """Leaves nothing of a cell behind that the next one would stumble over, or whose memory it would miss."""
    import torch
    from torch import distributed

    from hpcfed.runtime.world import leave_groups

    if distributed.is_initialized():  # by a cell that failed
        leave_groups()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # so that a cell's peak memory is its own


@contextmanager
def _data_read_once() -> Iterator[None]:
    """All cells of a data set share its images in host memory; synthetic ones depend on the cell."""
    from hpcfed import assembly

    load = assembly.load
    kept: dict[str, Any] = {}

    def load_once(name: str, **how: Any) -> Any:
        if name == "synthetic":
            return load(name, **how)
        if name not in kept:
            kept.clear()
            kept[name] = load(name, **how)
        return kept[name]

    assembly.load = load_once
    try:
        yield
    finally:
        assembly.load = load


def _texts(cell: Cell, study: Study, done: Outcome) -> str:
    figure, texts = study.figure(*cell.names), []
    for row in study.rows_of(cell.names[2]):
        values = done.accuracy.get(row)
        label = "" if row == cell.names[2] else f"{row} "
        known = "" if figure is None or values is None else f" (paper {figure:.2f}, {mean(values) - figure:+.2f})"
        texts.append(f"{label}{_ours(values)}{known}")
    return "  ".join(texts)


def _ours(values: Sequence[float] | None) -> str:
    if values is None:
        return "–"
    error = f" ± {stdev(values) / math.sqrt(len(values)):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{error}"


def _entry(done: Outcome | None, row: str, figure: float | None) -> str:
    return _ours(None if done is None else done.accuracy.get(row)) + ("" if figure is None else f" ({figure:.2f})")


def print_tables(cells: Sequence[Cell], study: Study) -> None:
    done = {cell.names: found for cell in cells if (found := outcome(cell))}
    if not done:
        print("no cell is finished")
        return
    columns = dict.fromkeys((dataset, clients) for dataset, clients, _ in done)
    table = [["method", *map(", ".join, columns)]]
    for method in dict.fromkeys(cell.names[2] for cell in cells):
        for row in study.rows_of(method):
            entries = (_entry(done.get((*at, method)), row, study.figure(*at, method)) for at in columns)
            table.append([row, *entries])
    _print_table(table)
    own = study.ablation
    table = [[f"{own.method}, {own.clients} clients", *own.finals]]
    for dataset in study.datasets:
        if of := done.get((dataset, own.clients, own.method)):
            figures = own.figures.get(dataset, {})
            table.append([dataset, *(_entry(of, final, figures.get(final)) for final in own.finals)])
    if len(table) > 1:
        _print_table(table)
    devices = ", ".join(sorted({of.device for of in done.values()}))
    print(f"\n{count(len(done), 'cell')} in {sum(of.seconds for of in done.values()):.0f} s on {devices}")
    _print_verdict(done, study)


def _print_table(table: Sequence[Sequence[str]]) -> None:
    print()
    for line in (table[0], ["---", *["---:"] * (len(table[0]) - 1)], *table[1:]):
        print(f"| {' | '.join(line)} |")


def _print_verdict(done: Outcomes, study: Study) -> None:
    """How near the baselines are to the paper's, and whether the paper's method is ahead here too."""
    gaps = [
        abs(mean(of.accuracy[row]) - figure)
        for names, of in done.items()
        if names[2] != study.ours and (figure := study.figure(*names)) is not None
        for row in study.rows_of(names[2])
        if row in of.accuracy
    ]
    if gaps:
        print(f"baselines within {CLOSE:g} points of the paper: {sum(gap <= CLOSE for gap in gaps)} of {len(gaps)}")
    for row in study.rows_of(study.ours) if study.ours and study.rival else ():
        pairs = [
            (mean(of.accuracy[row]), mean(done[dataset, clients, study.rival].accuracy[study.rival]))
            for (dataset, clients, method), of in done.items()
            if method == study.ours and row in of.accuracy and (dataset, clients, study.rival) in done
        ]
        if pairs:
            ahead = sum(own > other for own, other in pairs)
            print(f"{row} above {study.rival}: in {ahead} of {count(len(pairs), 'cell')}")


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("study", type=Path, metavar="STUDY.toml")
    add("--out", type=Path, required=True, help="folder of all cells")
    add("--data-root", type=Path, help="folder of the data sets (default: $HPCFED_DATA, else ./data)")
    add("--only", default="*", metavar="PATTERN", help="cells whose DATASET/CLIENTS/METHOD fits the pattern")
    add("--methods", metavar="A,B", help="these methods alone")
    add("--seeds", default="0..2", metavar="LIST", help="0..4 or 0,3,7 (default: 0..2)")
    add(
        "--set", nargs="+", action="extend", default=[], metavar="OPTION=VALUE", help="options, which win over the file"
    )
    add("--budget", type=float, default=math.inf, metavar="SECONDS", help="no cell begins after so many seconds")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--table", action="store_true", help="run nothing; print the tables of what is finished")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    failed = 0
    try:
        options = _parse(arguments)
        study = read_study(options.study)
        cells = plan(study, options)
        if not options.table:
            if not launched().alone:
                raise UserError("a study is one process; start it without mpirun or srun")
            cells = runnable(cells, study)
            failed = go(cells, study, budget=options.budget)
        print_tables(cells, study)
    except UserError as error:
        print(f"paper: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("paper: interrupted", file=sys.stderr)
        return 130
    if failed:
        print(f"failed: {count(failed, 'cell')}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
