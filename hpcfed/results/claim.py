"""Whose a folder is: one run, or one study, at a time writes to it.

A claim is a lock, which the system drops when its process dies, so none is ever stale.
`.job` names the Slurm job that began a run: no other job takes the folder for its own.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcfed.errors import UserError
from hpcfed.results.folder import CLAIM, JOB, STUDY_CLAIM

LONGEST = 1000
"""Bytes of a name that are read; the file may be anything that somebody put there."""


@contextmanager
def claimed(folder: Path, name: str = CLAIM) -> Iterator[None]:
    """Claim a folder within, or refuse one that another run has claimed. A study's
    claim is a file of another `name`.

    On a file system without locks every claim succeeds.
    """
    path = folder / name
    descriptor = _locked(path)
    try:
        yield
    finally:
        # The folder may be gone, or read-only by now.
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Open the file of a claim, and lock it."""
    # Neither a link nor a pipe that somebody has put there is followed or waited for.
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
            # There are no locks here.
            return descriptor
        # Its last owner may have removed the file between our opening and locking it:
        # then the lock is on a file that nobody else will find.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def is_abandoned(folder: Path) -> bool:
    """Tell whether a folder has a claim that no process of this machine holds: its run
    was killed.
    """
    return _is_locked(folder / CLAIM) is False


def hold(descriptor: int) -> None:
    """Lock a file for as long as this process, or one that inherits the descriptor, has
    it open; where there are no locks, nothing happens.
    """
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(path: Path) -> bool:
    """Tell whether a process holds this file."""
    return _is_locked(path) is True


def _is_locked(path: Path) -> bool | None:
    """Tell whether a file is locked; None if there is no file, or it cannot be told."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError:
        # There is none, or we may not look.
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        # There are no locks here.
        return None
    finally:
        os.close(descriptor)


def this_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Name the Slurm job that this process is part of; None outside Slurm.

    A requeued job keeps its name. The cluster is part of it: clusters that share a file
    system may give two jobs the same number.
    """
    number = environment.get("SLURM_JOB_ID", "")
    if not number.isdigit():
        return None
    cluster = environment.get("SLURM_CLUSTER_NAME", "cluster")
    return f"{number} on {cluster}"


def was_requeued(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether Slurm has begun this job before."""
    # Slurm sets it only from the second start on.
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    return restarts.isdigit() and int(restarts) > 0


def begun_by(folder: Path) -> str | None:
    """Read which job has begun the run in a folder; None if no job has, or there is no
    run.
    """
    path = folder / JOB
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        content = file.read(LONGEST)
    return content.decode(errors="replace").strip() or None


def sign(folder: Path) -> None:
    """Leave this job's name in the folder of a run that begins.

    Outside Slurm only remove a name that was there: that job's run is gone.
    """
    # Unlinked first: what is there may be a link, which must not be written through.
    (folder / JOB).unlink(missing_ok=True)
    job = this_job()
    if job is not None:
        (folder / JOB).write_text(f"{job}\n")
