"""The rounds of one run: sample, round, evaluate, record, rebalance, checkpoint."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.clients.initial import save_model
from hpcfed.experiment import checkpointing, resume
from hpcfed.experiment.adapters import write_adapters
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.checkpointing import Checkpointer
from hpcfed.experiment.evaluate import (
    AfterTraining,
    Evaluation,
    evaluate,
    evaluate_finals,
    is_due,
)
from hpcfed.experiment.generation import generate, is_only_asked
from hpcfed.experiment.newcomers import collaborate, welcome
from hpcfed.experiment.progress import RunProgress
from hpcfed.experiment.rebalance import Rebalancer
from hpcfed.experiment.recording import Recorder, closing, open_results, open_snapshots
from hpcfed.experiment.tracking import tracked
from hpcfed.federation.cohort import Cohort
from hpcfed.results.checkpoints import Checkpoint
from hpcfed.results.folder import SERVER
from hpcfed.results.results import ResultsWriter
from hpcfed.results.target import at_target
from hpcfed.runtime.energy import ENERGIES, Used
from hpcfed.runtime.signals import Stop
from hpcfed.runtime.starting import starting
from hpcfed.server.options import server_options
from hpcfed.server.schedule import rows_are_due

DESERTED = "no client is there any more"
"""Why a run ends early when its trace of devices ends."""


def run_rounds(
    setup: Setup,
    folder: Path,
    progress: RunProgress,
    stop: Stop,
    found: Checkpoint | None,
) -> None:
    """Run all rounds, or those after a checkpoint, and record them in the folder. A run
    that is complete only generates.
    """
    if is_only_asked(setup, folder, found):
        _, state = _first_state(setup, folder, found, None, progress)
        end_run(setup, None, status="complete")
        generate(setup, folder, state, progress.say)
        return
    # Only the root has results; every rank writes snapshots of its own clients.
    results = open_results(setup, folder) if setup.world.is_root else None
    snapshots = open_snapshots(setup, folder)
    with closing(results, snapshots), ExitStack() as within:
        used = within.enter_context(Used(setup.world))
        done, state = _first_state(setup, folder, found, results, progress)
        # Only after earlier rounds are read: a new tracker gets these, too.
        tracking = within.enter_context(
            tracked(setup, folder, results, progress.say, stop)
        )
        recorder = Recorder(setup, results, snapshots, progress, tracking, done)
        checkpointer = Checkpointer(
            setup, folder, results, stop, progress.say, done=done
        )
        rounds = _Rounds(setup, results, progress, recorder, checkpointer)
        state, stopped = rounds.run(done, state)
        if not stopped and setup.newcomers is not None:
            stopped = _new_rounds(setup, state, results, progress, stop, checkpointer)
        if stopped:
            end_run(setup, results, status="stopped")
        else:
            _finish(setup, folder, state, results, used)
            # The run's files are whole, whatever happens here.
            generate(setup, folder, state, progress.say)


def _first_state(
    setup: Setup,
    folder: Path,
    found: Checkpoint | None,
    results: ResultsWriter | None,
    progress: RunProgress,
) -> tuple[int, Any]:
    """Return the number of finished rounds, and the state after them."""
    if setup.settings.options.has_server:
        setup.federation.server.begin(str(folder))
    # Also if the run resumes: the first state gives every field's shape and type.
    state = setup.method.init(setup.federation)
    if setup.settings.config.resume is None:
        return 0, state
    return resume.restore_run(setup, folder, found, state, results, progress.say)


class _Rounds:
    """The rounds of one run: sample, round, evaluate, record, rebalance, checkpoint."""

    def __init__(
        self,
        setup: Setup,
        results: ResultsWriter | None,
        progress: RunProgress,
        recorder: Recorder,
        checkpointer: Checkpointer,
    ) -> None:
        self._setup = setup
        self._results = results
        self._progress = progress
        self._recorder = recorder
        self._checkpointer = checkpointer
        self._rebalancer = Rebalancer(setup, results, progress)
        self._early_end = begin_early_end(setup, results)
        self._planned = setup.settings.config.rounds

    def run(self, done: int, state: Any) -> tuple[Any, bool]:
        """Run the remaining rounds; return the state, and whether to stop."""
        # All ranks begin together, so that waiting is not counted as the first round.
        self._setup.collectives.barrier()
        self._setup.timer.start()
        starting.reached("opening")
        if self._is_over(done):
            return state, False
        for round in range(done, self._planned):
            self._setup.collectives.meet()
            due = is_due(round, self._setup.settings.config)
            trained = (
                AfterTraining(self._setup, self._setup.federation) if due else None
            )
            # A field marked IN_PLACE is overwritten here: the state before is lost.
            cohort, state = self._advance(round, state, trained, is_first=round == done)
            deserted = self._deserted_after(round)
            evaluation = None
            if due or deserted:
                evaluation = evaluate(self._setup, state, trained)
            self._recorder.close_snapshot(round, state)
            seconds = self._recorder.record(round, cohort.log, evaluation)
            is_last = self._ends_with(round, evaluation, deserted=deserted)
            # Before the checkpoint, which then holds the rows where their clients now
            # are.
            if not is_last:
                state = self._rebalancer.after_round(state, cohort, seconds)
            if self._checkpointer.after_round(round, state, is_last=is_last):
                return state, True
            if is_last:
                break
        return state, False

    def _advance(
        self, round: int, state: Any, trained: AfterTraining | None, *, is_first: bool
    ) -> tuple[Cohort, Any]:
        """Run one round; `trained` judges the rows after local training."""
        setup, fed = self._setup, self._setup.federation
        pool = setup.method.pool(fed, state, round)
        cohort = fed.sample(round, self._recorder.on_trained(round, trained), pool)
        state = setup.method.round(fed, state, cohort)
        # For methods that take no mean: the clock must advance in every round.
        fed.close_round(cohort)
        if is_first:
            # Report ranks that drift apart now, not after hours.
            with setup.timer.phase("record"):
                checkpointing.check_shared(setup, state)
        return cohort, state

    def _is_over(self, done: int) -> bool:
        """Tell whether a resumed run has already recorded all of its rounds."""
        if self._early_end.has_come:
            return True
        if done and self._deserted_after(done - 1):
            self._end_deserted(done - 1)
            return True
        return False

    def _ends_with(
        self, round: int, evaluation: Evaluation | None, *, deserted: bool
    ) -> bool:
        """Tell whether the run ends with this round, and say so if it is early."""
        is_last = self._early_end.comes_with(round, evaluation, self._progress)
        if not is_last and deserted:
            self._end_deserted(round)
            is_last = True
        is_last = is_last or round + 1 == self._planned
        if is_last and evaluation is not None:
            evaluation.check_finite(round)
        return is_last

    def _deserted_after(self, round: int) -> bool:
        """Tell whether a round is the last one because the trace of devices ends."""
        return self._setup.federation.is_deserted and round + 1 < self._planned

    def _end_deserted(self, round: int) -> None:
        """Say and record why the run ends with this round."""
        self._progress.stop(round, why=DESERTED)
        if self._results is not None:
            self._results.note_end(DESERTED)


def _new_rounds(
    setup: Setup,
    state: Any,
    results: ResultsWriter | None,
    progress: RunProgress,
    stop: Stop,
    checkpointer: Checkpointer,
) -> bool:
    """Run the rounds of clients that join, if any; return whether to stop."""
    assert setup.newcomers is not None
    if not setup.settings.config.new_rounds:
        return False
    checkpointer.before_new_rounds(state)
    stopping = collaborate(setup, setup.newcomers, state, results, progress, stop)
    checkpointer.after_new_rounds(state, stopping=stopping)
    return stopping


def _finish(
    setup: Setup, folder: Path, state: Any, results: ResultsWriter | None, used: Used
) -> None:
    """Do what follows the last round, and mark the run as complete."""
    evaluate_finals(setup, state, results)
    if setup.newcomers is not None and not setup.settings.config.new_rounds:
        welcome(setup, setup.newcomers, state, results)
    row = setup.method.global_row(state)
    if row is not None and setup.world.is_root:
        layout = setup.federation.layout
        save_model(folder, layout, row, setup.frozen, setup.base)
    write_adapters(setup, folder, state, row)
    options = server_options(setup.settings)
    fed, planned = setup.federation, setup.settings.config.rounds
    # If no client is there any more, the server has not learnt from the last rounds.
    if (
        options
        and options.server_save
        and rows_are_due(options, fed.round + 1, planned)
    ):
        start = None
        if row is not None and options.bank_of == "updates":
            # A later run adds the model's updates to this.
            start = row[fed.generated]
        fed.server.save(str(folder / SERVER), start)
    checkpointing.collect_telemetry(setup, results)
    mine = used.until_now() | starting.figures()
    everyones = setup.collectives.gather_vectors(np.array(list(mine.values())))
    measured = {}
    if everyones is not None:
        measured = dict(zip(mine, everyones.T, strict=True))
    if setup.settings.config.resume is not None:
        # The energy used before resuming is unknown.
        for name in ENERGIES:
            measured.pop(name, None)
    end_run(setup, results, status="complete", measured=measured)


def end_run(
    setup: Setup,
    results: ResultsWriter | None,
    *,
    status: str,
    measured: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Release the server, and close the results with their status."""
    # A server with its own ranks waits for requests until it is told to end.
    if setup.settings.options.has_server:
        setup.federation.server.leave()
    if results is not None:
        results.finish(status, measured=measured)


# Ends a run early: at its target, or when no evaluation has been better for a while.
#
# A run that has ended early can be extended. Then its patience starts anew, and a target
# that it has already reached no longer ends it.


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
    target = config.target_accuracy if config.stop_at_target else None
    limit = config.early_stop
    if config.resume is None or (target is None and limit is None):
        return EarlyEnd(config.rounds, Patience(limit), target)
    on_record = None
    if results is not None:
        series = [results.series(name) for name in _SERIES]
        on_record = np.stack(series, axis=1), results.was_shorter
    # Only the root has the record.
    evaluations, was_shorter = setup.collectives.bcast(on_record)
    patience = Patience(limit, [judged_figure(*figures) for figures in evaluations])
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
