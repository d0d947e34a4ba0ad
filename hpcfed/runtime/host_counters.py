"""What Linux counts about this process and its host: cores, memory, network."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
INFINIBAND = Path("/sys/class/infiniband")
MOST_LINKS = 8
"""Most network interfaces: hosts of containers have hundreds of virtual ones."""
WORD = 4
"""Bytes in a unit of InfiniBand's counters."""
Traffic = dict[str, tuple[float, float]]
"""Bytes received and sent since the host started, by interface."""


def process_cpu() -> float:
    """Return the CPU seconds of all threads of this process."""
    return time.process_time()


def process_memory(proc: Path = PROC) -> float | None:
    """Return the bytes of this process that are in memory; None if unknown."""
    with suppress(OSError, ValueError, IndexError):
        pages = int((proc / "self" / "statm").read_text().split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    return None


def host_cpu(proc: Path = PROC) -> float | None:
    """Return the seconds that the host's cores have worked; None if unknown."""
    with suppress(OSError, ValueError), open(proc / "stat") as lines:
        name, *ticks = lines.readline().split()
        # User, nice, system, idle, waiting for disks, interrupts of two kinds. Behind
        # them is the time of other virtual machines, and of guests, who are in user.
        user, nice, system, _, _, *interrupts = map(int, ticks[:7])
        if name == "cpu":
            worked = user + nice + system + sum(interrupts)
            return worked / os.sysconf("SC_CLK_TCK")
    return None


def host_memory(proc: Path = PROC) -> float | None:
    """Return the bytes of the host that programs cannot get; None if unknown."""
    with suppress(OSError):
        text = (proc / "meminfo").read_text()
        found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", text, re.M))
        if len(found) == 2:
            return 1024.0 * (int(found["MemTotal"]) - int(found["MemAvailable"]))
    return None


def traffic(proc: Path = PROC, infiniband: Path = INFINIBAND) -> Traffic:
    """Return what interfaces have moved; empty if unknown."""
    found: Traffic = {}
    with suppress(OSError, ValueError, IndexError):
        # Two lines of headings. A name may be followed by a number without a space.
        for line in (proc / "net" / "dev").read_text().splitlines()[2:]:
            name, _, numbers = line.rpartition(":")
            counted = numbers.split()
            found[name.strip()] = float(counted[0]), float(counted[8])
    with suppress(OSError):
        for counters in sorted(infiniband.glob("*/ports/*/counters")):
            port = f"{counters.parents[2].name}/{counters.parent.name}"
            with suppress(OSError, ValueError):
                both = []
                for counter in ("port_rcv_data", "port_xmit_data"):
                    both.append(float(WORD * int((counters / counter).read_text())))
                found[port] = both[0], both[1]
    return found


def busiest(moved: Traffic) -> list[str]:
    """Return the interfaces that have moved the most bytes, without idle ones."""
    used = [name for name, both in moved.items() if sum(both) > 0]
    return sorted(used, key=lambda name: -sum(moved[name]))[:MOST_LINKS]
