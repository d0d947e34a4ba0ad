"""Whether signals reach the ranks: a run that does not hear them is killed without a
checkpoint.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from hpcfed.doctor.finding import Finding, error, fine, skipped, warning
from hpcfed.errors import one_line
from hpcfed.runtime.launcher import Launch
from hpcfed.runtime.meetings import wait_for
from hpcfed.runtime.signals import Stop

PATIENCE = 5.0
"""Seconds after which a signal must have come."""
MPIRUNS = ("mpirun", "mpiexec", "orterun", "prterun")
"""Open MPI's launchers, which pass SIGUSR2 on to their ranks."""
STEPS = ("slurmstepd",)
"""What starts the ranks of srun."""
SENT = "sent"


class Heard(NamedTuple):
    """Which signals have reached a rank."""

    own: bool
    """One that it sent to itself."""
    launchers: bool
    """One that was sent through the launcher."""
    way: str
    """`SENT`, or why none was sent through the launcher."""


def listen(launch: Launch, meet: Callable[[str], Mapping[int, str]]) -> Heard:
    """Send SIGUSR2 to this rank, and then through the launcher to all; every rank must
    call this at once. A signal reaches Python only in the main thread.

    `meet` brings a word to all ranks, and returns all ranks' words.
    """
    with Stop(ends_process=False).listening() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        own = wait_for(lambda: stop.asked, PATIENCE)
    if launch.alone:
        return Heard(own, False, "one process, without a launcher")
    # From here on SIGUSR2 never ends this process, however late it comes.
    with Stop().listening() as stop:
        # All are listening, once they have met.
        meet("listening")
        way = (
            send(way_to_send(launch, os.environ, os.getppid()))
            if launch.rank == 0
            else ""
        )
        way = meet(way)[0]
        came = way == SENT and wait_for(lambda: stop.asked, PATIENCE)
    return Heard(own, came, way)


def way_to_send(
    launch: Launch, environment: Mapping[str, str], parent: int
) -> list[str] | int | str:
    """Return the command that sends SIGUSR2 to all ranks, the process that passes it on
    to them, or why there is neither; `parent` is the process that started rank 0.
    """
    try:
        name = Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:
        name = "a hidden process"
    # A shell in between would be killed by the signal, and the rank with it. And
    # elsewhere than on its own node, mpirun has a daemon that does not pass it on.
    srun = launch.launcher == "srun"
    if name not in (STEPS if srun else MPIRUNS):
        return f"{name}, not {'srun' if srun else 'mpirun'}, has started rank 0"
    if not srun:
        return parent
    scancel = shutil.which("scancel")
    if scancel is None:
        return "there is no scancel here"
    step = f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    return [scancel, "--signal=USR2", step]


def send(way: list[str] | int | str) -> str:
    """Send SIGUSR2 to all ranks; return `SENT`, or why it was not."""
    try:
        if isinstance(way, int):
            os.kill(way, signal.SIGUSR2)
        elif isinstance(way, list):
            done = subprocess.run(way, capture_output=True, timeout=PATIENCE)
            # The launcher may signal all that its ranks have started, this one as well.
            if done.returncode not in (0, -signal.SIGUSR2):
                return f"{way[0]} exits with {done.returncode}"
        else:
            return way
    except (OSError, subprocess.SubprocessError) as failure:
        return one_line(failure)
    return SENT


def judge(ranks: Mapping[int, Heard]) -> list[Finding]:
    """Judge which signals have arrived."""
    deaf = [rank for rank, heard in ranks.items() if not heard.own]
    if deaf:
        told = "SIGUSR2 does not arrive: something has blocked it"
        advice = (
            "look for a wrapper or library that blocks signals: time limits kill runs"
        )
        return [error("signals", told, advice, *deaf)]
    way = next(iter(ranks.values())).way
    if way != SENT:
        own = fine("signals", "a rank hears its own SIGUSR2")
        return [own, skipped("signals by launcher", way)]
    missed = [rank for rank, heard in ranks.items() if not heard.launchers]
    if missed:
        told = "the launcher's SIGUSR2 did not arrive"
        advice = (
            "start python without a shell around it, or with exec: otherwise a time "
            "limit ends the run without a checkpoint"
        )
        return [warning("signals", told, advice, *missed)]
    return [fine("signals", "SIGUSR2 reaches every rank through the launcher")]
