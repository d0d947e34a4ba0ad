"""One run, or several seeds of it, from the command line's settings to its end."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hpcfed.clients.lockstep import Lockstep
from hpcfed.config import Settings
from hpcfed.errors import remark
from hpcfed.experiment.assemble import Setup, assemble, assemble_seeds
from hpcfed.experiment.failures import (
    Reporting,
    ending_all_ranks,
    ending_when_stalled,
)
from hpcfed.experiment.folders import make_folder, run_folders
from hpcfed.experiment.loop import leave, run_rounds
from hpcfed.experiment.newcomers import check_new_rounds
from hpcfed.experiment.opening import opening_lines
from hpcfed.experiment.progress import RunProgress, SeedsProgress
from hpcfed.experiment.resume import find_checkpoints
from hpcfed.experiment.serving import (
    check_network,
    check_server,
    choose_server,
    serve_model,
)
from hpcfed.experiment.signs import showing_life
from hpcfed.experiment.tracking import check_account
from hpcfed.record.observer import Observer, observer
from hpcfed.runtime import world as worlds
from hpcfed.runtime.signals import STOPPED, Stop
from hpcfed.runtime.world import World


def run(
    settings: Settings, stop: Stop | None = None, *, quiet: bool = False
) -> Path | None:
    """Run to the end; the same call on every rank.

    The root gets the folder of the results, in which each of several seeds has a folder
    `seed-N`; other ranks get None. `stop` remembers whether a stop was asked for, also
    where that came too late.
    """
    config = settings.config
    stop = stop or Stop(60 * config.checkpoint_minutes)
    if config.deterministic:
        # cuBLAS reads it once, when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Before the world is entered: then a mistake costs no start of MPI.
    check_network(settings)
    check_new_rounds(settings)
    check_account(config)
    world = worlds.enter(
        device=config.device, server_ranks=config.server_ranks, backend=config.backend
    )
    # Some defaults depend on the device, which is known only now.
    places = world.server_locations
    on_gpu = all(location.device != "cpu" for location in places)
    settings = choose_server(settings, gpu=on_gpu, ranks=len(places))
    watch = observer()
    watch.begin(world)
    if world.role == "server":
        _serve(settings, world, watch, stop)
        return None
    folder = _work(settings, world, watch, stop, quiet=quiet)
    if stop.agreed:
        if world.is_root:
            remark(f"hpcfed: stopped; go on with: hpcfed run --resume {folder}")
        raise SystemExit(STOPPED)
    return folder if world.is_root else None


def _serve(settings: Settings, world: World, watch: Observer, stop: Stop) -> None:
    """Serve the model on a server rank, from the first to the last request."""
    out = settings.config.out
    # A server rank is not told of a folder that the root names.
    folders = [] if out is None else run_folders(out, settings.config)
    reporting = Reporting(lambda: "server", folders)
    # It listens for signals only to ignore them: workers tell it when to stop.
    with stop.listening(), ending_all_ranks(world, reporting):
        check_server(settings, world)
        serve_model(settings, world)
        watch.end(world, None)
        world.close()


def _work(
    settings: Settings, world: World, watch: Observer, stop: Stop, *, quiet: bool
) -> Path:
    """Run on a worker rank; return the folder of the results."""
    config = settings.config
    seeds = config.seeds or (config.seed,)
    timers = [watch.timer(world.device) for _ in seeds]
    reporting = Reporting(lambda: timers[0].current)
    stalls = ending_when_stalled(world, reporting, timers, config.stall_timeout)
    # Claims are given back last: until then nobody else may write to the folder.
    with (
        ExitStack() as claims,
        stop.listening(),
        stalls,
        ending_all_ranks(world, reporting),
    ):
        check_server(settings, world)
        lockstep = None
        if config.seeds is None:
            setups = [assemble(settings, world, timers[0])]
        else:
            every = [settings.of_seed(seed) for seed in seeds]
            lockstep, setups = assemble_seeds(every, world, timers)
            reporting.phase = partial(_phase, lockstep)
        # After assembling, where most mistakes are found: no folder is left behind.
        folder, complete = make_folder(config, world, claims)
        if complete:
            _leave_all(lockstep, setups, status="complete")
        else:
            reporting.folders = run_folders(folder, config)
            with showing_life(folder, reporting, timers, visible=world.is_root):
                if lockstep is None:
                    go(setups[0], folder, quiet=quiet, stop=stop)
                else:
                    folders = reporting.folders
                    go_together(lockstep, setups, folders, quiet=quiet, stop=stop)
        watch.end(world, folder)
        world.close()
    return folder


def _phase(lockstep: Lockstep) -> str:
    """Return the phase of the seed whose turn it is."""
    return lockstep.at_work.timer.current


def go(
    setup: Setup, folder: Path, *, quiet: bool = False, stop: Stop | None = None
) -> None:
    """Run all rounds, recorded in the folder."""
    stop = stop or Stop()
    visible = setup.world.is_root and not quiet
    with RunProgress(setup.settings.config.rounds, visible=visible) as progress:
        for line in opening_lines(setup):
            progress.say(line)
        found = find_checkpoints(setup, [folder], progress.say, stop)
        if stop.agreed:
            leave(setup, None, status="stopped")
        else:
            run_rounds(setup, folder, progress, stop, found[0])


def go_together(
    lockstep: Lockstep,
    setups: Sequence[Setup],
    folders: Sequence[Path],
    *,
    quiet: bool = False,
    stop: Stop | None = None,
) -> None:
    """Run all rounds of all seeds, each seed's recorded in its folder."""
    stop = stop or Stop()
    first = setups[0]
    rounds = first.settings.config.rounds
    visible = first.world.is_root and not quiet
    with SeedsProgress(rounds, seeds=len(setups), visible=visible) as progress:
        for line in opening_lines(first):
            progress.say(line)
        found = find_checkpoints(first, folders, progress.say, stop)
        if stop.agreed:
            _leave_all(lockstep, setups, status="stopped")
            return
        # Each seed is a program of its own; lockstep lets them advance together.
        programs = []
        for setup, folder, checkpoint in zip(setups, folders, found, strict=True):
            programs.append(
                partial(run_rounds, setup, folder, progress, stop, checkpoint)
            )
        lockstep.run(programs, first.world.device)


def _leave_all(
    lockstep: Lockstep | None, setups: Sequence[Setup], *, status: str
) -> None:
    """Let the server go without a round; stacked seeds take their turns in that, too."""
    if lockstep is None:
        leave(setups[0], None, status=status)
        return
    programs = [partial(leave, setup, None, status=status) for setup in setups]
    lockstep.run(programs, setups[0].world.device)
