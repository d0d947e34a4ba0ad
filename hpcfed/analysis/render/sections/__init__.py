"""What a study's page shows, section by section."""

from collections.abc import Sequence

from hpcfed.analysis.collect import Found
from hpcfed.analysis.comparison.comparison import Comparison
from hpcfed.analysis.costmodel import fit_groups
from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.sections import (
    accuracy,
    comparison,
    costs,
    origin,
    overview,
    scaling,
    server,
    spending,
    tradeoffs,
)
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.swept import swept


def sections(
    every: Sequence[Group], found: Found, compared: Comparison | None = None
) -> list[Section]:
    """Make the sections of a study, in the page's order, without empty ones."""
    varied = swept(every)
    # A comparison of two points already has their curves.
    drawn = compared is None or len(compared.points) > 1
    learnt = [
        accuracy.accuracy(every, varied, drawn=drawn),
        spending.clock(every, varied),
        tradeoffs.target(every),
        tradeoffs.privacy(every),
        spending.compression(every, varied),
    ]
    first = overview.overview(every, found)
    if compared is not None:
        made = [comparison.comparison(compared), first, *learnt]
    else:
        # Left out of a comparison, because they would let its two sides compete.
        made = [
            overview.verdicts(every, found.studies),
            first,
            overview.methods(every, varied),
            overview.options(every, varied),
            *learnt,
            tradeoffs.pareto(every, varied),
        ]
    made += [
        scaling.ranks(every, varied),
        scaling.clients(every, varied),
        costs.phases(every, varied),
        costs.memory(every, varied),
        costs.sent(every),
        server.server(every, varied, found.studies),
        overview.attacks(every),
        scaling.cost_model(fit_groups(every)),
        origin.noise(every),
        origin.environment(every),
        origin.reproduce(every, found),
    ]
    return [section for section in made if not section.empty]
