"""Energy that GPUs and CPUs have used, if the counters of their makers provide it."""

import threading
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any

from hpcfed.runtime.gpu_counters import UNKNOWN, gpu_counters, told
from hpcfed.runtime.machine import load
from hpcfed.runtime.world import World, is_first_of_device, is_first_of_host

POWERCAP = Path("/sys/class/powercap")
"""Where Linux has the RAPL counters of Intel and AMD processors."""
EVERY = 60.0
"""Seconds between readings of a CPU's counter, which wraps to 0 after some minutes."""
COUNTED = ("package-", "dram")
"""Prefixes of counters to add up; others are parts, or the whole machine."""
ENERGIES = ("energy", "cpu_energy")


def rank_joules(world: World) -> float:
    """Return the joules of this rank's GPU; if ranks share it, one reports them."""
    # The counter belongs to the GPU, not to the process.
    here = world.locations[world.rank]
    return joules(here.device) if is_first_of_device(world) else 0.0


def joules(device: str) -> float:
    """Return the joules that a GPU, given by `accelerator.unique_id`, has used since its
    driver started; NaN if not counted.
    """
    counters = gpu_counters(device)
    return UNKNOWN if counters is None else told(counters.joules)


class CpuMeter:
    """Adds up what all processes on a host use of its CPUs and memory."""

    def __init__(self, folder: Path) -> None:
        self._counters = _counters(folder)
        self._last = [_read(path / "energy_uj") for path in self._counters]
        readable = bool(self._last) and not any(map(isnan, self._last))
        self._used = 0.0 if readable else UNKNOWN
        """Microjoules."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> "CpuMeter":
        # Most users except root cannot read the counters; then there is nothing to do.
        if not isnan(self._used):
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def joules(self) -> float:
        """Stop, and return the joules since the start; NaN if they cannot be read."""
        # First the thread: two readers would count the same joules twice.
        self.__exit__()
        self.look()
        return self._used / 1e6

    def look(self) -> None:
        """Add what was used since the last reading."""
        for number, path in enumerate(self._counters):
            now = _read(path / "energy_uj")
            used = now - self._last[number]
            # The counter has wrapped; readings are frequent enough that it cannot wrap
            # twice.
            if used < 0:
                used += _read(path / "max_energy_range_uj")
            self._used += used
            self._last[number] = now

    def _look_on(self) -> None:
        while not self._stopped.wait(EVERY):
            self.look()


class Used:
    """What a rank has used since it began, and how busy its host was."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._load = load()
        self._gpu = rank_joules(world)
        # The counters belong to the host.
        self._cpu = CpuMeter(POWERCAP) if is_first_of_host(world) else None

    def __enter__(self) -> "Used":
        if self._cpu is not None:
            self._cpu.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._cpu is not None:
            self._cpu.__exit__()

    def until_now(self) -> dict[str, float]:
        """Return this rank's figures, by their names in run.h5."""
        return {
            "energy": rank_joules(self._world) - self._gpu,
            "cpu_energy": 0.0 if self._cpu is None else self._cpu.joules(),
            "load_at_start": self._load,
            "load_at_end": load(),
        }


def _counters(folder: Path) -> Sequence[Path]:
    """Return the counters of packages and of their memory."""
    found = []
    # Other counters, such as intel-rapl-mmio, count the same energy a second time.
    for path in sorted(folder.glob("intel-rapl:*")):
        try:
            name = (path / "name").read_text()
        except OSError:
            continue
        if name.startswith(COUNTED):
            found.append(path)
    return found


def _read(path: Path) -> float:
    """Return a counter's microjoules; NaN if it cannot be read."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return UNKNOWN
