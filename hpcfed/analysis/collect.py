"""Finds and reads the runs and studies of a report."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcfed.analysis.groups import Process
from hpcfed.errors import UserError
from hpcfed.options import named
from hpcfed.results.folder import CHECKPOINTS, RECORD, STUDY, seed_folder, seed_folders
from hpcfed.results.pace import WARMUP
from hpcfed.results.run import RunRecord
from hpcfed.results.sandbox import try_out
from hpcfed.results.stored import read_run
from hpcfed.results.study import StudyRecord, read_gathered


@dataclass
class Found:
    """The runs and studies found under the paths of a report."""

    processes: list[Process] = field(default_factory=list)
    unfinished: list[tuple[str, str, str]] = field(default_factory=list)
    """Name, status and error of runs that are not complete."""
    usable: int = 0
    """Number of these that `unfinished` would take."""
    studies: list[StudyRecord] = field(default_factory=list)
    single_runs: int = 0
    """Number of runs outside of any study."""
    unread: list[str] = field(default_factory=list)
    """Why files were left out."""
    copies: list[str] = field(default_factory=list)
    """Which runs are copies of others, and count once."""


def find(paths: Iterable[Path], *, unfinished: bool = False) -> Found:
    """Read every run and study under the paths. Report what cannot be read, and
    continue.

    With `unfinished`, a run that is still active or did not end well is included with
    the rounds it has.
    """
    found = Found()
    seen = set()
    for path in paths:
        unread: list[str] = []
        files = _files(path, unread)
        if not files and not unread:
            raise UserError(
                f"{path} holds neither a run nor a study (it has no {RECORD} and no "
                f"{STUDY})"
            )
        found.unread += unread
        for file in files:
            # Paths may overlap, or lead to the same folder through links.
            if file.resolve() not in seen:
                seen.add(file.resolve())
                _add(found, file, unfinished)
    _count_once(found)
    # At the end, because seeds of a run are found folder by folder.
    found.processes = _stack_seeds(found.processes)
    return found


def joined(sides: Sequence[Found], *, apart: bool) -> Found:
    """Combine what was found for A and B; kept `apart`, they are not repeats."""
    both = Found()
    # Not strict: there may be one path only.
    for name, side in zip("AB", sides, strict=False):
        for process in side.processes:
            both.processes.append(replace(process, side=name) if apart else process)
        both.unfinished += side.unfinished
        both.usable += side.usable
        both.studies += side.studies
        both.single_runs += side.single_runs
        both.unread += side.unread
        both.copies += side.copies
    if not apart:
        _count_once(both)
    return both


def _files(path: Path, unread: list[str]) -> list[Path]:
    """Return the records of all studies and runs under a path; add the folders that
    cannot be read to `unread`.

    A study represents the runs in its folder. A run represents its checkpoints, which
    hold copies of its record. If a folder holds both a run and seeds of another, only
    the run is returned: reading it refuses both.
    """
    is_record = path.name in (STUDY, RECORD)
    if is_record and path.is_file():
        return [path]
    if not path.exists():
        raise UserError(f"no such folder: {path}")
    names: dict[str, list[Path]] = {STUDY: [], RECORD: []}

    def refused(error: OSError) -> None:
        unread.append(f"{error.filename} cannot be read: {error.strerror}")

    for within, _, there in os.walk(path, onerror=refused):
        for name in names.keys() & there:
            file = Path(within, name)
            # Pipes and folders do not count.
            if file.is_file():
                names[name].append(file)
    # A study's file contains its runs whole, and knows their warm-up. Sorted, since file
    # systems list in any order and labels go to the first.
    studies = sorted(names[STUDY])
    of_studies = {study.parent for study in studies}
    runs = _outside(sorted(names[RECORD]), of_studies)
    checkpoints = {run.parent / CHECKPOINTS for run in runs}
    runs = _outside(runs, checkpoints)
    with_run = {run.parent for run in runs}
    found = list(studies)
    # `read_run` refuses a folder with both a run and seeds of one; report it only once.
    for run in runs:
        folder = run.parent
        beside_run = folder.parent in with_run
        if not (beside_run and folder in seed_folders(folder.parent)):
            found.append(run)
    return found


def _outside(files: Sequence[Path], folders: set[Path]) -> list[Path]:
    return [file for file in files if folders.isdisjoint(file.parents)]


def _add(found: Found, file: Path, unfinished: bool) -> None:
    try:
        # In a child process first, because HDF5's library may crash on a damaged file.
        try_out([file])
        if file.name == STUDY:
            _add_study(found, file)
        else:
            _add_run(found, file.parent, unfinished)
    # One damaged file among a thousand must not cost the report.
    except UserError as error:
        found.unread.append(str(error))


def _add_study(found: Found, path: Path) -> None:
    study = read_gathered(path)
    found.studies.append(study)
    found.unread += study.unread
    for trial in study.trials:
        outcome = trial.outcome
        if outcome.status == "complete" and trial.runs:
            source = f"{path.parent.name}: {trial.name}"
            process = Process(trial.runs, study.warmup, source)
            found.processes.append(process)
        else:
            why = (trial.name, outcome.status, outcome.error)
            found.unfinished.append(why)


def _add_run(found: Found, folder: Path, unfinished: bool) -> None:
    run = read_run(folder)
    found.single_runs += 1
    complete = run.status == "complete"
    found.usable += run.rounds_done > 0 and not complete
    if run.rounds_done and (complete or unfinished):
        process = Process((run,), WARMUP, str(folder))
        found.processes.append(process)
    if not complete or not run.rounds_done:
        why = (str(folder), run.status, run.error)
        found.unfinished.append(why)


def _count_once(found: Found) -> None:
    """Leave out copies of runs, such as a backup: they are no repeats. Of a copy that has
    gone on, the longer one stays.
    """
    kept: dict[str, tuple[RunRecord, str]] = {}
    for process in found.processes:
        for run in process.runs:
            other, _ = kept.setdefault(_identity(run), (run, process.source))
            if run.rounds_done > other.rounds_done:
                kept[_identity(run)] = run, process.source
    alone = []
    for process in found.processes:
        runs = tuple(run for run in process.runs if kept[_identity(run)][0] is run)
        for run in process.runs:
            original, source = kept[_identity(run)]
            if original is not run:
                found.copies.append(
                    f"{process.source}: a copy of {source}, counted once"
                )
        if runs:
            alone.append(replace(process, runs=runs))
    found.processes = alone


def _identity(run: RunRecord) -> str:
    """Return what two records have in common only if they began as one run."""
    # It may have gone on with these changed.
    free = {"rounds", *named(changes="time"), *named(changes="nothing")}
    config = {name: value for name, value in run.config.items() if name not in free}
    # Points that advance together share their seconds, no others do.
    seconds = float(run.rounds["seconds"][0])
    return json.dumps([seconds, run.facts["seed"], config], sort_keys=True, default=str)


def _stack_seeds(processes: Sequence[Process]) -> list[Process]:
    """Combine seeds that advanced together, but were found one by one."""
    by_folder: dict[Path, list[Process]] = defaultdict(list)
    for process in processes:
        run = process.runs[0]
        # Stacked seeds from a study already come as one process.
        several = len(process.runs) > 1
        # Points of a study that advanced together are not seeds of one run either.
        is_seed = run.folder == seed_folder(run.folder.parent, run.facts["seed"])
        # One that was resumed alone still has rounds beside its siblings.
        alone = several or (run.stacks == 1).all() or not is_seed
        folder = Path(process.source) if alone else run.folder.parent
        by_folder[folder].append(process)
    made = []
    for members in by_folder.values():
        runs: list[RunRecord] = []
        for process in members:
            runs += process.runs
        first = members[0]
        made.append(Process(tuple(runs), first.warmup, first.source))
    return made
