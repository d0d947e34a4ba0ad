"""Ending a run early: when no evaluation has been better for a while."""

from collections.abc import Iterable
from math import isnan, nan
from typing import Any

import numpy as np

from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.evaluate import Evaluation
from hpcfed.record.results import ResultsWriter

_SERIES = ("accuracy", "global_accuracy", "global_loss")


class Patience:
    """Counts evaluations in a row that were no better than the best before.

    All ranks count alike, because all have the same evaluations.
    """

    def __init__(self, limit: int | None, figures: Iterable[float] = ()) -> None:
        """Begin after evaluations with these figures; without a limit nothing ends."""
        self.limit = limit
        self._best = nan
        self._worse = 0
        for figure in figures:
            self._add(figure)

    def ends_with(self, evaluation: Evaluation | None) -> bool:
        """Count an evaluation, if there was one; tell whether it was one too many."""
        if self.limit is None or evaluation is None:
            return False
        judged = (getattr(evaluation, name) for name in _SERIES)
        self._add(judged_figure(*judged))
        return self._worse >= self.limit

    def _add(self, figure: float) -> None:
        # Rounds without an evaluation, and those that nothing can be said about.
        if isnan(figure):
            return
        if isnan(self._best) or figure > self._best:
            self._best = figure
            self._worse = 0
        else:
            self._worse += 1


def judged_figure(accuracy: float, global_accuracy: float, global_loss: float) -> float:
    """Return what a run is judged by, the more the better: the clients' mean accuracy,
    else the global model's, else less loss of the global model.
    """
    if not isnan(accuracy):
        return accuracy
    return -global_loss if isnan(global_accuracy) else global_accuracy


def begin_patience(setup: Setup, results: ResultsWriter | None) -> Patience:
    """Return the patience of a run, after the evaluations that it has on record."""
    config = setup.settings.config
    if config.early_stop is None or config.resume is None:
        return Patience(config.early_stop)
    figures: Any = None
    if results is not None:
        series = [results.series(name) for name in _SERIES]
        figures = [judged_figure(*values) for values in np.stack(series, axis=1)]
    # The root alone has the record.
    return Patience(config.early_stop, setup.collectives.bcast(figures))
