"""`hpcfed plan` after its command line has been understood."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpcfed.config import Settings, check
from hpcfed.errors import UserError, count, say
from hpcfed.plan.assumptions import GUESSED, OTHER_WORK, assumed, scaled
from hpcfed.plan.calibrate import calibrate, work_of
from hpcfed.plan.constants import DEFAULT, Constants, read_constants, write_constants
from hpcfed.plan.fits import Range
from hpcfed.plan.links import ASSUMED, Link, measured_link
from hpcfed.plan.planner import Plan, Planner
from hpcfed.plan.server import LearningPlan
from hpcfed.plan.split import Split, best_split, candidates
from hpcfed.plan.tables import print_plan
from hpcfed.runtime.launcher import Launch, launched
from hpcfed.server.options import server_options

STAGES = (0, 1, 2, 3)
MOST_RANKS = 100_000


def plan(
    options: argparse.Namespace, settings: Settings, values: Mapping[str, Any]
) -> None:
    """Calibrate if asked for, then print the plan."""
    if not launched().alone:
        raise UserError(
            "hpcfed plan starts ranks itself; start it without mpirun or srun"
        )
    _check(options, settings)
    path: Path = options.constants or DEFAULT
    if options.calibrate:
        write_constants(path, calibrate(settings, values))
        say(f"calibrated: {path}")
    made = make_plan(options, settings, path)
    if options.json:
        print(json.dumps(_plain(asdict(made)), indent=1, allow_nan=False))
        return
    print_plan(made, settings)


def _check(options: argparse.Namespace, settings: Settings) -> None:
    ranks, clients = options.ranks, settings.config.clients
    if not 1 <= ranks <= MOST_RANKS:
        raise UserError(f"--ranks {ranks}: must be from 1 to {MOST_RANKS:,}")
    if options.per_node is not None and not 1 <= options.per_node <= MOST_RANKS:
        raise UserError(f"--per-node {options.per_node}: must be 1 or more")
    if ranks > clients:
        raise UserError(
            f"--ranks {ranks}, but there are {count(clients, 'client')}; every rank "
            "hosts one at least"
        )
    check(settings, Launch("plan", 0, 1))


def make_plan(options: argparse.Namespace, settings: Settings, path: Path) -> Plan:
    """Predict everything that is asked for."""
    notes, constants, doubt = _constants(options, settings, path)
    link = _link(options, constants, notes)
    ranks: int = options.ranks
    per_node = options.per_node
    if per_node is None:
        # A rank with a GPU to itself shares nothing that counts.
        per_node = constants.machine.units if constants.machine.kind == "cpu" else 1
    planner = Planner(settings, constants, link, per_node=per_node)
    rounds = {number: planner.round(number) for number in _doublings(ranks)}
    learnings: list[LearningPlan] = []
    splits: list[Split] = []
    best = None
    whole = planner.whole(ranks)
    server = server_options(settings)
    if server is not None and not constants.server:
        notes.append(
            "the server's model: not measured, so not planned; use --calibrate"
        )
    elif server is not None:
        batches = [server.batch(network) for network in ("autoencoder", "denoiser")]
        numbers = candidates(ranks, batches)
        shown = [number for number in _doublings(ranks) if number <= min(batches) // 2]
        for number in shown:
            learnings += [planner.learning(server, number, stage) for stage in STAGES]
        best, splits = best_split(
            numbers,
            lambda number: planner.split(server, ranks, number),
            constants.machine.memory,
        )
        whole = best.seconds
    made = Plan(notes, rounds, learnings, splits, best, whole)
    return _doubted(made, doubt)


def _constants(
    options: argparse.Namespace, settings: Settings, path: Path
) -> tuple[list[str], Constants, float]:
    """Return what the plan rests on, the constants, and by which factor it may be off
    on top.
    """
    work = work_of(settings.config)
    if options.constants is None and not path.exists():
        constants = assumed(settings.config, work)
        note = (
            f"nothing was measured: {constants.machine.device} per rank is assumed, "
            f"which may be off by a factor of {GUESSED:g}; --calibrate measures"
        )
        return [note], constants, GUESSED
    constants = read_constants(path)
    machine = constants.machine
    most = max(point.ranks for point in constants.rounds)
    notes = [
        f"measured on {machine.device}, {constants.made}, up to "
        f"{max(point.clients for point in constants.rounds)} clients a rank and "
        f"{count(most, 'rank')} ({path})"
    ]
    same = ("network", "columns", "batch_size", "precision", "method")
    other = [
        name for name in same if getattr(work, name) != getattr(constants.work, name)
    ]
    if not other:
        return notes, constants, 1.0
    notes.append(
        f"measured with another {', '.join(other)}: scaled by arithmetic and columns, "
        f"which may be off by a factor of {OTHER_WORK:g}; --calibrate measures this one"
    )
    return notes, scaled(constants, work), OTHER_WORK


def _link(options: argparse.Namespace, constants: Constants, notes: list[str]) -> Link:
    """Return what joins ranks: as given, else as measured, else as assumed."""
    found = measured_link(constants.links) or ASSUMED
    if options.link is None and options.latency is None:
        if options.ranks > 1:
            notes.append(f"between ranks: {found.source}")
        return found
    if options.link is not None:
        found = replace(found, bytes_per_second=options.link)
    if options.latency is not None:
        found = replace(found, latency=options.latency)
    speed, latency = found.bytes_per_second / 1e9, found.latency * 1e6
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


def _doubted(made: Plan, factor: float) -> Plan:
    """Widen every interval by a factor, either way."""
    if factor == 1:
        return made

    def wide(found: Range) -> Range:
        return Range(found.middle, found.low / factor, found.high * factor)

    rounds = {}
    for ranks, found in made.rounds.items():
        rounds[ranks] = replace(
            found,
            seconds=wide(found.seconds),
            evaluation=wide(found.evaluation),
            memory=wide(found.memory),
        )
    learnings = [
        replace(found, seconds=wide(found.seconds), memory=wide(found.memory))
        for found in made.learnings
    ]
    splits = [replace(found, seconds=wide(found.seconds)) for found in made.splits]
    best = made.best and replace(made.best, seconds=wide(made.best.seconds))
    return Plan(made.notes, rounds, learnings, splits, best, wide(made.whole))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; keys become text."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
