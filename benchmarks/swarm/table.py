"""What became of all combinations: a line of JSON for each, and a table of them."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.swarm.drawing import RELATIONS, Case
from benchmarks.swarm.judging import GOOD, Verdict

MOST_REASONS = 20
_NUMBER = re.compile(r"(?<![\w-])[\d.,]+(?:e[-+]?\d+)?(?!\w)")
_PATH = re.compile(r"/\S+")


@dataclass(frozen=True)
class Row:
    """What is kept of a combination."""

    seed: int
    number: int
    relation: str
    method: str
    options: list[str]
    """The names of those that were given."""
    outcome: str
    reason: str
    runs: int

    @classmethod
    def of(cls, seed: int, number: int, case: Case, verdict: Verdict) -> "Row":
        """Return the row of a verdict."""
        given = case.first()
        return cls(
            seed=seed,
            number=number,
            relation=case.relation,
            method=str(given["method"]),
            options=sorted(given),
            outcome=verdict.outcome,
            reason=verdict.reason,
            runs=verdict.runs,
        )

    def append_to(self, path: Path) -> None:
        """Write a line at the end of a file."""
        with path.open("a") as file:
            print(json.dumps(asdict(self)), file=file)


def read(path: Path, seed: int) -> list[Row]:
    """Return the rows of a seed that a file holds."""
    if not path.exists():
        return []
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    return [row for row in rows if row.seed == seed]


def table(rows: Sequence[Row]) -> str:
    """Return outcomes by comparison, and the reasons of refusals."""
    counts = Counter((row.outcome, row.relation) for row in rows)
    outcomes = [*GOOD, *sorted({row.outcome for row in rows} - {*GOOD})]
    lines = [_line("outcome", [*RELATIONS, "all"])]
    for outcome in outcomes:
        numbers = [counts[outcome, relation] for relation in RELATIONS]
        lines.append(_line(outcome, [*numbers, sum(numbers)]))
    of_all = Counter(row.relation for row in rows)
    totals = [of_all[relation] for relation in RELATIONS]
    lines.append(_line("all", [*totals, sum(totals)]))
    completed = [row for row in rows if row.outcome == "completed"]
    known = {row.method for row in completed}
    options = {name for row in rows for name in row.options}
    lines.append(
        f"{sum(row.runs for row in rows)} runs; {len(options)} options were given; "
        f"{len(known)} methods completed"
    )
    refused = [row for row in rows if row.outcome == "refused"]
    reasons = Counter(pattern(row.reason) for row in refused)
    lines.append(f"refused in one line, for {len(reasons)} reasons:")
    for reason, count in reasons.most_common(MOST_REASONS):
        lines.append(f"{count:5}  {reason}")
    return "\n".join(lines)


def pattern(reason: str) -> str:
    """Return a refusal without its numbers and paths."""
    return _NUMBER.sub("N", _PATH.sub("PATH", reason))[:110]


def _line(name: str, cells: Sequence[object]) -> str:
    return f"{name:28}" + "".join(f"{cell!s:>9}" for cell in cells)
