"""The page of one run, or of the seeds of one: what came of it, and where its time went.

A section that has nothing to show is not there.
"""

from hpcfed.analysis.collect import Found
from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.page import Content
from hpcfed.analysis.render.run_page import (
    clients,
    costs,
    learning,
    server,
    timing,
    way,
)
from hpcfed.analysis.render.run_page.verdict import verdict
from hpcfed.analysis.render.run_page.way import Times
from hpcfed.analysis.render.sections import origin
from hpcfed.analysis.render.sections.profile import operators, profile
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.render.show import status, title
from hpcfed.errors import UserError
from hpcfed.results.clock_table import read_clock
from hpcfed.results.details import RunDetails, read_details
from hpcfed.results.profiles import Profile, read_profile


def is_one_run(every: list[Group], found: Found) -> bool:
    """Tell whether a report is about a single run, or seeds that advanced together."""
    return not found.studies and len(every) == 1 and len(every[0].processes) == 1


def run_content(group: Group, found: Found) -> Content:
    """Return what the page of a run holds."""
    warnings = [f"left out: {line}" for line in found.unread]
    details, profiled = RunDetails.nothing(), None
    times: Times = {}
    try:
        details = read_details(group.first.folder)
        profiled = read_profile(group.first.folder)
        if group.first.has_clock:
            times = read_clock(group.first.folder, group.first.rounds_done)
    except UserError as error:
        warnings.append(str(error))
    if group.first.status != "complete":
        warnings.append(status(group.first))
    made = _sections(group, details, profiled, times)
    made.append(origin.environment([group]))
    made.append(origin.reproduce([group], found))
    name = title(group.first)
    if len(group.seeds) > 1:
        name += f", {len(group.seeds)} seeds"
    return Content(name, verdict(group), warnings, made)


def _sections(
    group: Group, details: RunDetails, profiled: Profile | None, times: Times
) -> list[Section]:
    """Return the sections that have something to show, in the page's order."""
    # Who has profiled a run asks where its time went first.
    first = () if profiled is None else (profile(profiled), operators(profiled))
    every = (
        *first,
        learning.learning(group),
        way.virtual_time(group, times),
        way.privacy(group),
        clients.accuracy(group),
        clients.classes(details),
        timing.timing(group),
        server.server(group, details),
        server.latents(details),
        costs.traffic(group),
        costs.memory(group),
    )
    return [section for section in every if section.charts or section.tables]
