"""When trackers write, what they have already written, and what happens if they fail.

They read everything from the results, which hold all rounds. So a tracker that is added
to a resumed run also gets the earlier rounds, and no round is written twice.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path

import numpy as np

from hpcfed.errors import one_line
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.trackers import (
    Figures,
    MLflow,
    TensorBoard,
    Tracked,
    Tracker,
    WeightsAndBiases,
    check_key,
)
from hpcfed.options import RunConfig
from hpcfed.results.as_json import read_json
from hpcfed.results.folder import TRACKED
from hpcfed.results.publish import replace_quickly
from hpcfed.results.results import ResultsWriter
from hpcfed.runtime.signals import Stop

SHARE = 0.005
"""The share of a run's time that trackers may take; the rest comes at the end."""
MOST_ROUNDS = 50
"""Rounds that are written at a time, so that no round is delayed for long."""
MOST_LOSSES = 500
"""Points of a network's losses; each is a mean over some steps."""
MOST_BYTES = 2**16

Say = Callable[[str], None]
Open = Callable[[Tracked, str], Tracker]
"""Makes a tracker; the string is the tracker's own name for the run, if it has one."""


@dataclass
class TrackerMark:
    """How far a tracker has got."""

    rounds: int = 0
    learnings: int = 0
    id: str = ""
    """The tracker's name for the run."""


class Tracking:
    """The trackers of one run, on its root."""

    def __init__(
        self, results: ResultsWriter, run: Tracked, openers: dict[str, Open], say: Say
    ) -> None:
        self._results = results
        self._path = run.folder / TRACKED
        self._say = say
        self._marks = _read_marks(self._path)
        self._losses: list[list[Figures]] = []
        """What is written about each time the server's model has learnt so far."""
        self._trackers: dict[str, Tracker] = {}
        for name, open_tracker in openers.items():
            mark = self._marks.setdefault(name, TrackerMark())
            with self._surviving(name):
                self._trackers[name] = open_tracker(run, mark.id)
                mark.id = self._trackers[name].id
        self._note_losses()
        self._began = time.monotonic()
        self._spent = 0.0

    def after_round(self) -> None:
        """Write some rounds, if that has not taken too much time so far."""
        self._note_losses()
        now = time.monotonic()
        if not self._trackers or self._spent > SHARE * (now - self._began):
            return
        self._write(MOST_ROUNDS)
        self._spent += time.monotonic() - now

    def close(self, status: str) -> None:
        """Write the rest, and close the trackers."""
        self._write(self._results.rounds_done)
        for name, tracker in list(self._trackers.items()):
            with self._surviving(name):
                tracker.close(status)

    def _write(self, most: int) -> None:
        if not self._trackers:
            return
        # A copy, because a tracker that fails is removed within the loop.
        for name, tracker in list(self._trackers.items()):
            mark = self._marks[name]
            with self._surviving(name):
                last = min(mark.rounds + most, self._results.rounds_done)
                tracker.rounds([self._round(r) for r in range(mark.rounds, last)])
                # A resumed run repeats rounds that were already written.
                mark.rounds = max(mark.rounds, last)
                for losses in self._losses[mark.learnings :]:
                    tracker.losses(losses)
                    mark.learnings += 1
        marks = {name: asdict(mark) for name, mark in self._marks.items()}
        replace_quickly(json.dumps(marks), self._path)

    def _note_losses(self) -> None:
        """Copy new losses now: the file is closed before the trackers are."""
        for learning in range(len(self._losses), self._results.learnings):
            losses = self._results.losses(learning)
            self._losses.append(thinned(losses, learning))

    def _round(self, round: int) -> Figures:
        return Figures(round + 1, self._results.figures(round))

    @contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """Turn off a tracker that fails within the block; the run goes on."""
        try:
            yield
        # Third-party packages that use a network may raise anything.
        except Exception as error:
            self._trackers.pop(name, None)
            self._say(f"--{name} is off from here on: {one_line(error)}")


def _read_marks(path: Path) -> dict[str, TrackerMark]:
    """Read how far trackers have got; empty if no tracker has written anything."""
    try:
        marks: dict[str, TrackerMark] = read_json(
            path, dict[str, TrackerMark], MOST_BYTES
        )
        return marks
    # Missing, or damaged: trackers then begin with round 1 again.
    except (OSError, ValueError):
        return {}


def thinned(losses: dict[str, np.ndarray], learning: int) -> list[Figures]:
    """Return means over windows of steps, one network after the other."""
    points = []
    for network, values in losses.items():
        steps = len(values)
        windows = np.array_split(np.arange(steps), min(steps, MOST_LOSSES))
        for window in windows:
            # Step numbers continue when the model learns again.
            last = learning * steps + int(window[-1]) + 1
            mean = float(values[window].mean())
            if isfinite(mean):
                points.append(Figures(last, {f"server_losses/{network}": mean}))
    return points


def _openers(config: RunConfig) -> dict[str, Open]:
    """Return the functions that open the requested trackers."""
    found: dict[str, Open] = {}
    if config.tensorboard:
        found["tensorboard"] = TensorBoard
    if config.wandb is not None:
        found["wandb"] = partial(WeightsAndBiases, config.wandb)
    if config.mlflow is not None:
        found["mlflow"] = partial(MLflow, config.mlflow)
    return found


def check_account(config: RunConfig) -> None:
    """Refuse a tracker that would ask for a password during a job."""
    if config.wandb is not None:
        check_key()


@contextmanager
def tracked(
    setup: Setup, folder: Path, results: ResultsWriter | None, say: Say, stop: Stop
) -> Iterator[Tracking | None]:
    """Return a run's trackers within the block, on the root; None elsewhere."""
    config = setup.settings.config
    openers = _openers(config)
    if results is None or not openers:
        yield None
        return
    run = Tracked(
        folder=folder,
        options=setup.settings.flat(),
        command=shlex.join(setup.settings.command or sys.argv),
        seed=config.seed if setup.stacked > 1 else None,
    )
    tracking = Tracking(results, run, openers, say)
    try:
        yield tracking
    except BaseException:
        tracking.close("failed")
        raise
    tracking.close("stopped" if stop.agreed else "complete")
