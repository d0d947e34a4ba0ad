"""Findings about one run, or about its seeds that advanced together.

`hpcfed show`, its JSON and the run's page render exactly these tables, so they say the
same in the same words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpcfed.analysis.findings import Table
from hpcfed.analysis.run_findings import costs, depths, learning, machine
from hpcfed.analysis.run_findings.costs import Times
from hpcfed.analysis.run_findings.learning import Runs
from hpcfed.errors import UserError
from hpcfed.results.stored import (
    RunDetails,
    longest,
    read_clock,
    read_details,
    timed_run,
)

Findings = Mapping[str, Sequence[Table]]
"""Tables by their section of the page, in its order."""


@dataclass(frozen=True)
class RunFiles:
    """What a run has written besides its record."""

    details: RunDetails = field(default_factory=RunDetails.nothing)
    times: Times = field(default_factory=dict)
    problem: str = ""
    """Why some of it could not be read."""


def read_files(runs: Runs) -> RunFiles:
    """Read the files that belong to a run, as far as they are readable; with several
    seeds, those of the first, and what the machine did until the last has ended.
    """
    first, timed = runs[0], longest(runs)
    times: Times = {}
    try:
        details = read_details(first.folder)
        if timed is not first:
            telemetry = read_details(timed.folder).telemetry
            details = replace(details, telemetry=telemetry)
        if first.has_clock:
            times = read_clock(first.folder, first.rounds_done)
    except UserError as error:
        return RunFiles(problem=str(error))
    return RunFiles(details, times)


def run_findings(runs: Runs, files: RunFiles) -> Findings:
    """Return all tables. With several seeds, tables of costs and classes describe the
    first; time, memory and energy belong to all of them together.
    """
    first, timed = runs[0], timed_run(runs)
    if not first.rounds_done:
        return {}
    learnt = learning.learning_of_run(first)
    if len(runs) > 1:
        learnt = learning.learning_of_seeds(runs)
    return {
        "accuracy": list(learnt),
        "virtual-time": list(costs.of_virtual_time(first, files.times)),
        "privacy": list(costs.of_privacy(first)),
        "clients": list(learning.of_clients(runs)),
        "classes": list(learning.of_classes(files.details.class_counts)),
        "time": [costs.of_phases(timed)],
        "server": list(costs.of_server(runs)),
        "depths": list(depths.of_depths(runs)),
        "costs": [costs.of_costs(runs)],
        "machine": list(machine.of_machine(timed, files.details.telemetry)),
    }


def as_json(found: Findings) -> list[dict[str, object]]:
    """Return all tables as JSON values."""
    return [
        {"section": section, **table.json}
        for section, tables in found.items()
        for table in tables
    ]
