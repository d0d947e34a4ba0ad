"""HDF5 files that are written where they stay: what the system refuses is told by its
name and the file's.
"""

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_limit(path: Path, size: int) -> None:
    """Refuse a file that `ulimit -f` does not let become so large, before libhdf5
    crashes over it (2.0.0 does).
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and size > limit:
        error = OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        error.add_note(f"{size:,} bytes, and ulimit -f allows {limit:,}")
        raise error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn libhdf5's several lines about a failed write into the system's own error."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        found = re.search(r"errno = (\d+)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from None
