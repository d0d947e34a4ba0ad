"""`hpcfed study` after its command line has been understood."""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import isnan
from pathlib import Path

from hpcfed.errors import UserError, count, printable, say
from hpcfed.results.claim import claimed
from hpcfed.results.folder import POINTS, STUDY, STUDY_CLAIM
from hpcfed.results.publish import check_target
from hpcfed.results.trials import read_outcome, write_listing
from hpcfed.runtime.launcher import launched
from hpcfed.studies import execute
from hpcfed.studies.gather import gather
from hpcfed.studies.launch import Start, launcher
from hpcfed.studies.plan import (
    Point,
    Study,
    Trial,
    choose,
    find_study,
    points,
    read_study,
    trials,
)
from hpcfed.studies.stacks import describe, stacked
from hpcfed.studies.submit import submit
from hpcfed.words import flops_text


def study(options: argparse.Namespace, extra: Sequence[str]) -> int:
    """Do what was asked for with a study; return the number of trials that failed.
    `extra` are words for sbatch.
    """
    if not launched().alone:
        raise UserError(
            "hpcfed study starts mpirun or srun itself; start it without them"
        )
    path = find_study(options.study)
    asked = read_study(path)
    every = points(asked, path)
    chosen = choose(every, only=options.only, numbers=options.points)
    out = options.out or Path("runs") / path.stem
    start = launcher(options.launcher)
    text = path.read_text()
    chosen_trials = trials(asked, chosen, out)
    if options.dry_run and not options.submit:
        _print_plan(asked, chosen_trials, start)
        if options.stack > 1:
            _print_stacks(chosen_trials, options.stack)
        return 0
    if not options.dry_run:
        _make(out)
    # The jobs may start in another folder, so paths are absolute.
    if options.submit:
        file = path.resolve()
        dry_run = options.dry_run
        if not dry_run:
            write_listing(out, asked.title, [str(trial) for trial in chosen_trials])
        submit(file, out.resolve(), chosen, extra, dry_run=dry_run)
        return 0
    all_trials = trials(asked, every, out)
    if options.gather:
        # The last job of a submitted study, which runs nothing.
        execute.settle(all_trials, start)
        gather(out / STUDY, asked, text, all_trials)
        failed = _count_incomplete(chosen_trials)
    elif options.points is not None:
        # One job of an array: others write beside it, and the last job gathers.
        failed = _run_without_gathering(
            asked, chosen_trials, out, start, most=options.stack
        )
    else:
        return run_study(asked, text, every, chosen, out, start, most=options.stack)
    say(_closing(failed, len(chosen_trials), out))
    return failed


def run_study(
    asked: Study,
    text: str,
    every: Sequence[Point],
    chosen: Sequence[Point],
    out: Path,
    start: Start,
    *,
    most: int = 1,
) -> int:
    """Run the chosen points' trials here, at most so many as one process, gather all,
    and say how it went; return the number of trials that failed.
    """
    _make(out)
    all_trials = trials(asked, every, out)
    chosen_trials = trials(asked, chosen, out)
    with _claimed(out):
        write_listing(out, asked.title, [str(trial) for trial in chosen_trials])
        failed = execute.run_trials(
            asked, text, all_trials, chosen_trials, out, start, most=most
        )
    say(_closing(failed, len(chosen_trials), out))
    return failed


def _count_incomplete(chosen: Sequence[Trial]) -> int:
    incomplete = 0
    for trial in chosen:
        incomplete += read_outcome(trial.outcome).status != "complete"
    return incomplete


def _run_without_gathering(
    asked: Study, chosen: Sequence[Trial], out: Path, start: Start, *, most: int
) -> int:
    execute.wait_for_runs(chosen, out)
    execute.settle(chosen, start)
    # A requeued job goes on where it was stopped.
    done = execute.check_finished(chosen)
    return execute.run_left(asked, chosen, out, start, done=done, most=most)


def _make(out: Path) -> None:
    try:
        # The folder of trials tells from the first moment that a study is here.
        (out / POINTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --out {out}: {error.strerror}") from None
    # Now, not after hours of runs.
    check_target("--out: its", out / STUDY)


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Have the folder of a study for oneself within. Jobs of an array share theirs."""
    with ExitStack() as claims:
        try:
            claims.enter_context(claimed(out, STUDY_CLAIM))
        except OSError as error:
            raise UserError(f"cannot write to --out {out}: {error.strerror}") from None
        yield


def _closing(failed: int, number: int, out: Path) -> str:
    if failed:
        return (
            f"{count(failed, 'trial')} of {number} failed; "
            f"start the study again to try them once more: {out}"
        )
    every = count(number, "trial")
    return f"all of {every} complete; look at them: hpcfed report {out}"


def _print_plan(asked: Study, chosen: Sequence[Trial], start: Start) -> None:
    """Print every point, its command, and what it may cost."""
    # Only here: a study plans and starts runs without loading torch.
    import torch

    from hpcfed.experiment.serving import choose_server
    from hpcfed.studies import estimate

    cuda = torch.cuda.is_available()
    done = execute.check_finished(chosen)
    works = {}
    measured = []
    for trial in chosen:
        point = trial.point
        if point.name not in works:
            chosen_server = choose_server(point.settings, gpu=cuda)
            works[point.name] = estimate.work(chosen_server)
        runs = done.get(trial.folder)
        if runs:
            # A run of a stack has recorded the time of all of them.
            at_once = runs[0].stacked_seeds / point.settings.config.num_seeds
            rounds = float(runs[0].rounds["seconds"].sum()) / at_once
            process = read_outcome(trial.outcome).seconds
            work = works[point.name]
            measured.append((point, work, rounds, process))
    speed = estimate.speed(measured, cuda=cuda)
    total = 0.0
    for trial in chosen:
        if trial.repeat:  # the first repeat stands for all
            continue
        point = trial.point
        work = works[trial.point.name]
        seconds = speed.seconds(point, work)
        left = 0
        for other in chosen:
            left += other.point is point and other.folder not in done
        total += left * seconds
        print(f"{point.number}: {point.name}")
        print(
            f"   {_ranks(point)}, {_most(point)}{_flops(work.clients)} of clients, "
            f"{_flops(work.server)} of the server, {work.sent / 2**20:,.0f} MiB sent; "
            f"{_time(seconds)} × {left} of {asked.repeats}"
        )
        words = shlex.join(execute.command(trial, start))
        print(f"   {printable(words)}")
    basis = "a guess, since nothing is measured yet"
    if speed.measured:
        basis = count(speed.measured, "finished run")
    print(
        f"{count(len(works), 'point')}, {count(len(chosen), 'trial')}, "
        f"{len(done)} finished; {_time(total)} to go "
        f"({speed.flops / 1e9:,.1f} GFLOP/s a rank: {basis})"
    )


def _print_stacks(chosen: Sequence[Trial], most: int) -> None:
    """Print which of the trials that are left would advance together."""
    done = execute.check_finished(chosen)
    left = [trial for trial in chosen if trial.folder not in done]
    for line in describe(stacked(left, most)):
        print(line)


def _ranks(point: Point) -> str:
    servers = point.settings.config.server_ranks
    ranks = count(point.ranks, "rank")
    return f"{ranks} + {count(servers, 'server rank')}" if servers else ranks


def _most(point: Point) -> str:
    """Say that some clients may train less, where those do that lack time."""
    return "at most " if point.settings.config.partial else ""


def _flops(number: float) -> str:
    if isnan(number):
        return "unknown work"
    return flops_text(number)


def _time(seconds: float) -> str:
    if isnan(seconds):
        return "nobody knows how long"  # a data set whose size nobody has said
    if seconds < 120:
        return f"about {seconds:.0f} s"
    if seconds < 7200:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} h"
