"""`hpcfed list`: everything that has a name, such as methods, models and attacks."""

from collections.abc import Mapping
from inspect import getdoc

from hpcfed import methods, plugins, shipped
from hpcfed.cli.parser import CommandParser
from hpcfed.data import DATASETS, PARTITIONS
from hpcfed.errors import UserError
from hpcfed.models import MODELS
from hpcfed.options.aggregation import RULES
from hpcfed.options.compression import COMPRESSORS
from hpcfed.options.malicious import ATTACKS
from hpcfed.options.metrics import METRICS

SUMMARY = "methods, data sets, models, metrics, attacks, rules, ready studies"
EXAMPLES = """\
  hpcfed list                                                 everything that has a name"""


def command(arguments: list[str]) -> None:
    parser = CommandParser(
        "list",
        EXAMPLES,
        description="Lists methods, data sets, models, partitions, metrics, attacks, "
        "rules of aggregation, compressors and ready studies.",
    )
    parser.parse_args(arguments)
    # Summaries are read from the source, so a method that cannot be imported is listed.
    _print("methods", methods.summaries())
    datasets = {name: info.summary for name, info in DATASETS.items()}
    _print("data sets", datasets | _announced("datasets"))
    models = {name: info.summary for name, info in MODELS.items()}
    _print("models", models | _announced("models"))
    _print("partitions", PARTITIONS)
    metrics = {name: metric.meaning for name, metric in METRICS.items()}
    _print("metrics", metrics)
    _print("attacks", {name: one.summary for name, one in ATTACKS.items()})
    _print("rules of aggregation", RULES)
    _print("compressors", COMPRESSORS)
    studies = shipped.ready_studies().items()
    _print("ready studies", {name: shipped.summary(path) for name, path in studies})


def _announced(group: str) -> dict[str, str]:
    """Return a line for all that packages announce, even if it cannot be imported."""
    lines = {}
    for name, entry in sorted(plugins.installed(group).items()):
        try:
            docstring = getdoc(plugins.load_installed(entry)) or ""
            first = docstring.partition("\n")[0]
            lines[name] = f"{first} (plugin {entry.value})".strip()
        except UserError as error:
            lines[name] = f"cannot be used: {error}"
    return lines


def _print(title: str, summaries: Mapping[str, str]) -> None:
    print(f"{title}:")
    for name, summary in summaries.items():
        print(f"  {name:16} {summary}")
