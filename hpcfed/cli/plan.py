"""`hpcfed plan`: predict time and memory of a run on machines that are not at hand."""

from pathlib import Path

from hpcfed.cli.parser import CommandParser
from hpcfed.cli.settings import keyword_settings
from hpcfed.options import check_text, named, read_toml
from hpcfed.options.units import parse_bytes_per_second, parse_seconds

SUMMARY = "what a run will take on more ranks than there are here"
EXAMPLES = """\
  hpcfed plan my.toml --ranks 64 --link 50GB/s --latency 5us  seconds, memory, ranks for the server
  hpcfed plan my.toml --calibrate                             measure this machine first
  hpcfed plan my.toml --ranks 64 --json                       the same for programs"""

FLAGS = """\
--ranks N
  ranks of the run, those of the server included (default: 1)
--per-node N
  ranks that share a machine's memory (default: its cores; 1 where ranks have a GPU
  each)
--link SPEED
  bandwidth between two ranks, as in 50GB/s or 400Gb/s (default: as measured)
--latency TIME
  time of an empty message, as in 5us (default: as measured)
--calibrate
  first measure short runs of these options here: few clients, one rank and a few, the
  server's model in two sizes; takes a minute or two
--constants FILE
  where the calibration is written and read (default: hpcfed-plan.json)
--json
  everything as JSON, for programs
"""


def command(arguments: list[str]) -> None:
    options = vars(_parser().parse_args(arguments))
    config = options.pop("config")
    check_text(str(config), "CONFIG.toml")
    values = read_toml(config)
    # A plan writes no run folder, so drop the options about it.
    for name in named(study_sets=True):
        values.pop(name, None)
    settings = keyword_settings(values)
    # Late: this loads torch.
    from hpcfed.plan.make import PlanRequest, print_plan_of

    print_plan_of(settings, values, PlanRequest(**options))


def _parser() -> CommandParser:
    parser = CommandParser(
        "plan",
        EXAMPLES,
        description=(
            "Predicts a run's seconds per round and memory per rank, the server's "
            "time by ranks and ZeRO stage, and how many ranks to give to the server. "
            "Every figure has an interval. Figures rest on what --calibrate has "
            "measured here; without a calibration, they assume usual speeds and say "
            "so."
        ),
    )
    parser.add_argument(
        "config", type=Path, metavar="CONFIG.toml", help="the options of the run"
    )
    parser.add_flags(FLAGS, SPEED=parse_bytes_per_second, TIME=parse_seconds)
    parser.set_defaults(ranks=1)
    return parser
