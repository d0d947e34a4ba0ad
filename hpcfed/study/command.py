"""`hpcfed study` after its command line has been understood."""

import argparse
import shlex
from collections.abc import Sequence
from math import isnan
from pathlib import Path

from hpcfed.errors import UserError, count, printable, say
from hpcfed.record.publish import check_target
from hpcfed.runtime.launcher import launched
from hpcfed.study import execute
from hpcfed.study.gather import outcome_of, write_study
from hpcfed.study.plan import Point, Study, Trial, choose, points, read_study, trials


def study(options: argparse.Namespace, extra: Sequence[str]) -> int:
    """The number of trials that failed; `extra` are words for sbatch."""
    if not launched().alone:
        raise UserError(
            "hpcfed study starts mpirun or srun itself; start it without them"
        )
    asked = read_study(options.study)
    every = points(asked, options.study)
    chosen = choose(every, only=options.only, numbers=options.points)
    out = options.out or Path("runs") / options.study.stem
    start = execute.launcher(options.launcher)
    text = options.study.read_text()
    if options.dry_run and not options.submit:
        _show(asked, trials(asked, chosen, out), start)
        return 0
    if not options.dry_run:
        _make(out)
    if options.submit:
        script = (
            Path(__file__).with_name("study.sbatch").resolve()
        )  # of the repository's slurm/, or the wheel's copy
        execute.submit(
            options.study.resolve(),
            out.resolve(),
            chosen,
            script,
            extra,
            dry=options.dry_run,
        )
        return 0
    all_trials, own = trials(asked, every, out), trials(asked, chosen, out)
    if options.gather:
        execute.settle(all_trials, start)
        write_study(out / "study.h5", asked, text, all_trials)
        failed = sum(outcome_of(trial).status != "complete" for trial in own)
    elif (
        options.points is not None
    ):  # one job of an array: others write beside it, and the last job gathers
        execute.settle(own, start)
        failed = sum(
            _alone(asked, trial, start)
            for trial in own
            if not execute.check_finished([trial])
        )
    else:
        failed = execute.go(asked, text, all_trials, own, out, start)
    say(_closing(failed, own, out))
    return failed


def _alone(asked: Study, trial: Trial, start: execute.Start) -> bool:
    outcome = execute.attempt(trial, execute.command(trial, start), asked.limit)
    say(f"{trial}: {outcome.error or f'{outcome.seconds:.1f} s'}")
    return outcome.status != "complete"


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --out {out}: {error.strerror}") from None
    check_target("--out: its", out / "study.h5")


def _closing(failed: int, own: Sequence[Trial], out: Path) -> str:
    if failed:
        return f"{count(failed, 'trial')} of {len(own)} failed; start the study again to try them once more: {out}"
    return (
        f"all of {count(len(own), 'trial')} complete; look at them: hpcfed report {out}"
    )


def _show(asked: Study, own: Sequence[Trial], start: execute.Start) -> None:
    """Every point, its command, and what it may cost."""
    import torch

    from hpcfed.study import estimate

    done = execute.check_finished(own)
    works = {trial.point.name: estimate.work(trial.point.settings) for trial in own}
    measured = [
        (
            trial.point,
            works[trial.point.name],
            float(runs[0].rounds["seconds"].sum()),
            outcome_of(trial).seconds,
        )
        for trial in own
        if (runs := done.get(trial.folder))
    ]
    speed = estimate.speed(measured, cuda=torch.cuda.is_available())
    total = 0.0
    for trial in own:
        if trial.repeat:
            continue
        work, point = works[trial.point.name], trial.point
        seconds = speed.seconds(point, work)
        left = sum(other.point is point and other.folder not in done for other in own)
        total += left * seconds
        print(f"{point.number}: {point.name}")
        print(f"   {_ranks(point)}, {_flops(work.clients)} of clients, {_flops(work.server)} of the server, "
              f"{work.sent / 2**20:,.0f} MiB sent; {_time(seconds)} × {left} of {asked.repeats}")  # fmt: skip
        print(f"   {printable(shlex.join(execute.command(trial, start)))}")
    basis = (
        f"{count(speed.measured, 'finished run')}"
        if speed.measured
        else "a guess, since nothing is measured yet"
    )
    print(f"{count(len({t.point.name for t in own}), 'point')}, {count(len(own), 'trial')}, {len(done)} finished; "
          f"{_time(total)} to go ({speed.flops / 1e9:,.1f} GFLOP/s a rank: {basis})")  # fmt: skip


def _ranks(point: Point) -> str:
    servers = point.settings.config.server_ranks
    return count(point.ranks, "rank") + (
        f" + {count(servers, 'server rank')}" if servers else ""
    )


def _flops(number: float) -> str:
    if isnan(number):
        return "unknown work"
    return (
        f"{number / 1e12:,.2f} TFLOP"
        if number >= 1e10
        else f"{number / 1e9:,.2f} GFLOP"
    )


def _time(seconds: float) -> str:
    if isnan(seconds):
        return "nobody knows how long"  # a data set whose size nobody has said
    if seconds < 120:
        return f"about {seconds:.0f} s"
    return (
        f"about {seconds / 60:.0f} min"
        if seconds < 7200
        else f"about {seconds / 3600:.1f} h"
    )
