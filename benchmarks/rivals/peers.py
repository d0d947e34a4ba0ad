"""hpcfed beside its rivals, on the two pieces of work of benchmarks/speed/round.py, in one
call.

  hpcfed        as benchmarks/speed/round.py measures it: engine `batched`, TF32
  pfl-research  Apple's simulator (package `pfl`), one client at a time in each of P processes
  vmap          torch.func: functional_call, grad and vmap over the clients' stacked weights, eager
  loop          one torch module that trains one client after the other

A round is sampling, local training and aggregation, without evaluation. All train the
same network on the same number of synthetic images, which are on the device beforehand.
All may use TF32 and cudnn.benchmark. Every line is measured in fresh processes, one
line at a time.

Rivals get the benefit of the doubt:
- Only hpcfed shuffles samples and reports the training loss. pfl-research does neither by itself,
  and the other two do not either.
- pfl-research gets its users' data as cached batches on the device and, on a GPU, fused SGD.
- In P processes each handles cohort / P users. No all-reduce is made or counted. They start a
  round at the same instant, and the slowest one's time counts.
- Several processes on a GPU share it by NVIDIA's multi-process service (MPS) where that is there.
  It is started for them alone and stopped at the end, unless it was already running.

examples:
  python -m benchmarks.rivals.peers
  python -m benchmarks.rivals.peers --works pfl-cifar10 --processes 1 5 10 --rounds 30 --json peers.json
  python -m benchmarks.rivals.peers --rivals vmap --chunk 10 25 50
  python -m benchmarks.rivals.peers --device cpu --scale 0.05 --processes 1 2 --rounds 3
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import add_device
from benchmarks.measuring import setup_of
from benchmarks.rivals import mps
from benchmarks.rivals.children import Failed, in_children
from benchmarks.rivals.machine import Machine, device_of, probe, wants_mps
from benchmarks.rivals.others import run_pfl, run_plain
from benchmarks.rivals.work import Gate, Job, Report, Work, work_of
from benchmarks.speed.round import WORKS, timed_rounds
from benchmarks.strict import StrictParser, check_rounds
from hpcfed.errors import UserError
from hpcfed.runtime import world as worlds

RIVALS = ("pfl-research", "vmap", "loop")
HEADER = (
    f"{'work':16} {'who':13} {'processes':>9} {'MPS':>4} {'ms per round':>12} {'10 % … 90 %':>21} "
    f"{'samples/s':>11} {'slower':>8}"
)
Result = dict[str, Any]
"""What a job measured: a line of the table, and an object in the JSON file."""


def jobs_of(work: Work, options: argparse.Namespace) -> Iterator[Job]:
    """Yield the lines of one piece of work, hpcfed first."""
    job = partial(
        Job, work, device=options.device, rounds=options.rounds, warmup=options.warmup
    )
    yield job("hpcfed")
    for rival in options.rivals:
        if rival == "pfl-research":
            yield from (job(rival, processes=number) for number in options.processes)
        elif rival == "vmap":
            yield from (job(rival, chunk=chunk) for chunk in options.chunk)
        else:
            yield job(rival)


def run_job(job: Job, rank: int, gate: Gate | None) -> Report:
    """Measure a job, or one process of it."""
    if job.who == "hpcfed":
        return run_hpcfed(job)
    return run_pfl(job, rank, gate) if job.who == "pfl-research" else run_plain(job)


def run_hpcfed(job: Job) -> Report:
    """Measure hpcfed by the functions of benchmarks/speed/round.py."""
    work = job.work
    values = WORKS[work.name] | {
        "clients": work.clients,
        "train_per_client": work.images,
    }
    values |= {"engine": "batched", "precision": "tf32", "device": job.device}
    world = worlds.enter(device=job.device)
    setup = setup_of(values, world)
    seconds, samples = timed_rounds(setup, warmup=job.warmup, rounds=job.rounds)
    work.check(samples)
    world.close()
    return Report(seconds.tolist())


def measure(job: Job, variables: mps.Variables | None = None) -> Result:
    """Run a job in fresh processes; a round takes as long as in the slowest of them.

    A daemon of our own (with `variables`) is for several processes; any other serves
    all.
    """
    # Empty variables mean a daemon that serves every process anyway.
    shared = variables is not None and (not variables or job.processes > 1)
    gate = Gate(job.processes) if job.processes > 1 else None
    ranks = [(job, rank, gate) for rank in range(job.processes)]
    reports: list[Report] = in_children(run_job, ranks, variables if shared else None)
    milliseconds = 1e3 * np.array([report.seconds for report in reports])
    slowest = milliseconds.max(0)
    median = float(np.median(slowest))
    return {
        "work": job.work.name,
        "who": job.label,
        "processes": job.processes,
        "mps": shared,
        "ms_per_round": median,
        "ms_low": float(np.quantile(slowest, 0.1)),
        "ms_high": float(np.quantile(slowest, 0.9)),
        "samples_per_round": job.work.samples,
        "samples_per_second": 1e3 * job.work.samples / median,
        "samples_ms": slowest.tolist(),
        "samples_ms_by_process": milliseconds.tolist(),
        "loss_before": [report.loss_before for report in reports],
        "loss_after": [report.loss_after for report in reports],
    }


def header_of(
    options: argparse.Namespace,
    works: list[Work],
    machine: Machine,
    variables: mps.Variables | None,
) -> str:
    """Return the date, the machine and the versions."""
    cuda = options.device == "cuda"
    parts = [machine.gpu if cuda else f"CPU, {len(os.sched_getaffinity(0))} cores"]
    if cuda and machine.driver:
        parts.append(f"driver {machine.driver}")
    parts += [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    parts.append(f"pfl {machine.pfl}" if machine.pfl else "no pfl")
    on = "MPS on where several share" if variables else "MPS on"
    parts.append("MPS off" if variables is None else on)
    header = f"{datetime.now(UTC):%Y-%m-%d}  {', '.join(parts)}"
    if options.scale == 1:
        return header
    sizes = [
        f"{work.name} {work.cohort} clients × {work.images} images" for work in works
    ]
    return f"{header}\nscaled by {options.scale:g}, a try-out only: {'; '.join(sizes)}"


def told(result: Result, ours: Result | None) -> str:
    """Return one line of the table; `ours` is hpcfed's result."""
    spread = f"{result['ms_low']:.2f} … {result['ms_high']:.2f}"
    slower = f"{result['ms_per_round'] / ours['ms_per_round']:.2f}×" if ours else ""
    return (
        f"{result['work']:16} {result['who']:13} {result['processes']:9} "
        f"{'on' if result['mps'] else 'off':>4} {result['ms_per_round']:12.2f} {spread:>21} "
        f"{result['samples_per_second']:11,.0f} {slower:>8}"
    )


def verdict(ours: Result, rivals: list[Result]) -> str:
    """Return a sentence: hpcfed against pfl-research at its best and in one process,
    and others.
    """
    apple = [result for result in rivals if result["who"] == "pfl-research"]
    best = min(apple, key=lambda result: result["ms_per_round"], default=None)
    parts = []
    for result in rivals:
        name = result["who"]
        if name == "pfl-research":
            if result is not best and result["processes"] > 1:
                continue
            name += f" --processes {result['processes']}"
            name += " (its best here)" if result is best else ""
        ratio = result["ms_per_round"] / ours["ms_per_round"]
        faster = f"{ratio:.1f} times faster"
        if ratio < 1:
            faster = f"{1 / ratio:.1f} times slower"
        parts.append(f"{faster} than {name}")
    return f"{ours['work']}: hpcfed is {', '.join(parts)}."


def compare(
    options: argparse.Namespace, machine: Machine, variables: mps.Variables | None
) -> int:
    """Measure and print everything; return the exit code."""
    works = [work_of(name, options.scale) for name in options.works]
    jobs = [job for work in works for job in jobs_of(work, options)]
    header = header_of(options, works, machine, variables)
    print(f"{header}\n{HEADER}", flush=True)
    results: list[Result] = []
    ours: dict[str, Result] = {}
    for job in jobs:
        name = job.work.name
        try:
            result = measure(job, variables)
        except Failed as error:
            print(
                f"{name:16} {job.label:13} {job.processes:9} failed: {error}",
                flush=True,
            )
            continue
        results.append(result)
        if job.who == "hpcfed":
            ours[name] = result
        print(told(result, ours.get(name)), flush=True)
    for name, own in ours.items():
        rivals = [
            result for result in results if result["work"] == name and result is not own
        ]
        if rivals:
            print(verdict(own, rivals))
    if options.json:
        content = {
            "header": header,
            **asdict(machine),
            "works": [asdict(work) for work in works],
        }
        options.json.write_text(json.dumps(content | {"results": results}, indent=1))
    return 0 if len(results) == len(jobs) else 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options, checked."""
    parser = StrictParser(__doc__)
    add, several = parser.add_argument, partial(parser.add_argument, nargs="+")
    several("--works", choices=WORKS, default=list(WORKS))
    several("--rivals", choices=RIVALS, default=list(RIVALS))
    processes = "of pfl-research, one line for each number (default: 1 2 5 10)"
    several("--processes", type=int, default=[1, 2, 5, 10], help=processes)
    chunk = "clients that vmap trains together, one line for each number (default: the cohort)"
    several("--chunk", type=int, default=[0], help=chunk)
    add("--rounds", type=int, default=10, help="counted rounds (default: 10)")
    add("--warmup", type=int, default=2, help="rounds before (default: 2)")
    add_device(parser)
    share = f"share the GPU by MPS (default: where {mps.CONTROL} is there)"
    add("--mps", action=argparse.BooleanOptionalAction, help=share)
    add("--scale", type=float, default=1.0, help="shrink the work, for a try-out")
    add("--json", type=Path, help="also write every round to this file")
    options = parser.parse_args(words)
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    """Raise UserError where the options make no sense."""
    check_rounds(options)
    if not 0 < options.scale <= 1:
        raise UserError(f"--scale {options.scale:g}: use more than 0 and at most 1")
    if min(options.chunk) < 0:
        raise UserError(
            f"--chunk {min(options.chunk)}: use 1 or more, or 0 for the cohort"
        )
    for work in (work_of(name, options.scale) for name in options.works):
        for number in options.processes:
            if number < 1 or work.cohort % number:
                cohort = f"{work.name}'s cohort of {work.cohort}"
                raise UserError(f"--processes {number} does not divide {cohort}")


def main(words: Sequence[str]) -> int:
    try:
        options = parse(words)
        machine: Machine = in_children(probe, [()])[0]
        options.device = device_of(options.device, machine)
        if "pfl-research" in options.rivals and not machine.pfl:
            print(
                f"pfl-research is skipped: the package `pfl` cannot be imported ({machine.why})"
            )
            options.rivals = [
                rival for rival in options.rivals if rival != "pfl-research"
            ]
        wanted, demanded = wants_mps(options), options.mps is True
        cuda = options.device == "cuda"
        service = (
            mps.service(wanted=wanted, demanded=demanded) if cuda else nullcontext()
        )
        with service as variables:
            return compare(options, machine, variables)
    except (UserError, Failed) as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


if __name__ == "__main__":
    # So that MPS is stopped on SIGTERM, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
