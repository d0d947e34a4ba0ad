"""Experiment trackers, in addition to the record: TensorBoard, Weights & Biases, MLflow.

Each is configured by its own package. `tracking` decides when they write.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hpcfed.errors import UserError
from hpcfed.results.folder import TENSORBOARD


class Figures(NamedTuple):
    """Figures of one round or step."""

    step: int
    """The round, counted from 1, or the step of the server's networks."""
    values: Mapping[str, float]
    """By name, such as `rounds/accuracy` or `phases/train`."""


@dataclass(frozen=True)
class Tracked:
    """What trackers are told about a run before its first round."""

    folder: Path
    options: Mapping[str, Any]
    command: str
    seed: int | None
    """The seed, if several run at once and each is a separate run."""

    @property
    def name(self) -> str:
        """What trackers call the run."""
        if self.seed is None:
            return self.folder.name
        return f"{self.folder.parent.name}/{self.folder.name}"


class Tracker(Protocol):
    """One tracker of one run. If it raises anything, only the tracker is turned off."""

    @property
    def id(self) -> str:
        """The tracker's name for the run, to continue it later; may be empty."""

    def rounds(self, figures: Sequence[Figures]) -> None:
        """Write the figures of rounds, in order."""

    def losses(self, figures: Sequence[Figures]) -> None:
        """Write losses of the server's networks, by their steps."""

    def close(self, status: str) -> None:
        """Write everything out; the run is `complete`, `stopped` or `failed`."""


METRICS = ("rounds/accuracy", "rounds/global_accuracy", "rounds/train_loss")
"""What the hyperparameter tab shows next to the options."""


class TensorBoard:
    """Writes event files to `OUT/tensorboard`."""

    id = ""

    def __init__(self, run: Tracked, known: str) -> None:
        # torch's module loads TensorBoard, which takes seconds.
        from torch.utils import tensorboard

        board: Any = tensorboard
        self._writer = board.SummaryWriter(str(run.folder / TENSORBOARD))
        self._writer.add_text("command", f"`{run.command}`")
        self._writer.add_text("options", _table(run))
        options = {}
        for name, value in run.options.items():
            plain = isinstance(value, bool | int | float | str)
            options[name] = value if plain else str(value)
        shown = dict.fromkeys(METRICS, 0.0)
        *begin, self._end = board.summary.hparams(options, shown)
        for summary in begin:
            self._writer.file_writer.add_summary(summary)

    def rounds(self, figures: Sequence[Figures]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step, values in figures:
            # One event for all series: add_scalar writes one for each, and takes eight
            # times as long.
            entries = []
            for name, value in values.items():
                entries.append(Summary.Value(tag=name, simple_value=value))
            self._writer.file_writer.add_summary(Summary(value=entries), step)
        # A thread writes them. Flush here, so that its time counts for the tracker.
        self._writer.flush()

    losses = rounds

    def close(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.file_writer.add_summary(self._end)
        self._writer.close()


def _table(run: Tracked) -> str:
    lines = ["| option | value |", "|---|---|"]
    for name, value in run.options.items():
        # Only these two characters have a meaning inside a Markdown table.
        text = str(value).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines)


OFFLINE = ("offline", "disabled", "dryrun")
"""Modes in which nothing is sent."""
BY_ROUND = ("rounds", "phases", "ranks")


class WeightsAndBiases:
    """Sends figures to a project; each seed is a separate run."""

    def __init__(self, project: str, run: Tracked, known: str) -> None:
        import wandb

        several = run.seed is not None
        self._run = wandb.init(
            project=project,
            name=run.name,
            group=run.folder.parent.name if several else None,
            id=known or None,
            resume="allow" if known else None,
            config={**run.options, "command": run.command},
            # Seeds are parallel runs in one process.
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id = str(self._run.id)
        # Rounds and the server's steps are two axes; wandb's own axis counts calls.
        self._run.define_metric("round", hidden=True)
        self._run.define_metric("server_step", hidden=True)
        for group in BY_ROUND:
            self._run.define_metric(f"{group}/*", step_metric="round")
        self._run.define_metric("server_losses/*", step_metric="server_step")

    def rounds(self, figures: Sequence[Figures]) -> None:
        for step, values in figures:
            self._run.log({"round": step, **values})

    def losses(self, figures: Sequence[Figures]) -> None:
        for step, values in figures:
            self._run.log({"server_step": step, **values})

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "complete" else 1)


def check_key() -> None:
    """Refuse to begin without an account: a cluster's job cannot enter one."""
    import wandb

    if os.environ.get("WANDB_MODE") in OFFLINE or wandb.api.api_key:
        return
    raise UserError(
        "--wandb: there is no API key; run `wandb login` first, or set "
        "WANDB_MODE=offline to send the figures later"
    )


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
        from mlflow.entities import Metric

        now = int(1e3 * time.time())
        metrics = []
        for step, values in figures:
            for name, value in values.items():
                metrics.append(Metric(name, value, now, step))
        for batch in _batches(metrics, MOST_METRICS):
            self._client.log_batch(self.id, metrics=batch)

    losses = rounds

    def close(self, status: str) -> None:
        self._client.set_terminated(self.id, STATUSES[status])


def _batches(items: Sequence[Any], most: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while batch := list(islice(rest, most)):
        yield batch
