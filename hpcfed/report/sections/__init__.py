"""What the page shows, section by section."""

from collections.abc import Sequence

from hpcfed.report.collect import Found
from hpcfed.report.comparison import Comparison
from hpcfed.report.costmodel import fit_groups
from hpcfed.report.groups import Group
from hpcfed.report.scaling import scalings
from hpcfed.report.sections import (
    accuracy,
    attacks,
    comparison,
    costs,
    model,
    origin,
    overview,
    server,
    size,
    target,
)
from hpcfed.report.sections.section import Section


def sections(
    every: Sequence[Group], found: Found, compared: Comparison | None = None
) -> list[Section]:
    """Make all sections, in the page's order. One that has nothing to show says why."""
    first = [] if compared is None else [comparison.comparison(compared)]
    return [
        *first,
        overview.overview(every, found),
        accuracy.accuracy(every),
        target.target(every),
        size.ranks(scalings(every)),
        size.clients(every),
        costs.phases(every),
        costs.memory(every),
        costs.sent(every),
        server.server(every),
        attacks.attacks(every),
        model.cost_model(fit_groups(every)),
        origin.environment(every),
        origin.reproduce(every, found),
    ]
