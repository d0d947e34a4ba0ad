"""Files that a study writes beside its runs: `plan.json` lists the trials to run, and
`repeat-N.json` says how each of them went.

`study.h5` is gathered only after the first trial, or by the last job of a submitted
study. Without the list, a reader could not tell what is still to come.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from re import fullmatch

from pydantic import TypeAdapter

from hpcfed.errors import UserError, one_line
from hpcfed.results.folder import PLAN, POINTS
from hpcfed.results.json_values import plain
from hpcfed.results.publish import publish
from hpcfed.results.safe import check_file

MOST_OUTCOME_BYTES = 2**20
MOST_LISTING_BYTES = 16 * 2**20
"""Largest outcome and list of trials to read."""
_TRIAL = r"(?!\.)[^/\0]{1,255}/repeat-[0-9]{1,4}"
"""A trial's name is also its folder, so it must not lead anywhere else."""


@dataclass(frozen=True)
class Outcome:
    """How a trial went."""

    status: str
    """`complete`, `failed` or, before its start, `waiting`."""
    error: str = ""
    seconds: float = nan
    """Wall time of the whole process, including start and end; NaN if the study was
    killed before the process ended.
    """
    command: str = ""

    def __str__(self) -> str:
        """Why it failed, or how long it took."""
        return self.error or f"{self.seconds:.1f} s"


_OUTCOME = TypeAdapter(Outcome)


def read_outcome(path: Path) -> Outcome:
    """Read how a trial went from its file."""
    try:
        check_file(path, MOST_OUTCOME_BYTES)
        told = json.loads(path.read_text())
        if told["seconds"] is None:  # JSON has no NaN
            told["seconds"] = nan
        return _OUTCOME.validate_python(told)
    except FileNotFoundError:
        return Outcome("waiting")
    # Somebody has put another file there.
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
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
    """Turn a full disk or a folder that cannot be written to into one line that names
    the file.
    """
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


def write_listing(out: Path, title: str, trials: Sequence[str]) -> None:
    """Write the names of the trials that will run."""
    content = {"title": title, "trials": list(trials)}
    with writing(out / PLAN):
        publish(json.dumps(content, indent=1).encode(), out / PLAN)


def read_listing(folder: Path) -> Listing:
    """Read the list of a study's trials. Without a list, return the trials that have a
    folder.
    """
    try:
        check_file(folder / PLAN, MOST_LISTING_BYTES)
        found = json.loads((folder / PLAN).read_text())
        listing = TypeAdapter(Listing).validate_python(found)
    # An older study has no list, or somebody has put another file there.
    except (OSError, ValueError, RecursionError):
        return Listing("", _begun(folder))
    safe = [name for name in listing.trials if fullmatch(_TRIAL, name)]
    return Listing(listing.title, safe)


def _begun(folder: Path) -> list[str]:
    names = set()
    for path in (folder / POINTS).glob("*/repeat-*"):
        name = f"{path.parent.name}/{path.stem}"
        if fullmatch(_TRIAL, name):
            names.add(name)
    return sorted(names)
