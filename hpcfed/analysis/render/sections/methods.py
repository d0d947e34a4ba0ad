"""Methods: who is best under which condition, and whether the seeds tell."""

from collections.abc import Sequence

from hpcfed.analysis.contests import Contest, contests
from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.swept import swept
from hpcfed.analysis.verdicts import condition_text, entrant_text
from hpcfed.words import interval

COLUMNS = ("condition", "best", "score", "second", "its score", "lead", "verdict")


def methods(every: Sequence[Group]) -> Section:
    section = Section("methods", "Which method wins where")
    found = contests(every, swept(every))
    if not found:
        return section
    judged = sorted({f"{one.judged.axis} ({one.judged.whose})" for one in found})
    section.text.append(
        f"Methods under equal conditions, judged by their last {', '.join(judged)}. A "
        "method wins where the 95 % intervals of its leads over all others are above 0: "
        "paired where seeds are the same, otherwise by Welch's t. Of twenty conditions "
        "without any difference, one would look decided."
    )
    section.tables.append(Table(COLUMNS, [_row(one) for one in found]))
    return section


def _row(one: Contest) -> list[str]:
    best, second = one.ranking[:2]
    return [
        condition_text(one.condition),
        entrant_text(one, best),
        interval(one.judged.estimate(best)),
        entrant_text(one, second),
        interval(one.judged.estimate(second)),
        interval(one.leads[0]),
        _verdict(one),
    ]


def _verdict(one: Contest) -> str:
    if one.decided:
        return "wins"
    if one.seeds < 2:
        return "one seed cannot tell"
    return f"not told apart by {one.seeds} seeds"
