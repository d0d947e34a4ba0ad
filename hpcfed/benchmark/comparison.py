"""Results of several machines beside each other."""

from collections.abc import Sequence
from pathlib import Path

from hpcfed.analysis.findings import (
    HUNDREDTHS,
    IN_SECONDS,
    THOUSANDTHS,
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
COLUMNS = (
    "result", "verdict", "seconds [95 %]", "times the first", "told apart", "Wh",
    "load before", "ranks", "device", "precision", "rules",
)  # fmt: skip
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
    _, first = results[0]
    lines = [_row(name, one, first) for name, one in results]
    caption = (
        f"{first.benchmark} {first.size}: {first.figure.meaning}; less is better. "
        f"Intervals: {INTERVAL}. Ratios: pairs of runs with the same seed, trimmed alike. "
        "They do not cover load that changes between calls: compare quiet machines."
    )
    return Table(COLUMNS, lines, caption)


def _row(name: str, one: BenchmarkResult, first: BenchmarkResult) -> Row:
    # Work that was not done as the rules say has no time.
    counts = one is not first and one.verdict == first.verdict == "PASSED"
    found = relative(first, one)
    wh = DASH if one.energy_wh is None else WATT_HOURS(one.energy_wh)
    rules = "kept" if one.rules.kept else f"broken: {', '.join(one.rules.broken)}"
    return (
        name,
        one.verdict,
        IN_SECONDS(one.figure.estimate),
        THOUSANDTHS(found) if counts else DASH,
        verdict_of(found) if counts else DASH,
        wh,
        DASH if one.machine.load is None else HUNDREDTHS(one.machine.load),
        str(one.machine.ranks),
        devices_text(one),
        one.precision,
        rules,
    )


def devices_text(result: BenchmarkResult) -> str:
    """Return what computed, as in `2 × cpu (Neoverse-V2)`."""
    machine = result.machine
    kinds = []
    for device in dict.fromkeys(machine.devices):
        number_of = machine.devices.count(device)
        known = (
            f" ({', '.join(dict.fromkeys(machine.cpus))})" if device == "cpu" else ""
        )
        kinds.append(f"{number_of} × {device}{known}")
    return ", ".join(kinds)


def compared_page(results: Sequence[Named]) -> str:
    """Return a page of the machines' results, as a computing centre may publish it."""
    _, first = results[0]
    marks = []
    for name, one in results:
        found = one.figure.estimate
        if one.figure.seconds is not None:
            marks.append(Mark(name, found.centre, low=found.low, high=found.high))
    axis = Axis(first.figure.meaning)
    charts = [rows("Machines, with intervals of 95 %", marks, axis)] if marks else []
    passed = sum(one.verdict == "PASSED" for _, one in results)
    figures = Section(
        "figures", "Figure of merit", charts=charts, tables=[table(results)]
    )
    proofs = Section("verification", "Verification", tables=[_proofs(results)])
    software = Section("software", "Machines and software", tables=[_origins(results)])
    content = Content(
        f"Benchmark {first.benchmark}, size {first.size}",
        [
            f"{first.title}.",
            f"{count(len(results), 'result')}, {passed} PASSED. Less time is better. "
            "Results that FAILED do not count.",
        ],
        [],
        [figures, proofs, software],
    )
    return page(content)


def _proofs(results: Sequence[Named]) -> Table:
    lines = []
    for name, one in results:
        for check in one.checks:
            verdict = "passed" if check.passed else "failed"
            lines.append([name, check.name, verdict, check.said])
    return Table(("result", "check", "verdict", "found"), lines, words=True)


def _origins(results: Sequence[Named]) -> Table:
    lines = []
    for name, one in results:
        software = one.software
        commit = (software.commit or DASH)[:10] + (
            ", changed" if software.changed else ""
        )
        torch = software.packages.get("torch", DASH)
        lines.append(
            [
                name,
                ", ".join(one.machine.hosts),
                devices_text(one),
                f"{one.machine.ranks} × {one.machine.threads_per_rank} threads",
                f"{software.version} ({commit})",
                torch,
                software.cuda or DASH,
                one.reference,
                one.finished,
            ]
        )
    columns = (
        "result", "hosts", "devices", "ranks", "hpcfed", "torch", "CUDA", "reference",
        "finished",
    )  # fmt: skip
    return Table(columns, lines, words=True)
