"""Results of several machines beside each other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
from hpcfed.analysis.statistics import Estimate
from hpcfed.benchmark.definition import names, read_benchmark
from hpcfed.benchmark.figures import INTERVAL, ratio, verdict_of
from hpcfed.benchmark.reference import portable
from hpcfed.benchmark.result import BenchmarkResult, read_result
from hpcfed.errors import UserError
from hpcfed.words import DASH, number

WATT_HOURS = Kind("Wh", number)
MOST_NAMED = 4
NOT_MEASURED = "not measured"
FIGURES = (
    "result", "verdict", "seconds [95 %]", "times the first", "told apart", "Wh",
    "Wh of",
)  # fmt: skip
NOTE = (
    f"Intervals: {INTERVAL}. Ratios: pairs of runs with the same seed, trimmed alike. "
    "They do not cover load that changes between calls: compare quiet machines, or "
    "programs by turns. Wh: a run from just before its first round to its end; CPUs with "
    "their memory, and with whatever else ran there."
)
"""What a reader of figures should know."""
Named = tuple[str, BenchmarkResult]


@dataclass(frozen=True)
class SameWork:
    """Results of one benchmark in one size, with names that tell them apart."""

    benchmark: str
    size: str
    results: list[Named]

    @property
    def title(self) -> str:
        """The benchmark and its size."""
        return f"{self.benchmark} {self.size}"

    @property
    def first(self) -> BenchmarkResult:
        """The result by which others are divided."""
        return self.results[0][1]


def read_results(paths: Sequence[Path]) -> list[SameWork]:
    """Read results of one benchmark or of several, each in one size or in several."""
    if len(paths) < 2:
        raise UserError(f"--compare takes two result files or more, got {len(paths)}")
    found: dict[tuple[str, str], list[tuple[Path, BenchmarkResult]]] = {}
    for path in paths:
        result = read_result(path)
        found.setdefault((result.benchmark, result.size), []).append((path, result))
    for group in found.values():
        for path, result in group[1:]:
            _check_same_work(*group[0], path, result)
    name_of = _names([[path for path, _ in group] for group in found.values()])
    groups = []
    for (benchmark, size), group in found.items():
        results = [(name_of[path], result) for path, result in group]
        groups.append(SameWork(benchmark, size, results))
    return groups


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


def _names(groups: Sequence[Sequence[Path]]) -> dict[Path, str]:
    """Return a short name of every file, which tells the results of a group apart.

    It is the file's own name, or that of a folder above it: the one by which there are
    the fewest names in all, since a machine's is the same for every benchmark.
    """
    parts = {path: _parts(path) for group in groups for path in group}
    candidates = []
    for level in range(min(map(len, parts.values()))):
        found = {path: of_path[level] for path, of_path in parts.items()}
        if all(len({found[path] for path in group}) == len(group) for group in groups):
            candidates.append(found)
    # The nearest of several with as few names.
    return min(
        candidates,
        key=lambda found: len(set(found.values())),
        default={path: str(path) for path in parts},
    )


def _parts(path: Path) -> list[str]:
    """Return the names of a file and of the folders above it."""
    return [path.stem, *reversed(path.absolute().parent.parts)]


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


def table(group: SameWork) -> Table:
    """Return a row for each result; the first is what others are divided by."""
    columns = [*FIGURES, "load before", "ranks", "device", "precision", "rules"]
    lines: list[Row] = []
    for (_, one), row in zip(group.results, figures(group), strict=True):
        ranks = str(one.machine.ranks)
        more = [ranks, devices_text(one), precision_text(one), rules_text(one)]
        lines.append([*row, load_text(one), *more])
    caption = f"{group.title}: {group.first.figure.meaning}; less is better."
    return Table(columns, lines, caption)


def figures(group: SameWork) -> list[Row]:
    """Return verdicts, times and energies; the first is what others are divided by."""
    return [_row(name, one, group.first) for name, one in group.results]


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
        one.energy_of or DASH,
    )


def load_text(one: BenchmarkResult) -> str | Cell:
    """Return how busy the host was before."""
    return DASH if one.machine.load is None else HUNDREDTHS(one.machine.load)


def rules_text(result: BenchmarkResult) -> str:
    """Return whether the rules were kept, or which were not."""
    rules = result.rules
    return "kept" if rules.kept else f"broken: {named(rules.broken)}"


def precision_text(result: BenchmarkResult) -> str:
    """Return the arithmetic: processors have no TensorFloat-32."""
    on_cpu = set(result.machine.devices) == {"cpu"}
    return "float32" if on_cpu and result.precision == "tf32" else result.precision


def devices_text(result: BenchmarkResult) -> str:
    """Return what computed, as in `2 × cpu (Neoverse-V2)`."""
    text = kinds_text(result)
    if "cpu" in result.machine.devices:
        text += f" ({processors_text(result)})"
    return text


def kinds_text(result: BenchmarkResult) -> str:
    """Return what computed, as in `2 × cpu`."""
    devices = Counter(result.machine.devices)
    return named([f"{number_of} × {device}" for device, number_of in devices.items()])


def processors_text(result: BenchmarkResult) -> str:
    """Return the processors of all hosts."""
    return named(list(dict.fromkeys(result.machine.cpus)))


def named(names: Sequence[str]) -> str:
    """Join names, of which there may be hundreds."""
    more = len(names) - MOST_NAMED
    rest = [f"and {more} more"] if more > 0 else []
    return ", ".join([*names[:MOST_NAMED], *rest])
