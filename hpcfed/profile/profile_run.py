"""Runs under the profiler, interprets what it recorded, and writes and prints the
results.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hpcfed.analysis.render.console import Output
from hpcfed.errors import unless_full
from hpcfed.experiment.run import run
from hpcfed.options import Settings
from hpcfed.plan.ceilings import Ceilings
from hpcfed.profile import tables
from hpcfed.profile.timeline import lanes, trace
from hpcfed.profile.verdict import Workload, advice, words
from hpcfed.profile.watch import ProfileWatch
from hpcfed.profile.workloads import ProfiledRun, workloads
from hpcfed.results.folder import PROFILE, TRACE
from hpcfed.results.json_values import plain
from hpcfed.results.publish import publish
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import read_run
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.timer import PHASES, observed_by
from hpcfed.server.options import NETWORKS

Advised = list[tuple[Workload, list[str]]]
"""The run's workloads, each with options that may help."""


def profile_run(settings: Settings, *, warmup: int, active: int, nvtx: bool) -> None:
    """Run; then, on the root, write trace.json and profile.json beside run.h5 and print
    their contents.
    """
    watch = ProfileWatch(
        warmup=warmup, active=active, rounds=settings.config.rounds, nvtx=nvtx
    )
    with observed_by(watch):
        folder = run(settings)
    # The other ranks have sent their timelines, and are done.
    if folder is None:
        return
    record = read_run(folder)
    # Measured after the run, when the device is idle.
    ceilings = {"float32": Ceilings.of(watch.device)}
    if record.config.get("server_precision") == "bf16":
        ceilings["bfloat16"] = Ceilings.of(watch.device, torch.bfloat16)
    cuda = watch.device.type == "cuda"
    measured = ProfiledRun(
        _recorded(settings, record), record, watch.timelines, ceilings, cuda
    )
    # What to change next depends on the run's options.
    advised = []
    for workload in workloads(measured):
        server = workload.name in NETWORKS
        tips = advice(workload, record.config, cuda=cuda, server=server)
        advised.append((workload, tips))
    _write(folder, watch, measured, advised)
    with unless_full(f"all figures are in {folder / PROFILE}"):
        _print(folder, watch, measured, advised)


def _recorded(settings: Settings, record: RunRecord) -> Settings:
    """Return the settings with the options that the run has recorded.

    Some are chosen at the start from the devices of the server's ranks, which may
    differ from the root's.
    """
    kind = type(settings.options)
    values = {name: record.config[name] for name in kind.model_fields}
    return replace(settings, options=kind(**values))


def _write(
    folder: Path, watch: ProfileWatch, measured: ProfiledRun, advised: Advised
) -> None:
    timeline = json.dumps(trace(watch.timelines))
    publish(timeline.encode(), folder / TRACE)
    content = plain(_content(watch, measured, advised))
    publish(json.dumps(content, indent=1).encode(), folder / PROFILE)


def _content(
    watch: ProfileWatch, measured: ProfiledRun, advised: Advised
) -> dict[str, Any]:
    """Return the contents of profile.json."""
    record = measured.record
    # Keep the keys of earlier versions: other programs read this file, too.
    parts = []
    for workload, tips in advised:
        judged = {
            "bound": workload.bound,
            "words": words(workload, cuda=measured.cuda),
            "next": tips,
        }
        parts.append(asdict(workload) | judged)
    phases = {}
    for i, name in enumerate(PHASES):
        phases[name] = record.phases[:, :, i].sum(0).tolist()
    server = []
    for learning in record.learnings:
        server.append({"round": learning.round, "seconds": learning.seconds})
    ranks = []
    for line, of_rank in zip(watch.timelines, lanes(watch.timelines), strict=True):
        facts = {
            "rank": line.rank,
            "role": line.role,
            "host": line.host,
            "device": line.device,
            "memory": line.memory,
            "sessions": [session.model_dump() for session in line.sessions],
            "lanes": of_rank,
        }
        ranks.append(facts)
    ceilings = measured.ceilings
    return {
        "device": watch.timeline.device,
        "ceilings": {name: asdict(ceiling) for name, ceiling in ceilings.items()},
        "parts": parts,
        "phases": phases,
        "server": server,
        "ranks": ranks,
        "config": record.config,
        "environment": record.environment,
    }


def _print(
    folder: Path, watch: ProfileWatch, measured: ProfiledRun, advised: Advised
) -> None:
    # Output of ranks goes through their launcher, so it never reaches a terminal
    # directly.
    console = Output(force_terminal=None if launched().alone else False)
    cuda = measured.cuda
    tables.print_tables(console, measured.record, watch.timelines, cuda=cuda)
    tables.print_verdicts(
        console, watch.timeline.device, measured.ceilings, advised, cuda=cuda
    )
    tables.print_memory(console, watch.timelines)
    tables.print_files(console, folder)
