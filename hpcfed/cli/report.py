"""`hpcfed report`: make one page of runs and studies, and figures for programs."""

import sys
from pathlib import Path

from hpcfed.cli.parser import CommandParser

SUMMARY = "one page of runs and studies, and their figures for other programs"
EXAMPLES = """\
  hpcfed report runs/strong --out strong.html                 runs and studies on one page
  hpcfed report runs/before runs/after                        what changed, and what it did
  hpcfed report runs/before runs/after --fail-if slower=5%    a regression check for CI
  hpcfed report runs/strong --figures figures --format pdf    its charts, for a paper
  hpcfed report runs/first --unfinished                       how far a long run has come"""


NOTES = """\
conditions of --fail-if, each with a limit of your own:
  slower=5%          seconds per round, the median
  more-memory=10%    peak memory of a rank
  more-bytes=10%     bytes sent per round
  more-energy=10%    joules of the GPUs per round
  less-accurate=1    points of accuracy, of the clients or of the global model
  It holds where B is worse than A by more than the limit, and the 95 % interval excludes
  that nothing has changed. Where a side has one run, which cannot tell noise, it is
  undecided instead, unless --one-run-decides.

exit codes:
  0  the page is written
  1  a condition of --fail-if holds, or something could not be read and was left out: the
     terminal says which
  2  a mistake in the command, or nothing to report
  3  a condition of --fail-if is undecided, and none holds"""
PAGE = """\
--out FILE.html
  the page (default: report.html)
--unfinished
  include runs that are running, stopped or failed, with the rounds they have; not those
  of a study
"""
FILES = """\
--one-run-decides
  let a condition of --fail-if hold even if a side has only one run
--figures DIR
  also write every chart of the page to a file of its own, for a paper
--format pdf|svg|png
  what --figures writes (default: pdf); several as pdf,png
--width INCHES
  how wide the figures are (default: 3.4, a column of most papers)
--csv FILE.csv
  also write a line for every round of every run, with a column for each option that
  differs, the times of every rank to FILE-ranks.csv, a line for every point (means and
  intervals) to FILE-points.csv, and what GPUs, cores and networks did to
  FILE-telemetry.csv
--json FILE
  also write all figures of the page as JSON
--extrap FILE
  also write the times for Extra-P (JSON Lines)
"""


def command(arguments: list[str]) -> None:
    parser = CommandParser(
        "report",
        EXAMPLES,
        notes=NOTES,
        description="Makes one page of runs and studies; two paths, A and B, are also "
        "compared: options, code, speed and accuracy.",
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="folders of runs or studies, or folders of such folders",
    )
    parser.add_flags(PAGE)
    parser.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help=(
            "end with exit code 1 if B is worse than A, as in slower=5%%; see below; "
            "may be given several times"
        ),
    )
    parser.add_flags(FILES)
    parser.set_defaults(out=Path("report.html"))
    options = parser.parse_args(arguments)
    # Late: charts and HDF5 take a second to load.
    from hpcfed.analysis.command import ReportRequest, report

    code = report(ReportRequest(**vars(options)))
    if code:
        sys.exit(code)
