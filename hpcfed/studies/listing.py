"""`plan.json`: which trials a study is to run, for those who watch it.

`study.h5` is gathered only after the first trial, and by the last job of a submitted
study. Without this list nobody could tell what is still to come.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from re import fullmatch

from pydantic import TypeAdapter

from hpcfed.results.folder import PLAN, POINTS
from hpcfed.results.publish import publish
from hpcfed.results.safe import check_file
from hpcfed.studies.outcome import writing
from hpcfed.studies.plan import Trial

MOST_BYTES = 16 * 2**20
_TRIAL = r"(?!\.)[^/\0]{1,255}/repeat-[0-9]{1,4}"
"""A trial's name is also its folder: it must not lead anywhere else."""


@dataclass(frozen=True)
class Listing:
    """The trials of a study by name, in the order in which they run."""

    title: str
    trials: list[str]


def write_listing(out: Path, title: str, trials: Sequence[Trial]) -> None:
    """Write down which trials are to run."""
    content = {"title": title, "trials": [str(trial) for trial in trials]}
    with writing(out / PLAN):
        publish(json.dumps(content, indent=1).encode(), out / PLAN)


def read_listing(folder: Path) -> Listing:
    """Read which trials a study runs; those that have a folder, where nobody has
    written that down.
    """
    try:
        check_file(folder / PLAN, MOST_BYTES)
        found = json.loads((folder / PLAN).read_text())
        listing = TypeAdapter(Listing).validate_python(found)
    # An older study has none, or somebody has put something else there.
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
