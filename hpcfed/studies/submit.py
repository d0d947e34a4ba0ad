"""Submits a study to Slurm: an array of jobs for each number of ranks."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from hpcfed import shipped
from hpcfed.errors import UserError, printable
from hpcfed.studies.plan import Point

SCRIPT = "slurm/study.sbatch"
"""The script of an array's jobs; it comes with hpcfed."""


def submit(
    file: Path,
    out: Path,
    points: Sequence[Point],
    extra: Sequence[str],
    *,
    dry_run: bool,
) -> None:
    """Submit an array for each number of ranks, since all jobs of an array are alike,
    and a last job that gathers. `extra` are arguments for sbatch.
    """
    path = str(shipped.top() / SCRIPT)
    script = [path, str(file), "--out", str(out)]
    jobs = []
    by_size = sorted(points, key=_processes)
    for processes, members in groupby(by_size, key=_processes):
        numbers = ",".join(str(point.number) for point in members)
        words = [
            f"--ntasks={processes}",
            f"--array={numbers}",
            f"--output={out}/slurm-%A-%a.log",
            *extra,
        ]
        job = _sbatch([*words, *script], dry_run=dry_run)
        if job is not None:
            jobs.append(job)
    # `afterany`: finished runs are gathered even if some jobs have failed.
    arrays = ":".join(jobs) or "ARRAYS"
    last = [
        f"--dependency=afterany:{arrays}",
        "--ntasks=1",
        f"--output={out}/slurm-%j.log",
        *extra,
    ]
    _sbatch([*last, *script], dry_run=dry_run)


def _processes(point: Point) -> int:
    return point.processes


def _sbatch(words: Sequence[str], *, dry_run: bool) -> str | None:
    """Print and run sbatch; return the job's number, or None if it is only printed."""
    line = ["sbatch", "--parsable", *words]
    print(printable(shlex.join(line)), flush=True)
    if dry_run:
        return None
    # The script runs this Python, whatever the jobs' path contains.
    environment = os.environ | {"PYTHON": sys.executable}
    try:
        answer = subprocess.run(
            line,
            capture_output=True,
            text=True,
            env=environment,
        )
    except OSError as error:
        raise UserError(
            f"cannot start sbatch: {error.strerror}; "
            "--submit is for machines with Slurm"
        ) from None
    if answer.returncode:
        said = answer.stderr.strip().splitlines()
        raise UserError(f"sbatch refused: {said[-1] if said else 'no reason'}")
    # `--parsable` prints `number` or `number;cluster`.
    return answer.stdout.strip().partition(";")[0]
