"""A paper's tables, computed anew and set beside its figures.

A study file names data sets, numbers of clients (or columns of any kind, such as
attacks) and methods, each with its options. Every combination, or those that the file's
`cells` leave, is a cell: one run of all seeds at once, in the folder
OUT/DATASET/CLIENTS/METHOD. Cells whose seeds are all complete are not run again, so a
study that was stopped goes on where it was. By SIGTERM, SIGUSR2 or Ctrl-C the cells at
work end their round, the exit code is 75, and they go on after that round. A cell that
fails is told in one line, the others go on, and the exit code is 1; a mistake in the
file or in the flags ends everything before it begins, with 2.

After every cell comes a line: what the study measures (accuracy of the clients on their
own test data unless it says otherwise; mean ± standard error over seeds), the paper's,
the difference, seconds. At the end come the tables, in Markdown: `ours ± error
(paper)`.

examples:
  python benchmarks/paper.py benchmarks/paper/pfedgpa.toml --data-root data --out runs/paper
  python benchmarks/paper.py benchmarks/paper/pfedgpa.toml --out runs/paper --only 'cifar10/100/*' --budget 540
  python benchmarks/paper.py benchmarks/paper/pfedgpa.toml --out runs/try --methods fedavg,pfedgpa --seeds 0 \\
      --set rounds=3 bank_rounds=3
  python benchmarks/paper.py benchmarks/paper/pfedgpa.toml --out runs/paper --table
  python benchmarks/paper.py benchmarks/paper/genfed.toml --out runs/genfed --only 'mnist/*' --seeds 0..4 --jobs 8
"""

import argparse
import gc
import glob
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean, stdev
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from hpcfed import methods
from hpcfed.cli import parse_run
from hpcfed.config import (
    RunConfig,
    Settings,
    check,
    check_unchanged,
    load_toml,
    resolve,
    suggest_option,
)
from hpcfed.data import files
from hpcfed.errors import UserError, count, one_line, unknown
from hpcfed.record.reading import RunRecord, mean_accuracy, read_seeds
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.signals import SIGNALS, STOPPED, Stop

CLOSE = 2.0
"""Points within which a baseline counts as reproduced."""
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


Figures = dict[str, dict[str, dict[str, float]]]
"""A paper's: data set, method, column."""


class Stopped(Exception):
    """The study was asked to stop."""


class Measure(NamedTuple):
    title: str
    value: Callable[[RunRecord], float]
    """Of one seed; NaN when there is none."""
    digits: int = 2


def _best(record: RunRecord) -> float:
    """Of the global model, or of the mean client where there is none."""
    return next(
        (
            100 * v
            for v in map(record.best, ("global_accuracy", "accuracy"))
            if not math.isnan(v)
        ),
        math.nan,
    )


def _rounds_to_target(record: RunRecord) -> float:
    reached = record.reached()
    return math.nan if reached is None else float(reached.rounds)


MEASURES = {
    "accuracy": Measure(
        "last accuracy of clients, %", lambda record: 100 * record.last("accuracy")
    ),
    "best": Measure("best accuracy, %", _best),
    "rounds": Measure("rounds to the target accuracy", _rounds_to_target, digits=0),
    "comm": Measure(
        "sent by clients, GiB",
        lambda record: float(record.rounds["bytes_up"].sum()) / 2**30,
    ),
    "given": Measure(
        "sent to a new client to begin with, MiB",
        lambda record: record.newcomer_bytes / 2**20,
    ),
    "joining": Measure(
        "accuracy of new clients as they join, %",
        lambda record: 100 * record.newcomers_first("method"),
    ),
    "joined": Measure(
        "accuracy of new clients over their last ten updates, %",
        lambda record: 100 * record.newcomers_last("method"),
    ),
}


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
    methods: dict[str, dict[str, Any]]
    """By the name of a row; the method is the key `method`, or the row's own name."""
    clients: dict[str, dict[str, Any]] = {}
    columns: dict[str, dict[str, Any]] = {}
    """In place of numbers of clients: any names, with any options."""
    common: dict[str, Any] = {}
    cells: tuple[str, ...] = ("*",)
    """Patterns, of which a cell's DATASET/CLIENTS/METHOD must fit one."""
    measures: tuple[
        Literal["accuracy", "best", "rounds", "comm", "given", "joining", "joined"], ...
    ] = ("accuracy",)
    """What the tables show, one after the other; `figures` belong to the first."""
    ours: tuple[str, ...] = ()
    """The paper's own methods; the others are its baselines."""
    rival: str = ""
    """The baseline that it is compared with."""
    optional: tuple[str, ...] = ()
    """Data sets that are left out where their files are not there."""
    rows: dict[str, tuple[str, ...]] = {}
    """Finals that stand in the table for a method, in place of its accuracy after the
    last round.
    """
    figures: Figures = {}
    further_figures: dict[str, Figures] = {}
    """Of the other measures."""
    ablation: Ablation = Ablation()

    def rows_of(self, method: str) -> tuple[str, ...]:
        return self.rows.get(method, (method,))

    @field_validator("ours", mode="before")
    @classmethod
    def _several(cls, ours: Any) -> Any:
        return (ours,) if isinstance(ours, str) else ours

    @property
    def across(self) -> dict[str, dict[str, Any]]:
        """What tables have beside each other for a data set."""
        return self.columns or self.clients

    def figure(
        self, dataset: str, clients: str, method: str, *, measure: str = ""
    ) -> float | None:
        figures = (
            self.further_figures.get(measure, {})
            if measure in self.measures[1:]
            else self.figures
        )
        return figures.get(dataset, {}).get(method, {}).get(clients)


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


def read_study(path: Path) -> Study:
    try:
        study = Study.model_validate(load_toml(path))
    except ValidationError as failure:
        first = failure.errors()[0]
        *_, key = first["loc"]
        guess = suggest_option(str(key), [*Study.model_fields, *Ablation.model_fields])
        reason = (
            f"unknown key{guess}"
            if first["type"] == "extra_forbidden"
            else first["msg"]
        )
        raise UserError(
            f"{path}: {'.'.join(map(str, first['loc']))}: {reason}"
        ) from None
    if bool(study.clients) == bool(study.columns):
        raise UserError(
            f"{path}: a study has tables [clients.N], or [columns.NAME], and not both"
        )
    own = study.ablation
    figures = [
        of
        for every in (study.figures, *study.further_figures.values())
        for of in every.values()
    ]
    named: dict[str, tuple[Mapping[str, Any], Sequence[str]]] = {
        "data set": (study.datasets, [*study.optional, *study.figures, *own.figures]),
        "method": (
            study.methods,
            [
                *study.ours,
                study.rival,
                own.method,
                *study.rows,
                *itertools.chain(*figures),
            ],
        ),
        "number of clients" if study.clients else "column": (
            study.across,
            [own.clients, *(n for of in figures for row in of.values() for n in row)],
        ),
    }
    for kind, (
        known,
        names,
    ) in named.items():  # a slip here would be a missing figure, without a word
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
    changes = {
        name.replace("-", "_"): value
        for name, value in _pairs("--set", options.set, "rounds=3").items()
    }
    sources = _pairs("--data", options.data, "svhn=file:svhn.npz")
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
        _cell(study, names, changes, sources.get(names[0], names[0]), options)
        for names in chosen
    ]
    known = {name for cell in cells for name in cell.settings.flat()}
    for name in changes:
        if name not in known:
            raise UserError(
                f"--set {name}: unknown option{suggest_option(name, known)}"
            )
    return cells


def _pairs(flag: str, words: Sequence[str], example: str) -> dict[str, str]:
    pairs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{flag} {word}: needs a value, as in {flag} {example}")
        pairs[name] = value
    return pairs


def _cell(
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
        _check_folder(cell)
    for dataset, reason in absent.items():
        print(f"{dataset} is left out: {reason}", flush=True)
    return [cell for cell in cells if cell.names[0] not in absent]


def _check_folder(cell: Cell) -> None:
    complete = _complete(cell)
    lost = sorted(set(complete) - set(cell.seeds))
    if lost and not set(cell.seeds) <= set(complete):
        raise UserError(
            f"{cell.folder} holds seed {lost[0]}, which a run would remove; name another --out"
        )
    for seed, record in complete.items():
        check_unchanged(cell.folder, record.config, cell.settings.of_seed(seed).flat())


def _complete(cell: Cell) -> dict[int, RunRecord]:
    return {
        record.facts["seed"]: record
        for record in read_seeds(cell.folder)
        if record.status == "complete"
    }


def outcome(cell: Cell, study: Study) -> Outcome | None:
    """None unless every seed is complete."""
    complete = _complete(cell)
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


def go(cells: Sequence[Cell], study: Study, options: argparse.Namespace) -> int:
    """Runs what is not finished; the number of cells that failed."""
    begin, children = time.monotonic(), Children(options)
    attempt = children.attempt_here if options.jobs == 1 else children.attempt

    def settled(cell: Cell) -> bool | None:
        """Whether the cell is finished now; None if there was no time left for it."""
        started, done, reason = time.monotonic(), outcome(cell, study), None
        there = done is not None
        if not there:
            if started - begin >= options.budget or children.stopping:
                return None
            reason = attempt(cell)
            done = outcome(cell, study)
            if done is None and children.stopping:
                return None
        text = f"failed: {reason}" if done is None else _texts(cell, study, done)
        seconds = "there already" if there else f"{time.monotonic() - started:.1f} s"
        print(f"{cell!s:28} {text}  {seconds}", flush=True)
        return done is not None

    if options.jobs == 1:
        with children.listening(), _data_read_once():
            results = [settled(cell) for cell in cells]
    else:
        with children.listening(), ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(settled, cells))
    if children.stopping and None in results:
        raise Stopped
    if left := results.count(None):
        print(f"--budget {options.budget:g} is spent; cells left: {left}", flush=True)
    return results.count(False)


class Children:
    """Cells in processes of their own, which are asked to stop when the study is."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._at_work: set[subprocess.Popen[str]] = set()
        self.stopping = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """A second Ctrl-C ends them as they are."""
        at_once = self.stopping and number == signal.SIGINT
        self.stopping = True
        for child in list(self._at_work):
            child.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)
        if at_once:
            raise KeyboardInterrupt

    def attempt_here(self, cell: Cell) -> str | None:
        """Runs a cell in this process; the reason when it fails."""
        stop = Stop()
        try:
            return _attempt(cell, stop)
        finally:
            self.stopping = (
                self.stopping or stop.asked
            )  # perhaps in the cell's last round
            _clear()

    def attempt(self, cell: Cell) -> str | None:
        """Runs a cell; the reason when it fails."""
        options = self._options
        words = [
            str(options.study),
            "--out",
            str(options.out),
            "--only",
            glob.escape(str(cell)),
        ]
        changes = [
            word
            for word in options.set
            if word.partition("=")[0].replace("-", "_") in cell.settings.flat()
        ]
        words += [
            "--seeds",
            options.seeds,
            "--device",
            options.device,
            *(["--set", *changes] if changes else []),
        ]
        words += ["--data-root", str(options.data_root)] if options.data_root else []
        words += ["--data", *options.data] if options.data else []
        threads = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // options.jobs))
        }
        child = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=threads | os.environ,
            start_new_session=True,  # Ctrl-C is for the study alone, which asks them in turn
        )
        self._at_work.add(child)
        if self.stopping:  # meanwhile
            child.terminate()
        out, err = child.communicate()
        self._at_work.discard(child)
        self.stopping = self.stopping or child.returncode == STOPPED
        if not child.returncode:
            return None
        told = [
            line.partition("failed: ")[2]
            for line in out.splitlines()
            if line.startswith(f"{cell} ")
        ]
        return (
            "".join(told)
            or (err.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        )


def _attempt(cell: Cell, stop: Stop) -> str | None:
    """Runs a cell, or goes on with it; the reason when it fails."""
    from hpcfed.experiment.loop import run

    try:
        run(_begun(cell) or cell.settings, stop)
    except UserError as error:
        return str(error)
    except SystemExit as end:
        if end.code == STOPPED:
            raise Stopped from None
        return one_line(
            end.__context__ or end
        )  # the traceback has been shown, and is in the folder
    return None


def _begun(cell: Cell) -> Settings | None:
    """Settings that go on with the cell where it was stopped; None where there is
    nothing to go on with.
    """
    there = {record.facts["seed"]: record for record in read_seeds(cell.folder)}
    states = {record.status for record in there.values()}
    if (
        set(there) != set(cell.seeds)
        or "stopped" not in states
        or states - {"stopped", "complete"}
    ):
        return None
    try:
        for seed, record in there.items():
            check_unchanged(
                cell.folder, record.config, cell.settings.of_seed(seed).flat()
            )
    except UserError:
        return None
    return parse_run(["--resume", str(cell.folder)])


def _clear() -> None:
    """Leaves nothing of a cell behind that the next one would stumble over, or whose
    memory it would miss.
    """
    import torch

    from hpcfed.runtime import process_group

    process_group.leave()  # a cell that failed has not
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # so that a cell's peak memory is its own


@contextmanager
def _data_read_once() -> Iterator[None]:
    """All cells of a data set share its images in host memory; synthetic ones depend on
    the cell.
    """
    from hpcfed.experiment import assemble

    load = assemble.load
    kept: dict[str, Any] = {}

    def load_once(name: str, **how: Any) -> Any:
        if name == "synthetic":
            return load(name, **how)
        if name not in kept:
            kept.clear()
            kept[name] = load(name, **how)
        return kept[name]

    assemble.load = load_once
    try:
        yield
    finally:
        assemble.load = load


def _texts(cell: Cell, study: Study, done: Outcome) -> str:
    figure, texts = study.figure(*cell.names), []
    for row in study.rows_of(cell.names[2]):
        values = done.accuracy.get(row)
        label = "" if row == cell.names[2] else f"{row} "
        known = (
            ""
            if figure is None or values is None
            else f" (paper {figure:.2f}, {mean(values) - figure:+.2f})"
        )
        texts.append(f"{label}{_ours(values)}{known}")
    return "  ".join(texts)


def _ours(values: Sequence[float] | None, digits: int = 2) -> str:
    if values is None:
        return "–"
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "never"
    error = (
        f" ± {stdev(known) / math.sqrt(len(known)):.{digits}f}"
        if len(known) > 1
        else ""
    )
    missing = (
        ""
        if len(known) == len(values)
        else f", {len(known)} of {count(len(values), 'seed')}"
    )
    return f"{mean(known):.{digits}f}{error}{missing}"


def _entry(
    values: Sequence[float] | None, figure: float | None, digits: int = 2
) -> str:
    return _ours(values, digits) + ("" if figure is None else f" ({figure:.{digits}f})")


def print_tables(cells: Sequence[Cell], study: Study) -> None:
    done = {cell.names: found for cell in cells if (found := outcome(cell, study))}
    if not done:
        print("no cell is finished")
        return
    asked = list(dict.fromkeys(cell.names[2] for cell in cells))
    for measure in study.measures:
        _print_measure(measure, asked, done, study)
    own = study.ablation
    table = [[f"{own.method}, {own.clients} clients", *own.finals]]
    for dataset in study.datasets:
        if of := done.get((dataset, own.clients, own.method)):
            figures = own.figures.get(dataset, {})
            table.append(
                [
                    dataset,
                    *(
                        _entry(of.accuracy.get(name), figures.get(name))
                        for name in own.finals
                    ),
                ]
            )
    if len(table) > 1:
        _print_table(table)
    devices = ", ".join(sorted({of.device for of in done.values()}))
    print(
        f"\n{count(len(done), 'cell')} in "
        f"{sum(of.seconds for of in done.values()):.0f} s on {devices}"
    )
    _print_verdict(done, study)


def _print_measure(
    measure: str, asked: Sequence[str], done: Outcomes, study: Study
) -> None:
    """A table of what is finished; its first measure also for what stands for a method
    in its place.
    """
    columns = dict.fromkeys((dataset, column) for dataset, column, _ in done)
    title, _, digits = MEASURES[measure]
    table = [
        ["method" if len(study.measures) == 1 else title, *map(", ".join, columns)]
    ]
    first = measure == study.measures[0]
    for method in asked:
        for row in study.rows_of(method) if first else (method,):
            entries = []
            for at in columns:
                of, figure = (
                    done.get((*at, method)),
                    study.figure(*at, method, measure=measure),
                )
                values = (
                    None
                    if of is None
                    else of.accuracy.get(row)
                    if first
                    else of.further[measure]
                )
                entries.append(_entry(values, figure, digits))
            table.append([row, *entries])
    _print_table(table)


def _print_table(table: Sequence[Sequence[str]]) -> None:
    print()
    for line in (table[0], ["---", *["---:"] * (len(table[0]) - 1)], *table[1:]):
        print(f"| {' | '.join(line)} |")


def _print_verdict(done: Outcomes, study: Study) -> None:
    """How near the baselines are to the paper's, and whether the paper's method is
    ahead here too.
    """
    gaps = [
        abs(mean(of.accuracy[row]) - figure)
        for names, of in done.items()
        if names[2] not in study.ours and (figure := study.figure(*names)) is not None
        for row in study.rows_of(names[2])
        if row in of.accuracy
    ]
    if gaps:
        print(
            f"baselines within {CLOSE:g} points of the paper: "
            f"{sum(gap <= CLOSE for gap in gaps)} of {len(gaps)}"
        )
    own = [
        (method, row)
        for method in study.ours
        for row in study.rows_of(method)
        if study.rival
    ]
    for ours, row in own:
        pairs = [
            (
                mean(of.accuracy[row]),
                mean(done[dataset, clients, study.rival].accuracy[study.rival]),
            )
            for (dataset, clients, method), of in done.items()
            if method == ours
            and row in of.accuracy
            and (dataset, clients, study.rival) in done
        ]
        if pairs:
            ahead = sum(own > other for own, other in pairs)
            print(
                f"{row} above {study.rival}: in {ahead} of {count(len(pairs), 'cell')}"
            )


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _positive(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"{word} is no number from 1 on")
    return int(word)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("study", type=Path, metavar="STUDY.toml")
    add("--out", type=Path, required=True, help="folder of all cells")
    add(
        "--data-root",
        type=Path,
        help="folder of the data sets (default: $HPCFED_DATA, else ./data)",
    )
    add(
        "--data",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=DATASET",
        help="what stands for a data set of the study, such as a part of it: svhn=file:svhn-part.npz",
    )
    add(
        "--only",
        default="*",
        metavar="PATTERN",
        help="cells whose DATASET/CLIENTS/METHOD fits the pattern",
    )
    add("--methods", metavar="A,B", help="these methods alone")
    add("--seeds", default="0..2", metavar="LIST", help="0..4 or 0,3,7 (default: 0..2)")
    add(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="OPTION=VALUE",
        help="options, which win over the file",
    )
    add(
        "--budget",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="no cell begins after so many seconds",
    )
    add(
        "--jobs",
        type=_positive,
        default=1,
        metavar="N",
        help="so many cells at once, each in a process of its own; on a GPU start nvidia-cuda-mps-control -d before, "
        "or they take turns (default: 1)",
    )
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add(
        "--table",
        action="store_true",
        help="run nothing; print the tables of what is finished",
    )
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
                raise UserError(
                    "a study is one process; start it without mpirun or srun"
                )
            cells = runnable(cells, study)
            failed = go(cells, study, options)
        print_tables(cells, study)
    except UserError as error:
        print(f"paper: {error}", file=sys.stderr)
        return 2
    except Stopped:
        print("paper: stopped; start it again to go on", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print("paper: interrupted", file=sys.stderr)
        return 130
    if failed:
        print(f"failed: {count(failed, 'cell')}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
