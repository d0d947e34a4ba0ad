"""The page as HTML: sections with their charts, in one self-contained file."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpcfed.analysis.render.charts.drawing import Drawing, Record
from hpcfed.analysis.render.charts.themes import DARK, LIGHT
from hpcfed.analysis.render.sections.section import Section
from hpcfed.runtime import cache
from hpcfed.version import __version__


@dataclass(frozen=True)
class Content:
    """The content of a page, before it is rendered."""

    title: str
    lead: Sequence[str]
    """Sentences under the title: what a reader should know first."""
    warnings: Sequence[str]
    sections: Sequence[Section]


def page(content: Content) -> str:
    """Return the page as HTML."""
    environment = Environment(
        loader=PackageLoader("hpcfed.analysis.render", "."),
        autoescape=True,  # titles and folder names may be untrusted
        undefined=StrictUndefined,  # a typo in the template is an error, not a gap
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


# Charts in the page: their descriptions, and the library that draws them.

SNIPPET = "Object.assign(window, { vega, vegaLite, vegaEmbed });"
"""Gives the page's own script the names by which it calls the library."""


def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script.

    Bundling takes seconds, so the result is kept in the user's cache.
    """
    name = f"vega-{version('vl-convert-python')}.js"
    kept = cache.read(name)
    if kept is not None:
        return kept.decode()
    import vl_convert

    script: str = vl_convert.javascript_bundle(SNIPPET)
    cache.write(name, script.encode())
    return script


def packed(drawings: Sequence[Drawing]) -> str:
    """Return all drawings as JSON that is safe inside a script element."""
    every = []
    for drawing in drawings:
        spec = _pack(drawing.spec)
        every.append({"title": drawing.title, "dense": drawing.dense, "spec": spec})
    text = json.dumps(every, allow_nan=False, separators=(",", ":"))
    # A name such as `</script>` must not end the script that contains it.
    return text.replace("<", "\\u003c")


def _pack(part: Any) -> Any:
    """Replace each list of records in a description by its columns."""
    if isinstance(part, dict):
        packed = {key: _pack(value) for key, value in part.items()}
        if isinstance(part.get("data"), dict) and "values" in part["data"]:
            packed["data"] = _columns(part["data"]["values"])
        return packed
    if isinstance(part, list):
        return [_pack(value) for value in part]
    return part


def _columns(records: Sequence[Record]) -> dict[str, Any]:
    """Return columns by field. Words are stored once in `words`, and as their numbers
    in the column. page.js turns them back into records.
    """
    fields: dict[str, None] = {}
    for record in records:
        fields |= dict.fromkeys(record)
    columns: dict[str, list[Any]] = {}
    words: dict[str, list[str]] = {}
    for field in fields:
        values = [record.get(field) for record in records]
        if any(isinstance(value, str) for value in values):
            words[field] = list(dict.fromkeys(map(str, values)))
            number = {word: place for place, word in enumerate(words[field])}
            values = [number[str(value)] for value in values]
        columns[field] = values
    return {"columns": columns, "words": words}
