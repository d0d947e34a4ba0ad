"""What became of all combinations, as a table."""

import re
from collections import Counter
from collections.abc import Sequence

from benchmarks.swarm.drawing import RELATIONS, Case
from benchmarks.swarm.judging import GOOD, Verdict

MOST_REASONS = 30
_NUMBER = re.compile(r"(?<![\w-])[\d.,]+(?:e[-+]?\d+)?(?!\w)")
_PATH = re.compile(r"/\S+")


def table(found: Sequence[tuple[Case, Verdict]], runs: int) -> str:
    """Return outcomes by comparison, and the reasons of refusals."""
    counts = Counter((verdict.outcome, case.relation) for case, verdict in found)
    outcomes = [*GOOD, *sorted({name for name, _ in counts} - {*GOOD})]
    lines = [_line("outcome", [*RELATIONS, "all"])]
    for outcome in outcomes:
        numbers = [counts[outcome, relation] for relation in RELATIONS]
        lines.append(_line(outcome, [*numbers, sum(numbers)]))
    totals = [
        sum(counts[outcome, relation] for outcome in outcomes) for relation in RELATIONS
    ]
    lines.append(_line("all", [*totals, sum(totals)]))
    lines.append(f"{runs} runs")
    methods = Counter(
        str(case.first()["method"])
        for case, verdict in found
        if verdict.outcome == "completed"
    )
    least = min(methods.items(), key=lambda item: item[1], default=("none", 0))
    lines.append(
        f"{len(methods)} methods completed, {least[0]} the fewest times: {least[1]}"
    )
    options = {name for case, verdict in found if verdict.good for name in case.first()}
    lines.append(f"{len(options)} options were given")
    reasons = Counter(
        pattern(verdict.reason) for _, verdict in found if verdict.outcome == "refused"
    )
    lines.append(f"\nrefused in one line, {len(reasons)} reasons:")
    for reason, count in reasons.most_common(MOST_REASONS):
        lines.append(f"{count:5}  {reason}")
    return "\n".join(lines)


def pattern(reason: str) -> str:
    """Return a refusal without its numbers and paths."""
    return _NUMBER.sub("N", _PATH.sub("PATH", reason))[:110]


def _line(name: str, cells: Sequence[object]) -> str:
    return f"{name:28}" + "".join(f"{cell!s:>9}" for cell in cells)
