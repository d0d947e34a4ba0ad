"""A benchmark from its first run to its verdict, or the making of its reference."""

from pathlib import Path

from hpcfed.analysis.render.console import Output
from hpcfed.analysis.render.console import say as print_lines
from hpcfed.benchmark import mllog, turns
from hpcfed.benchmark.definition import Benchmark
from hpcfed.benchmark.reference import file_of, read_reference, text_of
from hpcfed.benchmark.result import FILE, BenchmarkResult, result_of
from hpcfed.benchmark.running import Finished, make_reference, make_runs, on_root
from hpcfed.errors import say, unless_full
from hpcfed.results.publish import publish
from hpcfed.runtime import mpi
from hpcfed.runtime.launcher import launched
from hpcfed.words import interval, number

REFERENCE = "reference.json"
SPAN = "from just before its first round to its end"
DRIFT = "the interval does not cover load that changes between calls"


def run_benchmark(
    benchmark: Benchmark,
    runs: int,
    out: Path,
    *,
    against: Path | None,
    own: bool,
    write_mllog: bool,
) -> bool:
    """Run, verify, write the result, and print it; tell every rank whether it passed.

    `against`: another reference than the shipped one. `own`: the user has named a file.
    """
    reference = read_reference(benchmark, against)
    # Before the runs: there may be too few seeds.
    reference.means(runs)
    finished = make_runs(
        benchmark, runs, out, say, stale=[out / FILE, out / mllog.FILE]
    )

    def judge() -> bool:
        assert finished is not None, "the root has the records"
        result = result_of(benchmark, finished, reference, own=own)
        _write(result, finished, out, write_mllog=write_mllog)
        return result.verdict == "PASSED"

    return bool(mpi.from_root(launched(), on_root(judge)))


def compare_programs(benchmark: Benchmark, other: Path, pairs: int, out: Path) -> bool:
    """Let this program and another take turns, write what came of it, and print it; tell
    whether this one is neither slower nor wrong.
    """
    result = turns.take_turns(benchmark, other, pairs, out, say)
    path = out / turns.FILE
    publish(f"{result.model_dump_json(indent=1)}\n".encode(), path)
    with unless_full(f"the result is in {path}"):
        print_lines(Output(), f"result: {path}", *turns.lines(result, other))
    return result.verdict not in ("SLOWER", "FAILED")


def _write(
    result: BenchmarkResult, finished: Finished, out: Path, *, write_mllog: bool
) -> None:
    """Write a result's files, and print it."""
    publish(f"{result.model_dump_json(indent=1)}\n".encode(), out / FILE)
    if write_mllog:
        lines = mllog.mllog_lines(result, finished.counted)
        publish("".join(f"{line}\n" for line in lines).encode(), out / mllog.FILE)
    with unless_full(f"the result is in {out / FILE}"):
        print_lines(Output(), f"result: {out / FILE}", *_lines(result))


def _lines(result: BenchmarkResult) -> list[str]:
    """Return what a terminal shows; the last line is the verdict."""
    lines = []
    for check in result.checks:
        lines.append(f"{check.name}: {'ok' if check.passed else 'WRONG'}: {check.said}")
    lines += [f"rule broken: {rule}" for rule in result.rules.broken]
    if result.energy_wh is None:
        lines.append("energy: no counter that could be read in every run")
    else:
        energy = f"{number(result.energy_wh)} Wh per run, {result.energy_of}"
        lines.append(f"energy: {energy}, {SPAN}")
    if result.machine.busy:
        lines.append(f"the host was busy (load {result.machine.load:.1f}): {DRIFT}")
    figure = result.figure
    told = interval(figure.estimate, unit=" s")
    each = figure.dropped // 2
    many = f"{each} " if each > 1 else ""
    dropped = f", {many}fastest and {many}slowest dropped" if each else ""
    lines.append(
        f"{result.verdict}: {told} ({figure.meaning}; {len(result.runs)} runs{dropped}; "
        "interval of 95 %)"
    )
    return lines


def write_reference(benchmark: Benchmark, seeds: int, out: Path) -> None:
    """Make a reference, write it, and say where it belongs."""
    found = make_reference(benchmark, seeds, out)
    if found is None:
        return
    path = out / REFERENCE
    publish(text_of(found).encode(), path)
    means = found.means(len(found.curves))
    centre = sum(means) / len(means)
    say(
        f"{found.quality}: {centre:.5f} over rounds and seeds, standard deviation over "
        f"seeds {found.spread():.5f}, margin {benchmark.definition.margin:g}"
    )
    say(
        f"wrote {path}; to ship it, copy it to hpcfed/benchmark/{file_of(benchmark).name}"
    )
