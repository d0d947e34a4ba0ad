"""What `hpcfed study` does: run a study here, as a job of an array, or through Slurm,
or gather what has run.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from hpcfed import shipped
from hpcfed.errors import UserError, command_line, count, say
from hpcfed.results.claim import claimed
from hpcfed.results.folder import POINTS, RUNS, STUDY, STUDY_CLAIM
from hpcfed.results.publish import check_folder, check_target, make_durably, publish
from hpcfed.results.study import write_listing, writing
from hpcfed.runtime.launcher import launched, launcher
from hpcfed.studies import execute
from hpcfed.studies.attempt import outcome_of
from hpcfed.studies.plan import (
    Point,
    StudyOrder,
    choose,
    find_study,
    points,
    read_study,
    study_of,
)

SCRIPT = "slurm/study.sbatch"
"""The script of an array's jobs; it comes with hpcfed."""
USUAL_ARRAY = 1001
"""Slurm's MaxArraySize if the site has not set it: all numbers in an array are below."""
PATIENCE = 30
"""Seconds to wait for Slurm's configuration."""


def order_of(
    study: Path | Mapping[str, Any],
    *,
    out: Path | None,
    only: str,
    numbers: Sequence[int] | None,
    starter: str,
    most: int,
) -> StudyOrder:
    """Read a study's file, or its tables; check all of it, and choose points."""
    if not launched().alone:
        raise UserError(
            "hpcfed study starts mpirun or srun itself; start it without them"
        )
    if isinstance(study, Mapping):
        path, text = Path("study"), json.dumps(study, indent=1)
        asked = study_of(study, path)
    else:
        path = find_study(study)
        asked, text = read_study(path), path.read_text(encoding="utf-8")
    every = points(asked, path)
    return StudyOrder(
        study=asked,
        path=path,
        text=text,
        every=every,
        chosen=choose(every, only=only, numbers=numbers),
        out=out or RUNS / path.stem,
        start=launcher(starter),
        most=most,
    )


def run_study(order: StudyOrder) -> int:
    """Run the chosen trials here, and gather all; return how many failed."""
    _make(order.out)
    with _claimed(order.out):
        _write_listing(order, host=socket.gethostname())
        failed = execute.run_trials(order)
    say(_closing(failed, order))
    return failed


def run_points(order: StudyOrder) -> int:
    """Run the chosen trials as one job of an array; return how many failed."""
    _make(order.out)
    execute.wait_for_runs(order.trials, order.out)
    execute.settle(order.trials, order.start)
    # A requeued job continues where it was stopped.
    done = execute.check_finished(order.trials)
    failed = execute.run_left(order, done=done)
    say(_closing(failed, order))
    return failed


def gather_study(order: StudyOrder) -> int:
    """Gather what has run, as an array's last job; return how many are incomplete."""
    if not any(
        trial.folder.exists() or trial.outcome.exists() for trial in order.every_trial
    ):
        raise UserError(
            f"{order.out} has no run of this study yet; start it without --gather"
        )
    _make(order.out)
    execute.check_kept(order)
    execute.settle(order.every_trial, order.start)
    execute.gather_all(order)
    found = Counter(outcome_of(trial).status for trial in order.trials)
    incomplete = len(order.trials) - found["complete"]
    say(_closing(found["failed"], order, left=incomplete - found["failed"]))
    return incomplete


def submit_study(order: StudyOrder, extra: Sequence[str], *, dry_run: bool) -> None:
    """Submit the chosen points to Slurm: an array for each number of ranks, since all
    jobs of an array are alike, or several if Slurm allows no such numbers; and a last
    job that gathers. `extra` are arguments for sbatch.
    """
    most = _array_size()
    # The jobs may start in another folder, so paths are absolute.
    out = order.out.resolve()
    content = order.text.encode()
    # A job knows its point by a number only. So it reads the file as it is now, and an
    # edited one that is submitted later has another name.
    file = out / f"slurm-{sha256(content).hexdigest()[:8]}.toml"
    if not dry_run:
        _make(order.out)
        _write_listing(order)
        with writing(file):
            publish(content, file)
    script = [str(shipped.top() / SCRIPT), str(file), "--out", str(out)]
    jobs: list[str] = []

    def array(point: Point) -> tuple[int, int]:
        return point.processes, point.number // most

    # Sorted, because `groupby` only joins neighbours.
    for (processes, part), members in groupby(sorted(order.chosen, key=array), array):
        numbers = ",".join(str(point.number % most) for point in members)
        words = [
            f"--ntasks={processes}",
            f"--array={numbers}",
            f"--output={out}/slurm-%A-%a.log",
            *extra,
        ]
        offset = ["--offset", str(part * most)] if part else []
        job = _sbatch([*words, *script, *offset], jobs, dry_run=dry_run)
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
    _sbatch([*last, *script], jobs, dry_run=dry_run)


def _array_size() -> int:
    """Return Slurm's MaxArraySize, or the usual one where Slurm does not tell."""
    ask = ["scontrol", "show", "config"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return USUAL_ARRAY
    found = re.search(r"^MaxArraySize\s*=\s*([0-9]+)", told.stdout, re.MULTILINE)
    size = int(found[1]) if found else USUAL_ARRAY
    if not size:
        raise UserError(
            "--submit makes arrays, and this Slurm has none (MaxArraySize = 0); start "
            "hpcfed study within a job"
        )
    return size


def _sbatch(
    words: Sequence[str], before: Sequence[str], *, dry_run: bool
) -> str | None:
    """Print and run sbatch; return the job's number, or None if it is only printed.
    `before` are the jobs that have been submitted already.
    """
    line = ["sbatch", "--parsable", *words]
    say(shlex.join(line))
    if dry_run:
        return None
    # The script runs this Python, whatever the jobs' path contains.
    environment = os.environ | {"PYTHON": sys.executable}
    try:
        answer = subprocess.run(line, capture_output=True, text=True, env=environment)
    except OSError as error:
        raise UserError(
            f"cannot start sbatch: {error.strerror}; "
            "--submit is for machines with Slurm"
        ) from None
    if answer.returncode:
        said = answer.stderr.strip().splitlines()
        # They would run, and nothing would gather them.
        undo = f"; to withdraw the rest: scancel {' '.join(before)}" if before else ""
        raise UserError(f"sbatch refused: {said[-1] if said else 'no reason'}{undo}")
    # `--parsable` prints `number` or `number;cluster`.
    return answer.stdout.strip().partition(";")[0]


def _write_listing(order: StudyOrder, *, host: str = "") -> None:
    names = [str(trial) for trial in order.trials]
    write_listing(order.out, order.study.title, names, host=host)


def _make(out: Path) -> None:
    check_folder("--out", out)
    try:
        # The folder of trials marks this as a study's folder from the start.
        make_durably(out / POINTS)
    except OSError as error:
        raise UserError(f"cannot write to --out {out}: {error.strerror}") from None
    # Check now, not after hours of runs.
    check_target("--out: its", out / STUDY)


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Claim the folder of a study within the block. Jobs of an array share theirs."""
    with ExitStack() as claims:
        try:
            claims.enter_context(claimed(out, STUDY_CLAIM))
        except OSError as error:
            raise UserError(f"cannot write to --out {out}: {error.strerror}") from None
        yield


def _closing(failed: int, order: StudyOrder, *, left: int = 0) -> str:
    number = len(order.trials)
    told = []
    if failed:
        told.append(f"{count(failed, 'trial')} of {number} failed")
    if left:
        told.append(f"{count(left, 'trial')} of {number} not complete yet")
    if told:
        again = "start the study again to go on with them"
        return f"{', '.join(told)}; {again}: {order.out}"
    every = count(number, "trial")
    look = command_line("report", order.out)
    return f"all of {every} complete; look at them: {look}"
