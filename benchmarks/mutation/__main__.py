"""Change modules that decide numbers or protect data in small ways, one at a time, and
count how many changes the tests notice.

A change (a mutant) swaps a comparison, an operator, `and` and `or`, `is` and `is not`,
min and max or two returned values; adds one to a number or takes one from it; negates a
condition; moves a bound of a slice; or removes a call, an assignment or a `raise`.
Docstrings, annotations, asserts and messages stay. Mutants are drawn by the seed,
equally many of each module.

Once, every test runs with probes in these modules, and a map of which tests reach which
statements is kept (--map); tests that have changed run again, and when a module has
changed, all do. Then only tests that reach a mutant's statement run, quick ones first,
until one fails: at most --seconds of them, as the map has it. With --again and more
seconds, what was not noticed is tried by more of them. Each mutant is tried in a fork of
a process that has imported all. Left out are tests that start hpcfed or mpirun: what
they start is not changed.

A mutant on which tests go on forever counts as noticed. One that no test reaches counts
as not noticed. Some mutants are no other program: that was judged by hand, with the reason,
in benchmarks/mutation/equivalent.toml. They do not count. Entries there that fit no
mutant any more are told.

examples:
  python -m benchmarks.mutation
  python -m benchmarks.mutation --number 400 --seed 1 --json score.json
  python -m benchmarks.mutation --number 400 --seed 1 --again score.json --seconds 100
  python -m benchmarks.mutation --number 40 --modules hpcfed/results/claim.py hpcfed/results/publish.py
  python -m benchmarks.mutation --number 400 --seed 1 --list
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import NoReturn

# Threads would not be there in forks, and all cores need not work on a row.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.arguments import parser_of
from benchmarks.mutation import trial
from benchmarks.mutation.judged import Judged
from benchmarks.mutation.mutants import Mutant, drawn
from benchmarks.mutation.reach import Map
from benchmarks.mutation.tracing import Tracing, plant_probes
from benchmarks.mutation.trial import Outcome, affordable, by_module

ROOT = Path(__file__).parents[2]
MODULES = (
    "hpcfed/federation/aggregation.py", "hpcfed/federation/cohort.py",
    "hpcfed/federation/participants.py", "hpcfed/federation/channel/clipping.py",
    "hpcfed/federation/channel/compressors.py", "hpcfed/federation/channel/noise.py",
    "hpcfed/federation/channel/clock.py", "hpcfed/methods/_timetable.py",
    "hpcfed/methods/_clusters.py", "hpcfed/methods/_server_optimiser.py", "hpcfed/clients/job.py",
    "hpcfed/data/schemes.py", "hpcfed/runtime/randomness.py", "hpcfed/server/diffusion.py",
    "hpcfed/experiment/checkpointing.py", "hpcfed/experiment/resume.py",
    "hpcfed/results/checkpoints.py", "hpcfed/results/claim.py", "hpcfed/results/publish.py",
    "hpcfed/results/snapshots.py",
)  # fmt: skip
"""Modules that decide numbers, and modules that protect data."""
IMPORTED = (
    "numpy", "torch", "torch._dynamo", "h5py", "scipy.stats", "mpi4py", "hypothesis",
)  # fmt: skip
"""What takes long to import, and is nothing of ours."""
MAP = Path.home() / ".cache" / "hpcfed-mutation.json"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--number", type=int, default=400, help="of mutants (400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--modules", nargs="+", metavar="FILE", default=MODULES, help="others than ours"
    )
    parser.add_argument(
        "--seconds", type=float, default=15.0, metavar="S",
        help="CPU seconds of tests that a mutant may take (15)",
    )  # fmt: skip
    parser.add_argument(
        "--map",
        type=Path,
        default=MAP,
        metavar="FILE",
        help=f"where it is kept ({MAP})",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        metavar="FILE",
        help="files of tests (all: tests/test_*.py)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all outcomes")
    parser.add_argument(
        "--again", type=Path, metavar="FILE",
        help="outcomes that --json has kept: try only those again that were not noticed",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print mutants, try none")
    asked = parser.parse_args()
    if asked.number < 1:
        parser.error("--number: at least 1")
    files = asked.tests or [
        f"tests/{path.name}" for path in ROOT.glob("tests/test_*.py")
    ]
    for name in (*asked.modules, *files):
        if not (ROOT / name).is_file():
            parser.error(f"there is no {name} in {ROOT}")
    texts = {module: (ROOT / module).read_bytes() for module in asked.modules}
    mutants, counts = drawn(texts, asked.number, asked.seed)
    known = _noticed(asked.again, mutants) if asked.again else []
    if asked.list:
        for mutant in mutants:
            print(_shown(mutant))
        return
    judged = Judged.read()
    for remark in judged.stale({m: (ROOT / m).read_bytes() for m in judged.modules}):
        print(remark, file=sys.stderr)
    for name in IMPORTED:
        import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        found = _mapped(asked.map, asked.modules, sorted(files), Path(folder))
        begin = sum(os.times()[:4])
        left = [mutant for mutant in mutants if mutant not in {o.mutant for o in known}]
        outcomes = known + _tried(
            left, found, sorted(files), asked.seconds, Path(folder)
        )
        taken = sum(os.times()[:4]) - begin
    outcomes.sort(key=lambda outcome: mutants.index(outcome.mutant))
    _report(outcomes, counts, judged, asked.seed, taken)
    if asked.json:
        asked.json.write_text(json.dumps([_row(each) for each in outcomes], indent=1))


def _noticed(file: Path, mutants: Sequence[Mutant]) -> list[Outcome]:
    """Return the outcomes of mutants that were noticed earlier."""
    by_key = {(*mutant.key, mutant.line): mutant for mutant in mutants}
    found = []
    for row in json.loads(file.read_text()):
        key = row["module"], row["in"], row["old"], row["new"], row["line"]
        if row["noticed"] and key in by_key:
            rest = row["by"], row["tests"], row["seconds"]
            found.append(Outcome(by_key[key], True, *rest))
    return found


def _mapped(
    file: Path, modules: Sequence[str], files: Sequence[str], folder: Path
) -> Map:
    """Return the map, of which only what is missing is made."""
    found = Map.read(file)
    new = found.forget_what_changed(ROOT, modules, files)
    if new:

        def trace() -> None:
            def keep(name: str) -> None:
                found.keep(ROOT, name)
                found.write(file)

            reached: set[int] = set()
            # Those of earlier calls, too: the map is one for all.
            known = [name for name in found.modules if (ROOT / name).exists()]
            every = list(dict.fromkeys([*known, *modules]))
            plant_probes(ROOT, every, reached)
            scratch = folder / "tests"
            tracing = Tracing(every, reached, scratch, found, new, keep)
            trial.pytest_of(ROOT, list(new), scratch, tracing)
            for name in new:  # those whose tests start programs, too
                keep(name)

        _apart(trace)
        found = Map.read(file)
    tests = [test for each in found.tests.values() for test in each]
    reaching = [test for test in tests if test.lines]
    print(
        f"{len(tests)} tests ran, {len(reaching)} of them reach these modules; "
        f"{len(found.failed)} failed or took too long by themselves, and are left out",
        file=sys.stderr,
    )
    for name in found.failed:
        print(f"  {name}", file=sys.stderr)
    return found


def _apart(work: Callable[[], None]) -> None:
    """Do work in a fork, so that this process does not import what it imports."""
    pid = os.fork()
    if pid == 0:
        _end_with(work)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit(1)


def _end_with(work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _tried(
    mutants: Sequence[Mutant],
    found: Map,
    files: Sequence[str],
    seconds: float,
    folder: Path,
) -> list[Outcome]:
    """Try all mutants, and tell how far one is."""
    file, scratch = folder / "outcomes", folder / "tests"
    file.touch()
    numbers = {mutant: number for number, mutant in enumerate(mutants)}
    begin = time.monotonic()

    def tell(outcome: Outcome) -> None:
        with file.open("a") as lines:
            row = asdict(outcome) | {"mutant": numbers[outcome.mutant]}
            print(json.dumps(row), file=lines)
        done = file.read_text().count("\n")
        if not outcome.noticed:
            print(_shown(outcome.mutant, outcome.by), file=sys.stderr, flush=True)
        if done % 10 == 0:
            now = time.monotonic() - begin
            print(
                f"{now:5.0f} s: {done} of {len(mutants)}", file=sys.stderr, flush=True
            )

    tests = {}
    at_once: list[Mutant] = []
    at_import: list[Mutant] = []
    for mutant in mutants:
        reaching = found.reaching(mutant.module, mutant.point.lines, files)
        imported = found.at_import.get(mutant.module, ())
        is_imported = bool(set(mutant.point.lines) & set(imported))
        if mutant.point.outer is None or (not reaching and is_imported):
            reaching = reaching or found.reaching(mutant.module, None, files)
            reaching += found.beside(reaching)
            at_import.append(mutant)
        elif reaching:
            at_once.append(mutant)
        tests[mutant] = affordable(reaching, seconds)
        if not reaching:
            tell(Outcome(mutant, False, "no test reaches it", 0, 0.0))
    left = folder / "left"

    def try_in_place() -> None:
        trials = trial.Trials(ROOT, at_once, tests, scratch, tell)
        used = [test for mutant in at_once for test in tests[mutant]]
        trial.pytest_of(ROOT, used, scratch, trials)
        left.write_text(json.dumps([numbers[mutant] for mutant in trials.left]))

    if at_once:
        _apart(try_in_place)
        at_import += [mutants[number] for number in json.loads(left.read_text())]
    for mutant in at_import:
        if tests[mutant]:
            tell(trial.try_imported(ROOT, mutant, tests[mutant], scratch))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows.sort(key=lambda row: row["mutant"])
    return [Outcome(**row | {"mutant": mutants[row["mutant"]]}) for row in rows]


def _shown(mutant: Mutant, remark: str = "") -> str:
    where = f"{mutant.module}:{mutant.line} {mutant.point.function}"
    text = f"{where}: {remark}" if remark else where
    return f"{text}\n  - {mutant.old}\n  + {mutant.new}"


def _row(outcome: Outcome) -> dict[str, object]:
    mutant = outcome.mutant
    return {
        "module": mutant.module,
        "line": mutant.line,
        "in": mutant.point.function,
        "old": mutant.old,
        "new": mutant.new,
        "noticed": outcome.noticed,
        "by": outcome.by,
        "tests": outcome.tests,
        "seconds": round(outcome.seconds, 2),
    }


def _report(
    outcomes: Sequence[Outcome],
    counts: dict[str, int],
    judged: Judged,
    seed: int,
    seconds: float,
) -> None:
    """Print survivors, and the score by module."""
    width = max(len(module) for module in counts)
    lines = []
    total = [0, 0, 0, 0, 0]
    for module, own in by_module(outcomes):
        alike = [
            each for each in own if not each.noticed and judged.reason(each.mutant)
        ]
        lost = [each for each in own if not each.noticed and each not in alike]
        noticed = len(own) - len(alike) - len(lost)
        forever = sum(each.noticed and each.by.startswith("no end") for each in own)
        row = [len(own), noticed, forever, len(alike), len(lost)]
        total = [a + b for a, b in zip(total, row, strict=True)]
        lines.append(_line(module, [counts[module], *row], width))
        for each in alike:
            print(
                _shown(each.mutant, f"no other program: {judged.reason(each.mutant)}")
            )
        for each in lost:
            print(_shown(each.mutant, each.by))
    print(
        f"\n{'module':{width}}  could be  tried  noticed  no end  equal  not noticed  score"
    )
    print("\n".join(lines))
    print(_line("all", [sum(counts.values()), *total], width))
    print(
        f"seed {seed}; without judging which are equal: {total[1] / total[0]:.1%}; "
        f"{seconds:.0f} CPU seconds, {seconds / total[0]:.1f} a mutant"
    )


def _line(name: str, row: Sequence[int], width: int) -> str:
    could, tried, noticed, forever, alike, lost = row
    score = f"{noticed / (noticed + lost):6.1%}" if noticed + lost else "     -"
    return (
        f"{name:{width}}  {could:8}  {tried:5}  {noticed:7}  {forever:6}  {alike:5}  "
        f"{lost:11}  {score}"
    )


if __name__ == "__main__":
    main()
