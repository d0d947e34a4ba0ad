"""`study.h5`: all raw samples of a study in one file, and reading it back.

Every run's `run.h5` is in it whole, so whatever can be asked of a run can be asked of
the study alone. The file is made in memory and published like a run's own: a reader
sees the old one or the new one.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from pydantic import TypeAdapter

from hpcfed.errors import UserError, one_line, printable
from hpcfed.experiment.stored import read_run, record_of
from hpcfed.record.json_values import parsed, plain
from hpcfed.record.publish import publish
from hpcfed.record.run import RunRecord
from hpcfed.record.safe import Reader, check, check_file, readable, reading
from hpcfed.study.plan import Study, Trial

FORMAT, SCHEMA = "hpcfed study", 1
TABLE = ("name", "status", "error", "command", "options")
"""What is said of every trial, as text."""


@dataclass(frozen=True)
class Outcome:
    """How a trial went; `repeat-N.json` beside the run's folder."""

    status: str
    """`complete`, `failed` or, before it was started, `waiting`."""
    error: str = ""
    seconds: float = nan
    """Wall time of the whole process, with its start and end; NaN where nobody saw its
    end.
    """
    command: str = ""


_OUTCOME = TypeAdapter(Outcome)


@dataclass(frozen=True)
class TrialRecord:
    name: str
    outcome: Outcome
    options: dict[str, Any]
    runs: tuple[RunRecord, ...]
    """One for every seed."""


@dataclass(frozen=True)
class StudyRecord:
    path: Path
    title: str
    warmup: int
    text: str
    """The study's file."""
    trials: tuple[TrialRecord, ...]
    unread: tuple[str, ...] = ()
    """Why runs of it were left out."""


MOST_OUTCOME = 2**20
"""Bytes of an outcome that is read."""


def outcome_of(trial: Trial) -> Outcome:
    """What is known of a trial."""
    try:
        check_file(trial.outcome, MOST_OUTCOME)
        told = json.loads(trial.outcome.read_text())
        if told["seconds"] is None:
            told["seconds"] = nan
        return _OUTCOME.validate_python(told)
    except FileNotFoundError:
        return Outcome("waiting")
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
    ) as error:  # somebody has put something else there
        return Outcome(
            "failed", f"{trial.outcome.name} cannot be read: {one_line(error)}"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within, a full disk or a folder that cannot be written to is one line that names
    the file.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; what is finished stays, start again later"
        ) from None


def write_outcome(trial: Trial, outcome: Outcome) -> None:
    with writing(trial.outcome):
        publish(json.dumps(plain(asdict(outcome)), indent=1).encode(), trial.outcome)


def finished(trial: Trial) -> list[RunRecord] | None:
    """The runs of a trial, one for every seed; None unless all are there and complete."""
    folders = [trial.folder / f"seed-{seed}" for seed in trial.seeds]
    folders = folders if trial.point.settings.config.seeds else [trial.folder]
    try:
        records = [read_run(folder) for folder in folders]
    except UserError:
        return None
    return records if all(record.status == "complete" for record in records) else None


def write_study(path: Path, study: Study, text: str, trials: Sequence[Trial]) -> None:
    """Brings all trials' runs together."""
    with h5py.File(path, "w", driver="core", backing_store=False) as file:
        file.attrs.update(
            format=FORMAT, schema=SCHEMA, title=study.title, warmup=study.warmup
        )
        file["study"] = text
        said = [_said(trial) for trial in trials]
        for column in TABLE:
            file[f"trials/{column}"] = np.array(
                [row[column] for row in said], dtype=h5py.string_dtype()
            )
        seconds = file.create_dataset(
            "trials/seconds", data=[row["seconds"] for row in said]
        )
        seconds.attrs.update(
            units="s",
            description="wall time of the trial's process, with its start and end",
        )
        for number, trial in enumerate(trials):
            for source in sorted(
                [*trial.folder.glob("run.h5"), *trial.folder.glob("seed-*/run.h5")]
            ):
                _take(source, file, number)
        file.flush()
        with writing(path):
            publish(file.id.get_file_image(), path)


def _said(trial: Trial) -> dict[str, Any]:
    outcome = outcome_of(trial)
    about = {
        "name": str(trial),
        "options": json.dumps(
            {**trial.point.given, "ranks": trial.point.ranks}, default=str
        ),
    }
    texts = {
        "error": printable(outcome.error),
        "command": printable(outcome.command),
    }  # HDF5 holds no null character
    return asdict(outcome) | texts | about


def _take(source: Path, file: h5py.File, number: int) -> None:
    """Copies a run; one that cannot be read has been recorded as failed, and stays
    where it is.
    """
    try:
        check_file(source)
        with h5py.File(source, "r") as run:
            check(run)
            seed = int(run.attrs["seed"])
            run.copy(run["/"], file, f"runs/{number:05}/seed-{seed}")
    except (OSError, KeyError, ValueError, RuntimeError):
        file.pop(f"runs/{number:05}", None)


def read_gathered(path: Path) -> StudyRecord:
    """Reads a study.h5; anything else is one line for the user."""
    with readable(path, "a study"), reading(path) as file:
        facts = file.facts()
        if facts.get("format") != FORMAT or facts["schema"] > SCHEMA:
            raise ValueError("it was not written by this hpcfed, or by a newer one")
        title, warmup = facts["title"], facts["warmup"]
        if not isinstance(title, str) or not isinstance(warmup, int) or warmup < 0:
            raise ValueError("its title or warmup is not one")
        unread: list[str] = []
        every = tuple(_trials(file, path, unread))
        return StudyRecord(
            path, title, warmup, file.text("study"), every, tuple(unread)
        )


def _trials(file: Reader, path: Path, unread: list[str]) -> Iterator[TrialRecord]:
    """Every trial; one of whose runs cannot be read has none, and `unread` says why."""
    columns = {column: file.texts(f"trials/{column}") for column in TABLE}
    every = file.numbers("trials/seconds", (len(columns["name"]),)).tolist()
    for number, (seconds, *row) in enumerate(
        zip(every, *columns.values(), strict=True)
    ):
        name, status, error, command, options = row
        outcome = Outcome(status, error, seconds, command)
        records: tuple[RunRecord, ...] = ()
        try:
            with readable(path, f"a study: trial {name}"):
                records = tuple(
                    _runs(file, f"runs/{number:05}", path.parent / f"trial {name}")
                )
        except UserError as reason:
            unread.append(str(reason))
            outcome = replace(outcome, status="unreadable")
        yield TrialRecord(name, outcome, parsed(options), records)


def _runs(file: Reader, group: str, folder: Path) -> Iterator[RunRecord]:
    """The runs of a trial, one for every seed."""
    if group in file:
        seeds = file.within(group)
        for seed in seeds.names():
            yield record_of(folder / seed, seeds.within(seed))
