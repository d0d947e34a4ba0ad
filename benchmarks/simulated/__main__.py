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
On Ctrl-C or SIGTERM it prints the table of the stories told so far.

examples:
  python -m benchmarks.simulated --seeds 0..1999 --processes 2
  python -m benchmarks.simulated --seed 137 --trace
  python -m benchmarks.simulated --seeds 0..199 --plant no-fsync --first
  python -m benchmarks.simulated --seeds 0..199 --brief
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from benchmarks.arguments import parser_of

if TYPE_CHECKING:
    from benchmarks.simulated.summary import Summary

EVERY = 10.0
"""Seconds between lines of progress."""
MEMORY = Path("/dev/shm")
"""Where the simulated disk is, if this machine has it."""


def main() -> None:
    signal.signal(signal.SIGTERM, _end)
    # A script's background job starts with Ctrl-C ignored, and must keep ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    # Importing takes a while, so wait until the handlers are in place.
    from benchmarks.simulated.summary import Summary

    options = _options()
    begin = time.monotonic()
    summary = Summary()
    interrupted: SystemExit | None = None
    try:
        _tell(options, summary)
    except SystemExit as ending:
        interrupted = ending
    print(summary.table(time.monotonic() - begin))
    if interrupted is not None:
        raise interrupted
    sys.exit(1 if summary.findings else 0)


def _end(number: int, _: object) -> NoReturn:
    """End after a signal, with the exit code that shells expect."""
    # A second one would leave processes and the disk.
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    os.write(2, b"benchmarks.simulated: interrupted\n")
    sys.exit(128 + number)


def _tell(options: argparse.Namespace, summary: "Summary") -> None:
    """Tell the stories of all seeds, add them up, and print what is found."""
    from benchmarks.simulated.campaign import told_by
    from benchmarks.simulated.work import BRIEF, WHOLE

    plant = options.plant
    next_line = time.monotonic() + EVERY
    with (
        tempfile.TemporaryDirectory(prefix="hpcfed-simulated-", dir=_disk()) as scratch,
        closing(
            told_by(
                Path(scratch),
                options.seeds,
                processes=options.processes,
                plant=plant,
                keep_trace=options.trace,
                length=BRIEF if options.brief else WHOLE,
            )
        ) as stories,
    ):
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


def _disk() -> Path | None:
    return MEMORY if os.access(MEMORY, os.W_OK) else None


def _options() -> argparse.Namespace:
    from benchmarks.simulated.plants import PLANTS

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
