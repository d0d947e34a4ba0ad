"""What `hpcfed study` does: run a study here, as a job of an array, or through Slurm,
or gather what has run.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpcfed.errors import UserError, count, say
from hpcfed.results.claim import claimed
from hpcfed.results.folder import POINTS, STUDY, STUDY_CLAIM
from hpcfed.results.publish import check_target
from hpcfed.results.trials import read_outcome, write_listing
from hpcfed.runtime.launcher import launched, launcher
from hpcfed.studies import execute
from hpcfed.studies.gather import gather
from hpcfed.studies.plan import StudyOrder, choose, find_study, points, read_study
from hpcfed.studies.submit import submit


def order_of(
    study: Path,
    *,
    out: Path | None,
    only: str,
    numbers: Sequence[int] | None,
    starter: str,
    most: int,
) -> StudyOrder:
    """Read a study file, check all of it, and choose points."""
    if not launched().alone:
        raise UserError(
            "hpcfed study starts mpirun or srun itself; start it without them"
        )
    path = find_study(study)
    asked = read_study(path)
    every = points(asked, path)
    return StudyOrder(
        study=asked,
        path=path,
        text=path.read_text(),
        every=every,
        chosen=choose(every, only=only, numbers=numbers),
        out=out or Path("runs") / path.stem,
        start=launcher(starter),
        most=most,
    )


def run_study(order: StudyOrder) -> int:
    """Run the chosen trials here, gather all, and say how it went; return the number of
    failed trials.
    """
    _make(order.out)
    with _claimed(order.out):
        _write_listing(order)
        failed = execute.run_trials(order)
    say(_closing(failed, order))
    return failed


def run_points(order: StudyOrder) -> int:
    """Run the chosen trials as one job of an array: other jobs write beside it, and the
    last one gathers. Return the number of failed trials.
    """
    _make(order.out)
    execute.wait_for_runs(order.trials, order.out)
    execute.settle(order.trials, order.start)
    # A requeued job continues where it was stopped.
    done = execute.check_finished(order.trials)
    failed = execute.run_left(order, done=done)
    say(_closing(failed, order))
    return failed


def gather_study(order: StudyOrder) -> int:
    """Gather what has run, as the last job of a submitted study does; return the number
    of chosen trials that are not complete.
    """
    _make(order.out)
    execute.settle(order.every_trial, order.start)
    gather(order.out / STUDY, order.study, order.text, order.every_trial)
    incomplete = 0
    for trial in order.trials:
        incomplete += read_outcome(trial.outcome).status != "complete"
    say(_closing(incomplete, order))
    return incomplete


def submit_study(order: StudyOrder, extra: Sequence[str], *, dry_run: bool) -> None:
    """Submit the chosen points to Slurm; `extra` are arguments for sbatch."""
    if not dry_run:
        _make(order.out)
        _write_listing(order)
    # The jobs may start in another folder, so paths are absolute.
    file, out = order.path.resolve(), order.out.resolve()
    submit(file, out, order.chosen, extra, dry_run=dry_run)


def _write_listing(order: StudyOrder) -> None:
    names = [str(trial) for trial in order.trials]
    write_listing(order.out, order.study.title, names)


def _make(out: Path) -> None:
    try:
        # The folder of trials marks this as a study's folder from the start.
        (out / POINTS).mkdir(parents=True, exist_ok=True)
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


def _closing(failed: int, order: StudyOrder) -> str:
    number = len(order.trials)
    if failed:
        return (
            f"{count(failed, 'trial')} of {number} failed; "
            f"start the study again to try them once more: {order.out}"
        )
    every = count(number, "trial")
    return f"all of {every} complete; look at them: hpcfed report {order.out}"
