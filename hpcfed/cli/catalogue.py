"""`hpcfed list`: methods, data sets, models, partitions and attacks."""

from collections.abc import Mapping

from hpcfed import methods
from hpcfed.cli.parser import CommandParser
from hpcfed.config.attacks import ATTACKS
from hpcfed.data import DATASETS, PARTITIONS
from hpcfed.models import MODELS

SUMMARY = "methods, data sets, models, partitions, attacks"
EXAMPLES = """\
  hpcfed list                                                 everything that has a name"""


def command(arguments: list[str]) -> None:
    parser = CommandParser(
        "list",
        f"examples:\n{EXAMPLES}",
        description="Lists methods, data sets, models, partitions and attacks.",
    )
    parser.parse_args(arguments)
    # Summaries are read from the sources: a method that cannot be imported is listed.
    _print("methods", methods.summaries())
    _print("data sets", {name: info.summary for name, info in DATASETS.items()})
    _print("models", {name: info.summary for name, info in MODELS.items()})
    _print("partitions", PARTITIONS)
    _print("attacks", ATTACKS)


def _print(title: str, summaries: Mapping[str, str]) -> None:
    print(f"{title}:")
    for name, summary in summaries.items():
        print(f"  {name:16} {summary}")
