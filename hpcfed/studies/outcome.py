"""How a trial went: `repeat-N.json`, beside the folder of its run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path

from pydantic import TypeAdapter

from hpcfed.errors import UserError, one_line
from hpcfed.results.folder import seed_folder
from hpcfed.results.json_values import plain
from hpcfed.results.publish import publish
from hpcfed.results.run import RunRecord
from hpcfed.results.safe import check_file
from hpcfed.results.stored import read_run
from hpcfed.studies.plan import Trial

MOST_BYTES = 2**20
"""Largest outcome that is read."""


@dataclass(frozen=True)
class Outcome:
    """How a trial went."""

    status: str
    """`complete`, `failed` or, before it was started, `waiting`."""
    error: str = ""
    seconds: float = nan
    """Wall time of the whole process, with its start and end; NaN where nobody saw its
    end.
    """
    command: str = ""

    def __str__(self) -> str:
        """Why it failed, or how long it took."""
        return self.error or f"{self.seconds:.1f} s"


_OUTCOME = TypeAdapter(Outcome)


def outcome_of(trial: Trial) -> Outcome:
    """Read what is known of a trial."""
    return read_outcome(trial.outcome)


def read_outcome(path: Path) -> Outcome:
    """Read how a trial went from its file."""
    try:
        check_file(path, MOST_BYTES)
        told = json.loads(path.read_text())
        if told["seconds"] is None:  # JSON has no NaN
            told["seconds"] = nan
        return _OUTCOME.validate_python(told)
    except FileNotFoundError:
        return Outcome("waiting")
    # Somebody has put something else there.
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{path.name} cannot be read: {one_line(error)}"
        return Outcome("failed", reason)


def write_outcome(trial: Trial, outcome: Outcome) -> None:
    """Write down how a trial went."""
    # `plain` makes null of NaN seconds, which JSON does not have.
    content = json.dumps(plain(asdict(outcome)), indent=1)
    with writing(trial.outcome):
        publish(content.encode(), trial.outcome)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within, a full disk or a folder that cannot be written to is one line that names
    the file.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; "
            "what is finished stays, start again later"
        ) from None


def finished(trial: Trial) -> list[RunRecord] | None:
    """Read the runs of a trial, one for every seed; None unless all are there and
    complete.
    """
    # No run yet, or one that cannot be read: either way the trial must run.
    try:
        records = [read_run(folder) for folder in run_folders(trial)]
    except UserError:
        return None
    complete = all(record.status == "complete" for record in records)
    return records if complete else None


def run_folders(trial: Trial) -> list[Path]:
    """Return where the runs of a trial belong: seeds of one run have own folders."""
    if trial.point.settings.config.seeds is None:
        return [trial.folder]
    return [seed_folder(trial.folder, seed) for seed in trial.seeds]
