"""Simulate runs on a cluster, from fault to fault, and look for what they lose.

Each seed is a story: a run, a requeued job or two seeds of a run, on one to three ranks,
lives from fault to fault in one folder. It is resumed after each, perhaps on another
number of ranks, until it is complete; then it is made longer, or another run takes its
folder. The program is hpcfed itself. Network, clock, disk, signals and processes are
simulated in one process, so all that happens follows from the seed.

  kill, killall           a rank, all ranks get SIGKILL
  cut                     power cut: what was not synced is lost, torn or reordered
  term, interrupt         SIGTERM or SIGUSR2, SIGINT to one rank or all: exit code 75
  halt, stall             a rank is halted forever, or for some seconds
  slow                    syncs take seconds
  full, read-only, failing   the disk refuses reads, writes, changes or syncs, for a time or until the end
  rival                   a second run begins in the same folder

After each life: no reported round and no complete checkpoint is lost; nothing that can
be read is torn; all rounds on record are those of an undisturbed run, bit for bit (to
1e-9 once the number of ranks has changed); the exit code is as promised; nobody waits
forever; users' files in the folder are as they were; two runs never write to one folder.

Prints a line for each finding, with the seed that replays it, and a table. The exit code
is 1 after a finding. --plant puts a fault into the program itself, which must be found.

examples:
  python -m benchmarks.simulated --seeds 0..1999 --processes 2
  python -m benchmarks.simulated --seed 137 --trace
  python -m benchmarks.simulated --seeds 0..199 --plant no-fsync --first
  python -m benchmarks.simulated --seeds 0..199 --brief
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.arguments import parser_of
from benchmarks.simulated.campaign import told_by
from benchmarks.simulated.plants import PLANTS
from benchmarks.simulated.summary import Summary
from benchmarks.simulated.work import BRIEF, WHOLE

EVERY = 10.0
"""Seconds between lines of progress."""
MEMORY = Path("/dev/shm")
"""Where the simulated disk is, if this machine has it."""


def main() -> None:
    options = _options()
    plant = options.plant
    begin = time.monotonic()
    summary = Summary()
    next_line = begin + EVERY
    with tempfile.TemporaryDirectory(
        prefix="hpcfed-simulated-", dir=_disk()
    ) as scratch:
        stories = told_by(
            Path(scratch),
            options.seeds,
            processes=options.processes,
            plant=plant,
            keep_trace=options.trace,
            length=BRIEF if options.brief else WHOLE,
        )
        for told in stories:
            summary.add(told)
            for what in told.findings:
                again = f" --plant {plant}" if plant else ""
                again += " --brief" if options.brief else ""
                print(f"--seed {told.seed}{again}: {what}", flush=True)
            if options.trace:
                print(*told.trace, f"checksum of all this: {told.digest:08x}", sep="\n")
            if time.monotonic() > next_line:
                print(summary.progress(len(options.seeds)), file=sys.stderr, flush=True)
                next_line = time.monotonic() + EVERY
            if options.first and told.findings:
                break
    print(summary.table(time.monotonic() - begin))
    sys.exit(1 if summary.findings else 0)


def _disk() -> Path | None:
    return MEMORY if os.access(MEMORY, os.W_OK) else None


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add(
        "--seeds",
        type=_range,
        default=_range("0..19"),
        help="as in 0..1999 (default: 0..19)",
    )
    add("--seed", type=int, help="one seed alone")
    add("--processes", type=int, default=1, help="stories at a time (default: 1)")
    add(
        "--trace",
        action="store_true",
        help="print all that happens, by the simulated clock",
    )
    add("--plant", choices=PLANTS, help="put this fault into the program")
    add(
        "--brief",
        action="store_true",
        help="stories of a fault and an end, as the tests tell them",
    )
    add("--first", action="store_true", help="end with the first finding")
    options = parser.parse_args()
    if options.seed is not None:
        options.seeds = range(options.seed, options.seed + 1)
    return options


def _range(text: str) -> range:
    first, _, last = text.partition("..")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: as in 0..1999") from None
    if not found or found[0] < 0:
        raise argparse.ArgumentTypeError(f"{text}: as in 0..1999")
    return found


if __name__ == "__main__":
    main()
