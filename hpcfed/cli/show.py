"""`hpcfed show`: show the content of a run, of its seeds, or of a study."""

import json
from pathlib import Path

from hpcfed.cli.parser import CommandParser
from hpcfed.results.folder import STUDY, records
from hpcfed.results.sandbox import try_out
from hpcfed.results.stored import read_run, read_seeds

SUMMARY = "what is in a run, in its seeds, or in a study"
EXAMPLES = """\
  hpcfed show runs/first                                      read a run (--json for programs)
  hpcfed show runs/strong --json                              a study's figures of merit"""


def command(arguments: list[str]) -> None:
    parser = CommandParser(
        "show",
        EXAMPLES,
        description="Shows what is in a run, in the seeds of one, or in a study.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="the folder of a run, of its seeds, or of a study, as given by --out",
    )
    parser.add_flags("--json\n  everything as JSON, for programs")
    options = parser.parse_args(arguments)
    runs = records(options.folder)
    study = options.folder / STUDY
    is_study = not runs and study.is_file()
    # A damaged record can crash HDF5: a child process opens it first.
    try_out([study] if is_study else runs)
    if is_study:
        _print_study(study, as_json=options.json)
    elif options.json:
        _print_json(options.folder)
    else:
        print_run(options.folder)


def _print_json(folder: Path) -> None:
    from hpcfed.analysis.render.show import shown_json

    seeds = read_seeds(folder)
    content = shown_json(seeds or [read_run(folder)], seeds=bool(seeds))
    # JSON has no NaN: missing values are already null.
    print(json.dumps(content, indent=1, allow_nan=False))


def _print_study(path: Path, *, as_json: bool) -> None:
    from hpcfed.analysis.render.console import Output
    from hpcfed.analysis.study_points import show_study, summary
    from hpcfed.results.study import read_gathered

    study = read_gathered(path)
    if as_json:
        print(json.dumps(summary(study), indent=1, allow_nan=False))
    else:
        show_study(study, Output())


def print_run(folder: Path) -> None:
    """Print tables of a run, or of its seeds."""
    from hpcfed.analysis.render.console import Output
    from hpcfed.analysis.render.show import show, show_seeds

    console = Output()
    seeds = read_seeds(folder)
    if seeds:
        show_seeds(seeds, folder, console)
    else:
        show(read_run(folder), console)
