"""Runs on disk, read back from their folders."""

import hashlib
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hpcfed import plugins
from hpcfed.errors import UserError, command_line
from hpcfed.options import Settings, check
from hpcfed.results.checkpoints import MARKER, recorded
from hpcfed.results.claim import is_abandoned
from hpcfed.results.folder import (
    GENERATED,
    PLAN,
    POINTS,
    RECORD,
    STUDY,
    check_one_kind,
    check_out,
    checkpoint_folder,
    failures,
    folders_with_runs,
    records,
    runs,
)
from hpcfed.results.format import CLOCK_COLUMNS
from hpcfed.results.reading import record_of
from hpcfed.results.run import RunRecord
from hpcfed.results.safe import Reader, check_answers, readable, reading
from hpcfed.results.sandbox import check_heaps
from hpcfed.results.server import LatentMap
from hpcfed.results.telemetry import Telemetry, telemetry_of
from hpcfed.runtime.launcher import Launch
from hpcfed.runtime.timer import PHASES

MOST_NAMED = 8
"""Most runs that a message names."""
MOST_LINE = 10_000
"""Longest error message to read, in characters."""
MOST_SAMPLES = 2**53
"""Most samples of a client and a class: floats hold whole numbers up to this."""


def longest(runs: Sequence[RunRecord]) -> RunRecord:
    """Return the run that was there in all rounds of its process: seeds that advance
    together share their times, memory and energy, and some may end before others.
    """
    return max(runs, key=lambda run: run.rounds_done)


def timed_run(runs: Sequence[RunRecord]) -> RunRecord:
    """Return the run with the times of its process, the longest. What the servers of the
    seeds beside it took, for which it waited, is `server` there, not `other`.
    """
    timed = longest(runs)
    phases = timed.phases.copy()
    server, other = PHASES.index("server"), PHASES.index("other")
    for run in runs:
        done = run.rounds_done
        if run is timed or run.phases.shape[1:] != phases.shape[1:]:
            continue
        together = (run.stacks > 1) & (run.stacks == timed.stacks[:done])
        theirs = np.where(together[:, None], run.phases[:, :, server], 0.0)
        # Where several wait at a time, it is not all in `other`.
        moved = np.fmin(theirs, phases[:done, :, other])
        phases[:done, :, server] += moved
        phases[:done, :, other] -= moved
    return replace(timed, phases=phases)


def wall_time(runs: Sequence[RunRecord]) -> float:
    """Return the seconds of all rounds of these runs. A round that some of them advanced
    through together counts once.
    """
    total = 0.0
    for round in range(longest(runs).rounds_done):
        there = [run for run in runs if run.rounds_done > round]
        # Seeds that were resumed apart have other numbers of runs beside them.
        alike = Counter(int(run.stacks[round]) for run in there)
        for run in there:
            together = int(run.stacks[round])
            sharing = min(together, alike[together])
            total += float(np.nan_to_num(run.rounds["seconds"][round])) / sharing
    return total


def most_memory(runs: Sequence[RunRecord]) -> np.ndarray:
    """Return the most bytes of each server rank, over all learnings of these runs."""
    peaks = [learning.peak_memory for run in runs for learning in run.learnings]
    return np.fmax.reduce(peaks)


def check_start(settings: Settings, launch: Launch) -> None:
    """Refuse settings that cannot start, and a folder that may not be written to."""
    check(settings, launch)
    config = settings.config
    # Last, because it accesses the disk. A resumed run is expected to be there.
    if config.out is not None and config.resume is None:
        check_out(config.out, overwrite=config.overwrite)


def read_run(folder: Path) -> RunRecord:
    """Read `folder/run.h5`; anything that is not a run's folder is a one-line error."""
    path = folder / RECORD
    if not folder.exists():
        raise UserError(f"no such folder: {folder}")
    if not folder.is_dir():
        raise UserError(f"{folder} is a file; name the folder of a run")
    if not path.is_file():
        report = command_line("report", folder)
        if (folder / STUDY).is_file():
            raise UserError(
                f"{folder} holds a study; look at all of its runs: {report}"
            )
        # Points that were run by their numbers leave no list.
        if (folder / PLAN).is_file() or (folder / POINTS).is_dir():
            if any(map(records, (folder / POINTS).glob("*/*"))):
                raise UserError(
                    f"{folder} holds a study's runs without {STUDY}; make it: "
                    f"{command_line('study', 'FILE', '--out', folder, '--gather')}, or "
                    f"look at them: {report}"
                )
            raise UserError(
                f"{folder} holds a study whose runs are not gathered yet; look at them: "
                f"{command_line('watch', folder)}"
            )
        below = folders_with_runs(folder)
        if below:
            names = ", ".join(path.name for path in below[:MOST_NAMED])
            more = ", …" if len(below) > MOST_NAMED else ""
            raise UserError(
                f"{folder} holds runs in folders of their own ({names}{more}); name one, as in "
                f"{below[0]}, or look at all of them: {report}"
            )
        raise UserError(f"{folder} holds no run (there is no {RECORD} in it)")
    check_one_kind(folder)
    with readable(path, "a run"):
        # Also where nothing has tried the file: a study reads its own runs, and a process
        # in MPI does not fork.
        check_heaps(path)
    with readable(path, "a run"), reading(path) as file:
        record = record_of(folder, file)
        # A complete run has not failed, whatever other files are there.
        if record.status == "complete":
            return record
        error = first_failure(folder)
        if error is not None:
            return replace(record, status="failed", error=error)
        if record.status == "running" and _was_killed(record):
            return replace(record, status="interrupted")
        return record


def read_resumable(folder: Path) -> RunRecord:
    """Read the record of a run; if it is damaged or gone, the copy from which a resumed
    run rebuilds it.
    """
    try:
        return read_run(folder)
    except UserError:
        # What the disk cannot read now may be whole, and is not rebuilt.
        check_answers(folder / RECORD)
        (copy, *_) = recorded(folder, record_only=True)
        return read_run(copy.parent)


def _was_killed(record: RunRecord) -> bool:
    """Tell whether a run without an end is dead; False if it ran elsewhere."""
    hosts = {rank.get("host") for rank in record.environment.get("ranks", [])}
    return hosts == {socket.gethostname()} and is_abandoned(record.folder)


def first_failure(folder: Path) -> str | None:
    """Return the error of the first rank that failed; others may have followed it."""
    found = failures(folder)
    if not found:
        return None

    def age(path: Path) -> tuple[int, str]:
        return path.stat().st_mtime_ns, path.name

    first = min(found, key=age)
    with open(first, errors="replace") as file:
        return file.readline(MOST_LINE).rstrip("\n")


def read_seeds(folder: Path) -> list[RunRecord]:
    """Read the runs in `folder/seed-N`, by seed; none if the folder holds a run."""
    # `runs` returns the folder itself if it has no seeds.
    found = runs(folder)
    if found == [folder]:
        return []
    return sorted(map(read_run, found), key=lambda run: run.facts["seed"])


def is_complete(folder: Path, rounds: int = 0) -> bool:
    """Tell whether a run, or each of its seeds, is complete and was planned with at
    least `rounds`. A run whose record cannot be read is not complete.
    """
    found = _read_all(folder)
    done = all(run.status == "complete" for run in found)
    return done and _are_planned(found, rounds)


def is_planned(folder: Path, rounds: int) -> bool:
    """Tell whether the records of a run, or of each of its seeds, can be read and plan
    at least `rounds`.
    """
    return _are_planned(_read_all(folder), rounds)


def _read_all(folder: Path) -> list[RunRecord]:
    """Read a run, or each of its seeds; none if one of them cannot be read."""
    try:
        return [read_run(run) for run in runs(folder)]
    except UserError:
        return []


def _are_planned(found: Sequence[RunRecord], rounds: int) -> bool:
    return bool(found) and all(run.config["rounds"] >= rounds for run in found)


def is_silent(folder: Path, prompts: int) -> bool:
    """Tell whether a complete run, or a seed of it, has yet to continue this many
    prompts.
    """
    for run in runs(folder):
        path = run / GENERATED
        if not path.is_file():
            return prompts > 0
        # There may be fewer prompts than the run was asked for.
        asked = read_run(run).config.get("generate", 0)
        if max(asked, path.read_bytes().count(b"\n")) < prompts:
            return True
    return False


def keeps_last(folder: Path) -> bool:
    """Tell whether a run, or each of its seeds, has the state after its last round."""
    for run in runs(folder):
        last = checkpoint_folder(run, read_run(run).rounds_done)
        if not (last / MARKER).exists():
            return False
    return True


def changed_files(record: RunRecord, kept: Path | None = None) -> list[str]:
    """Return the user's files that have changed since a run recorded them.

    A missing file has not changed: the code that needs it reports that. `kept` is the
    run's own copy of the weights of --init, if these need not be the same any more.
    """
    changed = []
    init = record.config.get("init")
    for name, before in (record.environment.get("files") or {}).items():
        path = Path(name)
        # A run's folder, or PEFT's, is recorded by the file in it.
        if kept is not None and init in (name, str(path.parent)):
            path = kept / path.name if kept.is_dir() else kept
        if plugins.is_given(name):
            # It must have been passed in again.
            if plugins.checksums([name])[name] != before:
                changed.append(name)
        elif path.is_file():
            with open(path, "rb") as file:
                now = hashlib.file_digest(file, "sha256").hexdigest()
            if now != before:
                changed.append(str(path))
    return changed


# Data in a run's file beyond its record, read only if it is shown.


@dataclass(frozen=True)
class RunDetails:
    """Details of a run. A part that the file does not have is empty or None."""

    class_counts: np.ndarray
    """Training samples: [client, class]."""
    losses: dict[str, np.ndarray]
    """The loss of each step of the server's networks: [training, step]."""
    latents: LatentMap | None
    """The map of the last training of the server's model."""
    telemetry: Telemetry | None = None
    """What the machine did meanwhile."""

    @classmethod
    def nothing(cls) -> "RunDetails":
        """Return empty details, for a run without any."""
        return cls(np.empty((0, 0)), {}, None)


def read_details(folder: Path) -> RunDetails:
    """Read the details of a run; raise a UserError if they are damaged."""
    path = folder / RECORD
    with readable(path, "a run"), reading(path) as file:
        return RunDetails(
            _class_counts(file), _losses(file), _latents(file), telemetry_of(file)
        )


def _class_counts(file: Reader) -> np.ndarray:
    if "clients/classes" not in file:
        return np.empty((0, 0))
    clients = file.shape("clients/train_samples")
    shape = (*clients, None)
    return file.between("clients/classes", shape, high=MOST_SAMPLES, known=True)


def _losses(file: Reader) -> dict[str, np.ndarray]:
    """Read the losses of all trainings so far."""
    if "server" not in file:
        return {}
    group = file.within("server")
    came = np.isfinite(group.numbers("round", (None,)).astype(np.float64))
    losses = {}
    for network in group.texts("network_names"):
        name = f"{network}_loss"
        if name in group:
            of_all = group.numbers(name, (len(came), None))
            losses[network] = of_all[came].astype(np.float64)
    return losses


def _latents(file: Reader) -> LatentMap | None:
    if "server/latents" not in file:
        return None
    places = file.numbers("server/latents", (None, 2)).astype(np.float64)
    clients = file.numbers("server/latent_clients", (len(places),)).astype(np.float64)
    shares = file.numbers("server/latent_shares", (2,)).astype(np.float64)
    # Unused places are NaN; a damaged file may hold anything.
    known = np.isfinite(places).all(1) & (clients >= 0) & (clients <= MOST_SAMPLES)
    if not known.any() or not ((shares >= 0) & (shares <= 1 + 1e-6)).all():
        return None
    return LatentMap(clients[known].astype(np.int64), places[known], shares)


def read_clock(folder: Path, rounds: int) -> dict[str, np.ndarray]:
    """Read the clock table of a run's first rounds, one row per member: the round,
    counted from 1, and the table's columns. Runs without a clock have no rows.
    """
    path = folder / RECORD
    with readable(path, "a run"), reading(path) as file:
        if not all(f"clock/{name}" in file for name in CLOCK_COLUMNS):
            return {name: np.empty(0) for name in ("round", *CLOCK_COLUMNS)}
        shape = file.shape("clock/client")
        columns = {}
        for name in CLOCK_COLUMNS:
            columns[name] = file.between(f"clock/{name}", shape, rounds)
        # A round with fewer members than the largest ends with NaN.
        round, member = np.nonzero(~np.isnan(columns["client"]))
        found = {"round": round + 1}
        for name, values in columns.items():
            found[name] = values[round, member]
        found["client"] = found["client"].astype(np.int64)
        return found


def read_test_samples(record: RunRecord) -> np.ndarray:
    """Read the number of test samples of every client."""
    path = record.folder / RECORD
    with readable(path, "a run"), reading(path) as file:
        samples = file.numbers("clients/test_samples", (len(record.train_samples),))
    return samples.astype(np.int64)
