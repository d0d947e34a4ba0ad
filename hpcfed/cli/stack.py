"""`hpcfed stack FILE`: run the trials of a stack as one process. `hpcfed study --stack`
starts it; users do not need it, and the help does not list it.
"""

from dataclasses import replace
from pathlib import Path

from hpcfed.cli.settings import keyword_settings
from hpcfed.errors import UserError
from hpcfed.results.stored import check_start
from hpcfed.runtime.launcher import launched


def command(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UserError("hpcfed stack takes one file; hpcfed study --stack writes it")
    # Late: every command imports this module, and few read HDF5.
    from hpcfed.options.declare import flags
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
