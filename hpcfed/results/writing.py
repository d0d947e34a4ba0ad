"""HDF5 files that are written in place: an error of the system names itself and the
file.
"""

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_limit(path: Path, size: int) -> None:
    """Refuse a file that `ulimit -f` does not let become so large."""
    # libhdf5 2.0.0 crashes when a write fails for this reason, so ask before.
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY or size <= limit:
        return
    error = OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    error.add_note(f"{size:,} bytes, and ulimit -f allows {limit:,}")
    raise error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn libhdf5's several lines about a failed write into the system's own error."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        # h5py raises any of the three, with the system's number within the text.
        found = re.search(r"errno = (\d+)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from None
