"""Verdicts: what the study says, before the figures that say it."""

from collections.abc import Sequence

from hpcfed.analysis.groups import Group
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.verdicts import verdicts as answered


def verdicts(every: Sequence[Group]) -> Section:
    section = Section("verdicts", "Verdicts")
    section.verdicts += answered(every)
    section.text.append("Brackets hold 95 % confidence.")
    return section
