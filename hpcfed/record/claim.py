"""One run at a time writes to a folder. The system drops the claim of a process that
dies, so none is ever stale.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcfed.errors import UserError
from hpcfed.record.folder import CLAIM


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Claim a folder within, or refuse one that another run has claimed.

    On a file system without locks everybody gets a claim.
    """
    path = folder / CLAIM
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
            raise UserError(
                f"another run is writing to {path.parent}; wait for its end, or name "
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
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(folder / CLAIM, flags)
    except OSError:
        # Nobody has claimed it, or we may not look.
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except OSError:
        # Somebody holds it, or there are no locks here.
        return False
    finally:
        os.close(descriptor)
