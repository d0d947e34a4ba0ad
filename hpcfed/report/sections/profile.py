"""What `hpcfed profile` has found: where the time goes, what limits it, what to try."""

from collections.abc import Iterator
from math import nan

from hpcfed.record.profiles import Operator, Part, Profile, Session
from hpcfed.report.charts import Axis, Drawing, stripes
from hpcfed.report.sections.section import Section, Table, number

MOST_OPERATORS = 8
"""Operators that a chart names; the others are one more bar."""
ROUNDS = "rounds"
"""The session of clients' rounds; others have the names of the server's networks."""


def profile(found: Profile) -> Section:
    """Make the section of a run that was profiled."""
    section = Section("profile", "Profile")
    longest_first = sorted(found.parts, key=lambda part: -part.seconds)
    section.text += [_sentence(part) for part in longest_first]
    section.tables.append(_ceilings(found))
    section.charts += _operator_charts(found.sessions)
    return section


def _sentence(part: Part) -> str:
    """Return what limits a part, and what to try."""
    text = part.words[:1].upper() + part.words[1:].rstrip(".") + "."
    if part.next:
        text += f" Next: {'; '.join(part.next)}."
    return text


def _ceilings(found: Profile) -> Table:
    rows = []
    for part in found.parts:
        shares = (part.busy, part.compute, part.bandwidth)
        cells = [_cell(share, 100) for share in shares]
        rows.append([part.name, number(part.seconds), _cell(part.warm), *cells])
    columns = (
        "part",
        "seconds",
        "warm",
        "busy, %",
        "of the arithmetic, %",
        "of the bandwidth, at least, %",
    )
    caption = (
        f"beside the measured ceilings of {found.device}; warm: at the pace of the "
        "last rounds or steps, which the shares are of"
    )
    return Table(columns, rows, caption)


def _cell(value: float | None, scale: float = 1) -> str:
    return number(nan if value is None else scale * value)


def _operator_charts(sessions: list[Session]) -> Iterator[Drawing]:
    """Draw the longest operators or kernels of every session."""
    for session in sessions:
        if not session.operators:
            continue
        of = ROUNDS if session.name == ROUNDS else f"steps of the {session.name}"
        title = f"operators in {session.number} {of}"
        names, milliseconds = _longest(session.operators)
        yield stripes(title, names, {"ms": milliseconds}, Axis("ms in all"))


def _longest(operators: list[Operator]) -> tuple[list[str], list[float]]:
    """Return names and milliseconds of the longest, and of all others together."""
    ordered = sorted(operators, key=lambda operator: -operator.seconds)
    names, milliseconds = [], []
    for operator in ordered[:MOST_OPERATORS]:
        calls = f"{operator.calls:,} calls" if operator.calls != 1 else "1 call"
        names.append(f"{operator.name.removeprefix('void ')} ({calls})")
        milliseconds.append(1e3 * operator.seconds)
    others = ordered[MOST_OPERATORS:]
    if others:
        names.append(f"{len(others)} others")
        milliseconds.append(1e3 * sum(operator.seconds for operator in others))
    return names, milliseconds
