"""One run, or several seeds of it: enter the world, go round after round, write
everything down.
"""

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.balance import MOVES
from hpcfed.clients.lockstep import Lockstep
from hpcfed.clients.placement import Clients
from hpcfed.config import RunConfig, Settings
from hpcfed.errors import UserError, count, one_line, remark, tell
from hpcfed.experiment import resume
from hpcfed.experiment.assemble import (
    Newcomers,
    Setup,
    assemble,
    assemble_seeds,
    check_network,
    dataless_lines,
    serve_model,
)
from hpcfed.experiment.progress import RunProgress, SeedsProgress
from hpcfed.experiment.rebalance import Moving
from hpcfed.federation.federation import Federation
from hpcfed.federation.log import OnTrained, RoundLog
from hpcfed.record import environment, series
from hpcfed.record.checkpoints import Checkpoint
from hpcfed.record.claim import claimed
from hpcfed.record.energy import joules
from hpcfed.record.folder import (
    check_out,
    check_plain,
    empty,
    failures,
    leave_failure,
    remove_empty_seeds,
    seed_folder,
    seed_folders,
)
from hpcfed.record.job import sign
from hpcfed.record.observer import observer
from hpcfed.record.reading import at_target, is_complete, mean_accuracy
from hpcfed.record.results import ResultsWriter, ServerSize
from hpcfed.record.snapshots import SnapshotWriter
from hpcfed.record.timing import PHASES
from hpcfed.runtime import world as worlds
from hpcfed.runtime.device import on_device, peak_memory
from hpcfed.runtime.signals import STOPPED, Stop
from hpcfed.runtime.stalls import ending_stalls
from hpcfed.runtime.world import World
from hpcfed.server.options import ServerOptions
from hpcfed.server.schedule import num_learnings, num_steps
from hpcfed.server.transport import check_world

BEAT = 1.0
"""Seconds between two signs of life of a rank."""
PERSONAL_FLOATS = 2**28
"""Rows are evaluated in groups of clients that hold at most this many floats."""


@dataclass(frozen=True)
class Evaluation:
    accuracy: float
    client_accuracy: np.ndarray
    global_accuracy: float
    global_loss: float

    def reaches(self, target: float | None) -> bool:
        """Whether the accuracy is so many per cent; all ranks find the same."""
        return target is not None and bool(
            at_target(self.accuracy, self.global_accuracy, target)
        )


def run(settings: Settings, stop: Stop | None = None) -> Path | None:
    """Runs to the end, the same call on every rank; the root gets the folder of the
    results, other ranks None.

    Each of several seeds has a folder `seed-N` in it. `stop` remembers whether one was
    asked for, also where it came too late.
    """
    stop = stop or Stop(60 * settings.config.checkpoint_minutes)
    if settings.config.deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS reads it once, when it starts
    check_network(settings)
    config = settings.config
    world = worlds.enter(
        device=config.device, server_ranks=config.server_ranks, backend=config.backend
    )
    settings = settings.on_device(
        gpu=all(place.device != "cpu" for place in world.server_locations)
    )
    watch = observer()
    watch.begin(world)
    if world.role == "server":
        failing = _Failing(lambda: "server", _named_folders(settings.config))
        with (
            stop.listening(),
            _ending_all_ranks(world, failing),
        ):  # asked to stop it goes on: workers tell it when
            _check_server(settings, world)
            serve_model(settings, world)
            watch.end(world, None)
            world.close()
        return None
    seeds = settings.config.seeds
    timers = [watch.timer(world.device) for _ in seeds or [settings.config.seed]]
    failing = _Failing(lambda: timers[0].current)
    ending = ending_stalls(
        lambda: (sum(timer.changes for timer in timers), failing.phase()),
        settings.config.stall_timeout,
        partial(_stalled, world, failing),
    )
    beating = (
        world.pulse.beating(BEAT)
        if world.pulse and settings.config.stall_timeout
        else nullcontext()
    )
    with (
        ExitStack() as claims,
        stop.listening(),
        ending,
        beating,
        _ending_all_ranks(world, failing),
    ):
        _check_server(settings, world)
        if seeds is None:
            setup = assemble(settings, world, timers[0])
            folder, complete = _make_folder(settings.config, world, claims)
            if complete:
                _leave(setup, None, status="complete")
            else:
                failing.folders = [folder]
                go(setup, folder, stop=stop)
        else:
            lockstep, setups = assemble_seeds(
                [settings.of_seed(seed) for seed in seeds], world, timers
            )
            failing.phase = lambda: lockstep.at_work.timer.current
            folder, complete = _make_folder(settings.config, world, claims)
            if complete:
                lockstep.run(
                    [
                        partial(_leave, setup, None, status="complete")
                        for setup in setups
                    ],
                    world.device,
                )
            else:
                failing.folders = [folder / f"seed-{seed}" for seed in seeds]
                go_together(lockstep, setups, failing.folders, stop=stop)
        watch.end(world, folder)
        world.close()
    if stop.agreed:
        if world.is_root:
            remark(f"hpcfed: stopped; go on with: hpcfed run --resume {folder}")
        raise SystemExit(STOPPED)
    return folder if world.is_root else None


def _check_server(settings: Settings, world: World) -> None:
    if isinstance(settings.options, ServerOptions):
        check_network(settings)  # again: what the device has decided may not fit
        check_world(settings.options, world)


def go(
    setup: Setup, folder: Path, *, quiet: bool = False, stop: Stop | None = None
) -> None:
    """All rounds, recorded in the folder."""
    with RunProgress(
        setup.settings.config.rounds, visible=setup.world.is_root and not quiet
    ) as progress:
        _open(progress, setup)
        own = stop or Stop()
        found = _found([setup], [folder], progress, own)
        if own.agreed:
            _leave(setup, None, status="stopped")
        else:
            _rounds(setup, folder, progress, own, found[0])


def go_together(
    lockstep: Lockstep,
    setups: Sequence[Setup],
    folders: Sequence[Path],
    *,
    stop: Stop | None = None,
) -> None:
    """All rounds of all seeds, each seed's recorded in its folder."""
    config, world = setups[0].settings.config, setups[0].world
    with SeedsProgress(
        config.rounds, seeds=len(setups), visible=world.is_root
    ) as progress:
        _open(progress, setups[0])
        own = stop or Stop()
        triples = zip(
            setups, folders, _found(setups, folders, progress, own), strict=True
        )
        programs = [
            partial(_rounds, setup, folder, progress, own, found)
            for setup, folder, found in triples
        ]
        leaving = [partial(_leave, setup, None, status="stopped") for setup in setups]
        lockstep.run(leaving if own.agreed else programs, world.device)


def _found(
    setups: Sequence[Setup], folders: Sequence[Path], progress: RunProgress, stop: Stop
) -> Sequence[Checkpoint | None]:
    """Where every run goes on, rid of the reasons why it has failed.

    `stop` has agreed if a stop was asked for meanwhile.
    """
    if setups[0].settings.config.resume is None:
        return [None] * len(folders)
    found = resume.beginning(setups[0], folders, progress.say, stop)
    if setups[0].world.is_root and not stop.agreed:
        for failure in [path for folder in folders for path in failures(folder)]:
            failure.unlink()
    return found or [None] * len(folders)


def _rounds(
    setup: Setup,
    folder: Path,
    progress: RunProgress,
    stop: Stop,
    found: Checkpoint | None,
) -> None:
    config, world, fed, timer = (
        setup.settings.config,
        setup.world,
        setup.federation,
        setup.timer,
    )
    results = _results(setup, folder) if world.is_root else None
    snapshots = _snapshots(setup, folder)
    with _closing(results, snapshots):
        energy_before = _joules(world)
        first, state = 0, setup.method.init(fed)
        if config.resume is not None:
            first, state = resume.go_on(
                setup, folder, found, state, results, progress.say
            )
        if snapshots is not None:
            snapshots.begin(first, setup.collectives.barrier)
        moving = Moving(setup, results, progress)
        setup.collectives.barrier()
        timer.start()
        for round in range(first, config.rounds):
            listener = (
                _listener(snapshots, round)
                if snapshots and snapshots.due(round)
                else None
            )
            cohort = fed.sample(round, listener)
            state = setup.method.round(fed, state, cohort)
            if round == first:
                with timer.phase("record"):
                    resume.check_shared(setup, state)
            evaluation = evaluate(setup, state) if _due(round, config) else None
            if listener and snapshots:
                with timer.phase("record"):
                    row = setup.method.global_row(state)
                    snapshots.close_round(
                        round, None if row is None else row.cpu().numpy()
                    )
            train_seconds = _record_round(
                setup, round, cohort.log, evaluation, results, progress
            )
            if (
                config.stop_at_target
                and evaluation is not None
                and evaluation.reaches(config.target_accuracy)
            ):
                progress.stop(round)
                break
            state = moving.after_round(state, cohort, train_seconds)
            with timer.phase("record"):
                orders = setup.collectives.allgather(
                    (stop.after(round), stop.is_due(round))
                )
                stopping = (
                    any(asked for asked, _ in orders) and round + 1 < config.rounds
                )
                if stopping or orders[0][1] or _checkpointed(round, config):
                    with stop.checkpointing():
                        resume.save(setup, folder, round + 1, state, results)
            if stopping:
                stop.agreed = True
                _leave(setup, results, status="stopped")
                return
        _judge(setup, state, results)
        if setup.newcomers is not None:
            _welcome(setup, setup.newcomers, state, results)
        options = setup.settings.options
        if isinstance(options, ServerOptions) and options.server_save:
            fed.server.save(str(folder / "server.h5"))
        energies = setup.collectives.gather_vectors(
            np.array([_joules(world) - energy_before])
        )
        if config.resume is not None:
            energies = None  # nobody knows what was used before it went on
        _leave(
            setup,
            results,
            status="complete",
            energy=None if energies is None else energies[:, 0],
        )


def _joules(world: World) -> float:
    """Of this rank's GPU, which counts for the first of those that share it."""
    places = [(place.host, place.device) for place in world.locations]
    first = places.index(places[world.rank]) == world.rank
    return joules(places[world.rank][1]) if first else 0.0


def _leave(
    setup: Setup,
    results: ResultsWriter | None,
    *,
    status: str,
    energy: np.ndarray | None = None,
) -> None:
    if setup.settings.options.has_server:
        setup.federation.server.leave()
    if results is not None:
        results.finish(status, energy=energy)


def _checkpointed(round: int, config: RunConfig) -> bool:
    return config.checkpoint_every > 0 and (round + 1) % config.checkpoint_every == 0


def evaluate(setup: Setup, state: Any) -> Evaluation:
    """Personal accuracy of every client and the global model's, summed over ranks in
    one small collective.
    """
    fed, method, clients = setup.federation, setup.method, setup.clients
    with setup.timer.phase("evaluate"):
        total = len(clients.rank)
        sums = torch.zeros(total + 2, dtype=torch.float64, device=fed.device)
        group = max(1, PERSONAL_FLOATS // (fed.layout.num_columns * setup.stacked))
        for start in range(0, len(fed.clients), group):
            members = np.arange(start, min(start + group, len(fed.clients)))
            score = fed.evaluate(method.personal(fed, state, members), members)
            sums[on_device(fed.clients[members], fed.device)] = score.correct.double()
        row = method.global_row(state)
        if row is not None:
            score = setup.engine.evaluate(
                row.unsqueeze(0), setup.global_test, np.zeros(1, np.int64)
            )
            sums[total], sums[total + 1] = (
                score.correct.double().sum(),
                score.loss.double().sum(),
            )
        answers = setup.collectives.allreduce(sums).cpu().numpy()
    accuracy = _accuracies(answers[:total], clients)
    everything = float(setup.global_test_size) if row is not None else float("nan")
    return Evaluation(
        accuracy=mean_accuracy(accuracy),
        client_accuracy=accuracy,
        global_accuracy=float(answers[total] / everything),
        global_loss=float(answers[total + 1] / everything),
    )


def _judge(setup: Setup, state: Any, results: ResultsWriter | None) -> None:
    """What a method has its clients judged with at the end, beyond a round's
    evaluation.
    """
    fed = setup.federation
    for name, rows in setup.method.finals(fed, state, np.arange(len(fed.clients))):
        accuracy = _client_accuracy(setup, fed, rows, setup.clients)
        if results is not None:
            results.write_final(name, accuracy)


def _welcome(
    setup: Setup, newcomers: Newcomers, state: Any, results: ResultsWriter | None
) -> None:
    """New clients' accuracy after every local update, from different starts; NaN before
    they have joined.
    """
    fed, method, config = newcomers.federation, setup.method, setup.settings.config
    here = np.arange(len(fed.clients))
    # Rounds may have ended at the target, long before the last one.
    cohort = fed.everyone(setup.federation.round + 1)
    starts = {"method": method.welcome(fed, state, cohort)}
    if results is not None:
        results.write_newcomer_bytes(cohort.log.bytes_down / max(1, fed.num_holders))
    if config.new_starts == "all":
        starts["random"] = fed.initial_row().expand(len(here), -1)
        common = method.global_row(state)
        if common is not None:
            starts["global model"] = common.expand(len(here), -1)
    joins = np.arange(config.new_clients) * config.join_rounds // config.new_clients
    for name, rows in starts.items():
        for update in range(config.new_updates + 1):
            if update:
                before, rows = (
                    rows,
                    _updated(
                        fed, rows, np.flatnonzero(joins[fed.clients] < update), update
                    ),
                )
                if name == "method":
                    rows = method.lead(fed, update - 1, before, rows)
            accuracy = _client_accuracy(setup, fed, rows, newcomers.clients)
            if results is not None:
                results.write_newcomers(
                    name, update, np.where(joins <= update, accuracy, np.nan)
                )


def _updated(fed: Federation, rows: Tensor, joined: np.ndarray, update: int) -> Tensor:
    """The rows after a local update of those that have joined."""
    at = on_device(joined, fed.device)
    return rows.index_copy(0, at, fed.finetune(rows[at], joined, phase=update))


def _client_accuracy(
    setup: Setup, fed: Federation, rows: Tensor, clients: Clients
) -> np.ndarray:
    """Of every client of a federation, on its own test data; `rows` are this rank's
    clients'.
    """
    with setup.timer.phase("evaluate"):
        sums = torch.zeros(len(clients.rank), dtype=torch.float64, device=fed.device)
        score = fed.evaluate(rows, np.arange(len(fed.clients)))
        sums[on_device(fed.clients, fed.device)] = score.correct.double()
        return _accuracies(setup.collectives.allreduce(sums).cpu().numpy(), clients)


def _accuracies(correct: np.ndarray, clients: Clients) -> np.ndarray:
    """NaN for clients without test data."""
    return np.where(
        clients.test_samples > 0, correct / np.maximum(clients.test_samples, 1), np.nan
    )


def _record_round(
    setup: Setup,
    round: int,
    log: RoundLog,
    evaluation: Evaluation | None,
    results: ResultsWriter | None,
    progress: RunProgress,
) -> np.ndarray | None:
    """Ends the round's timing, brings the ranks' figures together, and writes them
    down.

    The root gets every rank's train seconds, others None.
    """
    fed, collectives = setup.federation, setup.collectives
    phases, wall = setup.timer.lap()
    with setup.timer.phase("record"):
        wire, collectives.bytes_sent = collectives.bytes_sent, 0
        reports = fed.server.reports() if setup.settings.options.has_server else []
        peaks = [peak_memory(setup.world.device)]
        if (
            not setup.world.server_ranks
        ):  # this process has learnt, too, and DeepSpeed may have set the count back
            peaks += [report.own_peak for _, report in reports]
        figures = {
            "wall": wall,
            "peak_memory": max(peaks),
            "wire": wire,
            "halvings": setup.engine.halvings,
            "loss_sum": float(log.loss_sum),
            "loss_samples": int(log.samples_seen),
            # What all clients send is known on every rank: the root counts it.
            "bytes_up": int(log.bytes_up_here)
            + (log.bytes_up if results is not None else 0),
            "bytes_down": log.bytes_down,
            "cohort": log.cohort_size,
            "excluded": len(log.excluded),
            "train_seconds": phases[PHASES.index("train")],
        }
        figures |= _selection(setup, log)
        if evaluation is not None:
            figures |= {
                "accuracy": evaluation.accuracy,
                "global_accuracy": evaluation.global_accuracy,
                "global_loss": evaluation.global_loss,
            }
        own = series.as_vector(figures)
        gathered = collectives.gather_vectors(np.concatenate([own, phases]))
        if results is None or gathered is None:
            return None
        everyones = series.by_rank(gathered[:, : len(own)])
        values = series.round_figures(everyones)
        on_disk = results.write_round(
            round,
            values,
            client_accuracy=None if evaluation is None else evaluation.client_accuracy,
            rank_values={name: everyones[name] for name in series.RANK_SERIES},
            phases=gathered[:, len(own) :],
        )
        for told in reports:
            results.write_server(*told)
        progress.round(round, values, on_disk=on_disk)
        return everyones["train_seconds"]


def _selection(setup: Setup, log: RoundLog) -> dict[str, int]:
    """Count the uploads that the server has selected, and attackers' among them."""
    if log.selected is None:
        return {}
    attackers = np.isin(log.selected, setup.dealt.attackers)
    return {"kept": len(log.selected), "kept_attackers": int(attackers.sum())}


def _due(round: int, config: RunConfig) -> bool:
    return (round + 1) % config.evaluate_every == 0 or round + 1 == config.rounds


def _results(setup: Setup, folder: Path) -> ResultsWriter:
    config, world, layout = setup.settings.config, setup.world, setup.federation.layout
    return ResultsWriter(
        folder,
        settings=setup.settings.flat(),
        environment=environment.capture(
            places=world.locations,
            backend=world.backend,
            reason=world.reason,
            launcher=world.launch.launcher,
            threads=world.threads,
        ),
        clients={**vars(setup.clients), **_dealt_facts(setup)},
        ranks=world.num_workers,
        facts={
            "model": config.network(),
            "columns": layout.num_columns,
            "parameters": layout.num_parameters,
            "engine": setup.engine.mode,
            "stacked_seeds": setup.stacked,
            "validation_samples": len(setup.dealt.parts.validation),
            "leaked_samples": setup.dealt.supplement.leaked,
            "data": setup.data,
        },
        moves=0 if setup.shards is None else MOVES,
        server=_server_size(setup),
        finals=setup.method.FINALS,
        resumed=config.resume is not None,
    )


def _dealt_facts(setup: Setup) -> dict[str, np.ndarray]:
    """Of every client, where the run is about it: what it was given, and whether it is
    malicious.
    """
    config, dealt, facts = setup.settings.config, setup.dealt, {}
    if config.supplement:
        facts["supplement_samples"] = dealt.supplement.samples
    if config.attack != "none":
        facts["attacker"] = np.isin(np.arange(config.clients), dealt.attackers).astype(
            np.int64
        )
    return facts


def _server_size(setup: Setup) -> ServerSize | None:
    """How much a run will have to tell of its server's model."""
    options, config = setup.settings.options, setup.settings.config
    if not isinstance(options, ServerOptions):
        return None
    times = num_learnings(options, config.rounds)
    return ServerSize(
        times, setup.world.server_ranks or setup.world.role_size, num_steps(options)
    )


def _snapshots(setup: Setup, folder: Path) -> SnapshotWriter | None:
    config, fed = setup.settings.config, setup.federation
    if not config.snapshot_every:
        return None
    rounds = np.arange(config.snapshot_every - 1, config.rounds, config.snapshot_every)
    return SnapshotWriter(
        folder,
        setup.world.role_rank,
        clients=fed.clients,
        layout=fed.layout,
        rounds=rounds,
        dtype=np.dtype("f8" if config.precision == "fp64" else "f4"),
        root=setup.world.is_root,
    )


def _listener(snapshots: SnapshotWriter, round: int) -> OnTrained:
    return lambda here, rows: snapshots.write_rows(round, here, rows.cpu().numpy())


def _open(progress: RunProgress, setup: Setup) -> None:
    progress.say(_opening_line(setup))
    chosen = [str(choice) for choice in setup.settings.choices]
    for line in (
        *chosen,
        _arithmetic_line(setup),
        _supplement_line(setup),
        *dataless_lines(setup),
    ):
        if line is not None:
            progress.say(line)


def _opening_line(setup: Setup) -> str:
    config, world, layout = setup.settings.config, setup.world, setup.federation.layout
    devices = sorted({place.device_name for place in world.locations})
    collectives = (
        "" if world.backend == "none" else f", {world.backend}: {world.reason}"
    )
    servers = (
        f" and {count(world.server_ranks, 'server rank')}" if world.server_ranks else ""
    )
    seeds = "" if setup.stacked == 1 else f"{setup.stacked} seeds × "
    return (
        f"{config.method} on {config.dataset}: "
        f"{seeds}{count(config.clients, 'client')} × {layout.num_columns:,} columns "
        f"({config.network()}, {setup.engine.mode}) on {count(world.num_workers, 'rank')}{servers} "
        f"({', '.join(devices)}{collectives})"
    )


def _arithmetic_line(setup: Setup) -> str | None:
    """What the user may not expect of the arithmetic that was asked for."""
    serves = setup.engine.mode == "loop" and setup.world.device.type == "cuda"
    if setup.settings.config.precision != "bf16" or serves:
        return None
    return "--precision bf16 is for clients that are trained one by one on a GPU: these are computed as with tf32"


def _supplement_line(setup: Setup) -> str | None:
    """What clients have got of the validation set; of the first seed, where there are
    several.
    """
    if not setup.settings.config.supplement:
        return None
    given, whole = setup.dealt.supplement, len(setup.dealt.parts.validation)
    asked = int(np.count_nonzero(given.samples))
    if not asked:
        return "supplement: no client has so few samples that it asks"
    return (
        f"supplement: {count(asked, 'client')} got {given.samples.max()} validation samples each; "
        f"{given.leaked} of the {whole} are now trained on"
    )


def _named_folders(config: RunConfig) -> list[Path]:
    """Where the results go, as far as a rank knows that is not told of the folder."""
    if config.out is None:
        return []
    return (
        [config.out / f"seed-{seed}" for seed in config.seeds]
        if config.seeds
        else [config.out]
    )


def _make_folder(
    config: RunConfig, world: World, claims: ExitStack
) -> tuple[Path, bool]:
    """The root makes the folder, after every rank has checked the command line, claims
    it, and tells the others.

    Also tells whether a run that was to go on is complete: another may have brought it
    to its end meanwhile.
    """
    folder, complete = config.out or Path("runs"), False
    if world.is_root:
        try:
            folder = config.out or _new_folder(config)
            folder.mkdir(parents=True, exist_ok=True)
            check_plain(folder)
            claims.enter_context(claimed(folder))
            own = [seed_folder(folder, seed) for seed in config.seeds or ()]
            if config.resume is not None:
                for path in own:
                    claims.enter_context(claimed(path))
                complete = _look_again(folder, own)
            else:
                _clear(folder, own, claims, overwrite=config.overwrite)
                sign(folder)
        except OSError as error:
            raise UserError(
                f"cannot write to --out {folder}: {error.strerror}"
            ) from None
    name, complete = world.role_bcast((str(folder), complete))
    return Path(name), complete


def _look_again(folder: Path, seeds: Sequence[Path]) -> bool:
    """Whether the runs are complete by now."""
    check_plain(folder)
    done = [is_complete(run) for run in seeds or [folder]]
    if all(done):
        remark(f"hpcfed: {folder} is complete; there is nothing to go on with")
        return True
    if any(done):
        raise UserError(
            f"{seeds[done.index(True)]} has been completed meanwhile; give --resume once more"
        )
    return False


def _clear(
    folder: Path, seeds: Sequence[Path], claims: ExitStack, *, overwrite: bool
) -> None:
    """Rids the folder of the run that was in it, and makes those of the seeds."""
    with ExitStack() as others:
        for path in seed_folders(folder):
            (claims if path in seeds else others).enter_context(claimed(path))
        check_out(
            folder, overwrite=overwrite, claimed=True
        )  # another run may have come to its end meanwhile
        empty(folder)
    remove_empty_seeds(folder)
    for path in seeds:
        if not path.exists():
            path.mkdir()
            claims.enter_context(claimed(path))


def _new_folder(config: RunConfig) -> Path:
    """Named by the time; with a number where several runs begin in the same second, as
    those of a job array do.
    """
    unique = (
        f"{config.method}-{Path(config.dataset).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    for number in range(1, 1_000_000):
        folder = Path("runs") / (unique if number == 1 else f"{unique}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


@contextmanager
def _closing(
    results: ResultsWriter | None, snapshots: SnapshotWriter | None
) -> Iterator[None]:
    """Marks the run as failed when it is, and closes its files in any case."""
    try:
        yield
    except BaseException as error:
        if results is not None:
            with suppress(
                OSError
            ):  # a full disk may be what failed; the last published rounds stay
                results.finish("failed", error=one_line(error))
        raise
    finally:
        if snapshots is not None:
            snapshots.close()


@dataclass
class _Failing:
    phase: Callable[[], str]
    """The phase in progress."""
    folders: Sequence[Path] = field(default_factory=list)
    """Where the reason of a failure is left."""


def _stalled(world: World, failing: _Failing, phase: str, waited: float) -> None:
    """Nothing has happened for too long: the last words of this rank."""
    where = f"rank {world.rank} on {world.locations[world.rank].host}"
    line = f"{where} has been in phase {phase} for {waited:.0f} s: it hangs, or waits for a rank that does"
    silent = [] if world.pulse is None else world.pulse.silent(3 * BEAT)
    if silent:
        ranks = ", ".join(f"{rank} on {world.locations[rank].host}" for rank in silent)
        line += f"; no sign of life from rank {ranks}"
    _last_words(world, failing, line)
    if world.role_rank == 0:
        time.sleep(2 * BEAT)  # it keeps the store, in which others may still be looking


def _last_words(world: World, failing: _Failing, line: str, details: str = "") -> None:
    remark(f"hpcfed: {line}")
    for folder in failing.folders:
        leave_failure(folder, world.rank, f"{line}\n\n{details}")


@contextmanager
def _ending_all_ranks(world: World, failing: _Failing) -> Iterator[_Failing]:
    """An exception on one rank ends all ranks at once, and says where it came from."""
    try:
        yield failing
    except UserError as error:
        if world.alone:
            raise
        tell(error, world.rank)
        world.abort(2)
    except Exception as error:
        where = f"rank {world.rank} on {world.locations[world.rank].host} failed in phase {failing.phase()}"
        line = f"{where}: {one_line(error)}"
        remark(traceback.format_exc().rstrip())
        _last_words(world, failing, line, traceback.format_exc())
        world.abort(1)
        raise SystemExit(1) from None
