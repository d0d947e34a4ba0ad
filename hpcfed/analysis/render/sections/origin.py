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
from hpcfed.analysis.findings import COUNT, PER_CENT_OF, Row, Table
from hpcfed.analysis.groups import MOST_DRIFT, MOST_VARIATION, Group, Noise, noisy
from hpcfed.analysis.labels import label, size_text
from hpcfed.analysis.render.sections.section import WHICH, Section, size_name, which
from hpcfed.errors import count
from hpcfed.results.run import RunRecord

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
        f"Listed where the medians of repeats have a coefficient of variation above "
        f"{100 * MOST_VARIATION:.0f} % and differ by more than their own rounds do, or "
        f"where local training became more than {100 * MOST_DRIFT:.0f} % slower or "
        "faster from the first to the last third of a run."
    )
    section.text.append(
        f"To trust these times: {_repeat(found)}, take "
        "the node for yourself (sbatch --exclusive), and pin ranks to cores (srun "
        "--cpu-bind=cores, mpirun --bind-to core). Accuracies do not depend on it."
    )
    columns = (*WHICH, "runs", "repeats differ, %", "training drifts within a run, %")
    section.tables.append(Table(columns, [_noise_row(one) for one in found]))
    return section


def _repeat(found: Sequence[Noise]) -> str:
    """Return advice on repeats; there may be some already."""
    fewest = min(len(one.group.processes) for one in found)
    if fewest < ENOUGH:
        return f"raise repeats in the study file to {ENOUGH}"
    return "measure these points again"


def _noise_row(one: Noise) -> Row:
    runs = COUNT(len(one.group.processes))
    return [
        *which(one.group),
        runs,
        PER_CENT_OF(one.variation),
        PER_CENT_OF(one.drift),
    ]


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
    rows = _rows(every)
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


def _rows(every: Sequence[Group]) -> list[list[str]]:
    """Return a row for each different environment, with its number of points."""
    alike = grouped(every, lambda group: tuple(_environment(group)))
    rows = []
    for cells, members in alike.items():
        first = min(str(group.first.facts.get("started", "?")) for group in members)
        rows.append([_points(members, every), *cells, first])
    return rows


def _points(members: Sequence[Group], every: Sequence[Group]) -> str:
    """Name the points of an environment, or count them if there are many."""
    if len(members) == len(every):
        return "all"
    if len(members) > MOST_NAMED:
        return f"{len(members)} of {len(every)}"
    names = [f"{label(group.key)}: {size_name(group)}" for group in members]
    return "; ".join(names)


def _environment(group: Group) -> list[str]:
    about = group.first.environment
    hosts, processors = set(), set()
    for rank in about.get("ranks", []):
        hosts.add(str(rank.get("host", "?")))
        processors.add(_processor(rank))
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


def _processor(rank: Mapping[str, Any]) -> str:
    """Return the processor of a rank's host, and the rank's cores."""
    if not rank.get("cpu"):  # older runs have not recorded it
        return "?"
    return f"{rank['cpu']} (cores {rank.get('binding', '?')})"


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
        commands = []
        for trial in study.trials:
            if trial.outcome.command:  # a waiting trial has none yet
                commands.append(trial.outcome.command)
        lines = "\n".join(commands)
        section.listings.append((f"commands of {folder}", lines))
    # A dict, because runs on different numbers of ranks have the same command.
    different: dict[str, None] = {}
    for group in every:
        different[_command(group.first)] = None
    lines = "\n".join(different)
    section.listings.append(("hpcfed's part of every command", lines))
    return section


def _command(run: RunRecord) -> str:
    # The first word is the program's path, which differs between machines.
    words = run.environment.get("command", ["?"])
    return shlex.join(["hpcfed", *words[1:]])
