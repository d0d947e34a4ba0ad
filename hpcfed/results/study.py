"""Files that a study writes beside its runs: `plan.json` lists the trials to run,
`repeat-N.json` says how each of them went, and `study.h5` has all raw samples.

`study.h5` contains every run's `run.h5` whole, so it can answer any question about a
run. The file is made in memory and published like a run's own: a reader sees the old
one or the new one. It is gathered only after the first trial, or by the last job of a
submitted study; without the list, a reader could not tell what is still to come.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import isnan, nan
from pathlib import Path
from re import fullmatch
from typing import Any

import h5py
import numpy as np
from pydantic import TypeAdapter

from hpcfed.errors import UserError, one_line, printable
from hpcfed.results.as_json import parsed, plain, read_json
from hpcfed.results.folder import PLAN, POINTS, RECORD, records
from hpcfed.results.publish import publish
from hpcfed.results.reading import record_of
from hpcfed.results.run import RunRecord
from hpcfed.results.safe import Reader, check, check_file, readable, reading
from hpcfed.results.sandbox import check_heaps, try_out

FORMAT, SCHEMA = "hpcfed study", 1
TABLE = ("name", "status", "error", "command", "options")
"""Text columns about each trial."""
MOST_OUTCOME_BYTES = 2**20
MOST_LISTING_BYTES = 16 * 2**20
"""Largest outcome and list of trials to read."""
_DAMAGE = (OSError, KeyError, ValueError, RuntimeError)
"""Exceptions that opening a damaged record may raise."""
_TRIAL = r"(?!\.)[^/\0]{1,255}/repeat-[0-9]{1,4}"
"""A trial's name is also its folder, so it must not lead anywhere else."""


@dataclass(frozen=True)
class Outcome:
    """How a trial went."""

    status: str
    """`complete`, `failed` or, before its start and between attempts, `waiting`."""
    error: str = ""
    seconds: float = nan
    """Wall time of the processes that have run it, each going on from the last; NaN if
    the study was killed before the end of one.
    """
    command: str = ""
    """What runs it from its start."""

    def __str__(self) -> str:
        """Why it failed, or how long it took, if that is known."""
        if self.error:
            return self.error
        return self.status if isnan(self.seconds) else f"{self.seconds:.1f} s"


def read_outcome(path: Path) -> Outcome:
    """Read how a trial went from its file."""
    try:
        told: dict[str, Any] = read_json(path, dict[str, Any], MOST_OUTCOME_BYTES)
        if told["seconds"] is None:  # JSON has no NaN
            told["seconds"] = nan
        return TypeAdapter(Outcome).validate_python(told)
    except FileNotFoundError:
        return Outcome("waiting")
    # Somebody has put another file there.
    except (OSError, ValueError, KeyError) as error:
        reason = f"{path.name} cannot be read: {one_line(error)}"
        return Outcome("failed", reason)


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write down how a trial went."""
    # `plain` turns NaN seconds into null, because JSON has no NaN.
    content = json.dumps(plain(asdict(outcome)), indent=1)
    with writing(path):
        publish(content.encode(), path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a refusal of the disk into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; "
            "what is finished stays, start again later"
        ) from None


@dataclass(frozen=True)
class Listing:
    """The trials of a study by name, in the order in which they run."""

    title: str
    trials: list[str]
    host: str = ""
    """The machine whose process runs them, one after the other; empty: jobs do."""


def write_listing(out: Path, title: str, trials: Sequence[str], *, host: str) -> None:
    """Write the names of the trials that will run."""
    content = asdict(Listing(title, list(trials), host))
    with writing(out / PLAN):
        publish(json.dumps(content, indent=1).encode(), out / PLAN)


def read_listing(folder: Path) -> Listing:
    """Read the list of a study's trials; without one, list those that have a folder."""
    try:
        listing: Listing = read_json(folder / PLAN, Listing, MOST_LISTING_BYTES)
    # An older study has no list, or somebody has put another file there.
    except (OSError, ValueError):
        return Listing("", _begun(folder))
    safe = [name for name in listing.trials if fullmatch(_TRIAL, name)]
    return replace(listing, trials=safe)


def _begun(folder: Path) -> list[str]:
    names = set()
    for path in (folder / POINTS).glob("*/repeat-*"):
        name = f"{path.parent.name}/{path.stem}"
        if fullmatch(_TRIAL, name):
            names.add(name)
    return sorted(names)


@dataclass(frozen=True)
class TrialRecord:
    name: str
    outcome: Outcome
    options: dict[str, Any]
    runs: tuple[RunRecord, ...]
    """One for each seed."""


@dataclass(frozen=True)
class StudyRecord:
    path: Path
    title: str
    warmup: int
    """Rounds at the start of a run whose times do not count."""
    text: str
    """The study's file."""
    trials: tuple[TrialRecord, ...]
    unread: tuple[str, ...] = ()
    """Why some runs were left out."""


@dataclass(frozen=True)
class TrialSource:
    """A trial whose runs are to be gathered."""

    name: str
    folder: Path
    outcome: Outcome
    options: dict[str, Any]


def write_study(
    path: Path, *, title: str, warmup: int, text: str, trials: Sequence[TrialSource]
) -> None:
    """Combine all trials' runs in one file."""
    # In memory: HDF5 uses the path only as a name, until `publish` writes the file.
    with h5py.File(path, "w", driver="core", backing_store=False) as file:
        file.attrs.update(format=FORMAT, schema=SCHEMA, title=title, warmup=warmup)
        file["study"] = text
        _write_table(file, trials)
        for number, trial in enumerate(trials):
            for record in records(trial.folder):
                copy_run(record, file, number)
        file.flush()
        with writing(path):
            publish(file.id.get_file_image(), path)


def _write_table(file: h5py.File, trials: Sequence[TrialSource]) -> None:
    """Write what is known about each trial, as columns."""
    columns = {
        "name": [trial.name for trial in trials],
        "status": [trial.outcome.status for trial in trials],
        # HDF5's strings cannot hold a null character.
        "error": [printable(trial.outcome.error) for trial in trials],
        "command": [printable(trial.outcome.command) for trial in trials],
        "options": [json.dumps(trial.options, default=str) for trial in trials],
    }
    for column in TABLE:
        content = np.array(columns[column], dtype=h5py.string_dtype())
        file[f"trials/{column}"] = content
    times = [trial.outcome.seconds for trial in trials]
    seconds = file.create_dataset("trials/seconds", data=times)
    seconds.attrs.update(
        units="s",
        description="wall time of the trial's processes, with their starts and ends",
    )


def copy_run(source: Path, file: h5py.File, number: int) -> None:
    """Copy a trial's run, unless it is unreadable: its trial was recorded as failed."""
    group = f"runs/{number:05}"
    try:
        with _opened(source) as run:
            seed = int(run.attrs["seed"])
            run.copy(run["/"], file, f"{group}/seed-{seed}")
    except _DAMAGE:
        # Seeds copied before are useless without this one.
        file.pop(group, None)


@contextmanager
def _opened(source: Path) -> Iterator[h5py.File]:
    """Open a record as untrusted: no links, no pipes."""
    check_file(source)
    check_heaps(source)
    with h5py.File(source, "r") as run:
        check(run)
        yield run


def can_be_gathered(folder: Path) -> bool:
    """Tell whether a run has a record that can be copied into the study's file."""
    with suppress(*_DAMAGE), _opened(folder / RECORD):
        return True
    return False


def kept_alone(path: Path) -> dict[Path, Path]:
    """Return the folders of trials that a study.h5 has as complete and of which a run
    has no whole record any more, with that run's folder; none if the file cannot be read.
    """
    alone: dict[Path, Path] = {}
    # A missing or damaged file keeps nothing.
    with suppress(UserError):
        try_out([path])
        with readable(path, "a study"), reading(path) as file:
            columns = file.texts("trials/name"), file.texts("trials/status")
            for number, (name, status) in enumerate(zip(*columns, strict=True)):
                group, folder = f"runs/{number:05}", path.parent / POINTS / name
                known = fullmatch(_TRIAL, name) and status == "complete"
                if not known or group not in file or can_be_gathered(folder):
                    continue
                for seed in file.within(group).names():
                    if not can_be_gathered(folder / seed):
                        # A run without --seeds is in the trial's own folder.
                        single = (folder / RECORD).exists() or not records(folder)
                        alone[folder] = folder if single else folder / seed
    return alone


def read_gathered(path: Path) -> StudyRecord:
    """Read a study.h5; anything else is a one-line error."""
    with readable(path, "a study"), reading(path) as file:
        facts = file.facts()
        if facts.get("format") != FORMAT or facts["schema"] > SCHEMA:
            raise ValueError("it was written by another program, or by a newer hpcfed")
        title = facts["title"]
        warmup = facts["warmup"]
        whole = isinstance(warmup, int) and warmup >= 0
        if not isinstance(title, str) or not whole:
            raise ValueError("its title or its warmup is not valid")
        unread: list[str] = []
        trials = tuple(_read_trials(file, path, unread))
        text = file.text("study")
        return StudyRecord(path, title, warmup, text, trials, tuple(unread))


def _read_trials(file: Reader, path: Path, unread: list[str]) -> Iterator[TrialRecord]:
    """Read all trials; `unread` gets why one with an unreadable run has no runs."""
    columns = {column: file.texts(f"trials/{column}") for column in TABLE}
    number_of_trials = len(columns["name"])
    seconds = file.numbers("trials/seconds", (number_of_trials,))
    rows = zip(seconds.tolist(), *columns.values(), strict=True)
    for number, row in enumerate(rows):
        took, name, status, error, command, options = row  # in the order of TABLE
        outcome = Outcome(status, error, took, command)
        runs: tuple[RunRecord, ...] = ()
        try:
            with readable(path, f"a study: trial {name}"):
                folder = path.parent / f"trial {name}"  # a name for people only
                group = f"runs/{number:05}"
                runs = tuple(_read_runs(file, group, folder))
        except UserError as reason:
            unread.append(str(reason))
            outcome = replace(outcome, status="unreadable")
        yield TrialRecord(name, outcome, parsed(options), runs)


def _read_runs(file: Reader, group: str, folder: Path) -> Iterator[RunRecord]:
    """Read the runs of a trial, one for each seed."""
    # A waiting or failed trial has no group.
    if group in file:
        seeds = file.within(group)
        for seed in seeds.names():
            yield record_of(folder / seed, seeds.within(seed))
