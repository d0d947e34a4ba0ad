"""A paper's tables, computed anew and set beside its figures.

A study file names data sets, numbers of clients (or columns of any kind, such as
attacks) and methods, each with its options. Every combination, or those that the file's
`cells` leave, is a cell: one run of all seeds at once, in the folder
OUT/DATASET/CLIENTS/METHOD. Cells whose seeds are all complete are not run again, so a
study that was stopped goes on where it was. On SIGTERM, SIGUSR2 or Ctrl-C
the cells at work end their round, and the exit code is 75; the next call resumes them
there. A cell that fails is reported in one line, the others go on, and the exit code is
1. A mistake in the file or in the flags ends everything before it begins, with 2. Cells
write a checkpoint every minute, from which a study goes on that was killed.

A plan (--plan FILE) names cells of several studies, one line for those with the same
seeds and options: STUDY.toml PATTERN SEEDS [OPTION=VALUE…] [as=FOLDER]. A cell belongs
to the first line that names it.

A line per cell shows what the study measures (mean ± standard error over seeds; the
accuracy of clients on their own test data, unless the study says otherwise), the
paper's figure, the difference, and seconds. At the end come the tables, in Markdown:
`ours ± error (paper)`, and how many of a table's cells are near to the paper.

examples:
  python -m benchmarks.paper benchmarks/paper/pfedgpa.toml --data-root data --out runs/paper
  python -m benchmarks.paper benchmarks/paper/pfedgpa.toml --out runs/paper --only 'cifar10/100/*' --budget 540
  python -m benchmarks.paper benchmarks/paper/pfedgpa.toml --out runs/try --methods fedavg,pfedgpa --seeds 0 \\
      --set rounds=3 bank_rounds=3
  python -m benchmarks.paper benchmarks/paper/pfedgpa.toml --out runs/paper --table
  python -m benchmarks.paper benchmarks/paper/genfed.toml --out runs/genfed --only 'mnist/*' --seeds 0..4 --jobs 8
  python -m benchmarks.paper --plan plan.txt --out runs/plan --jobs 16 --stop-after 540
  python -m benchmarks.paper --plan plan.txt --out runs/plan --stack 30 --jobs 8 --stop-after 540
  python -m benchmarks.paper --plan plan.txt --out runs/plan --table --unfinished
  python -m benchmarks.paper benchmarks/paper/genfed.toml --out runs/genfed --table --figures figures
"""

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.arguments import add_device
from benchmarks.paper.cells import plan, runnable
from benchmarks.paper.drawings import draw
from benchmarks.paper.plan import read_plan
from benchmarks.paper.runs import Stopped, go
from benchmarks.paper.study import read_study
from benchmarks.paper.tables import print_tables
from benchmarks.strict import StrictParser
from hpcfed.cli.parser import path_of, positive
from hpcfed.errors import UserError, count
from hpcfed.runtime.launcher import launched
from hpcfed.runtime.signals import STOPPED

FLAGS = """\
--plan FILE
  in place of a study: lines of STUDY.toml PATTERN SEEDS [OPTION=VALUE…] [as=FOLDER],
  run in their order; cells stand in OUT/STUDY or OUT/FOLDER
--data-root DIR
  folder of the data sets (default: $HPCFED_DATA, else ./data)
--methods A,B
  these methods alone
--seeds LIST
  0..4 or 0,3,7 (default: 0..2)
--budget SECONDS
  begin no cell after this number of seconds
--stop-after SECONDS
  after this number of seconds the running cells end their round and write a
  checkpoint; the next call resumes them (exit code 75)
--jobs N
  run this number of cells at once, each in a process of its own; on a GPU start
  nvidia-cuda-mps-control -d before, or they take turns (default: 1)
--stack N
  let cells that differ only in stackable options, such as the supplement's share or
  GenFed's schedule, advance together in one process: at most N runs, of which every
  seed is one; not where time is measured (default: 1)
--table
  run nothing; print the tables of what is finished
--unfinished
  show unfinished cells in the tables, too, with the round that they have reached
--figures FOLDER
  draw the paper's figures of what has run, finished or not, as SVG files
"""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = StrictParser(__doc__)
    parser.add_flags(FLAGS, N=positive, FOLDER=path_of)
    parser.set_defaults(budget=math.inf, stop_after=math.inf, jobs=1, stack=1)
    add_device(parser)
    add = parser.add_argument
    add("study", type=Path, metavar="STUDY.toml", nargs="?")
    add("--out", type=Path, required=True, help="folder of all cells")
    of_cells = "cells whose DATASET/CLIENTS/METHOD fits the pattern; may be given again"
    add("--only", action="append", default=[], metavar="PATTERN", help=of_cells)
    several = partial(add, nargs="+", action="extend", default=[])
    of_data = "what stands for a data set of the study, such as a part of it: svhn=file:svhn-part.npz"
    several("--data", metavar="NAME=DATASET", help=of_data)
    of_options = "options, which win over the file"
    several("--set", metavar="OPTION=VALUE", help=of_options)
    options = parser.parse_args(arguments)
    if (options.study is None) == (options.plan is None):
        raise UserError("name a study's file, or a --plan")
    if options.plan is not None and options.seeds is not None:
        raise UserError("--seeds: every line of a plan has its own")
    options.seeds = options.seeds or "0..2"
    options.only = options.only or ["*"]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    failed = 0
    try:
        options = parse_arguments(arguments)
        if options.plan is not None:
            cells = read_plan(options.plan, options)
        else:
            cells = plan(read_study(options.study), options)
        if not options.table:
            if not launched().alone:
                raise UserError(
                    "a study is one process; start it without mpirun or srun"
                )
            # Checks everything before the first cell begins.
            cells = runnable(cells)
            failed = go(cells, options)
        print_tables(cells, unfinished=options.unfinished)
        if options.figures is not None:
            draw(cells, options.figures)
    except UserError as error:
        print(f"paper: {error}", file=sys.stderr)
        return 2
    except Stopped:
        print("paper: stopped; start it again to go on", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print("paper: interrupted", file=sys.stderr)
        return 130
    if failed:
        print(f"failed: {count(failed, 'cell')}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
