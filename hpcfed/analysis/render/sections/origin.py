"""Where the figures come from, and whether to trust them: noise, machines, versions,
options and commands.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

from hpcfed.analysis.choices import grouped
from hpcfed.analysis.collect import Found
from hpcfed.analysis.findings import COUNT, PER_CENT_OF, Table
from hpcfed.analysis.groups import MOST_DRIFT, MOST_VARIATION, Group, noisy
from hpcfed.analysis.labels import label, size_text
from hpcfed.analysis.render.sections.section import Section, points_table, size_name
from hpcfed.errors import count

ENVIRONMENT = (
    "points", "hosts", "devices", "processors", "threads per rank", "launcher",
    "collectives", "torch", "CUDA", "commit (+: changed) or version and checksum",
    "first started",
)  # fmt: skip
MOST_NAMED = 3
"""Most points of an environment to name."""
ENOUGH = 5
"""Repeats of a point that are enough to show how noisy a machine is."""


def noise(every: Sequence[Group]) -> Section:
    """Show points whose times should be measured again, and how."""
    section = Section("noise", "Noise of the machine")
    found = noisy(every)
    if not found:
        return section
    section.text.append(
        "The medians of these points' repeats have a coefficient of variation above "
        f"{100 * MOST_VARIATION:.0f} % and differ by more than their own rounds do, or "
        f"local training became more than {100 * MOST_DRIFT:.0f} % slower or faster "
        "from the first to the last third of a run."
    )
    # There may be some repeats already.
    few = min(len(one.group.processes) for one in found) < ENOUGH
    raised = f"raise repeats in the study file to {ENOUGH}"
    section.text.append(
        f"To trust these times: {raised if few else 'measure these points again'}, take "
        "the node for yourself (sbatch --exclusive), and pin ranks to cores (srun "
        "--cpu-bind=cores, mpirun --bind-to core). Accuracies do not depend on it."
    )
    columns = {
        "runs": [COUNT(len(one.group.processes)) for one in found],
        "repeats differ, %": [PER_CENT_OF(one.variation) for one in found],
        "training drifts within a run, %": [PER_CENT_OF(one.drift) for one in found],
    }
    section.tables.append(points_table([one.group for one in found], columns))
    return section


def noise_warnings(every: Sequence[Group]) -> list[str]:
    """Return the line for the top of the page, if the machine was not quiet."""
    found = noisy(every)
    if not found:
        return []
    worst = max(found, key=lambda one: 0.0 if isnan(one.variation) else one.variation)
    size = size_text(worst.group.clients, worst.group.ranks)
    return [
        f"The machine was not quiet: the times of {len(found)} of "
        f"{count(len(every), 'point')} cannot be trusted, least of all those of "
        f"{label(worst.group.key)}, {size}. See the section on noise."
    ]


def environment(every: Sequence[Group]) -> Section:
    section = Section("environment", "Environment and options")
    alike = grouped(every, lambda group: tuple(_environment(group)))
    rows = []
    for cells, members in alike.items():
        # Points are named, or counted if there are many.
        points = "; ".join(f"{label(one.key)}: {size_name(one)}" for one in members)
        if len(members) == len(every):
            points = "all"
        elif len(members) > MOST_NAMED:
            points = f"{len(members)} of {len(every)}"
        first = min(str(group.first.facts.get("started", "?")) for group in members)
        rows.append([points, *cells, first])
    section.tables.append(Table(ENVIRONMENT, rows, words=True))
    files = _files(every)
    if files:
        section.tables.append(Table(("file of your own", "sha256"), files, words=True))
    shared = json.dumps(_shared_options(every), indent=1)
    section.listings.append(("options that all runs share", shared))
    # Only for one run: the table above shows what differs between runs.
    first = json.dumps(every[0].first.environment, indent=1)
    section.listings.append(("environment of the first run", first))
    return section


def _environment(group: Group) -> list[str]:
    about = group.first.environment
    hosts, processors = set(), set()
    for rank in about.get("ranks", []):
        hosts.add(str(rank.get("host", "?")))
        cores = f"{rank.get('cpu')} (cores {rank.get('binding', '?')})"
        # Older runs have not recorded it.
        processors.add(cores if rank.get("cpu") else "?")
    packages = about.get("packages") or {}
    return [
        ", ".join(sorted(hosts)),
        str(group.options["on"]),
        ", ".join(sorted(processors)),
        str(about.get("threads_per_rank", "?")),
        str(about.get("launcher", "?")),
        str(about.get("backend", "?")),
        str(packages.get("torch", "?")),
        str(about.get("cuda") or "–"),
        _version(about.get("source") or {}),
    ]


def _files(every: Sequence[Group]) -> list[list[str]]:
    """Return the user's own files behind these figures, with their checksums."""
    # A pair, because a file may have changed between two runs.
    found = set()
    for group in every:
        for process in group.processes:
            # Seeds of one process share its files.
            run = process.runs[0]
            for path, checksum in (run.environment.get("files") or {}).items():
                found.add((str(path), str(checksum)))
    return [list(pair) for pair in sorted(found)]


def _version(source: Mapping[str, Any]) -> str:
    """Return the version that was run: a commit or, for a wheel, a version and the
    checksum of its files.
    """
    if source.get("commit"):
        changed = "+" if source.get("changed") else ""
        return str(source["commit"])[:10] + changed
    checksum = str(source.get("sha256", ""))[:10]
    return f"{source.get('version', '?')} {checksum}".strip()


def _shared_options(every: Sequence[Group]) -> dict[str, Any]:
    """Return options with the same value in all groups that have them."""
    shared = dict(every[0].options)
    for group in every:
        for name in list(shared):
            # Only groups of a method have its own options.
            value = shared[name]
            if group.options.get(name, value) != value:
                del shared[name]
    return shared


def reproduce(every: Sequence[Group], found: Found) -> Section:
    section = Section("reproduce", "Reproduce")
    section.text.append("The commands that made these figures, as they were given.")
    # A study's commands also include the launcher and its number of ranks.
    for study in found.studies:
        folder = study.path.parent.name
        title = study.title or folder
        section.listings.append((f"study file: {title}", study.text))
        # A waiting trial has no command yet.
        lines = "\n".join(filter(None, (one.outcome.command for one in study.trials)))
        section.listings.append((f"commands of {folder}", lines))
    # A dict, because runs on different numbers of ranks have the same command.
    different: dict[str, None] = {}
    for group in every:
        # The first word is the program's path, which differs between machines.
        words = group.first.environment.get("command", ["?"])
        different[shlex.join(["hpcfed", *words[1:]])] = None
    lines = "\n".join(different)
    section.listings.append(("hpcfed's part of every command", lines))
    return section
