"""The rounds of one run: sample, round, evaluate, record, rebalance, checkpoint."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.clients.initial import save_model
from hpcfed.errors import Halted
from hpcfed.experiment import checkpointing, resume
from hpcfed.experiment.adapters import write_adapters
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.checkpointing import Checkpointer
from hpcfed.experiment.early_end import begin_early_end
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
        _, state = _first_state(setup, folder, found, None, progress, stop)
        end_run(setup, None, status="complete")
        generate(setup, folder, state, progress.say)
        return
    # Only the root has results; every rank writes snapshots of its own clients.
    results = open_results(setup, folder) if setup.world.is_root else None
    snapshots = open_snapshots(setup, folder)
    with closing(results, snapshots), ExitStack() as within:
        used = within.enter_context(Used(setup.world))
        done, state = _first_state(setup, folder, found, results, progress, stop)
        # Only after earlier rounds are read: a new tracker gets these, too.
        tracking = within.enter_context(
            tracked(setup, folder, results, progress.say, stop)
        )
        recorder = Recorder(setup, results, snapshots, progress, tracking, done)
        checkpointer = Checkpointer(
            setup, folder, results, stop, progress.say, done=done
        )
        rounds = _Rounds(setup, results, progress, recorder, checkpointer)
        try:
            state, stopped = rounds.run(done, state)
        except Halted:
            # The round whose learning has stopped is repeated: there is no checkpoint
            # within a round.
            stop.agreed = stopped = True
        if not stopped and setup.newcomers is not None:
            stopped = _new_rounds(setup, state, results, progress, stop, checkpointer)
        if stopped:
            end_run(setup, results, status="stopped")
        else:
            _finish(setup, folder, state, results, used)
            checkpointer.after_completion()
            # The run's files are whole, whatever happens here.
            generate(setup, folder, state, progress.say)


def _first_state(
    setup: Setup,
    folder: Path,
    found: Checkpoint | None,
    results: ResultsWriter | None,
    progress: RunProgress,
    stop: Stop,
) -> tuple[int, Any]:
    """Return the number of finished rounds, and the state after them."""
    if setup.settings.options.has_server:
        setup.federation.server.begin(str(folder), lambda: stop.asked)
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
            self._checkpointer.before_learning(round, state)
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
