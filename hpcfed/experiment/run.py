"""One run, several seeds, or several points of a study, from settings to their end."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hpcfed.clients.lockstep import Lockstep
from hpcfed.errors import command_line, remark
from hpcfed.experiment.assemble import Setup, assemble, assemble_stacked
from hpcfed.experiment.failures import (
    Reporting,
    ending_all_ranks,
    ending_when_stalled,
    tell_failure,
)
from hpcfed.experiment.folders import make_folders, run_folders
from hpcfed.experiment.loop import end_run, run_rounds
from hpcfed.experiment.newcomers import check_new_rounds
from hpcfed.experiment.opening import distinct_names, opening_lines
from hpcfed.experiment.progress import RunProgress, StackedProgress, showing_life
from hpcfed.experiment.resume import find_checkpoints
from hpcfed.experiment.serving import (
    check_network,
    check_server,
    choose_server,
    serve_model,
    smallest_memory,
    what_follows,
)
from hpcfed.experiment.tracking import check_account
from hpcfed.options import RunConfig, Settings
from hpcfed.results.stored import is_planned
from hpcfed.runtime import world as worlds
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.signals import STOPPED, Stop
from hpcfed.runtime.starting import starting
from hpcfed.runtime.telemetry import sampling
from hpcfed.runtime.timer import Observer, observer
from hpcfed.runtime.world import World


def run(
    settings: Settings, stop: Stop | None = None, *, quiet: bool = False
) -> Path | None:
    """Run to the end; the same call on every rank.

    The root gets the folder of the results. If there are several seeds, each has a
    folder `seed-N` in it. Other ranks get None. `stop` remembers whether a stop was
    requested, even if it came too late.
    """
    folders = run_stacked([settings], stop, quiet=quiet)
    return folders[0] if folders else None


def run_stacked(
    points: Sequence[Settings], stop: Stop | None = None, *, quiet: bool = False
) -> list[Path]:
    """Run points of a study to their ends, in step, each as if it ran alone; the same
    call on every rank.

    The root gets their folders, other ranks none. If one of several points fails, the
    others go on.
    """
    starting.begin_run()
    config = points[0].config
    stop = stop or Stop(60 * config.checkpoint_minutes)
    if config.deterministic:
        # cuBLAS reads it only once, when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Before the world is entered, so that a mistake is found before MPI starts.
    check_network(points[0])
    for point in points:
        check_new_rounds(point)
    check_account(config)
    starting.reached("network")  # of a user: built by now, with its libraries
    world = worlds.enter(
        device=config.device, server_ranks=config.server_ranks, backend=config.backend
    )
    starting.reached("world")
    # Some defaults depend on the device, which is known only now.
    places = world.server_locations
    on_gpu = all(location.device != "cpu" for location in places)
    memory, ranks = smallest_memory(world), len(places)
    points = [
        choose_server(point, gpu=on_gpu, memory=memory, ranks=ranks) for point in points
    ]
    # Does nothing, unless `hpcfed profile` has set another one.
    watch = observer()
    watch.begin(world)
    if world.role == "server":
        _serve(points[0], world, watch, stop)
        return []
    folders = _work(points, world, watch, stop, quiet=quiet)
    if stop.agreed:
        if world.is_root:
            how = stop.go_on or _command_to_go_on(folders[0], config)
            if len(points) > 1:
                how = "the same study"
            remark(f"hpcfed: stopped; go on with: {how}")
        raise SystemExit(STOPPED)
    return folders if world.is_root else []


def _command_to_go_on(folder: Path, config: RunConfig) -> str:
    """Return the command that resumes a run that was stopped."""
    command = command_line("run", "--resume", folder)
    # A run that is made longer may be stopped before its record knows that.
    if config.resume is None or is_planned(folder, config.rounds):
        return command
    return f"{command} --rounds {config.rounds}"


def _serve(settings: Settings, world: World, watch: Observer, stop: Stop) -> None:
    """Serve the model on a server rank, from the first to the last request."""
    out = settings.config.out
    # If the root chooses the folder's name, a server rank does not know it.
    folders = [] if out is None else run_folders(out, settings.config)
    reporting = Reporting(lambda: "server", folders)
    # It listens for signals only to ignore them: workers tell it when to stop.
    with stop.listening(), ending_all_ranks(world, reporting):
        check_server(settings, world)
        serve_model(settings, world)
        watch.end(world, None)
        world.close()


def _work(
    points: Sequence[Settings],
    world: World,
    watch: Observer,
    stop: Stop,
    *,
    quiet: bool,
) -> list[Path]:
    """Run on a worker rank; return the folders of the results."""
    config = points[0].config
    runs: list[Settings] = []
    for point in points:
        runs += point.each_seed()
    timers = [watch.timer(world.device) for _ in runs]
    reporting = Reporting(lambda: timers[0].current)
    stalls = ending_when_stalled(world, reporting, timers, config.stall_timeout)
    if world.is_root and not quiet:
        stop.tell(alone=launched().alone)
    # Claims are released last: until then no other process may write to the folders.
    with (
        ExitStack() as claims,
        stop.listening(),
        stalls,
        ending_all_ranks(world, reporting),
        sampling(world, config.telemetry) as sampler,
    ):
        # The device decides the model's size, so this cannot be checked before MPI
        # starts.
        check_server(points[0], world)
        lockstep = None
        if runs == [points[0]]:
            setups = [assemble(points[0], world, timers[0])]
        else:
            names = distinct_names(runs)
            lockstep, setups = assemble_stacked(runs, names, world, timers)
            reporting.phase = partial(_phase, lockstep)
        for setup in setups:
            setup.sampler = sampler
        # After assembling, where most mistakes are found: they leave no folder behind.
        folders, complete = make_folders(points, world, claims)
        if complete:
            _release_server(lockstep, setups, status="complete")
        else:
            every = []
            for point, folder in zip(points, folders, strict=True):
                every += run_folders(folder, point.config)
            reporting.folders = every
            root = world.is_root
            with showing_life(folders, reporting, timers, sampler, visible=root):
                if lockstep is None:
                    run_setup(setups[0], every[0], quiet=quiet, stop=stop)
                else:
                    # Seeds of a run fail together; points of a study do not.
                    apart = len(points) > 1
                    run_in_step(
                        lockstep, setups, every, apart=apart, quiet=quiet, stop=stop
                    )
        watch.end(world, folders[0])
        world.close()
    return folders


def _phase(lockstep: Lockstep) -> str:
    """Return the phase of the run whose turn it is."""
    return lockstep.at_work.timer.current


def run_setup(
    setup: Setup, folder: Path, *, quiet: bool = False, stop: Stop | None = None
) -> None:
    """Run all rounds, and record them in the folder."""
    stop = stop or Stop()
    visible = setup.world.is_root and not quiet
    rounds, then = setup.settings.config.rounds, what_follows(setup.settings)
    with RunProgress(rounds, visible=visible, then=then) as progress:
        for line in opening_lines(setup):
            progress.say(line)
        found = find_checkpoints(setup, [folder], progress.say, stop)
        if stop.agreed:
            end_run(setup, None, status="stopped")
        else:
            run_rounds(setup, folder, progress, stop, found[0])


def run_in_step(
    lockstep: Lockstep,
    setups: Sequence[Setup],
    folders: Sequence[Path],
    *,
    apart: bool = False,
    quiet: bool = False,
    stop: Stop | None = None,
) -> None:
    """Run all rounds of all runs, and record each in its folder.

    If they are `apart`, a run that fails ends alone.
    """
    stop = stop or Stop()
    first = setups[0]
    rounds, then = first.settings.config.rounds, what_follows(first.settings)
    visible = first.world.is_root and not quiet
    shown = StackedProgress(rounds, runs=len(setups), visible=visible, then=then)
    with shown as progress:
        for line in opening_lines(first):
            progress.say(line)
        found = find_checkpoints(first, folders, progress.say, stop)
        if stop.agreed:
            _release_server(lockstep, setups, status="stopped")
            return
        # Each run is a separate program; lockstep lets them advance together.
        functions = []
        for setup, folder, checkpoint in zip(setups, folders, found, strict=True):
            functions.append(
                partial(run_rounds, setup, folder, progress, stop, checkpoint)
            )

        def failed(number: int, error: Exception) -> None:
            program = lockstep.programs[number]
            phase = program.timer.current
            tell_failure(first.world, phase, [folders[number]], error)
            progress.lose()
            progress.say(f"{program.name} has failed, the others go on")

        lockstep.run(
            functions,
            first.world.device,
            on_failure=failed if apart else None,
            exchange=first.world.role_allgather,
        )


def _release_server(
    lockstep: Lockstep | None, setups: Sequence[Setup], *, status: str
) -> None:
    """Release the server without a round; stacked runs take turns in this, too."""
    if lockstep is None:
        end_run(setups[0], None, status=status)
        return
    functions = [partial(end_run, setup, None, status=status) for setup in setups]
    lockstep.run(functions, setups[0].world.device)
