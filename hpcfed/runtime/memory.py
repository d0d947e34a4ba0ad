"""How much memory this machine lets us use, and how much we have used. Imports no
torch.
"""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path


def usable(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes of the machine's memory, or of what our control group may use
    where that is less.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(groups, mounted)])


def peak(status: Path = Path("/proc/self/status")) -> int:
    """Return the most bytes that this process has held so far."""
    # Not by getrusage: Linux hands its peak on to programs that a process starts, so a
    # run would begin with that of a study or a notebook.
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return 1024 * int(found[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _limits(groups: Path, mounted: Path) -> Iterator[int]:
    """Yield the limits of our control group and of all above it; a batch system sets
    one for a job.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # A line is number:controllers:path. Version 2 of control groups has one line,
        # without controllers; version 1 has a hierarchy of folders per controller.
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = mounted, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mounted / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            try:
                yield int((folder / name).read_text())
            except (OSError, ValueError):  # there is none, or it says `max`
                continue
