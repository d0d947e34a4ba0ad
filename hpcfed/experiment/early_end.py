"""Ends a run early: at its target, or when no evaluation has been better for a while.

A run that has ended early can be extended. Then its patience starts anew, and a target
that it has already reached no longer ends it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan, nan

import numpy as np

from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.evaluate import Evaluation
from hpcfed.experiment.progress import RunProgress
from hpcfed.options import RunConfig
from hpcfed.results.results import ResultsWriter
from hpcfed.results.run import RunRecord
from hpcfed.results.target import at_target

_SERIES = ("accuracy", "global_accuracy", "global_loss")


class Patience:
    """Counts consecutive evaluations that were no better than the best before.

    All ranks count alike, because all have the same evaluations.
    """

    def __init__(self, limit: int | None, figures: Iterable[float] = ()) -> None:
        """Begin after rounds with these figures; without a limit, never end a run."""
        self.limit = limit
        self._best = nan
        self._worse = 0
        for figure in figures:
            # Another round followed, so the run has been extended since.
            if self.is_over:
                self.begin_anew()
            self._add(figure)

    @property
    def is_over(self) -> bool:
        """Whether patience is used up."""
        return self.limit is not None and self._worse >= self.limit

    def begin_anew(self) -> None:
        """Restore the full patience; the best figure so far stays."""
        self._worse = 0

    def ends_with(self, evaluation: Evaluation | None) -> bool:
        """Count an evaluation, if there was one; tell whether patience is used up."""
        if self.limit is None or evaluation is None:
            return False
        judged = (getattr(evaluation, name) for name in _SERIES)
        self._add(judged_figure(*judged))
        return self.is_over

    def _add(self, figure: float) -> None:
        # Rounds without an evaluation, or with an undefined figure.
        if isnan(figure):
            return
        if isnan(self._best) or figure > self._best:
            self._best = figure
            self._worse = 0
        else:
            self._worse += 1


def judged_figure(accuracy: float, global_accuracy: float, global_loss: float) -> float:
    """Return the figure that a run is judged by, higher is better: the clients' mean
    accuracy, else the global model's, else its negative loss.
    """
    if not isnan(accuracy):
        return accuracy
    return -global_loss if isnan(global_accuracy) else global_accuracy


@dataclass
class EarlyEnd:
    """Tells whether a run ends early, and after which round."""

    rounds: int
    """Planned number of rounds."""
    patience: Patience
    target: float | None
    """Per cent at which the run ends."""
    has_come: bool = False
    """Whether a resumed run has already recorded all of its rounds."""

    def comes_with(
        self, round: int, evaluation: Evaluation | None, progress: RunProgress
    ) -> bool:
        """Tell whether the run ends with this round, and say so. All ranks have the
        same evaluation, so they end together.
        """
        lost_patience = self.patience.ends_with(evaluation)
        if evaluation is not None and evaluation.reaches(self.target):
            progress.stop(round)
            return True
        if lost_patience and round + 1 < self.rounds:
            progress.stop(round, patience=self.patience.limit)
            return True
        return False


def begin_early_end(setup: Setup, results: ResultsWriter | None) -> EarlyEnd:
    """Return when a run ends early, given its recorded evaluations."""
    config = setup.settings.config
    may_come = config.stop_at_target or config.early_stop is not None
    if config.resume is None or not may_come:
        nothing = np.empty((0, len(_SERIES)))
        return _early_end_after(nothing, config, was_shorter=False)
    on_record = None
    if results is not None:
        series = [results.series(name) for name in _SERIES]
        on_record = np.stack(series, axis=1), results.was_shorter
    # Only the root has the record.
    evaluations, was_shorter = setup.collectives.bcast(on_record)
    return _early_end_after(evaluations, config, was_shorter=was_shorter)


def _early_end_after(
    evaluations: np.ndarray, config: RunConfig, *, was_shorter: bool
) -> EarlyEnd:
    """Return when a run ends early that goes on after these evaluations: [rounds,
    series].
    """
    target = config.target_accuracy if config.stop_at_target else None
    judged = (judged_figure(*figures) for figures in evaluations)
    patience = Patience(config.early_stop, judged)
    if was_shorter and patience.is_over:
        patience.begin_anew()
    reached = np.zeros(len(evaluations), bool)
    if target is not None:
        reached = at_target(evaluations[:, 0], evaluations[:, 1], target)
    # A run only goes on after its target if --rounds was raised.
    if reached[:-1].any() or (was_shorter and reached.any()):
        reached[:] = False
        target = None
    has_come = patience.is_over or bool(reached.any())
    return EarlyEnd(config.rounds, patience, target, has_come)


def is_over(record: RunRecord, config: RunConfig) -> bool:
    """Tell whether a run that goes on after this record has no round left, except those
    of new clients.
    """
    # The record names other ends than those of target and patience.
    if "ended" in record.facts or record.rounds_done >= config.rounds:
        return True
    was_shorter = record.config["rounds"] < config.rounds
    evaluations = np.stack([record.rounds[name] for name in _SERIES], axis=1)
    return _early_end_after(evaluations, config, was_shorter=was_shorter).has_come
