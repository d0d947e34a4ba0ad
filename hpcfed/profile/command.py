"""`hpcfed profile` after its command line has been understood: a run, looked at."""

import json
from dataclasses import asdict
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcfed.config import Settings
from hpcfed.errors import unless_full
from hpcfed.experiment.loop import run
from hpcfed.models.layout import Layout
from hpcfed.profile.ceilings import Ceilings
from hpcfed.profile.verdict import Part, advice, words
from hpcfed.profile.watch import (
    PROFILER,
    ROUNDS,
    ProfileWatch,
    Session,
    Timeline,
    trace,
)
from hpcfed.record.observer import observed_by
from hpcfed.record.publish import publish
from hpcfed.record.reading import RunRecord, plain, read_run
from hpcfed.record.timing import PHASES
from hpcfed.report.console import Output, bare_table, bytes_text, say
from hpcfed.runtime.launcher import launched
from hpcfed.server.options import NETWORKS, ServerOptions, batching
from hpcfed.server.schedule import num_steps
from hpcfed.study.estimate import client_network, server_networks, work

PASSES = 10
"""How often a training step of AdamW reads or writes a number for each parameter, at
least: forward and backward pass, the gradient written and read, and weight and both
moments read and written.
"""
ACTIVATION_PASSES = 10
"""How often a training step reads or writes every activation, at least. Forward, a
convolution writes it, a norm reads it for its sums and once more to write it anew, the
next convolution reads that. Backward, a norm reads gradient and activation and writes,
and both gradients of a convolution read.
"""
ROWS, NAME = 8, 42
"""Operators that are shown of a session, and letters of their names."""


def profile(settings: Settings, *, warmup: int, active: int, nvtx: bool) -> None:
    """Runs, and on the root writes trace.json and profile.json beside run.h5 and tells
    what is in them.
    """
    watch = ProfileWatch(
        warmup=warmup, active=active, rounds=settings.config.rounds, nvtx=nvtx
    )
    with observed_by(watch):
        folder = run(settings)
    if folder is None:
        return
    settings = settings.on_device(gpu=watch.device.type == "cuda")
    record = read_run(folder)
    ceilings = {"float32": Ceilings.of(watch.device)}
    if getattr(settings.options, "server_precision", "fp32") == "bf16":
        ceilings["bfloat16"] = Ceilings.of(watch.device, torch.bfloat16)
    parts = _parts(
        settings, record, watch.timelines, ceilings, cuda=watch.device.type == "cuda"
    )
    publish(json.dumps(trace(watch.timelines)).encode(), folder / "trace.json")
    publish(
        json.dumps(plain(_content(record, watch, ceilings, parts)), indent=1).encode(),
        folder / "profile.json",
    )
    with unless_full(f"all figures are in {folder / 'profile.json'}"):
        _tell(record, watch, ceilings, parts, folder)


def _parts(
    settings: Settings,
    record: RunRecord,
    timelines: list[Timeline],
    ceilings: dict[str, Ceilings],
    *,
    cuda: bool,
) -> list[Part]:
    """The clients' training, and both networks of the server, beside what the device
    can do.
    """
    config = settings.config
    todo, plain = work(settings), ceilings["float32"]
    done = record.rounds_done / config.rounds / record.facts["ranks"]
    train = record.phases[:, :, PHASES.index("train")].mean(1)
    alone = train[max(line.warm for line in timelines) :]
    warm = float(alone.mean() if len(alone) else train.mean()) * record.rounds_done
    shares = (
        todo.clients * done / plain.flops,
        todo.moved * done / plain.bytes_per_second,
    )
    parts = [
        _part(
            "clients' training",
            float(train.sum()),
            warm,
            busy(timelines, ROUNDS, cuda=cuda),
            *shares,
        )
    ]
    options = settings.options
    if isinstance(options, ServerOptions):
        steps, best = num_steps(options), ceilings.get("bfloat16", plain)
        autoencoder, denoiser = server_networks(
            options, Layout.of(client_network(settings))
        )
        activations = {
            "autoencoder": autoencoder.activations,
            "denoiser": denoiser.activations,
        }
        for network in NETWORKS if record.learnings else ():
            seconds = sum(one.seconds[network] for one in record.learnings) - _overhead(
                timelines, network
            )
            ranks, every = (
                len(record.learnings[-1].peak_memory),
                steps[network] * len(record.learnings),
            )
            pace = max(
                (line.paces[network] for line in timelines if network in line.paces),
                default=nan,
            )
            warm = seconds if isnan(pace) else pace * every
            flops = sum(one.flops[network] for one in record.learnings) / ranks
            moved = 4.0 * PASSES * record.learnings[-1].parameters[network] * every
            samples = batching(options, ranks, network).batch // ranks * every
            moved += (
                (2.0 if "bfloat16" in ceilings else 4.0)
                * ACTIVATION_PASSES
                * activations[network]
                * samples
            )
            shares = flops / best.flops, moved / plain.bytes_per_second
            parts.append(
                _part(
                    network, seconds, warm, busy(timelines, network, cuda=cuda), *shares
                )
            )
    return parts


def _part(
    name: str, seconds: float, warm: float, busy: float, computing: float, moving: float
) -> Part:
    """With the seconds that its arithmetic and its bytes would take at the ceilings."""
    return Part(
        name,
        seconds,
        warm,
        busy,
        *(least / warm if warm else nan for least in (computing, moving)),
    )


def _overhead(timelines: list[Timeline], name: str) -> float:
    """Seconds that the profiler itself took within a part, on the rank where it took
    longest.
    """
    own = [
        sum(s.seconds for s in line.spans if (s.track, s.name) == (PROFILER, name))
        for line in timelines
    ]
    return max(own, default=0.0)


def _sessions(timelines: list[Timeline], name: str) -> list[Session]:
    return [
        session
        for line in timelines
        for session in line.sessions
        if session.name == name
    ]


def busy(timelines: list[Timeline], name: str, *, cuda: bool) -> float:
    """Of the rank that was busy most; NaN where nobody has looked.

    On a GPU it is what a step's kernels took, by the pace of steps without the
    profiler, since that slows launches.
    """
    found = [nan]
    for line in timelines:
        for session in (session for session in line.sessions if session.name == name):
            pace = line.paces.get(name, 0.0) if cuda else 0.0
            own = session.busy * session.seconds / session.number
            found.append(min(1.0, own / pace) if pace else session.busy)
    return float(np.nanmax(found)) if len(found) > 1 else nan


def _content(
    record: RunRecord,
    watch: ProfileWatch,
    ceilings: dict[str, Ceilings],
    parts: list[Part],
) -> dict[str, Any]:
    cuda = watch.device.type == "cuda"
    return {
        "device": watch.own.device,
        "ceilings": {name: asdict(own) for name, own in ceilings.items()},
        "parts": [_judged(part, record, cuda) for part in parts],
        "phases": {name: record.phases[:, :, i].sum(0).tolist() for i, name in enumerate(PHASES)},
        "server": [{"round": one.round, "seconds": one.seconds} for one in record.learnings],
        "ranks": [
            {"rank": line.rank, "role": line.role, "host": line.host, "device": line.device,
             "memory": line.memory, "sessions": [asdict(session) for session in line.sessions]}
            for line in watch.timelines
        ],
        "config": record.config,
        "environment": record.environment,
    }  # fmt: skip


def _judged(part: Part, record: RunRecord, cuda: bool) -> dict[str, Any]:
    return asdict(part) | {
        "bound": part.bound,
        "words": words(part, cuda=cuda),
        "next": _next(part, record, cuda),
    }


def _next(part: Part, record: RunRecord, cuda: bool) -> list[str]:
    return advice(part, record.config, cuda=cuda, server=part.name in NETWORKS)


def _tell(
    record: RunRecord,
    watch: ProfileWatch,
    ceilings: dict[str, Ceilings],
    parts: list[Part],
    folder: Path,
) -> None:
    console = Output(force_terminal=None if launched().alone else False)
    cuda = watch.device.type == "cuda"
    for made in (
        _phase_table(record),
        *_server_tables(record),
        *_operator_tables(watch.timelines, cuda),
    ):
        console.print(made)
        console.print()
    for name, own in ceilings.items():
        say(console, f"{watch.own.device}, measured: {name} products {own.flops / 1e12:.3g} TFLOP/s, "
                     f"copies {own.bytes_per_second / 1e9:.3g} GB/s")  # fmt: skip
    beside = bare_table(
        "beside these ceilings", "seconds", "warm", "busy", "MFU", "bandwidth, at least"
    )
    for part in parts:
        shares = map(_share, (part.busy, part.compute, part.bandwidth))
        beside.add_row(part.name, f"{part.seconds:.2f}", f"{part.warm:.2f}", *shares)
    console.print(beside)
    say(
        console,
        "warm: at the pace of the last rounds or steps, which MFU and bandwidth are of",
    )
    console.print()
    for part in sorted(parts, key=lambda p: -p.seconds):
        say(
            console,
            words(part, cuda=cuda),
            *(f"   next: {tip}" for tip in _next(part, record, cuda)),
        )
    most = max(
        (used, line.rank, at) for line in watch.timelines for at, used in line.memory
    )
    say(
        console,
        f"most memory: {bytes_text(most[0])} on rank {most[1]}, {most[2]:.1f} s after the start",
    )
    say(console, f"timeline of all ranks: {folder / 'trace.json'} (open it in Perfetto, https://ui.perfetto.dev, or "
                 f"chrome://tracing); all figures: {folder / 'profile.json'}")  # fmt: skip


def _share(value: float) -> str:
    return "" if isnan(value) else f"{value:.1%}"


def _phase_table(record: RunRecord) -> Any:
    """Every rank's seconds over the whole run."""
    ranks = record.phases.shape[1]
    made = bare_table("seconds by phase", *(f"rank {rank}" for rank in range(ranks)))
    sums = record.phases.sum(0)
    for i in sorted(range(len(PHASES)), key=lambda i: -sums[:, i].mean()):
        if sums[:, i].any():
            made.add_row(PHASES[i], *(f"{value:.3f}" for value in sums[:, i]))
    return made


def _server_tables(record: RunRecord) -> list[Any]:
    if not record.learnings:
        return []
    made = bare_table(
        "the server's seconds",
        *(f"after round {one.round + 1}" for one in record.learnings),
    )
    for phase in record.learnings[0].seconds:
        made.add_row(phase, *(f"{one.seconds[phase]:.3f}" for one in record.learnings))
    return [made]


def _short(name: str) -> str:
    name = name.removeprefix("void ").replace("at::native::", "")
    return name if len(name) <= NAME else name[: NAME - 1] + "…"


def _operator_tables(timelines: list[Timeline], cuda: bool) -> list[Any]:
    """Of every kind of session, on the first rank that has one."""
    names = dict.fromkeys(
        session.name for line in timelines for session in line.sessions
    )
    made = []
    for name in names:
        session = _sessions(timelines, name)[0]
        unit = "rounds" if name == ROUNDS else f"steps of the {name}"
        title = f"{'kernels' if cuda else 'operators'} in {session.number} {unit}"
        own, total = (
            bare_table(title, "ms", "share", "calls"),
            sum(one.seconds for one in session.operators),
        )
        for one in session.operators[:ROWS]:
            own.add_row(
                _short(one.name),
                f"{1e3 * one.seconds:.3f}",
                f"{one.seconds / total:.1%}",
                str(one.calls),
            )
        made.append(own)
    return made
