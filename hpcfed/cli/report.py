"""`hpcfed report`: one page of runs and studies, and their figures for programs."""

import sys
from pathlib import Path

from hpcfed.cli.parser import CommandParser

SUMMARY = "one page of runs and studies, and their figures for other programs"
EXAMPLES = """\
  hpcfed report runs/strong --out strong.html                 runs and studies on one page
  hpcfed report runs/first runs/second --csv rounds.csv       two runs, their rounds as a table
  hpcfed report runs/first --unfinished                       how far a long run has come"""


def command(arguments: list[str]) -> None:
    parser = CommandParser(
        "report",
        f"examples:\n{EXAMPLES}",
        description="Makes one page of runs and studies. Exit code 1: something could "
        "not be read and was left out.",
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="folders of runs or studies, or folders of such folders",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE.html",
        help="the page (default: report.html)",
    )
    parser.add_argument(
        "--unfinished",
        action="store_true",
        help="include runs that are running, stopped or failed, with the rounds they "
        "have; not those of a study",
    )
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE.csv",
        help="also write a line for every round of every run, with a column for each "
        "option that differs, and the times of every rank to FILE-ranks.csv",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write all figures of the page as JSON",
    )
    parser.add_argument(
        "--extrap",
        type=Path,
        metavar="FILE",
        help="also write the times for Extra-P (JSON Lines)",
    )
    options = parser.parse_args(arguments)
    # Late: charts and HDF5 take a second to load.
    from hpcfed.report.command import report

    # True where something was left out.
    if report(options):
        sys.exit(1)
