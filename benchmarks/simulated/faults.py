"""Faults of a simulated cluster: what each does, and which exit codes are promised."""

import errno
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.simulated.processes import Cluster, Job, Process

REFUSALS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "failing": errno.EIO}
KINDS = (
    "none", "kill", "kill", "killall", "killall", "cut", "cut", "cut", "term", "term", "interrupt",
    "halt", "stall", "slow", "full", "read-only", "failing", "rival", "rival",
)  # fmt: skip
"""Kinds of faults, some more often than others."""
ALONE = 400.0
"""Simulated seconds that a run may take to notice a halted rank: ten times
--stall-timeout in the phase `server`, and the looks at signs of life.
"""
NOT_YET = 30.0
"""Simulated seconds after which a job is killed that cannot notice a halt yet."""


@dataclass
class Struck:
    """What a fault has done."""

    kind: str
    came: bool = False
    """Whether it came before the job had ended."""
    listening: bool = False
    """Whether every rank caught signals by then."""
    codes: set[int] = field(default_factory=set)
    """Exit codes that the job may have then, besides 0."""
    findings: list[str] = field(default_factory=list)


def listening(job: Job) -> bool:
    """Tell whether all ranks of a job are between the first round and the last."""
    return all(
        process.code is None and process.handlers.get(signal.SIGUSR2) is not None
        for process in job.processes
    ) and all(callable(one.handlers[signal.SIGUSR2]) for one in job.processes)


def plan(kind: str, cluster: Cluster, job: Job, step: int) -> Struck:
    """Have a fault strike a job at a turn of the scheduler."""
    struck = Struck(kind)
    act = _ACTS.get(kind)
    if act is None:
        return struck

    def strike() -> None:
        if job.active:
            struck.came = True
            struck.listening = listening(job)
            cluster.scheduler.note(f"fault: {kind}")
            act(cluster, job, struck)

    cluster.scheduler.at_step.setdefault(step, []).append(strike)
    return struck


def _kill(cluster: Cluster, job: Job, struck: Struck) -> None:
    struck.codes = {137}
    cluster.scheduler.chance.choice(job.processes).receive(signal.SIGKILL)


def _kill_all(cluster: Cluster, job: Job, struck: Struck) -> None:
    struck.codes = {137}
    cluster.kill_all()


def _stop(number: int, cluster: Cluster, job: Job, struck: Struck) -> None:
    chance = cluster.scheduler.chance
    struck.codes = {75}
    if not struck.listening:
        # Nothing is promised before the first round and after the last.
        struck.codes |= {128 + number, 130, 75}
    to_one = len(job.processes) > 1 and chance.random() < 0.4
    if to_one:
        chance.choice(job.processes).receive(number)
    else:
        job.signal(number)


def _term(cluster: Cluster, job: Job, struck: Struck) -> None:
    number = cluster.scheduler.chance.choice((signal.SIGTERM, signal.SIGUSR2))
    _stop(number, cluster, job, struck)


def _interrupt(cluster: Cluster, job: Job, struck: Struck) -> None:
    _stop(signal.SIGINT, cluster, job, struck)


def _halt(cluster: Cluster, job: Job, struck: Struck) -> None:
    """Halt a rank forever: the others must give up, once they watch each other."""
    process = cluster.scheduler.chance.choice(job.processes)
    process.receive(signal.SIGSTOP)
    watched = struck.listening and len(job.processes) > 1 and cluster.watches
    struck.codes = {1, 137}

    def look() -> None:
        waiting = [
            one.name for one in job.processes if one.code is None and one is not process
        ]
        if watched and waiting and job.active:
            doing = [
                f"{one.name}: {one.main.waits_for}" for one in job.processes if one.main
            ]
            struck.findings.append(
                f"{process.name} is halted, and {', '.join(waiting)} go on waiting ({'; '.join(doing)})"
            )
        job.abort(137)

    cluster.scheduler.after(ALONE if watched else NOT_YET, look)


def _stall(cluster: Cluster, job: Job, struck: Struck) -> None:
    """Halt a rank for a short time."""
    process: Process = cluster.scheduler.chance.choice(job.processes)
    process.receive(signal.SIGSTOP)
    seconds = cluster.scheduler.chance.uniform(0.01, 3.0)
    cluster.scheduler.after(seconds, lambda: process.receive(signal.SIGCONT))


def _slow(cluster: Cluster, job: Job, struck: Struck) -> None:
    cluster.disk.slow = True
    # Longer than --stall-timeout, a disk may look like a rank that hangs.
    struck.codes = {1}


def _refuse(kind: str, cluster: Cluster, job: Job, struck: Struck) -> None:
    chance, disk, number = cluster.scheduler.chance, cluster.disk, REFUSALS[kind]
    struck.codes = {1, 2}
    if kind == "full":
        disk.room = chance.choice((0, 100, 5000, 200_000))
    elif kind == "read-only":
        disk.refuses = {"write": number, "change": number, "sync": number}
    else:
        disk.refuses = {chance.choice(("write", "sync", "read")): number}
    if chance.random() < 0.5:
        cluster.scheduler.after(chance.uniform(0.01, 3.0), lambda: mend(cluster))


def mend(cluster: Cluster) -> None:
    """Make the disk sound again."""
    cluster.disk.room, cluster.disk.refuses, cluster.disk.slow = None, {}, False


_ACTS: dict[str, Callable[[Cluster, Job, Struck], None]] = {
    "kill": _kill,
    "killall": _kill_all,
    "cut": _kill_all,
    "term": _term,
    "interrupt": _interrupt,
    "halt": _halt,
    "stall": _stall,
    "slow": _slow,
    "full": lambda *words: _refuse("full", *words),
    "read-only": lambda *words: _refuse("read-only", *words),
    "failing": lambda *words: _refuse("failing", *words),
}
