"""Runs one trial, or a stack of trials, in its own process, and records how it went."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import takewhile
from math import isinf
from pathlib import Path
from types import FrameType

from hpcfed.errors import UserError, count, printable
from hpcfed.results.claim import claimed, hold, is_at_work
from hpcfed.results.folder import (
    JOB,
    RECORD,
    check_plain,
    empty,
    remove_empty_seeds,
    runs,
    seed_folders,
    strangers,
)
from hpcfed.results.publish import check_target, make_durably
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import is_complete, read_run
from hpcfed.results.study import (
    Outcome,
    can_be_gathered,
    read_outcome,
    write_outcome,
    writing,
)
from hpcfed.runtime.launcher import environment_of
from hpcfed.runtime.signals import STOPPED
from hpcfed.studies.plan import Trial
from hpcfed.studies.stacks import Stack, begun

GRACE = 10
"""Seconds that a launcher has to end its ranks before it is killed."""


def attempt(
    trial: Trial,
    words: Sequence[str],
    limit: float,
    *,
    command: str,
    goes_on: bool = False,
) -> Outcome:
    """Run a trial to its end, or for `limit` seconds, and record how it went.

    `command` is what would run the trial from its start. A trial that `goes_on` keeps
    what it has written, and the seconds that this took.
    """
    before = _prepare(trial, goes_on=goes_on)
    begin = time.monotonic()
    try:
        code, seconds = run_logged(words, trial.log, limit)
    except (KeyboardInterrupt, SystemExit):
        _leave(trial, before + time.monotonic() - begin, command)
        raise
    reason = _error(trial, code, limit)
    status = "failed" if reason else "complete"
    outcome = Outcome(status, reason, before + seconds, command)
    write_outcome(trial.outcome, outcome)
    return outcome


def attempt_stack(
    stack: Stack,
    words: Sequence[str],
    path: Path,
    limit: float,
    *,
    commands: Sequence[str],
) -> list[Outcome | None]:
    """Run the trials of a stack as one process, and record how each of them went.

    `path` is the stack's file, and `commands` are the commands that would run each
    trial alone. Return None for a trial that did not cause the failure of the whole
    process.
    """
    before = []
    for trial in stack.trials:
        before.append(_prepare(trial, goes_on=begun(trial).goes_on))
        with writing(trial.log):
            others = count(len(stack.trials) - 1, "other trial")
            trial.log.write_text(f"ran together with {others}: see {path.stem}.log\n")
    log = path.with_suffix(".log")
    size = len(stack.trials)
    begin = time.monotonic()
    try:
        # More trials may take proportionally longer.
        code, seconds = run_logged(words, log, limit * size)
    except (KeyboardInterrupt, SystemExit):
        took = (time.monotonic() - begin) / size
        for trial, told, earlier in zip(stack.trials, commands, before, strict=True):
            _leave(trial, earlier + took, told)
        raise
    outcomes: list[Outcome | None] = []
    for trial, command, earlier in zip(stack.trials, commands, before, strict=True):
        share = earlier + seconds / size
        reason = _error_in_stack(trial, code, log, limit)
        if reason is None:
            # It may go on from here.
            write_outcome(trial.outcome, Outcome("waiting", seconds=share))
            outcomes.append(None)
            continue
        outcome = Outcome("failed" if reason else "complete", reason, share, command)
        write_outcome(trial.outcome, outcome)
        outcomes.append(outcome)
    return outcomes


def _leave(trial: Trial, seconds: float, command: str) -> None:
    """Record the seconds of a trial whose process was interrupted. It may have come to
    its end: others of its stack take longer.
    """
    outcome = Outcome("waiting", seconds=seconds)
    if finished(trial) is not None:
        outcome = replace(outcome, status="complete", command=command)
    write_outcome(trial.outcome, outcome)


def finished(trial: Trial) -> list[RunRecord] | None:
    """Read a trial's runs, one per seed; None unless all exist and are complete."""
    # No run yet, or an unreadable one: either way the trial must run.
    try:
        records = [read_run(folder) for folder in trial.run_folders]
    except UserError:
        return None
    complete = all(record.status == "complete" for record in records)
    return records if complete else None


def outcome_of(trial: Trial) -> Outcome:
    """Return how a trial went; one that has lost a run since is not complete."""
    outcome = read_outcome(trial.outcome)
    if outcome.status != "complete" or all(map(can_be_gathered, trial.run_folders)):
        return outcome
    lost = next(run for run in trial.run_folders if not can_be_gathered(run))
    how = "damaged" if (lost / RECORD).exists() else "missing"
    reason = f"{RECORD} of {lost.name} is {how}"
    return replace(outcome, status="failed", error=reason)


def _prepare(trial: Trial, *, goes_on: bool) -> float:
    """Make a trial ready to run; return the seconds of the attempts that it goes on
    from, NaN if one of them was killed with the study.
    """
    before = read_outcome(trial.outcome).seconds if goes_on else 0.0
    # Its outcome and its log are not ours, then. `make_room` looks by itself.
    if goes_on and is_at_work(trial.folder):
        raise UserError(
            f"another run is writing to {trial.folder}; wait for its end, or name "
            "another --out"
        )
    check_target("the log", trial.log)
    with writing(trial.log):
        if not goes_on:
            make_room(trial)
        make_durably(trial.folder.parent)
        # If we were killed, an old outcome would be taken for the new attempt's.
        trial.outcome.unlink(missing_ok=True)
    return before


def run_logged(
    words: Sequence[str], path: Path, limit: float
) -> tuple[int | None, float]:
    """Run a process with its output in a log; return its exit code (None: it exceeded
    `limit` seconds), and the seconds it took.
    """
    check_target("the log", path)
    with writing(path):
        log = open(path, "w")  # noqa: SIM115 closed below
        # The process inherits the lock, so a restarted study sees whether it is alive.
        hold(log.fileno())
    # From here on the process itself writes to the log.
    begin = time.monotonic()
    with log, _ending_with_us():
        try:
            # In its own session, because mpirun and srun end their ranks when the
            # terminal closes.
            process = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment_of(words),
                start_new_session=True,
            )
            code = _wait(process, limit)
        except OSError as error:
            raise UserError(f"cannot start {words[0]}: {error.strerror}") from None
    return code, time.monotonic() - begin


def make_room(trial: Trial) -> None:
    """Remove what an unsuccessful run has left, unless a process has claimed it; refuse
    to remove a complete run.
    """
    if trial.folder.exists():
        check_plain(trial.folder)
        others = strangers(trial.folder)
        if others:
            raise UserError(f"{others[0]} was not made by a run; move it elsewhere")
        with ExitStack() as claims:
            for folder in (trial.folder, *seed_folders(trial.folder)):
                claims.enter_context(claimed(folder))
            # Another process may have completed it until now.
            for run in filter(is_complete, runs(trial.folder)):
                raise keeping(run, trial)
            empty(trial.folder)
        # Only after the claims are released, because they are files in these folders.
        remove_empty_seeds(trial.folder)
        (trial.folder / JOB).unlink(missing_ok=True)


def keeping(run: Path, trial: Trial) -> UserError:
    """Return the refusal to remove a complete run of a trial that has to begin anew."""
    return UserError(
        f"{run} is complete, but the rest of {trial} cannot go on as it is; move "
        f"{trial.folder} elsewhere to run all of it, or name another --out"
    )


@contextmanager
def _ending_with_us() -> Iterator[None]:
    """Let SIGTERM and SIGUSR2 end the process we wait for, as Ctrl-C does, and then us.

    Slurm sends SIGUSR2 before a time limit, if a job asks for it.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # Python allows only the main thread to set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in (signal.SIGTERM, signal.SIGUSR2):
        before[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """Return the exit code; None if the process had to be ended."""
    try:
        return process.wait(None if isinf(limit) else limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher ends its ranks when asked to
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            _kill(process)
        return None
    except BaseException:  # Ctrl-C or SIGTERM: end the process
        process.terminate()
        try:
            process.wait()
        except BaseException:  # a second signal: do not wait for it
            _kill(process)
        raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and its ranks at once; they have their own session."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _error(trial: Trial, code: int | None, limit: float) -> str:
    """Return why a trial failed; empty if it did not."""
    if code is None:
        return f"took longer than the limit of {limit:g} s"
    if code == 0 and finished(trial) is not None:
        return ""
    return exit_reason(trial.log, code)


def _error_in_stack(
    trial: Trial, code: int | None, log: Path, limit: float
) -> str | None:
    """Return why a trial of a stack failed, empty if it did not; None: run it again."""
    if finished(trial) is not None:
        return ""
    if code is None:
        return f"took longer than the limit of {limit:g} s a trial"
    if code == 0:
        # The others have reached their end, so it has failed by itself.
        return _recorded_error(trial)
    if code == STOPPED:
        return exit_reason(log, code)
    return None


def _recorded_error(trial: Trial) -> str:
    for folder in trial.run_folders:
        try:
            record = read_run(folder)
        except UserError as error:
            return str(error)
        if record.status == "failed":
            return printable(record.error)
    return "it has left no result"


def exit_reason(log: Path, code: int) -> str:
    """Return the run's own last message; else the first line of a notice between rules,
    as mpirun writes it; else the last line.
    """
    lines = []
    for line in log.read_text(errors="replace").splitlines():
        if line.strip():
            lines.append(line.strip())
    telling = [line for line in lines if line.startswith("hpcfed: ")]
    if not telling and lines and _is_rule(lines[-1]):
        # Backwards to the rule above: the notice's first line comes last.
        notice = takewhile(lambda line: not _is_rule(line), reversed(lines[:-1]))
        telling = list(notice)
    last = (telling or lines or ["it said nothing"])[-1]
    return f"exit code {code}: {printable(last.removeprefix('hpcfed: '))}"


def _is_rule(line: str) -> bool:
    return not line.strip("-")
