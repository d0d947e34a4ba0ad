"""`hpcfed show`: what is in a run, or in its seeds."""

import json
from pathlib import Path

from hpcfed.cli.parser import CommandParser
from hpcfed.runtime.launcher import launched

SUMMARY = "what is in a run, or in its seeds"
EXAMPLES = """\
  hpcfed show runs/first                                      read a run (--json for programs)"""


def command(arguments: list[str]) -> None:
    parser = CommandParser(
        "show",
        f"examples:\n{EXAMPLES}",
        description="Shows what is in a run, or in the seeds of one.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="the folder of a run, or of its seeds, as given by --out",
    )
    parser.add_argument(
        "--json", action="store_true", help="everything as JSON, for programs"
    )
    options = parser.parse_args(arguments)
    from hpcfed.record.folder import records
    from hpcfed.record.sandbox import try_out

    # A damaged record can crash HDF5: a child process opens it first.
    try_out(records(options.folder))
    if options.json:
        _print_json(options.folder)
    else:
        print_run(options.folder)


def _print_json(folder: Path) -> None:
    from hpcfed.experiment.stored import read_run, read_seeds

    seeds = [record.summary() for record in read_seeds(folder)]
    content = {"seeds": seeds} if seeds else read_run(folder).summary()
    # JSON has no NaN: what is missing is null already.
    print(json.dumps(content, indent=1, allow_nan=False))


def print_run(folder: Path) -> None:
    """Print tables of a run, or of its seeds."""
    from hpcfed.experiment.stored import read_run, read_seeds
    from hpcfed.report.console import Output
    from hpcfed.report.show import show
    from hpcfed.report.show_seeds import show_seeds

    # Open MPI gives each rank a terminal of its own, even when the user's output goes
    # to a file.
    console = Output(force_terminal=None if launched().alone else False)
    seeds = read_seeds(folder)
    if seeds:
        show_seeds(seeds, folder, console)
    else:
        show(read_run(folder), console)
