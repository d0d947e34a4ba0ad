"""Makes a plan: from a calibration, or from assumptions if nothing was measured."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from math import isclose, isinf
from pathlib import Path
from typing import Any

from rich.markup import escape

from hpcfed.analysis.costmodel import Range
from hpcfed.analysis.render.console import Output, bare_table, say
from hpcfed.clients.footprint import too_large
from hpcfed.errors import UserError, count, remark
from hpcfed.options import Settings
from hpcfed.plan.assumptions import GUESSED, OTHER_WORK, assumed, scaled
from hpcfed.plan.calibrate import calibrate, work_of
from hpcfed.plan.constants import (
    DEFAULT,
    Calibration,
    MeasuredMachine,
    MeasuredWork,
    check_writable,
    kind_of,
    read_constants,
    write_constants,
)
from hpcfed.plan.planner import Plan, Planner, best_split, candidates
from hpcfed.plan.server import PLANNED
from hpcfed.plan.speeds import ASSUMED, LinkSpeed, measured_link
from hpcfed.plan.work import described_footprint
from hpcfed.results.as_json import plain
from hpcfed.results.stored import check_start
from hpcfed.runtime.launcher import Launch, launched
from hpcfed.server.options import ServerOptions, server_options
from hpcfed.words import Write, bytes_text, seconds_text

STAGES = (0, 1, 2, 3)
MOST_RANKS = 100_000
COMPARED = {
    "network": "network",
    "columns": "number of columns",
    "batch_size": "batch size",
    "precision": "precision",
    "kernels": "--kernels",
    "method": "method",
    "client_bytes": "amount of data",
}
"""What must match the measurement, in words, by the field of `MeasuredWork`."""


@dataclass(frozen=True)
class PlanRequest:
    """What to plan for which machines; None: as measured, else as assumed."""

    ranks: int = 1
    per_node: int | None = None
    """Ranks that share a machine's memory."""
    link: float | None = None
    """Bytes per second between two ranks."""
    latency: float | None = None
    """Seconds of an empty message."""
    constants: Path | None = None
    """The file of a calibration."""
    calibrate: bool = False
    """Measure first."""
    json: bool = False
    """Print the plan as JSON."""

    @property
    def path(self) -> Path:
        return self.constants or DEFAULT


def print_plan_of(
    settings: Settings, values: Mapping[str, Any], request: PlanRequest
) -> None:
    """Print the plan; `values` are the options as the user wrote them."""
    if not launched().alone:
        raise UserError(
            "hpcfed plan starts ranks itself; start it without mpirun or srun"
        )
    _check(request, settings)
    if request.calibrate:
        # Check before a calibration that takes minutes.
        check_writable(request.path)
        write_constants(request.path, calibrate(settings, values))
        remark(f"calibrated: {request.path}")
    made = make_plan(request, settings)
    if request.json:
        print(json.dumps(plain(asdict(made)), indent=1, allow_nan=False))
        return
    print_plan(made, settings)


def _check(request: PlanRequest, settings: Settings) -> None:
    ranks, clients = request.ranks, settings.config.clients
    if not 1 <= ranks <= MOST_RANKS:
        raise UserError(f"--ranks {ranks}: must be from 1 to {MOST_RANKS:,}")
    if request.per_node is not None and not 1 <= request.per_node <= MOST_RANKS:
        raise UserError(f"--per-node {request.per_node}: must be 1 or more")
    if ranks > clients:
        raise UserError(
            f"--ranks {ranks}, but there are {count(clients, 'client')}; every rank "
            "hosts at least one"
        )
    config = settings.config
    if settings.options.has_server:
        # The plan itself determines the number of server ranks.
        # With one server rank added, all checks of a run apply to the workers.
        one = config.model_copy(update={"server_ranks": 1})
        check_start(replace(settings, config=one), Launch("plan", 0, ranks + 1))
        return
    check_start(settings, Launch("plan", 0, ranks))


def make_plan(request: PlanRequest, settings: Settings) -> Plan:
    """Predict everything that was requested."""
    notes, constants, doubt = _constants(request, settings)
    notes += _seeds_note(settings)
    link = _link(request, constants, notes)
    ranks, per_node = request.ranks, request.per_node
    if per_node is None:
        # A rank with its own GPU shares nothing relevant.
        per_node = constants.machine.units if constants.machine.kind == "cpu" else 1
    planner = Planner(settings, constants, link, per_node=per_node)
    rounds = {number: planner.round(number) for number in _doublings(ranks)}
    found = planner.all_rounds(ranks)
    made = Plan(notes, rounds, [], [], None, found, found)
    room = room_of_rank(constants.machine, min(ranks, per_node))
    notes += _base_notes(settings, constants.machine.kind, room)
    server = server_options(settings)
    if server is not None:
        unplanned = _not_planned(server, constants)
        if unplanned:
            notes.append(f"the server's model: {unplanned}")
            made = replace(made, whole=None)
        else:
            made = _with_server(made, planner, server, ranks, room)
    # Ranks that also train the server's model hold both.
    fullest = rounds[ranks].memory.middle if made.best is None else made.best.memory
    if room and fullest > room:
        notes.append(
            f"does not fit: a rank takes {bytes_text(fullest)} and has "
            f"{bytes_text(room)}; give more --ranks, or fewer --per-node"
        )
    widened: Plan = _widened(made, doubt)
    return widened


def _base_notes(settings: Settings, kind: str, room: float) -> list[str]:
    """Say what clients over a large frozen network take, and whether it fits."""
    found = described_footprint(settings.config, kind)
    if found is None:
        return []
    size = round(found.base / found.parameters)
    why = too_large(found.parameters, size, room) if room else ""
    return [str(found), f"does not fit: {why}"] if why else [str(found)]


def _not_planned(server: ServerOptions, constants: Calibration) -> str:
    """Return why the server's learning is not planned; empty if it is."""
    model = server.server_model
    if model not in PLANNED:
        return f"{model} is not planned, only {' and '.join(PLANNED)}"
    if not constants.server:
        return "not measured, so not planned; use --calibrate"
    if model != constants.server_model:
        return f"{constants.server_model} was measured, not {model}; use --calibrate"
    return ""


def _with_server(
    made: Plan, planner: Planner, server: ServerOptions, ranks: int, room: float
) -> Plan:
    """Add the server's learning, and the fastest split of ranks."""
    batches = [server.batch(network) for network in server.networks]
    learnings = []
    for number in _doublings(ranks):
        # One rank can always learn; several need two samples of a batch each.
        if number == 1 or number <= min(batches) // 2:
            learnings += [planner.learning(server, number, stage) for stage in STAGES]
    best, splits = best_split(
        candidates(ranks, batches),
        lambda number: planner.split(server, ranks, number),
        room,
    )
    return replace(
        made, learnings=learnings, splits=splits, best=best, whole=best.seconds
    )


def room_of_rank(machine: MeasuredMachine, local: int) -> float:
    """Return the bytes that each of `local` ranks on a machine may take; 0: unknown."""
    return machine.memory if machine.kind == "cuda" else machine.memory / local


def _seeds_note(settings: Settings) -> list[str]:
    """Say that figures are for one seed, if a run has several."""
    seeds = settings.config.num_seeds
    if seeds == 1:
        return []
    return [
        f"{seeds} seeds: all figures are of one; the run takes up to {seeds} times it"
    ]


def _constants(
    request: PlanRequest, settings: Settings
) -> tuple[list[str], Calibration, float]:
    """Return notes on the constants, the constants, and the factor of doubt."""
    work, path = work_of(settings.config), request.path
    if request.constants is None and not path.exists():
        constants = assumed(settings, work)
        note = (
            f"nothing was measured: {constants.machine.device} per rank is assumed, "
            f"which may be off by a factor of {GUESSED:g}; --calibrate measures"
        )
        return [note], constants, GUESSED
    constants = read_constants(path)
    machine = constants.machine
    _check_kind(settings.config.device, machine, path)
    most = max(point.ranks for point in constants.rounds)
    notes = [
        f"measured on {machine.device}, {constants.made}, up to "
        f"{max(point.clients for point in constants.rounds)} clients a rank and "
        f"{count(most, 'rank')} ({path})"
    ]
    other = _differences(work, constants.work)
    if not other:
        return notes, constants, 1.0
    notes.append(
        f"measured with another {', '.join(other)}: scaled by arithmetic and columns, "
        f"which may be off by a factor of {OTHER_WORK:g}; --calibrate measures this one"
    )
    return notes, scaled(constants, work), OTHER_WORK


def _check_kind(device: str, machine: MeasuredMachine, path: Path) -> None:
    """Refuse to plan a GPU run from a calibration on CPU cores, and vice versa."""
    if device != "auto" and kind_of(device) != machine.kind:
        raise UserError(
            f"--constants {path}: measured with device {machine.kind} "
            f"({machine.device}), and the run has device {device}; calibrate where it "
            "will run"
        )


def _differences(work: MeasuredWork, measured: MeasuredWork) -> list[str]:
    """Return in words what differs from the measurement."""
    found = []
    for name, words in COMPARED.items():
        ours, theirs = getattr(work, name), getattr(measured, name)
        same = ours == theirs
        if name == "client_bytes":
            # Clients divide a data set, so one client more or less makes no difference.
            same = isclose(ours, theirs, rel_tol=0.05)
        if not same:
            found.append(words)
    return found


def _link(request: PlanRequest, constants: Calibration, notes: list[str]) -> LinkSpeed:
    """Return the connection of ranks: as given, else as measured, else as assumed."""
    found = measured_link(constants.links) or ASSUMED
    if request.link is None and request.latency is None:
        if request.ranks > 1:
            notes.append(f"between ranks: {found.source}")
        return found
    if request.link is not None:
        found = replace(found, bytes_per_second=request.link)
    if request.latency is not None:
        found = replace(found, latency=request.latency)
    speed, latency = found.bytes_per_second / 1e9, found.latency * 1e6
    if isinf(speed):
        # It is too fast for the measured sizes.
        notes.append(f"between ranks: {latency:g} µs, and bytes take no time")
        return found
    notes.append(f"between ranks: {speed:g} GB/s and {latency:g} µs")
    return found


def _doublings(ranks: int) -> list[int]:
    """Return 1, 2, 4, … and the number of ranks itself."""
    found = []
    number = 1
    while number < ranks:
        found.append(number)
        number *= 2
    return [*found, ranks]


def _widened(found: Any, factor: float) -> Any:
    """Widen each interval of a plan by a factor, either way."""
    if isinstance(found, Range):
        return Range(found.middle, found.low / factor, found.high * factor)
    if isinstance(found, list):
        return [_widened(one, factor) for one in found]
    if isinstance(found, dict):
        return {key: _widened(one, factor) for key, one in found.items()}
    # A plan is made of dataclasses that hold others, and intervals at their ends.
    if not is_dataclass(found) or isinstance(found, type):
        return found
    changes = {
        one.name: _widened(getattr(found, one.name), factor) for one in fields(found)
    }
    return replace(found, **changes)


def print_plan(plan: Plan, settings: Settings) -> None:
    """Print what the plan is based on, and its tables; intervals are in brackets."""
    console = Output()
    config = settings.config
    say(
        console,
        f"{config.method} on {config.dataset}: {count(config.clients, 'client')}, "
        f"{config.cohort_size} in a round, {count(config.rounds, 'round')}",
    )
    say(console, *plan.notes, "")
    table = bare_table("ranks", "a round", "", "efficiency", "evaluation", "memory", "")
    first = plan.rounds[1].seconds.middle
    for ranks, found in plan.rounds.items():
        efficiency = first / ranks / found.seconds.middle
        table.add_row(
            str(ranks),
            seconds_text(found.seconds.middle),
            escape(_interval(found.seconds)),
            f"{efficiency:.0%}",
            seconds_text(found.evaluation.middle),
            bytes_text(found.memory.middle),
            escape(_interval(found.memory, bytes_text)),
        )
    console.print(table)
    if plan.learnings:
        _print_learnings(plan, console)
    say(console, "")
    if plan.best is not None:
        best = plan.best
        whose = "all ranks do both"
        if best.server_ranks:
            whose = f"{best.workers} workers and --server-ranks {best.server_ranks}"
        say(console, f"ends soonest with: {whose}")
    if plan.whole is None:
        seconds = _with_interval(plan.all_rounds)
        say(console, f"all rounds, without the server's learning: {seconds}")
        return
    say(console, f"the whole run: {_with_interval(plan.whole)}")


def _print_learnings(plan: Plan, console: Output) -> None:
    """Print one row for every number of server ranks."""
    say(console, "")
    stages = sorted({found.zero_stage for found in plan.learnings})
    table = bare_table(
        "server ranks", *(f"ZeRO {stage}" for stage in stages), "memory, ZeRO 0 – 3"
    )
    for ranks in sorted({found.ranks for found in plan.learnings}):
        row = [found for found in plan.learnings if found.ranks == ranks]
        times = [escape(_with_interval(found.seconds)) for found in row]
        first, last = row[0].memory.middle, row[-1].memory.middle
        table.add_row(str(ranks), *times, f"{bytes_text(first)} – {bytes_text(last)}")
    console.print(table)
    say(console, "", "server ranks   whole run")
    for split in plan.splits:
        name = str(split.server_ranks or "0 (both)")
        say(console, f"{name:14} {_with_interval(split.seconds)}")


def _with_interval(found: Range) -> str:
    return f"{seconds_text(found.middle)} {_interval(found)}"


def _interval(found: Range, write: Write = seconds_text) -> str:
    return f"[{write(found.low)} – {write(found.high)}]"
