"""The report: a table on the terminal, and the same as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hpcfed.analysis.findings import Row, Table
from hpcfed.analysis.render.console import print_tables, say
from hpcfed.doctor.finding import Finding, Level, ranks_text, summary, worst
from hpcfed.errors import UserError, count
from hpcfed.results.as_json import plain
from hpcfed.results.publish import publish
from hpcfed.runtime.environment import capture
from hpcfed.runtime.world import World
from hpcfed.version import source
from hpcfed.words import seconds_text

FORMAT = 1
"""The version of the JSON file."""
MOST_HOSTS = 4
"""Most hosts to name beside ranks."""


@dataclass(frozen=True)
class Diagnosis:
    """All findings, by the part of the machine that they are about."""

    parts: dict[str, list[Finding]]
    seconds: float

    @property
    def findings(self) -> list[Finding]:
        return [finding for own in self.parts.values() for finding in own]

    @property
    def level(self) -> Level:
        return worst(self.findings)

    @property
    def exit_code(self) -> int:
        """1 if there is an error; warnings do not count."""
        return int(self.level == Level.ERROR)


def print_diagnosis(
    console: Console, diagnosis: Diagnosis, hosts: Sequence[str]
) -> None:
    """Print the table, and how many errors and warnings it has."""
    rows: list[Row] = []
    for part, findings in diagnosis.parts.items():
        for number, finding in enumerate(findings):
            name = part if number == 0 else ""
            rows.append([name, finding.check, finding.level, told_by(finding, hosts)])
            if finding.advice:
                rows.append(["", "", "", f"→ {finding.advice}"])
    print_tables(console, [Table(("", "check", "", "found"), rows, words=True)])
    nodes = count(len(set(hosts)), "node")
    say(
        console,
        f"{summary(diagnosis.findings)}: {count(len(hosts), 'rank')} on {nodes}, "
        f"{seconds_text(diagnosis.seconds)}",
    )


def told_by(finding: Finding, hosts: Sequence[str]) -> str:
    """Return what was found, after the ranks that it is about unless these are all."""
    own = sorted(set(finding.ranks))
    if len(own) in (0, len(hosts)):
        return finding.told
    names = sorted({hosts[rank] for rank in own})
    at = f" on {', '.join(names)}" if len(names) <= MOST_HOSTS else ""
    return f"{ranks_text(own)}{at}: {finding.told}"


def as_json(diagnosis: Diagnosis, world: World) -> dict[str, Any]:
    """Return the report for programs."""
    findings = []
    for part, own in diagnosis.parts.items():
        for finding in own:
            fields = finding._asdict()
            fields["ranks"] = sorted(set(finding.ranks))
            fields["figures"] = plain(dict(finding.figures))
            findings.append({"part": part, **fields})
    return {
        "format": FORMAT,
        "hpcfed": source(),
        "verdict": diagnosis.level,
        "seconds": diagnosis.seconds,
        "findings": findings,
        "environment": capture(
            locations=world.locations,
            backend=world.backend,
            reason=world.reason,
            launcher=world.launch.launcher,
            threads=world.threads,
        ),
    }


def write_json(path: Path, diagnosis: Diagnosis, world: World) -> None:
    """Write the report for programs to a file."""
    content = json.dumps(as_json(diagnosis, world), indent=1)
    try:
        publish(content.encode(), path)
    except OSError as failure:
        raise UserError(f"cannot write --json {path}: {failure.strerror}") from None
