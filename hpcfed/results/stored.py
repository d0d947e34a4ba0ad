"""Runs on disk, read back with their options checked.

`results/` reads files and knows no options; this module combines both.
"""

import hashlib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcfed import plugins
from hpcfed.errors import UserError
from hpcfed.options import RunConfig, Settings, check, named
from hpcfed.options.facts import with_old_meaning
from hpcfed.results import reading
from hpcfed.results.folder import check_out, runs
from hpcfed.results.run import RunRecord
from hpcfed.results.safe import Reader
from hpcfed.runtime.launcher import Launch


def check_start(settings: Settings, launch: Launch) -> None:
    """Refuse settings with which a run could not start, and an output folder that it
    may not write to.
    """
    check(settings, launch)
    config = settings.config
    # Last, because it accesses the disk. A resumed run is expected to be there.
    if config.out is not None and config.resume is None:
        check_out(config.out, overwrite=config.overwrite)


def read_run(folder: Path) -> RunRecord:
    """Read the run in a folder; anything else is a one-line error."""
    return reading.read_run(folder, check_options)


def record_of(folder: Path, file: Reader) -> RunRecord:
    """Read a run from its file, or from a copy of its content inside another file."""
    return reading.record_of(folder, file, check_options)


def read_seeds(folder: Path) -> list[RunRecord]:
    """Read the runs in `folder/seed-N`, in the order of their seeds; none if the folder
    itself holds a run.
    """
    # `runs` returns the folder itself if it has no seeds.
    found = runs(folder)
    if found == [folder]:
        return []
    return sorted(map(read_run, found), key=lambda run: run.facts["seed"])


def is_complete(folder: Path, rounds: int = 0) -> bool:
    """Tell whether a run, or each of its seeds, is complete and was planned with at
    least `rounds`. A run whose record cannot be read is not complete.
    """
    try:
        records = [read_run(run) for run in runs(folder)]
    except UserError:
        return False
    for record in records:
        if record.status != "complete" or record.config["rounds"] < rounds:
            return False
    return True


def changed_files(record: RunRecord) -> list[str]:
    """Return the user's files that have changed since a run recorded them.

    A missing file has not changed: the code that needs it reports that.
    """
    changed = []
    for name, before in (record.environment.get("files") or {}).items():
        path = Path(name)
        if plugins.is_given(name):
            # It must have been passed in again.
            if plugins.checksums([name])[name] != before:
                changed.append(name)
        elif path.is_file():
            with open(path, "rb") as file:
                now = hashlib.file_digest(file, "sha256").hexdigest()
            if now != before:
                changed.append(name)
    return changed


def check_options(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a stored config after checking its general options like those of a command
    line; a method's own options stay unchecked.
    """
    stored = with_old_meaning(stored)
    fields = RunConfig.model_fields
    # An older record lacks newer options, and null means an option was not given.
    known = {}
    for name, value in stored.items():
        if name in fields and value is not None:
            known[name] = value
    try:
        checked = RunConfig.model_validate(known)
    except ValidationError as failure:
        error = failure.errors()[0]
        raise ValueError(f"its option {error['loc'][0]}: {error['msg']}") from None
    # But no run has ever stored null for an option that has a default.
    for name, field in fields.items():
        if name in stored and stored[name] is None and field.default is not None:
            raise ValueError(f"its option {name} is null")
    for name in named(in_every_record=True):
        if name not in known:
            raise ValueError(f"its config has no {name}")
    return stored | checked.model_dump(mode="json", include=set(known))
