"""Runs a study's trials one after the other, or in stacks, here or inside a Slurm job,
and gathers them into `study.h5`.
"""

import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path

from hpcfed.errors import UserError, count, say
from hpcfed.options import check_unchanged
from hpcfed.options.declare import flags
from hpcfed.results.claim import claimed, is_held
from hpcfed.results.folder import STACKS, STUDY, runs
from hpcfed.results.publish import make_durably
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import changed_files, is_complete
from hpcfed.results.study import (
    Outcome,
    TrialSource,
    kept_alone,
    read_outcome,
    write_outcome,
    write_study,
    writing,
)
from hpcfed.runtime.launcher import Start
from hpcfed.studies.attempt import attempt, attempt_stack, finished, keeping, outcome_of
from hpcfed.studies.plan import Study, StudyOrder, Trial
from hpcfed.studies.stacks import (
    Stack,
    begun,
    describe,
    folders_of,
    options_of,
    singles,
    stacked,
    write_stack,
)

Finished = dict[Path, list[RunRecord]]
"""The runs of finished trials, one for each seed, by the trial's folder."""
WAIT = 0.5
"""Seconds between two checks of a run that we wait for."""
PAUSE = 20
"""Pause before the next gathering, in durations of the last: at most 5 % of time."""


def command(trial: Trial, start: Start) -> list[str]:
    """Return the command line of the process that runs a trial."""
    return [*_python(trial, start), *trial.words]


def _python(trial: Trial, start: Start) -> list[str]:
    """Return the command line that starts hpcfed on a trial's ranks."""
    ranks = start(trial.point.processes)
    # This Python, not the first on the path, which may differ under a launcher.
    return [*ranks, sys.executable, "-m", "hpcfed"]


def check_finished(trials: Sequence[Trial]) -> Finished:
    """Return the runs of finished trials; refuse those made with other options."""
    done = {}
    for trial in trials:
        records = finished(trial)
        if records is None:
            _check_seeds(trial)
        else:
            _check_options(trial, records)
            done[trial.folder] = records
    return done


def _check_options(trial: Trial, records: Sequence[RunRecord]) -> None:
    settings = trial.point.settings
    ranks = trial.point.ranks
    several = settings.config.seeds is not None
    # With several seeds, each is recorded as a run of that seed alone.
    for seed, record in zip(trial.seeds, records, strict=True):
        for path in changed_files(record):
            raise UserError(
                f"{trial.folder} was run with an earlier version of {path}; name "
                "another --out"
            )
        had = record.config | {"ranks": record.facts["ranks"]}
        wanted = settings.of_seed(seed) if several else settings
        check_unchanged(trial.folder, had, wanted.flat() | {"ranks": ranks})


def _check_seeds(trial: Trial) -> None:
    """Refuse to run a trial again if it would replace complete runs of its seeds, or of
    others.
    """
    wanted = trial.run_folders
    lost = [folder for folder in wanted if not folder.exists()]
    for folder in filter(is_complete, runs(trial.folder)):
        if folder not in wanted:
            raise UserError(f"{folder} was run with other seeds; name another --out")
        if lost:
            raise UserError(
                f"{lost[0]} is missing beside complete runs of other seeds; put it back, "
                f"or move {trial.folder} elsewhere to run all seeds"
            )
        if not begun(trial).goes_on:
            raise keeping(folder, trial)


def wait_for_runs(trials: Sequence[Trial], out: Path) -> None:
    """Wait for trials that still run: their study was killed, but they were not."""
    logs = {trial.log: str(trial) for trial in trials}
    folders = {str(trial.folder) for trial in trials}
    for path in sorted((out / STACKS).glob("*.json")):
        log = path.with_suffix(".log")
        if is_held(log) and folders & set(folders_of(path)):
            logs[log] = path.stem
    for log, name in logs.items():
        if is_held(log):
            say(
                f"{name}: still at work, perhaps for a study that was killed; waiting …"
            )
        while is_held(log):
            time.sleep(WAIT)


def settle(trials: Sequence[Trial], start: Start) -> None:
    """Write missing outcomes of finished trials, whose runs outlived a killed study."""
    for trial in trials:
        if read_outcome(trial.outcome).status == "complete":
            continue
        try:
            done = check_finished([trial])
        except UserError:
            continue  # a run with other options is not a trial of this study
        if done:
            words = shlex.join(command(trial, start))
            write_outcome(trial.outcome, Outcome("complete", command=words))


def run_trials(order: StudyOrder) -> int:
    """Run the chosen unfinished trials, and gather all; return how many failed."""
    wait_for_runs(order.trials, order.out)
    # Before the first trial, so that a run with other options does not end the study
    # half-way.
    done = check_finished(order.trials)
    check_kept(order, again=[trial.folder for trial in order.trials])
    settle(order.every_trial, order.start)
    next_time = 0.0

    def gather_unless_recent() -> None:
        nonlocal next_time
        begin = time.monotonic()
        if begin >= next_time:
            gather_all(order)
            now = time.monotonic()
            next_time = now + PAUSE * (now - begin)

    failed = run_left(order, done=done, after=gather_unless_recent)
    gather_all(order)  # what the last pause has skipped
    return failed


def check_kept(order: StudyOrder, *, again: Collection[Path] = ()) -> None:
    """Refuse to gather if that would drop runs whose folders are gone, unless their
    trials run `again`, or were tried again since.
    """
    path = order.out / STUDY
    for folder, run in kept_alone(path).items():
        tried = read_outcome(folder.with_suffix(".json")).status == "failed"
        if folder not in again and not tried:
            raise UserError(
                f"{run} is missing or damaged, and only {path} has that run; put the "
                f"folder back, or move {STUDY} elsewhere to gather without it"
            )


def gather_all(order: StudyOrder) -> None:
    """Combine what every trial of a study has left, in the study's file."""
    gather(order.out / STUDY, order.study, order.text, order.every_trial)


def gather(path: Path, study: Study, text: str, every: Sequence[Trial]) -> None:
    """Combine all trials' runs and outcomes in one file; `text` is the study's own."""
    sources = []
    for trial in every:
        options = {**trial.point.given, "ranks": trial.point.ranks}
        outcome = outcome_of(trial)
        sources.append(TrialSource(str(trial), trial.folder, outcome, options))
    write_study(path, title=study.title, warmup=study.warmup, text=text, trials=sources)


def run_left(
    order: StudyOrder,
    *,
    done: Collection[Path],
    after: Callable[[], None] = lambda: None,
) -> int:
    """Run the trials that are not done, with `after` each; return how many failed."""
    chosen, most = order.trials, order.most
    told = {}
    for number, trial in enumerate(chosen, start=1):
        told[trial.folder] = f"[{number}/{len(chosen)}] {trial}"
        if trial.folder in done:
            say(f"{told[trial.folder]}: finished already")
    left = [trial for trial in chosen if trial.folder not in done]
    stacks = deque(singles(left))
    if most > 1 and left:
        stacks = deque(stacked(left, most))
        for line in describe(stacks):
            say(line)
    failed = 0
    with closing(_taken(stacks, order, told)) as each:
        for label, stack in each:
            say(f"{label}: {count(stack.trials[0].point.processes, 'rank')} …")
            outcomes = _attempted(stack, order)
            again = []
            for trial, outcome in zip(stack.trials, outcomes, strict=True):
                if outcome is None:
                    again.append(trial)
                    continue
                failed += outcome.status != "complete"
                say(f"{told[trial.folder]}: {outcome}")
            if again:
                say(
                    f"{label}: failed; {count(len(again), 'trial')} start again, fewer at "
                    "a time, which may change the last digits of their figures"
                )
                # Whether memory was too small or one trial failed, halving isolates it.
                halves = Stack(tuple(again)).halves()
                # Trials that can continue after a round are stacked apart from others.
                parts = chain.from_iterable(
                    stacked(half.trials, most) for half in halves
                )
                stacks.extendleft(reversed(list(parts)))
            after()
    return failed


def _taken(
    stacks: deque[Stack], order: StudyOrder, told: Mapping[Path, str]
) -> Generator[tuple[str, Stack], None, None]:
    """Yield the stacks with their labels until none is left: each while no other process
    runs its trials. One that another process runs comes later.
    """
    busy: set[str] = set()
    passed_over = 0
    while stacks:
        stack = stacks.popleft()
        label = str(stack)
        if len(stack.trials) == 1:
            label = told[stack.trials[0].folder]
        with ExitStack() as claims:
            if not _take(stack.trials, claims):
                if label not in busy:
                    say(f"{label}: another process runs it; waiting for it …")
                busy.add(label)
                stacks.append(stack)
                passed_over += 1
                if passed_over >= len(stacks):
                    time.sleep(WAIT)
                continue
            passed_over = 0
            parts = _still_left(stack, order, told)
            if [part.trials for part in parts] == [stack.trials]:
                yield label, stack
            else:
                stacks.extendleft(reversed(parts))


def _take(trials: Sequence[Trial], taken: ExitStack) -> bool:
    """Take trials until `taken` is left: no other process of the study then runs them.
    Take none, and return False, if another has taken one.
    """
    with ExitStack() as claims:
        for trial in trials:
            with writing(trial.log):
                make_durably(trial.folder.parent)
                try:
                    claims.enter_context(claimed(trial.folder.parent, trial.claim))
                except UserError:
                    return False
        taken.push(claims.pop_all())
    return True


def _still_left(
    stack: Stack, order: StudyOrder, told: Mapping[Path, str]
) -> list[Stack]:
    """Return the trials of a stack, which we have taken, that no other process has
    finished meanwhile; stack them anew if they have come apart.
    """
    wait_for_runs(stack.trials, order.out)
    done = check_finished(stack.trials)
    for folder in done:
        say(f"{told[folder]}: finished already")
    left = [trial for trial in stack.trials if trial.folder not in done]
    return stacked(left, order.most) if len(stack.trials) > 1 else singles(left)


def _attempted(stack: Stack, order: StudyOrder) -> Sequence[Outcome | None]:
    """Run a stack's trials as one process."""
    first, start, limit = stack.trials[0], order.start, order.study.limit
    if len(stack.trials) == 1:
        resumes = begun(first).goes_on
        words = command(first, start)
        if resumes:
            # Begin anew if it cannot be continued after all.
            options = options_of(first) | {"overwrite": True}
            words = [*_python(first, start), "run", *flags(options)]
        told = shlex.join(command(first, start))
        return [attempt(first, words, limit, command=told, goes_on=resumes)]
    path = order.out / STACKS / stack.file
    write_stack(path, stack)
    words = [*_python(first, start), "stack", str(path)]
    commands = [shlex.join(command(trial, start)) for trial in stack.trials]
    return attempt_stack(stack, words, path, limit, commands=commands)
