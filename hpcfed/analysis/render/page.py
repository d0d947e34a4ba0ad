"""The page as HTML: sections with their charts, in one file that needs nothing beside it."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpcfed.analysis.render.charts.library import library
from hpcfed.analysis.render.charts.packing import packed
from hpcfed.analysis.render.charts.themes import DARK, LIGHT
from hpcfed.analysis.render.sections.section import Section
from hpcfed.version import __version__


@dataclass(frozen=True)
class Content:
    """What a page holds, before it is one."""

    title: str
    lead: Sequence[str]
    """Sentences under the title: what a reader should know first."""
    warnings: Sequence[str]
    sections: Sequence[Section]


def page(content: Content) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=PackageLoader("hpcfed.analysis.render", "."),
        autoescape=True,  # titles and names of folders may come from others
        undefined=StrictUndefined,  # a slip in the template is an error, not a gap
        trim_blocks=True,
    )
    drawings = [drawing for section in content.sections for drawing in section.charts]
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return environment.get_template("page.html").render(
        content=content,
        drawings=packed(drawings),
        themes=json.dumps({"light": LIGHT, "dark": DARK}),
        library=library() if drawings else "",
        footer=f"hpcfed {__version__}, {now}",
    )
