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
    """Refuses a folder that another run has claimed; file systems without locks are
    taken at their word.
    """
    path = folder / CLAIM
    while True:
        file = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
        )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise UserError(
                f"another run is writing to {folder}; wait for its end, or name another --out"
            ) from None
        except OSError:
            break
        with suppress(
            FileNotFoundError
        ):  # its last owner may have removed it since it was opened
            if os.path.samestat(os.fstat(file), os.stat(path)):
                break
        os.close(file)
    try:
        yield
    finally:
        with suppress(OSError):  # the folder may be gone, or read-only by now
            path.unlink()
        os.close(file)
