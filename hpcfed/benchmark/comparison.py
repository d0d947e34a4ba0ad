"""Results of several machines beside each other."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hpcfed.analysis.findings import (
    HUNDREDTHS,
    IN_SECONDS,
    THOUSANDTHS,
    Cell,
    Kind,
    Row,
    Table,
)
from hpcfed.analysis.render.charts import Axis, Mark, rows
from hpcfed.analysis.render.page import Content, page
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.statistics import Estimate
from hpcfed.benchmark.definition import names, read_benchmark
from hpcfed.benchmark.figures import INTERVAL, ratio
from hpcfed.benchmark.reference import portable
from hpcfed.benchmark.result import BenchmarkResult, read_result
from hpcfed.errors import UserError, count
from hpcfed.words import DASH, number

WATT_HOURS = Kind("Wh", number)
MOST_NAMED = 4
MINUTE = len("2026-11-18T20:01")
NOT_MEASURED = "not measured"
FIGURES = ("result", "verdict", "seconds [95 %]", "times the first", "told apart", "Wh")
MACHINES = ("hosts", "devices", "ranks × threads", "backend", "load before", "finished")
SOFTWARE = ("hpcfed", "torch", "CUDA", "precision", "changed options", "rules")
NOT_APART = "within noise"
Named = tuple[str, BenchmarkResult]


def read_results(paths: Sequence[Path]) -> list[Named]:
    """Read results of one benchmark in one size, with names that tell them apart."""
    if len(paths) < 2:
        raise UserError(f"--compare takes two result files or more, got {len(paths)}")
    found = [read_result(path) for path in paths]
    first = found[0]
    for path, result in zip(paths, found, strict=True):
        for what in ("benchmark", "size"):
            ours, theirs = getattr(first, what), getattr(result, what)
            if ours != theirs:
                raise UserError(
                    f"{path} has {what} {theirs}, and {paths[0]} has {ours}; compare "
                    "results of the same work"
                )
        _check_same_work(paths[0], first, path, result)
    return list(zip(_names(paths), found, strict=True))


def _check_same_work(
    path: Path, first: BenchmarkResult, other_path: Path, other: BenchmarkResult
) -> None:
    """Refuse results of versions in which the benchmark does other work."""
    if first.benchmark not in names():
        return
    for name in read_benchmark(first.benchmark, first.size, {}).work():
        ours, theirs = (portable(one.settings.get(name)) for one in (first, other))
        if ours != theirs:
            raise UserError(
                f"{other_path} has {name} {theirs}, and {path} has {ours}; compare "
                "results of the same work"
            )


def _names(paths: Sequence[Path]) -> list[str]:
    """Name results by their files, or by their folders where all files are alike."""
    stems = [path.stem for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    return [str(path.parent) for path in paths]


def relative(first: BenchmarkResult, other: BenchmarkResult) -> Estimate:
    """Return how many times as long the other takes, by pairs of runs with one seed."""
    theirs = {run.seed: run.seconds for run in other.runs}
    before, after = [], []
    for run in first.runs:
        seconds = theirs.get(run.seed)
        if run.seconds is not None and seconds is not None:
            before.append(run.seconds)
            after.append(seconds)
    return ratio(before, after) if before else Estimate(float("nan"))


def verdict_of(found: Estimate) -> str:
    """Say whether a ratio is told apart from noise."""
    if not found.bounded or found.low <= 1 <= found.high:
        return NOT_APART
    return "slower" if found.low > 1 else "faster"


def table(results: Sequence[Named]) -> Table:
    """Return a row for each result; the first is what others are divided by."""
    found = figures(results)
    columns = [*found.columns, "load before", "ranks", "device", "precision", "rules"]
    lines: list[Row] = []
    for (_, one), row in zip(results, found.rows, strict=True):
        ranks = str(one.machine.ranks)
        more = [_load(one), ranks, devices_text(one), one.precision, rules_text(one)]
        lines.append([*row, *more])
    return Table(columns, lines, found.caption)


def figures(results: Sequence[Named]) -> Table:
    """Return verdicts, times and energies; the first is what others are divided by."""
    _, first = results[0]
    lines = [_row(name, one, first) for name, one in results]
    caption = (
        f"{first.benchmark} {first.size}: {first.figure.meaning}; less is better. "
        f"Intervals: {INTERVAL}. Ratios: pairs of runs with the same seed, trimmed alike. "
        "They do not cover load that changes between calls: compare quiet machines, or "
        "programs by turns."
    )
    return Table(FIGURES, lines, caption)


def _row(name: str, one: BenchmarkResult, first: BenchmarkResult) -> Row:
    # Work that was not done as the rules say has no time.
    counts = one is not first and one.verdict == first.verdict == "PASSED"
    found = relative(first, one)
    energy = one.energy_wh
    return (
        name,
        one.verdict,
        IN_SECONDS(one.figure.estimate),
        THOUSANDTHS(found) if counts else DASH,
        verdict_of(found) if counts else DASH,
        NOT_MEASURED if energy is None else WATT_HOURS(energy),
    )


def _load(one: BenchmarkResult) -> str | Cell:
    return DASH if one.machine.load is None else HUNDREDTHS(one.machine.load)


def rules_text(result: BenchmarkResult) -> str:
    """Return whether the rules were kept, or which were not."""
    rules = result.rules
    return "kept" if rules.kept else f"broken: {_named(rules.broken)}"


def devices_text(result: BenchmarkResult) -> str:
    """Return what computed, as in `2 × cpu (Neoverse-V2)`."""
    machine = result.machine
    cpus = f" ({_named(list(dict.fromkeys(machine.cpus)))})"
    kinds = []
    for device, number_of in Counter(machine.devices).items():
        kinds.append(f"{number_of} × {device}{cpus if device == 'cpu' else ''}")
    return _named(kinds)


def _named(names: Sequence[str]) -> str:
    """Join names, of which there may be hundreds."""
    more = len(names) - MOST_NAMED
    rest = [f"and {more} more"] if more > 0 else []
    return ", ".join([*names[:MOST_NAMED], *rest])


def compared_page(results: Sequence[Named]) -> str:
    """Return a page of the machines' results, as a computing centre may publish it."""
    _, first = results[0]
    marks = []
    for name, one in results:
        found = one.figure.estimate
        if one.verdict == "PASSED":
            marks.append(Mark(name, found.centre, low=found.low, high=found.high))
    axis = Axis(first.figure.meaning, zero=True)
    charts = [rows("Results that PASSED, with intervals of 95 %", marks, axis)]
    merit = Section(
        "figures",
        "Figure of merit",
        charts=charts if marks else [],
        tables=[figures(results)],
    )
    proofs = Section("verification", "Verification", tables=[_proofs(results)])
    machines = Section("machines", "Machines", tables=[_machines(results)])
    software = Section("software", "Software and rules", tables=[_software(results)])
    content = Content(
        f"Benchmark {first.benchmark}, size {first.size}",
        [
            f"{first.title}.",
            f"{count(len(results), 'result')}, {len(marks)} PASSED. Less time is better. "
            "Results that FAILED do not count.",
        ],
        [],
        [merit, machines, software, proofs],
    )
    return page(content)


def _proofs(results: Sequence[Named]) -> Table:
    lines = []
    for name, one in results:
        for check in one.checks:
            verdict = "passed" if check.passed else "FAILED"
            lines.append([name, check.name, verdict, check.said])
        lines.append([name, "reference", DASH, one.reference])
    return Table(("result", "check", "verdict", "found"), lines, words=True)


def _machines(results: Sequence[Named]) -> Table:
    lines = []
    for name, one in results:
        machine = one.machine
        used = [
            _named(machine.hosts),
            devices_text(one),
            f"{machine.ranks} × {machine.threads_per_rank}",
            machine.backend,
            str(_load(one)),
            one.finished[:MINUTE].replace("T", " "),
        ]
        lines.append([name, *used])
    return Table(("result", *MACHINES), lines, words=True)


def _software(results: Sequence[Named]) -> Table:
    lines = []
    for name, one in results:
        software = one.software
        commit = (software.commit or "no commit")[:10]
        changed = ", changed" if software.changed else ""
        options = [f"{name} {value}" for name, value in one.rules.changed.items()]
        used = [
            f"{software.version} ({commit}{changed})",
            software.packages.get("torch", DASH),
            software.cuda or DASH,
            one.precision,
            _named(options) or DASH,
            rules_text(one),
        ]
        lines.append([name, *used])
    return Table(("result", *SOFTWARE), lines, words=True)
