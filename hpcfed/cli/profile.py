"""`hpcfed profile`: run, and show where the time goes."""

import os

from hpcfed.cli.parser import CommandParser, positive
from hpcfed.cli.settings import parse_run
from hpcfed.errors import UserError
from hpcfed.options import RunConfig
from hpcfed.results.stored import check_start
from hpcfed.runtime.launcher import launched

SUMMARY = "a run, and where its time goes"
EXAMPLES = """\
  hpcfed profile --method pfedgpa --server small --bank-rounds 5 --denoiser-samples 2000
  mpirun -n 3 python -m hpcfed profile my.toml --server-ranks 1 --profile-rounds 5"""

FLAGS = """\
--profile-rounds N
  rounds, and steps of the server's networks, that are profiled by kernel (default: 3)
--profile-warmup N
  rounds and steps before them (default: 2)
--nvtx
  mark phases as ranges for Nsight, without torch's profiler
"""


def command(arguments: list[str]) -> None:
    # All words that this parser does not know are options of the run.
    options, words = _parser().parse_known_args(arguments)
    settings = parse_run(words)
    _check_profiled(settings.config)
    check_start(settings, launched())
    # Else torch's profiler would complain about missing GPUs. It reads this on import.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from hpcfed.profile.profile_run import profile_run

    profile_run(
        settings,
        warmup=options.profile_warmup,
        active=options.profile_rounds,
        nvtx=options.nvtx,
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        "profile",
        EXAMPLES,
        usage="hpcfed profile [--profile-rounds N] [--profile-warmup N] [--nvtx] "
        "[CONFIG.toml] [options of hpcfed run]",
        description="A run, and where its time goes: the phases of all ranks as a "
        "timeline, kernels, memory, and how close the device comes to its limits. All "
        "other options are those of hpcfed run.",
    )
    parser.add_flags(FLAGS, N=positive)
    parser.set_defaults(profile_rounds=3, profile_warmup=2)
    return parser


def _check_profiled(config: RunConfig) -> None:
    """Refuse runs that cannot be profiled as a whole."""
    if config.resume is not None:
        raise UserError(
            "--resume: a profile follows a run from its start; give the run's "
            "options and another --out"
        )
    if config.requeue:
        raise UserError(
            "--requeue: a profile writes no checkpoints to resume from; leave it out"
        )
    if config.seeds is not None:
        raise UserError("--seeds: a profile takes one seed; use --seed")
