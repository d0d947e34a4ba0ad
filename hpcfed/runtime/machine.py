"""The host: its processor, NUMA nodes and memory, and what else it is doing.

Linux reports these in /proc and /sys. Otherwise a figure is missing, but no run stops.
"""

import os
import platform
import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CPUINFO = Path("/proc/cpuinfo")
NODES = Path("/sys/devices/system/node")
ARM_FIELDS = ("CPU implementer", "CPU part")
"""What an ARM processor reports instead of a name."""


class Machine(NamedTuple):
    """The host of a rank, as far as it is known."""

    cpu: str = ""
    """The processor's model."""
    numa: tuple[tuple[int, ...], ...] = ()
    """The cores of every NUMA node."""
    memory: int = 0
    """Bytes."""

    def nodes_of(self, cores: Iterable[int]) -> list[int]:
        """Return the NUMA nodes that these cores belong to."""
        wanted = set(cores)
        found = enumerate(self.numa)
        return [node for node, members in found if not wanted.isdisjoint(members)]


def this_machine() -> Machine:
    """Return what this process runs on."""
    return Machine(cpu_model(CPUINFO), numa_nodes(NODES), _memory())


def cpu_model(path: Path) -> str:
    """Return the processor's name, or what an ARM processor reports instead."""
    facts: dict[str, str] = {}
    with suppress(OSError), path.open(errors="replace") as lines:
        for line in lines:
            # Every core has such a block: the first is enough.
            if not line.strip() and facts:
                break
            name, _, value = line.partition(":")
            facts[name.strip()] = value.strip()
    if "model name" in facts:
        return facts["model name"]
    parts = [f"{name} {facts[name]}" for name in ARM_FIELDS if name in facts]
    return ", ".join([platform.machine(), *parts])


def numa_nodes(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Return the cores of every NUMA node, by its number; empty if unknown."""
    nodes: dict[int, tuple[int, ...]] = {}
    with suppress(OSError, ValueError):
        for path in folder.glob("node[0-9]*"):
            number = int(path.name.removeprefix("node"))
            nodes[number] = cores_of((path / "cpulist").read_text())
    return tuple(nodes.get(number, ()) for number in range(max(nodes, default=-1) + 1))


def cores_of(text: str) -> tuple[int, ...]:
    """Parse `0-3,8`, Linux's notation for cores."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def cores_text(cores: Iterable[int]) -> str:
    """Format cores as `0-3,8`."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    return ",".join(texts)


def load() -> float:
    """Return the host's load, averaged over the last minute; NaN if unknown."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return float("nan")


def _memory() -> int:
    with suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


# How much memory this machine lets us use, and how much we have used. Imports no
# torch.


def usable(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the machine's memory in bytes, or our control group's limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(groups, mounted)])


def available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes that new programs can get, at most `usable`; None if unknown."""
    with suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.M)
        # A control group's own use says little: it counts files that Linux caches.
        return None if found is None else min(1024 * int(found[1]), usable())
    return None


def peak(status: Path = Path("/proc/self/status")) -> int:
    """Return the most bytes that this process has held so far."""
    # Not by getrusage: Linux passes its peak on to programs that a process starts, so a
    # run would begin with the peak of a study or a notebook.
    try:
        # As bytes, without an encoding: this is read in every round.
        with open(status, "rb", 0) as file:
            found = re.search(rb"^VmHWM:\s+(\d+) kB$", file.read(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return 1024 * int(found[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _limits(groups: Path, mounted: Path) -> Iterator[int]:
    """Yield the limits of our control group and its ancestors, as of a job."""
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
            except (OSError, ValueError):  # without a limit, or with `max`
                continue
