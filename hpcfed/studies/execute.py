"""Running a study's trials one after the other, here or inside a Slurm job."""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpcfed.config import check_unchanged
from hpcfed.errors import UserError, count, say
from hpcfed.experiment.stored import changed_files, is_complete
from hpcfed.record.folder import STUDY, runs
from hpcfed.record.run import RunRecord
from hpcfed.studies.attempt import attempt
from hpcfed.studies.gather import write_study
from hpcfed.studies.launch import Start
from hpcfed.studies.outcome import (
    Outcome,
    finished,
    outcome_of,
    run_folders,
    write_outcome,
)
from hpcfed.studies.plan import Study, Trial

GATHER_PAUSE = 20
"""How many times longer than gathering the pause before the next gathering is, at
least.
"""


def command(trial: Trial, start: Start) -> list[str]:
    """Return the words of the process that runs a trial."""
    ranks = start(trial.point.processes)
    # This Python, not the first on the path, which a launcher may not share.
    return [*ranks, sys.executable, "-m", "hpcfed", *trial.words]


def check_finished(trials: Sequence[Trial]) -> dict[Path, list[RunRecord]]:
    """Return the runs of trials that need not run again, by folder. Refuse runs that
    were made with other options.
    """
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
    # Each of several seeds is recorded as a run of that seed alone.
    for seed, record in zip(trial.seeds, records, strict=True):
        for path in changed_files(record):
            raise UserError(
                f"{trial.folder} was run with {path} as it was before it changed; name "
                "another --out"
            )
        had = record.config | {"ranks": record.facts["ranks"]}
        wanted = settings.of_seed(seed) if several else settings
        check_unchanged(
            trial.folder,
            had,
            wanted.flat() | {"ranks": ranks},
        )


def _check_seeds(trial: Trial) -> None:
    """Refuse to replace complete runs of other seeds, which a trial that is run again
    would do.
    """
    wanted = run_folders(trial)
    all_there = all(folder.exists() for folder in wanted)
    for folder in runs(trial.folder):
        of_other_seeds = folder not in wanted or not all_there
        if of_other_seeds and is_complete(folder):
            raise UserError(f"{folder} was run with other seeds; name another --out")


def settle(trials: Sequence[Trial], start: Start) -> None:
    """Write the outcome of trials that are finished without one: their run outlived a
    study that was killed.
    """
    for trial in trials:
        if outcome_of(trial).status == "complete":
            continue
        try:
            done = check_finished([trial])
        except UserError:
            continue  # a run that other options have made is no trial of this study
        if done:
            words = shlex.join(command(trial, start))
            write_outcome(trial, Outcome("complete", command=words))


def run_trials(
    study: Study,
    text: str,
    every: Sequence[Trial],
    chosen: Sequence[Trial],
    out: Path,
    start: Start,
) -> int:
    """Run the chosen trials that are not finished, and gather every trial; return the
    number of those that failed.
    """
    # Before the first trial, so that a run of other options ends nothing half-way.
    done = check_finished(chosen)
    settle(every, start)
    gathering = Gathering(out / STUDY, study, text, every)
    failed = 0
    for number, trial in enumerate(chosen, start=1):
        told = f"[{number}/{len(chosen)}] {trial}"
        if trial.folder in done:
            say(f"{told}: there already")
            continue
        ranks = count(trial.point.processes, "rank")
        say(f"{told}: {ranks} …")
        words = command(trial, start)
        outcome = attempt(trial, words, study.limit)
        failed += outcome.status != "complete"
        say(f"{told}: {outcome}")
        gathering.after_trial()
    gathering.gather()  # whatever the last pause has left out
    return failed


class Gathering:
    """Keeps study.h5 up to date without spending a noticeable share of the time on it."""

    def __init__(
        self, path: Path, study: Study, text: str, every: Sequence[Trial]
    ) -> None:
        self._path = path
        self._study = study
        self._text = text
        self._every = every
        self._next = 0.0  # when to gather again, by the monotonic clock

    def after_trial(self) -> None:
        if time.monotonic() >= self._next:
            self.gather()

    def gather(self) -> None:
        begin = time.monotonic()
        write_study(
            self._path,
            self._study,
            self._text,
            self._every,
        )
        now = time.monotonic()
        # At least `GATHER_PAUSE` times as long as it took: at most 5 % of the time.
        self._next = now + GATHER_PAUSE * (now - begin)
