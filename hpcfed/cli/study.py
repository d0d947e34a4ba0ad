"""`hpcfed study`: sweep over any options, here or on Slurm."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from re import fullmatch

from hpcfed.cli.parser import CommandParser
from hpcfed.cli.settings import keyword_settings
from hpcfed.errors import UserError, remark
from hpcfed.options import check_text
from hpcfed.options.declare import flags
from hpcfed.options.run import MOST_SEEDS
from hpcfed.results.stored import check_start
from hpcfed.runtime.launcher import launched

SUMMARY = "a sweep over any options, here or on Slurm"
USUAL = 32
"""The default number of points in a stack."""
EXAMPLES = """\
  hpcfed study quick                                          a ready study; hpcfed list has all
  hpcfed study my.toml --dry-run                              its points, commands and costs
  hpcfed study strong --only 'ranks=2*'
  hpcfed study my.toml --stack                                learning rates, seeds … in one process
  hpcfed study strong --submit -- --partition=gpu --time=2:00:00"""

BEFORE = """\
--out DIR
  folder of the study (default: runs/NAME of the file)
--dry-run
  print every point, its command and its estimated cost; run nothing
--only PATTERN
  only points whose names match, as in 'ranks=4*'
--points LIST
  only points with these numbers, as in 0,3; gathers nothing
--offset N
  add N to the numbers of --points: those of an array's jobs, which Slurm limits
"""
AFTER = """\
--submit
  submit the points to Slurm as arrays
--gather
  collect finished runs into study.h5; run nothing
--launcher {auto,mpirun,srun}
  what starts ranks; auto: srun in a Slurm job, else mpirun (default)
"""


def command(arguments: list[str]) -> None:
    # argparse would take sbatch's words after -- for our own arguments.
    words, for_sbatch = _split(arguments)
    options = _parser().parse_args(words)
    if for_sbatch and not options.submit:
        raise UserError(
            f"unexpected argument '{for_sbatch[0]}'; words after -- are sbatch's, with "
            "--submit"
        )
    for flag in ("submit", "gather"):
        if options.stack > 1 and getattr(options, flag):
            raise UserError(
                f"--stack runs points as one process here, and --{flag} runs none; "
                "leave one of them out"
            )
    if options.offset is not None and options.points is None:
        raise UserError("--offset adds to the numbers of --points; give both")
    try:
        failed = _act(options, for_sbatch)
    except KeyboardInterrupt:
        remark("hpcfed: interrupted; start it again: it goes on from there")
        sys.exit(130)
    if failed:
        sys.exit(1)


def _act(options: argparse.Namespace, for_sbatch: list[str]) -> int:
    """Do what was asked for; return the number of trials that failed."""
    from hpcfed.studies import start

    order = start.order_of(
        options.study,
        out=options.out,
        only=options.only,
        numbers=points_of(options),
        starter=options.launcher,
        most=options.stack,
    )
    if options.submit:
        start.submit_study(order, for_sbatch, dry_run=options.dry_run)
        return 0
    if options.dry_run:
        # Late: only this loads torch.
        from hpcfed.studies.dry_run import print_dry_run

        print_dry_run(order)
        return 0
    if options.gather:
        return start.gather_study(order)
    if options.points is not None:
        return start.run_points(order)
    return start.run_study(order)


def points_of(options: argparse.Namespace) -> list[int] | None:
    """Return the numbers of the points to run; None: all."""
    if options.points is None:
        return None
    return [number + (options.offset or 0) for number in options.points]


def _parser() -> CommandParser:
    parser = CommandParser(
        "study",
        EXAMPLES,
        usage="hpcfed study STUDY [options] [-- words for sbatch]",
        description="Runs every point of a sweep and skips those that are finished. "
        "Exit code 1: some points have failed.",
    )
    parser.add_argument(
        "study",
        type=Path,
        metavar="STUDY",
        help="what is swept: a file, or the name of a ready study such as quick",
    )
    parser.add_flags(BEFORE, DIR=_folder, LIST=_numbers, N=_number)
    parser.add_argument(
        "--stack",
        type=_stack,
        nargs="?",
        const=USUAL,
        default=1,
        metavar="N",
        help=(
            "run points that differ only in options such as lr, seed or alpha "
            f"together in one process, at most N of them (N: {USUAL}); their results "
            "are those of separate runs but for rounding (some 1e-7 in fp32), which "
            "also depends on the group: a study that goes on may group them otherwise"
        ),
    )
    parser.add_flags(AFTER)
    parser.set_defaults(only="*", launcher="auto")
    return parser


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after the first `--`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _folder(text: str) -> Path:
    # The folder's name goes into commands, records and Slurm's scripts.
    check_text(text, "--out")
    return Path(text)


def _stack(text: str) -> int:
    if not fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MOST_SEEDS:
        raise argparse.ArgumentTypeError(
            f"must be a number of points from 1 to {MOST_SEEDS}, got '{text}'"
        )
    return int(text)


def _number(text: str) -> int:
    if not fullmatch("[0-9]{1,9}", text):
        raise ValueError("must be a number of points, as in 1001")
    return int(text)


def _numbers(text: str) -> list[int]:
    if not fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise ValueError("must be numbers of points, as in 0,3")
    return [int(word) for word in text.split(",")]


def run_stack(arguments: list[str]) -> None:
    """Run the trials of a stack as one process: `hpcfed stack FILE`, by `--stack`."""
    if len(arguments) != 1:
        raise UserError("hpcfed stack takes one file; hpcfed study --stack writes it")
    # Late: every command imports this module, and few read HDF5.
    from hpcfed.studies.stacks import read_stack

    points = []
    for options in read_stack(Path(arguments[0])):
        # The record holds the command that repeats this trial alone.
        words = ("hpcfed", "run", *flags(options))
        settings = replace(keyword_settings(options), command=words)
        check_start(settings, launched())
        points.append(settings)
    # Late: this loads torch, and MPI starts.
    from hpcfed.experiment.run import run_stacked

    run_stacked(points)
