"""What the page shows, section by section."""

from collections.abc import Sequence

from hpcfed.analysis.collect import Found
from hpcfed.analysis.comparison import Comparison
from hpcfed.analysis.costmodel import fit_groups
from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.sections import (
    accuracy,
    attacks,
    clock,
    comparison,
    compression,
    costs,
    methods,
    model,
    noise,
    options,
    origin,
    overview,
    pareto,
    privacy,
    server,
    size,
    target,
    verdicts,
)
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.swept import swept


def sections(
    every: Sequence[Group], found: Found, compared: Comparison | None = None
) -> list[Section]:
    """Make the sections of a study, in the page's order, without those that have
    nothing to show.
    """
    options_swept = swept(every)
    first = [overview.overview(every, found)]
    if compared is not None:
        first.insert(0, comparison.comparison(compared))
    else:
        # Beside a comparison they, and frontiers, would let its two sides compete.
        first.insert(0, verdicts.verdicts(every))
        first += [methods.methods(every), options.options(every)]
    made = [
        *first,
        # A comparison of two points has their curves already.
        accuracy.accuracy(
            every,
            options_swept,
            drawn=compared is None or len(compared.points) > 1,
        ),
        clock.clock(every, options_swept),
        target.target(every),
        privacy.privacy(every),
        compression.compression(every, options_swept),
        *([pareto.pareto(every)] if compared is None else []),
        size.ranks(every, options_swept),
        size.clients(every, options_swept),
        costs.phases(every, options_swept),
        costs.memory(every, options_swept),
        costs.sent(every),
        server.server(every, options_swept),
        attacks.attacks(every),
        model.cost_model(fit_groups(every)),
        noise.noise(every),
        origin.environment(every),
        origin.reproduce(every, found),
    ]
    return [section for section in made if not section.empty]
