"""Draw combinations of options, run each as a user could type it, and judge what comes
of it by properties.

Types, limits and choices of all options come from their declarations, so a new option
takes part by itself. Data and networks are small; a combination takes about a second.
Every run must complete with finite numbers, be refused in one line with exit code 2, or
say that its numbers diverged. Beyond that most combinations are run twice and compared:
on two ranks, as one of several seeds, stopped and resumed, with everything switched off
against FedAvg, and with other names of clients. A combination that breaks a promise is
shrunk to the shortest command line that still breaks it.

What became of each goes to the file of --out as well. Called again with the same file,
the swarm goes on where it was interrupted.

examples:
  python -m benchmarks.swarm --number 2000 --seed 0 --processes 2 --out swarm.jsonl
  python -m benchmarks.swarm --number 200 --only resume    one kind of comparison
  python -m benchmarks.swarm --case 17                     the 17th of seed 0 again
"""

import argparse
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from benchmarks.arguments import parser_of
from benchmarks.harness import waiting
from benchmarks.harness.waiting import Forking
from benchmarks.swarm import table
from benchmarks.swarm.drawing import RELATIONS, Case, draw
from benchmarks.swarm.judging import GOOD, Judge, Verdict
from benchmarks.swarm.shrinking import shrink

LOADED = ("torch._dynamo", "sklearn.datasets", "benchmarks.swarm.worker")
"""What processes have imported before they are forked."""
MEMORY = Path("/dev/shm")
"""Where runs write if it is there: they wait for no disk."""


class Swarm:
    """Combinations by number, and what became of each."""

    def __init__(self, asked: argparse.Namespace, numbers: Sequence[int]) -> None:
        self._asked = asked
        self.found = [] if asked.out is None else table.read(asked.out, asked.seed)
        known = {row.number for row in self.found}
        self._numbers = iter([n for n in numbers if n not in known])
        self._all = len(numbers)
        self._lock = threading.Lock()
        self._begin = time.monotonic()

    def share(self, folder: Path, server: Forking) -> None:
        """Judge combinations until there are no more."""
        judge = Judge(folder, server)
        try:
            while (number := self._next()) is not None:
                case = drawn(self._asked.seed, number)
                if self._asked.only in ("", case.relation):
                    self._note(number, case, judge.judge(case), judge)
        finally:
            judge.end()

    def end(self) -> None:
        """Begin no more combinations."""
        with self._lock:
            self._numbers = iter(())

    def _next(self) -> int | None:
        with self._lock:
            return next(self._numbers, None)

    def _note(self, number: int, case: Case, verdict: Verdict, judge: Judge) -> None:
        row = table.Row.of(self._asked.seed, number, case, verdict)
        with self._lock:
            self.found.append(row)
            if self._asked.out is not None:
                row.append_to(self._asked.out)
        done = len(self.found)
        if done % 50 == 0 or done == self._all:
            seconds = time.monotonic() - self._begin
            broken = sum(row.outcome not in GOOD for row in self.found)
            print(
                f"{done}/{self._all} combinations, {seconds:.0f} s, {broken} not as "
                "promised",
                file=sys.stderr,
                flush=True,
            )
        if not verdict.good:
            _tell(f"number {number}", verdict)
            if not self._asked.whole:
                case = shrink(case, verdict, judge.judge)
                _tell(f"number {number}, shrunk", judge.judge(case))


def _tell(what: str, verdict: Verdict) -> None:
    lines = [f"{what}, {verdict.outcome}: {verdict.reason}"]
    lines += [f"  {command}" for command in verdict.commands]
    print("\n".join(lines), flush=True)


def drawn(seed: int, number: int) -> Case:
    """Return a combination by its number; others need not be drawn before."""
    return draw(Random(f"{seed} {number}"))


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--number", type=int, default=200, metavar="N", help="combinations (200)")
    add("--seed", type=int, default=0, help="of all draws (0)")
    add("--processes", type=int, default=1, metavar="N", help="runs at a time (1)")
    add("--only", default="", choices=[*RELATIONS], help="one kind of comparison")
    add("--case", type=int, metavar="NUMBER", help="only this one of all combinations")
    add("--whole", action="store_true", help="do not shrink what is not as promised")
    add("--out", type=Path, metavar="FILE", help="a line of JSON for each combination")
    asked = parser.parse_args()
    # A batch system's way to interrupt.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    numbers: Sequence[int] = range(asked.number)
    if asked.case is not None:
        numbers = [asked.case]
    swarm = Swarm(asked, numbers)
    where = MEMORY if MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=where, prefix="swarm-") as name,
        waiting.fork_server(Path(name), *LOADED) as server,
        ThreadPoolExecutor(asked.processes) as pool,
    ):
        shares = [
            pool.submit(swarm.share, Path(name) / str(share), server)
            for share in range(asked.processes)
        ]
        try:
            for one in shares:
                one.result()
        except KeyboardInterrupt:
            swarm.end()
            print("interrupted; so far:", file=sys.stderr)
    print(table.table(swarm.found))
    sys.exit(any(row.outcome not in GOOD for row in swarm.found))


if __name__ == "__main__":
    main()
