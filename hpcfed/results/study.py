"""`study.h5`: all raw samples of a study in one file, and reading it back.

It contains every run's `run.h5` whole, so it can answer any question about a run. The
file is made in memory and published like a run's own: a reader sees the old one or the
new one.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfed.errors import UserError, printable
from hpcfed.results.folder import records
from hpcfed.results.json_values import parsed
from hpcfed.results.publish import publish
from hpcfed.results.run import RunRecord
from hpcfed.results.safe import Reader, check, check_file, readable, reading
from hpcfed.results.stored import record_of
from hpcfed.results.trials import Outcome, writing

FORMAT, SCHEMA = "hpcfed study", 1
TABLE = ("name", "status", "error", "command", "options")
"""Text columns about each trial."""


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
        description="wall time of the trial's process, with its start and end",
    )


def copy_run(source: Path, file: h5py.File, number: int) -> None:
    """Copy a trial's run into the study's file. Leave out a run that cannot be read:
    its trial has been recorded as failed.
    """
    group = f"runs/{number:05}"
    try:
        # Treated as untrusted: no links, no pipes.
        check_file(source)
        with h5py.File(source, "r") as run:
            check(run)
            seed = int(run.attrs["seed"])
            run.copy(run["/"], file, f"{group}/seed-{seed}")
    except (OSError, KeyError, ValueError, RuntimeError):
        # Seeds copied before are useless without this one.
        file.pop(group, None)


def read_gathered(path: Path) -> StudyRecord:
    """Read a study.h5; anything else is a one-line error."""
    with readable(path, "a study"), reading(path) as file:
        facts = file.facts()
        if facts.get("format") != FORMAT or facts["schema"] > SCHEMA:
            raise ValueError("it was not written by this hpcfed, or by a newer one")
        title = facts["title"]
        warmup = facts["warmup"]
        whole = isinstance(warmup, int) and warmup >= 0
        if not isinstance(title, str) or not whole:
            raise ValueError("its title or warmup is not one")
        unread: list[str] = []
        trials = tuple(_read_trials(file, path, unread))
        text = file.text("study")
        return StudyRecord(path, title, warmup, text, trials, tuple(unread))


def _read_trials(file: Reader, path: Path, unread: list[str]) -> Iterator[TrialRecord]:
    """Read all trials. If one of its runs cannot be read, a trial has no runs, and
    `unread` gets the reason.
    """
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
