"""What the system allows a rank: memory, files, and time."""

import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hpcfed.doctor.finding import Finding, error, fine, skipped, warning
from hpcfed.runtime import cache
from hpcfed.runtime.host_counters import INFINIBAND
from hpcfed.runtime.machine import available
from hpcfed.words import bytes_text, time_text

SHARED_MEMORY = Path("/dev/shm")
LITTLE_MEMORY = 2 * 2**30
"""Bytes a rank below which a warning is due."""
TOO_LITTLE_MEMORY = 2**29
"""Bytes a rank: hpcfed with torch takes as much before the first client."""
LITTLE_SHARED = 2**28
"""Bytes of shared memory; containers often have 64 MiB, and NCCL needs more."""
SHORT = 600
"""Seconds of a job below which a warning is due."""
ANSWER = 10
"""Seconds that Slurm may take to answer."""
TOO_SHORT = 120
"""Seconds before its limit at which slurm/run.sbatch stops a run."""


class ResourceLimit(NamedTuple):
    """A limit of the system."""

    name: str
    number: int
    flag: str
    """Of ulimit."""
    least: int | None
    """The least that will do; None: any limit is too low."""
    fatal: int
    """Below this no run starts."""
    why: str


RESOURCES = (
    ResourceLimit(
        "open files", resource.RLIMIT_NOFILE, "-n", 1024, 128, "each rank has sockets"
    ),
    ResourceLimit(
        "processes", resource.RLIMIT_NPROC, "-u", 1024, 64, "threads count as well"
    ),
    ResourceLimit(
        "file size", resource.RLIMIT_FSIZE, "-f", None, 2**20, "snapshots are large"
    ),
    ResourceLimit(
        "virtual memory", resource.RLIMIT_AS, "-v", None, 2**32, "CUDA reserves much"
    ),
    ResourceLimit(
        "CPU time", resource.RLIMIT_CPU, "-t", None, 60, "the run is killed after it"
    ),
)
"""Limits that end runs, or keep them from starting."""


class Allowed(NamedTuple):
    """What a rank may use."""

    host: str
    limits: dict[str, int | None]
    """Of `RESOURCES`, by name; None: without a limit."""
    locked: int | None
    """Bytes that a process may keep from being moved; None: any number."""
    infiniband: bool
    memory: int | None
    """Bytes that are available on its host; None: unknown."""
    shared: int | None
    """Bytes that are free in shared memory; None: there is none."""
    seconds_left: float | None
    """Until the job's time limit; None: not known, or no job."""
    in_job: bool
    cached: bool
    """Whether compiled kernels can be kept."""


def look(host: str, *, is_root: bool) -> Allowed:
    """Find out what this rank may use. Only the root asks Slurm: it is slow to answer
    thousands at once.
    """
    limits = {one.name: soft_limit(one.number) for one in RESOURCES}
    shared = None
    if SHARED_MEMORY.is_dir():
        status = os.statvfs(SHARED_MEMORY)
        shared = status.f_bavail * status.f_frsize
    return Allowed(
        host=host,
        limits=limits,
        locked=soft_limit(resource.RLIMIT_MEMLOCK),
        infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
        memory=available(),
        shared=shared,
        seconds_left=seconds_left(os.environ, time.time()) if is_root else None,
        in_job="SLURM_JOB_ID" in os.environ,
        cached=cache.bytecode_folder() is not None,
    )


def soft_limit(number: int) -> int | None:
    """Return a limit of this process; None if there is none."""
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def seconds_left(environment: Mapping[str, str], now: float) -> float | None:
    """Return the time until the Slurm job's end; None if Slurm does not tell."""
    end = environment.get("SLURM_JOB_END_TIME", "")
    if end.isdigit():
        return float(end) - now
    # Older versions do not set it.
    job, squeue = environment.get("SLURM_JOB_ID", ""), shutil.which("squeue")
    if not job.isdigit() or squeue is None:
        return None
    command = [squeue, "--noheader", f"--jobs={job}", "--format=%L"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER)
    return clock_seconds(asked.stdout.strip())


def clock_seconds(text: str) -> float | None:
    """Return the seconds of `1-02:03:04`, as Slurm writes times; None for a word."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return float(seconds + 60 * (minutes + 60 * (hours + 24 * days)))


def judge(ranks: Mapping[int, Allowed]) -> list[Finding]:
    """Judge what all ranks may use."""
    return [
        *_resources(ranks),
        *_memory(ranks),
        *_shared(ranks),
        _time(ranks),
        _cache(ranks),
    ]


def _resources(ranks: Mapping[int, Allowed]) -> list[Finding]:
    found = []
    for rank, allowed in ranks.items():
        for one in RESOURCES:
            limit = allowed.limits[one.name]
            if limit is None or (one.least is not None and limit >= one.least):
                continue
            level = error if limit < one.fatal else warning
            told = f"{one.name}: {limit:,} ({one.why})"
            found.append(level("ulimit", told, _raise(one), rank))
        if allowed.infiniband and allowed.locked is not None:
            told = (
                f"locked memory: {bytes_text(allowed.locked)}, and there is InfiniBand"
            )
            advice = "have it raised (ulimit -l unlimited): it needs locked memory"
            found.append(warning("ulimit", told, advice, rank))
    names = ", ".join(one.name for one in RESOURCES)
    return joined(found) or [fine("ulimit", f"enough: {names}")]


def _raise(one: ResourceLimit) -> str:
    value = "unlimited" if one.least is None else f"{4 * one.least}"
    return f"ulimit {one.flag} {value} before the start, or ask your administrators"


def joined(findings: list[Finding]) -> list[Finding]:
    """Join findings that differ in their ranks alone."""
    ranks: dict[Finding, tuple[int, ...]] = {}
    for finding in findings:
        alike = finding._replace(ranks=())
        ranks[alike] = (*ranks.get(alike, ()), *finding.ranks)
    return [finding._replace(ranks=own) for finding, own in ranks.items()]


def _memory(ranks: Mapping[int, Allowed]) -> list[Finding]:
    hosts = [allowed.host for allowed in ranks.values()]
    found, shares = [], []
    for rank, allowed in ranks.items():
        if allowed.memory is None:
            continue
        share = allowed.memory / hosts.count(allowed.host)
        shares.append(share)
        if share < LITTLE_MEMORY:
            level = error if share < TOO_LITTLE_MEMORY else warning
            told = f"{bytes_text(share)} a rank is available on {allowed.host}"
            advice = "ask for more (--mem-per-cpu), or start fewer ranks on a node"
            found.append(level("memory", told, advice, rank, bytes=share))
    if not shares:
        return [skipped("memory", "Linux does not tell")]
    told = f"{bytes_text(min(shares))} a rank is available, or more"
    return joined(found) or [fine("memory", told, bytes=min(shares))]


def _shared(ranks: Mapping[int, Allowed]) -> list[Finding]:
    known = {rank: own.shared for rank, own in ranks.items() if own.shared is not None}
    if not known:
        return [skipped("shared memory", f"there is no {SHARED_MEMORY}")]
    found = []
    for rank, free in known.items():
        if free < LITTLE_SHARED:
            told = f"{bytes_text(free)} free in {SHARED_MEMORY}"
            advice = "give the container more (--shm-size 8g): MPI and NCCL use it"
            found.append(warning("shared memory", told, advice, rank, bytes=free))
    told = f"{bytes_text(min(known.values()))} free, or more"
    return joined(found) or [fine("shared memory", told, bytes=min(known.values()))]


def _time(ranks: Mapping[int, Allowed]) -> Finding:
    if not any(allowed.in_job for allowed in ranks.values()):
        return skipped("time limit", "no Slurm job")
    known = [own.seconds_left for own in ranks.values() if own.seconds_left is not None]
    if not known:
        return skipped("time limit", "Slurm tells none")
    left = min(known)
    told = f"{time_text(max(left, 0))} of the job are left"
    if left < TOO_SHORT:
        advice = "submit with a longer --time: a run would be stopped at once"
        return error("time limit", told, advice, seconds=left)
    if left < SHORT:
        advice = (
            "submit with a longer --time, and through slurm/run.sbatch, which requeues"
        )
        return warning("time limit", told, advice, seconds=left)
    return fine("time limit", told, seconds=left)


def _cache(ranks: Mapping[int, Allowed]) -> Finding:
    without = [rank for rank, allowed in ranks.items() if not allowed.cached]
    if without:
        told = "compiled kernels cannot be kept: each start compiles them again"
        advice = f"export {cache.VARIABLE}= a folder of yours that all nodes see"
        return warning("cache", told, advice, *without)
    return fine("cache", "compiled kernels are kept")
