"""MLflow, at MLFLOW_TRACKING_URI."""

import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from hpcfed.experiment.tracking.interface import Figures, Tracked

MOST_METRICS, MOST_PARAMS = 1000, 100
"""Limits of one request."""
MOST_TEXT = 500
"""The most characters of an option's value."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""A server that does not answer must not delay a run for minutes."""
STATUSES = {"complete": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    """Sends figures to an experiment; each seed is a separate run."""

    def __init__(self, experiment: str, run: Tracked, known: str) -> None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        # Not mlflow's module functions, which allow only one run per process.
        self._client: Any = MlflowClient()
        if known:
            self.id = known
            self._client.update_run(known, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            number = self._client.create_experiment(experiment)
        else:
            number = found.experiment_id
        made = self._client.create_run(number, run_name=run.name)
        self.id = str(made.info.run_id)
        self._log_options(run)

    def _log_options(self, run: Tracked) -> None:
        from mlflow.entities import Param

        params = []
        for name, value in run.options.items():
            params.append(Param(name, str(value)[:MOST_TEXT]))
        for batch in _batches(params, MOST_PARAMS):
            self._client.log_batch(self.id, params=batch)
        self._client.set_tag(self.id, "command", run.command)

    def rounds(self, figures: Sequence[Figures]) -> None:
        self._log(figures)

    def losses(self, figures: Sequence[Figures]) -> None:
        self._log(figures)

    def _log(self, figures: Sequence[Figures]) -> None:
        from mlflow.entities import Metric

        now = int(1e3 * time.time())
        metrics = []
        for step, values in figures:
            for name, value in values.items():
                metrics.append(Metric(name, value, now, step))
        for batch in _batches(metrics, MOST_METRICS):
            self._client.log_batch(self.id, metrics=batch)

    def close(self, status: str) -> None:
        self._client.set_terminated(self.id, STATUSES[status])


def _batches(items: Sequence[Any], most: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while batch := list(islice(rest, most)):
        yield batch
