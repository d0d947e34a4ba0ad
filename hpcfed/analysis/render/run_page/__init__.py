"""The page of one run, or of its seeds: the results, and where its time went.

Its tables are those of `hpcfed show`; the page adds charts. Empty sections are left
out.
"""

from hpcfed.analysis.collect import Found
from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.page import Content
from hpcfed.analysis.render.run_page import clients, costs, learning
from hpcfed.analysis.render.run_page.profile import operators, profile
from hpcfed.analysis.render.run_page.verdict import verdict
from hpcfed.analysis.render.sections import origin
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.render.show import of_first
from hpcfed.analysis.run_findings import Findings, RunFiles, read_files, run_findings
from hpcfed.analysis.run_findings.headline import status, title
from hpcfed.errors import UserError
from hpcfed.results.profiles import read_profile


def is_one_run(every: list[Group], found: Found) -> bool:
    """Tell whether a report is about a single run, or seeds that advanced together."""
    return not found.studies and len(every) == 1 and len(every[0].processes) == 1


def run_content(group: Group, found: Found) -> Content:
    """Return the content of a run's page."""
    first = group.first
    files = read_files(first)
    problems = [*found.unread, *([files.problem] if files.problem else [])]
    warnings = [f"left out: {line}" for line in problems]
    if first.status != "complete":
        warnings.append(status(first))
    made = []
    try:
        profiled = read_profile(first.folder)
        # Users who profiled a run want to know first where its time went.
        if profiled is not None:
            made += [profile(profiled), operators(profiled)]
    except UserError as error:
        warnings.append(f"left out: {error}")
    made += _sections(group, files, run_findings(group.seeds, files))
    shown = [section for section in made if section.charts or section.tables]
    shown += [origin.environment([group]), origin.reproduce([group], found)]
    name = title(first)
    lead = verdict(group)
    if len(group.seeds) > 1:
        name += f", {len(group.seeds)} seeds"
        lead.append(of_first(group.seeds))
    return Content(name, lead, warnings, shown)


def _sections(group: Group, files: RunFiles, found: Findings) -> list[Section]:
    """Return charts with the findings that belong to them, in the page's order."""
    every = [
        learning.learning(group),
        learning.virtual_time(group),
        learning.privacy(group),
        clients.accuracy(group),
        clients.classes(files.details),
        costs.timing(group.first),
        costs.server(group.first, files.details),
        clients.latents(files.details),
        costs.traffic_and_memory(group.first),
    ]
    for section in every:
        section.tables += found.get(section.id, ())
    return every
