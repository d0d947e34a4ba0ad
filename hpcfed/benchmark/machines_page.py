"""A page of results, as a computing centre may publish it: every benchmark and machine
with its figure of merit, energy, verdict, hardware, software and date.
"""

from collections.abc import Iterator, Sequence

from hpcfed.analysis.findings import IN_SECONDS, Cell, Table
from hpcfed.analysis.render.charts import Axis, Drawing, Mark, rows
from hpcfed.analysis.render.page import Content, page
from hpcfed.analysis.render.sections.section import Section
from hpcfed.benchmark.comparison import (
    FIGURES,
    NOTE,
    SameWork,
    figures,
    kinds_text,
    load_text,
    named,
    precision_text,
    processors_text,
    rules_text,
)
from hpcfed.benchmark.result import BenchmarkResult
from hpcfed.errors import count
from hpcfed.words import DASH

MINUTE = len("2026-11-18T20:01")
MACHINES = (
    "result", "hosts", "devices", "processors", "ranks × threads", "cores of a rank",
    "backend", "load before", "finished, UTC",
)  # fmt: skip
SOFTWARE = (
    "result", "hpcfed", "torch", "CUDA", "precision", "changed options", "rules",
)  # fmt: skip
Works = Sequence[SameWork]


def machines_page(groups: Works) -> str:
    """Return the page."""
    every = [one for group in groups for _, one in group.results]
    passed = sum(one.verdict == "PASSED" for one in every)
    lead = (
        f"{count(len(groups), 'benchmark')}, {count(len(every), 'result')}, {passed} "
        "PASSED. Less time is better. Results that FAILED do not count."
    )
    title = f"Benchmark {groups[0].title}" if len(groups) == 1 else "Benchmarks"
    merit = Section(
        "figures",
        "Figures of merit",
        text=[NOTE],
        charts=[chart for group in groups for chart in _charts(group)],
        tables=[_figures(groups)],
    )
    if len(groups) > 1:
        merit.tables.insert(0, _overview(groups))
    machines = Section("machines", "Machines", tables=[_machines(groups)])
    software = Section("software", "Software and rules", tables=[_software(groups)])
    proofs = Section("verification", "Verification", tables=[_proofs(groups)])
    return page(Content(title, [lead], [], [merit, machines, software, proofs]))


def _every(groups: Works) -> Iterator[tuple[str, BenchmarkResult]]:
    """Yield all results with the names that they have on the page."""
    for group in groups:
        for name, one in group.results:
            yield _which(groups, group, name), one


def _which(groups: Works, group: SameWork, name: str) -> str:
    return name if len(groups) == 1 else f"{group.title}, {name}"


def _charts(group: SameWork) -> Iterator[Drawing]:
    marks = []
    for name, one in group.results:
        found = one.figure.estimate
        if one.verdict == "PASSED":
            marks.append(Mark(name, found.centre, low=found.low, high=found.high))
    if marks:
        axis = Axis(group.first.figure.meaning, zero=True)
        yield rows(f"{group.title}. {group.first.title}", marks, axis)


def _overview(groups: Works) -> Table:
    """Return a row for each benchmark, and a column for each machine."""
    every = [name for group in groups for name, _ in group.results]
    machines = list(dict.fromkeys(every))
    lines = []
    for group in groups:
        found = dict(group.results)
        cells = [_cell(found.get(machine)) for machine in machines]
        lines.append([f"{group.title}: {group.first.figure.meaning}", *cells])
    caption = "Seconds, with intervals of 95 %."
    return Table(("benchmark", *machines), lines, caption)


def _cell(one: BenchmarkResult | None) -> str | Cell:
    if one is None:
        return DASH
    return IN_SECONDS(one.figure.estimate) if one.verdict == "PASSED" else one.verdict


def _figures(groups: Works) -> Table:
    lines = []
    for group in groups:
        for (name, _), row in zip(group.results, figures(group), strict=True):
            lines.append([_which(groups, group, name), *row[1:]])
    return Table(FIGURES, lines)


def _machines(groups: Works) -> Table:
    lines = []
    for name, one in _every(groups):
        machine = one.machine
        used = [
            named(machine.hosts),
            kinds_text(one),
            processors_text(one),
            f"{machine.ranks} × {machine.threads_per_rank}",
            str(machine.cores_per_rank),
            machine.backend,
            str(load_text(one)),
            one.finished[:MINUTE].replace("T", " "),
        ]
        lines.append([name, *used])
    return Table(MACHINES, lines, words=True)


def _software(groups: Works) -> Table:
    lines = []
    for name, one in _every(groups):
        software = one.software
        commit = (software.commit or "no commit")[:10]
        changed = ", changed" if software.changed else ""
        options = [f"{option} {value}" for option, value in one.rules.changed.items()]
        used = [
            f"{software.version} ({commit}{changed})",
            software.packages.get("torch", DASH),
            software.cuda or DASH,
            precision_text(one),
            named(options) or DASH,
            rules_text(one),
        ]
        lines.append([name, *used])
    return Table(SOFTWARE, lines, words=True)


def _proofs(groups: Works) -> Table:
    lines = []
    for name, one in _every(groups):
        for check in one.checks:
            verdict = "passed" if check.passed else "FAILED"
            lines.append([name, check.name, verdict, check.said])
        lines.append([name, "reference", DASH, one.reference])
    return Table(("result", "check", "verdict", "found"), lines, words=True)
