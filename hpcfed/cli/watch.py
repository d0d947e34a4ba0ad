"""`hpcfed watch`: follow a run or a study while it is running."""

import sys
from pathlib import Path

from hpcfed.cli.parser import CommandParser

SUMMARY = "a run or a study while it goes on, also from another machine"
EXAMPLES = """\
  hpcfed watch runs/first                                     curves, pace and ETA, up to the end
  hpcfed watch                                                the newest run under runs/
  hpcfed watch runs/strong --once                             how far a study is"""

FLAGS = """\
--once
  show how far it is, and leave
--wait
  wait for a run also in a folder that holds something else
--every SECONDS
  time between two lines if the output is not a terminal (default: 10)
"""


def command(arguments: list[str]) -> None:
    parser = CommandParser(
        "watch",
        EXAMPLES,
        description="Shows how far a run, its seeds or a study is: curves, where the "
        "time goes, what is left. It reads files alone, so it works on any machine that "
        "sees the folder, and Ctrl-C leaves the run alone. Exit code 0: it is complete, "
        "or goes on; 1: it has failed or was stopped.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="the folder of a run, of its seeds, or of a study; if it does "
        "not exist yet, wait for it (default: the newest under runs/)",
    )
    parser.add_flags(FLAGS, SECONDS=_seconds)
    parser.set_defaults(every=10.0)
    options = parser.parse_args(arguments)
    # Late: most command lines read no HDF5.
    from hpcfed.analysis.render.console import Piped
    from hpcfed.analysis.render.watch import watch

    code = watch(
        options.folder,
        once=options.once,
        wait=options.wait,
        every=options.every,
        console=Piped(),
    )
    if code:
        sys.exit(code)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ValueError("must be seconds above 0")
    return seconds
