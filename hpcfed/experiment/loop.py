"""The rounds of one run: sample, round, evaluate, record, rebalance, checkpoint."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed.clients.initial import save_model
from hpcfed.experiment import checkpointing, resume
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.checkpointing import Checkpointer
from hpcfed.experiment.evaluate import AfterTraining, evaluate, evaluate_finals, is_due
from hpcfed.experiment.newcomers import collaborate, welcome
from hpcfed.experiment.patience import begin_early_end
from hpcfed.experiment.progress import RunProgress
from hpcfed.experiment.rebalance import Rebalancer
from hpcfed.experiment.recording import Recorder, closing, open_results, open_snapshots
from hpcfed.experiment.tracking import tracked
from hpcfed.results.checkpoints import Checkpoint
from hpcfed.results.folder import SERVER
from hpcfed.results.results import ResultsWriter
from hpcfed.runtime.energy import ENERGIES, Used
from hpcfed.runtime.signals import Stop
from hpcfed.server.options import server_options

DESERTED = "no client is there any more"
"""Why a run ends early whose trace does."""


def run_rounds(
    setup: Setup,
    folder: Path,
    progress: RunProgress,
    stop: Stop,
    found: Checkpoint | None,
) -> None:
    """Run all rounds, or those after a checkpoint, and record them in the folder."""
    config = setup.settings.config
    fed = setup.federation
    method = setup.method
    timer = setup.timer
    # Results are the root's; everywhere else they are None, which also tells who is root.
    results = open_results(setup, folder) if setup.world.is_root else None
    # Every rank writes snapshots of the clients that it hosts.
    snapshots = open_snapshots(setup, folder)
    with closing(results, snapshots), ExitStack() as within:
        used = within.enter_context(Used(setup.world))
        if setup.settings.options.has_server:
            fed.server.begin(str(folder))
        first = 0
        state = method.init(fed)
        checkpointing.check_state(setup, state, "init")
        if config.resume is not None:
            first, state = resume.go_on(
                setup, folder, found, state, results, progress.say
            )
        # After the rounds of before are known, which a new tracker is told of, too.
        tracking = within.enter_context(
            tracked(setup, folder, results, progress.say, stop)
        )
        recorder = Recorder(setup, results, snapshots, progress, tracking, first)
        rebalancer = Rebalancer(setup, results, progress)
        early_end = begin_early_end(setup, results)
        checkpointer = Checkpointer(
            setup, folder, results, stop, progress.say, done=first
        )
        # All ranks begin together, so that nobody's wait counts as the first round's.
        setup.collectives.barrier()
        timer.start()
        end = config.rounds
        if early_end.has_come:
            end = first
        elif 0 < first < end and fed.is_deserted:
            end = first
            _end_deserted(first - 1, results, progress)
        for round in range(first, end):
            trained = AfterTraining(setup, fed) if is_due(round, config) else None
            cohort = fed.sample(round, recorder.on_trained(round, trained))
            state = method.round(fed, state, cohort)
            fed.close_round(cohort)
            if round == first:
                checkpointing.check_state(setup, state, "round")
                # A method whose ranks drift apart is told so now, not after hours.
                with timer.phase("record"):
                    checkpointing.check_shared(setup, state)
            # A trace may end before the run: then this was the last round.
            deserted = fed.is_deserted and round + 1 < config.rounds
            evaluation = None
            if trained is not None or deserted:
                evaluation = evaluate(setup, state, trained)
            recorder.close_snapshot(round, state)
            train_seconds = recorder.record(round, cohort.log, evaluation)
            is_last = early_end.comes_with(round, evaluation, progress)
            if deserted and not is_last:
                is_last = True
                _end_deserted(round, results, progress)
            is_last = is_last or round + 1 == config.rounds
            if is_last and evaluation is not None:
                evaluation.check_finite(round)
            if not is_last:
                state = rebalancer.after_round(state, cohort, train_seconds)
            stopping = checkpointer.after_round(round, state, is_last=is_last)
            if stopping:
                leave(setup, results, status="stopped")
                return
            if is_last:
                break
        if setup.newcomers is not None and config.new_rounds:
            checkpointer.before_new_rounds(state)
            stopping = collaborate(
                setup, setup.newcomers, state, results, progress, stop
            )
            checkpointer.after_new_rounds(state, stopping=stopping)
            if stopping:
                leave(setup, results, status="stopped")
                return
        _finish(setup, folder, state, results, used)


def _end_deserted(
    round: int, results: ResultsWriter | None, progress: RunProgress
) -> None:
    """Say and record why the run ends with this round."""
    progress.stop(round, why=DESERTED)
    if results is not None:
        results.note_end(DESERTED)


def _finish(
    setup: Setup,
    folder: Path,
    state: Any,
    results: ResultsWriter | None,
    used: Used,
) -> None:
    """Do what follows the last round, and mark the run as complete."""
    evaluate_finals(setup, state, results)
    if setup.newcomers is not None and not setup.settings.config.new_rounds:
        welcome(setup, setup.newcomers, state, results)
    row = setup.method.global_row(state)
    if row is not None and setup.world.is_root:
        save_model(folder, setup.federation.layout, row, setup.frozen)
    options = server_options(setup.settings)
    if options is not None and options.server_save:
        fed = setup.federation
        start = None
        if row is not None and options.bank_of == "updates":
            # What a later run adds the model's updates to.
            start = row[fed.generated]
        fed.server.save(str(folder / SERVER), start)
    mine = used.until_now()
    everyones = setup.collectives.gather_vectors(np.array(list(mine.values())))
    measured = {}
    if everyones is not None:
        measured = dict(zip(mine, everyones.T, strict=True))
    if setup.settings.config.resume is not None:
        # Nobody knows what it has used before it was resumed.
        for name in ENERGIES:
            measured.pop(name, None)
    leave(setup, results, status="complete", measured=measured)


def leave(
    setup: Setup,
    results: ResultsWriter | None,
    *,
    status: str,
    measured: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Let the server go, and close the results with their status."""
    # A server with ranks of its own waits for requests until it is told to go.
    if setup.settings.options.has_server:
        setup.federation.server.leave()
    if results is not None:
        results.finish(status, measured=measured)
