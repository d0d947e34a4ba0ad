"""`.job` in a run's folder names the Slurm job that began the run: no other job takes
the folder for its own.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from hpcfed.results.folder import JOB

LONGEST = 1000
"""Bytes of a name that are read; the file may be anything that somebody put there."""


def this_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Name the Slurm job that this process is part of; None outside Slurm.

    A requeued job keeps its name. The cluster is part of it: clusters that share a file
    system may give two jobs the same number.
    """
    number = environment.get("SLURM_JOB_ID", "")
    if not number.isdigit():
        return None
    cluster = environment.get("SLURM_CLUSTER_NAME", "cluster")
    return f"{number} on {cluster}"


def was_requeued(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether Slurm has begun this job before."""
    # Slurm sets it only from the second start on.
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    return restarts.isdigit() and int(restarts) > 0


def begun_by(folder: Path) -> str | None:
    """Read which job has begun the run in a folder; None if no job has, or there is no
    run.
    """
    path = folder / JOB
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        content = file.read(LONGEST)
    return content.decode(errors="replace").strip() or None


def sign(folder: Path) -> None:
    """Leave this job's name in the folder of a run that begins.

    Outside Slurm only remove a name that was there: that job's run is gone.
    """
    # Unlinked first: what is there may be a link, which must not be written through.
    (folder / JOB).unlink(missing_ok=True)
    job = this_job()
    if job is not None:
        (folder / JOB).write_text(f"{job}\n")
