"""Ownership of a folder: only one run, or one study, writes to it at a time.

A claim is a lock. The system drops it when its process dies, so a claim is never stale.
`.job` names the Slurm job that began a run: no other job takes over the folder.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from hpcfed.errors import UserError
from hpcfed.results.folder import CLAIM, JOB, POINTS, STACKS, STUDY_CLAIM, seed_folders
from hpcfed.results.publish import publish

LONGEST = 1000
"""Longest name to read, in bytes; the file may be anything that somebody put there."""


@contextmanager
def claimed(folder: Path, name: str = CLAIM) -> Iterator[None]:
    """Claim a folder within the block, or refuse if another run has claimed it. A
    study's claim is a file of another `name`.

    On a file system without locks every claim succeeds.
    """
    path = folder / name
    descriptor = _locked(path)
    try:
        yield
    finally:
        # The folder may be gone or read-only by now.
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Open the file of a claim and lock it."""
    # Do not follow a link or wait for a pipe that somebody has put there.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            what = "study" if path.name == STUDY_CLAIM else "run"
            raise UserError(
                f"another {what} is writing to {path.parent}; wait for its end, or name "
                "another --out"
            ) from None
        except OSError:
            # This file system has no locks.
            return descriptor
        # The last owner may have removed the file between our opening and locking it.
        # Then the lock is on a file that no other process will find.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def is_abandoned(folder: Path) -> bool:
    """Tell whether no process here holds a folder's claim: its run was killed."""
    return _is_locked(folder / CLAIM) is False


def is_at_work(folder: Path) -> bool:
    """Tell whether a process here holds the claim of a run, or of a seed of it."""
    return any(is_held(run / CLAIM) for run in (folder, *seed_folders(folder)))


def is_study_abandoned(out: Path) -> bool:
    """Tell whether no process here runs the study in a folder: it ended or was killed.
    Runs that outlived it hold their logs.
    """
    claim = out / STUDY_CLAIM
    if claim.exists() and _is_locked(claim) is not False:
        return False
    logs = chain(out.glob(f"{POINTS}/*/*.log"), out.glob(f"{STACKS}/*.log"))
    return not any(map(is_held, logs))


def hold(descriptor: int) -> None:
    """Lock a file, if possible, as long as a process has this descriptor open."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(path: Path) -> bool:
    """Tell whether a process holds this file."""
    return _is_locked(path) is True


def _is_locked(path: Path) -> bool | None:
    """Tell whether a file is locked; None if it does not exist or cannot be checked."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError:
        # It does not exist, or we lack permission.
        return None
    try:
        # Shared, so that two processes that only look do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        # This file system has no locks.
        return None
    finally:
        os.close(descriptor)


def this_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the Slurm job that this process belongs to; None outside
    Slurm.

    A requeued job keeps its name. The cluster is part of the name: clusters that share
    a file system may give two jobs the same number.
    """
    number = environment.get("SLURM_JOB_ID", "")
    if not number.isdigit():
        return None
    cluster = environment.get("SLURM_CLUSTER_NAME", "cluster")
    return f"{number} on {cluster}"


def was_requeued(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether Slurm has started this job before."""
    # Slurm sets it only from the second start on.
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    return restarts.isdigit() and int(restarts) > 0


def begun_by(folder: Path) -> str | None:
    """Read which job began the run in a folder; None without a job or a run."""
    path = folder / JOB
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        content = file.read(LONGEST)
    return content.decode(errors="replace").strip() or None


def sign(folder: Path) -> None:
    """Write this job's name to the folder of a new run; outside Slurm remove it."""
    job = this_job()
    if job is None:
        (folder / JOB).unlink(missing_ok=True)
    else:
        # In one step, also where the name is there: a requeued job that is killed in
        # between must know its folder again.
        publish(f"{job}\n".encode(), folder / JOB)
