"""Make a long run under mpirun, and see whether its ranks need more memory, open files
or time at the end than near the beginning.

The exit code is 1 if something has grown by more than 5 %.

examples:
  python -m benchmarks.harness.soak
  python -m benchmarks.harness.soak --rounds 5000 -- --method pfedhn
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import launching
from benchmarks.arguments import parser_of
from hpcfed.results.checkpoints import MARKER
from hpcfed.results.stored import read_run

RANKS = 2
EARLY, WINDOW = 50, 50
"""The round of the first look, and how many rounds around it are timed."""
MOST = 1.05
"""Times as much as at the first look that something may be at the end."""


@dataclass(frozen=True)
class Sample:
    """Memory and open files of all ranks at one moment."""

    round: int
    memory: list[int]
    files: list[int]


def sample(ranks: list[int], out: Path) -> Sample | None:
    """Look at all ranks; None before the first checkpoint, and when a rank has gone."""
    rounds = [int(marker.parent.name) for marker in out.glob(f"checkpoints/*/{MARKER}")]
    try:
        pages = [
            # The second number of statm is the resident pages.
            int(Path(f"/proc/{rank}/statm").read_text().split()[1])
            for rank in ranks
        ]
        files = [len(os.listdir(f"/proc/{rank}/fd")) for rank in ranks]
    except OSError:
        return None
    if not rounds or not ranks or not all(pages) or not all(files):
        return None
    return Sample(
        max(rounds), [page * os.sysconf("SC_PAGE_SIZE") for page in pages], files
    )


def soak(rounds: int, words: list[str], out: Path) -> tuple[Sample, Sample]:
    """Make the run; return how it was after the first rounds and at the end."""
    work = [
        "-m", "hpcfed", "run", "--model", "mlp", "--clients", "8", "--checkpoint-every", "10",
    ]  # fmt: skip
    work += ["--rounds", str(rounds), "--out", str(out), *words]
    command = launching.on_ranks(RANKS, work)
    variables = launching.environment() | {"OMP_NUM_THREADS": "1"}
    early = late = None
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=log, env=variables
        )
        while process.poll() is None:
            time.sleep(0.1)
            # Ranks are the children of mpirun.
            found = subprocess.run(
                ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
            ).stdout
            now = sample([int(number) for number in found.split()], out)
            # Not in the last round, when the ranks are about to leave.
            if now is not None and EARLY <= now.round < rounds:
                early, late = early or now, now
        if process.returncode or early is None or late is None:
            log.seek(0)
            sys.exit(
                f"the run has ended with {process.returncode}:\n{log.read()[-2000:]}"
            )
    return early, late


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("words", nargs="*", help="options of hpcfed run, after --")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        early, late = soak(asked.rounds, asked.words, Path(scratch) / "run")
        seconds = read_run(Path(scratch) / "run").rounds["seconds"]
    places = (slice(EARLY - WINDOW // 2, EARLY + WINDOW // 2), slice(-WINDOW, None))
    before, after = (1e3 * float(np.median(seconds[place])) for place in places)
    figures = {
        f"memory of rank {i}, MiB": (early.memory[i] / 2**20, late.memory[i] / 2**20)
        for i in range(RANKS)
    }
    figures |= {
        f"open files of rank {i}": (early.files[i], late.files[i]) for i in range(RANKS)
    }
    figures["a round, ms (median of 50)"] = (before, after)
    print(
        f"{'':28}{f'round {early.round}':>12}{f'round {late.round}':>12}{'change':>9}"
    )
    for name, (first, last) in figures.items():
        print(f"{name:28}{first:12.1f}{last:12.1f}{last / first - 1:9.1%}")
    sys.exit(any(last > MOST * first for first, last in figures.values()))


if __name__ == "__main__":
    main()
