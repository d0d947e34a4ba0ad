"""One run, or one study, at a time writes to a folder. The system drops the claim of a process that
dies, so none is ever stale.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcfed.errors import UserError
from hpcfed.results.folder import CLAIM, STUDY_CLAIM


@contextmanager
def claimed(folder: Path, name: str = CLAIM) -> Iterator[None]:
    """Claim a folder within, or refuse one that another run has claimed; another study,
    by the file of its `name`.

    On a file system without locks everybody gets a claim.
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
    """Tell whether a file is locked; None where there is none, or nobody can tell."""
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
