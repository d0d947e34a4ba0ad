"""Keeps `study.h5` up to date while trials run."""

import time
from collections.abc import Sequence
from pathlib import Path

from hpcfed.results.study import TrialSource, write_study
from hpcfed.results.trials import read_outcome
from hpcfed.studies.plan import Study, Trial

PAUSE = 20
"""The minimum pause before the next gathering, as a multiple of the last one's
duration.
"""


def gather(path: Path, study: Study, text: str, every: Sequence[Trial]) -> None:
    """Combine the runs of all trials, and how each trial went, in one file. `text` is
    the study's own file.
    """
    sources = []
    for trial in every:
        options = {**trial.point.given, "ranks": trial.point.ranks}
        outcome = read_outcome(trial.outcome)
        sources.append(TrialSource(str(trial), trial.folder, outcome, options))
    write_study(path, title=study.title, warmup=study.warmup, text=text, trials=sources)


class Gathering:
    """Keeps study.h5 up to date, with a negligible share of the time."""

    def __init__(
        self, path: Path, study: Study, text: str, every: Sequence[Trial]
    ) -> None:
        self._path = path
        self._study = study
        self._text = text
        self._every = every
        self._next = 0.0  # when to gather again, by the monotonic clock

    def after_trial(self) -> None:
        """Gather, unless the last time was too recent."""
        if time.monotonic() >= self._next:
            self.gather()

    def gather(self) -> None:
        """Gather now."""
        begin = time.monotonic()
        gather(self._path, self._study, self._text, self._every)
        now = time.monotonic()
        # At least `PAUSE` times as long as it took: at most 5 % of the time.
        self._next = now + PAUSE * (now - begin)
