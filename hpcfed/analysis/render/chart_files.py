"""`hpcfed report --figures`: every chart of the page as a file for a paper, as wide as a
column, in its font, with lines that differ in more than their colours.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from re import sub
from typing import Any

from hpcfed.analysis.render.charts.drawing import Drawing, Spec
from hpcfed.analysis.render.charts.themes import PAPER
from hpcfed.analysis.render.sections.section import Section
from hpcfed.errors import UserError
from hpcfed.results.folder import check_export
from hpcfed.results.publish import check_folder

FORMATS = ("pdf", "svg", "png")
COLUMN = 3.4
"""Inches; a column of most conferences."""
POINTS = 72
"""Points per inch; Vega's pixels become points."""
PNG_DPI = 300
PAGE_WIDTH = 480
"""Width in pixels that the heights of drawings were chosen for."""
LENGTHS = ("size", "height", "yOffset", "dy")
"""Properties of a mark that are in the page's pixels."""
DASHES = [[1, 0], [5, 2], [2, 2], [7, 2, 2, 2], [1, 3], [9, 3], [4, 1, 1, 1], [3, 4]]
LONGEST_NAME = 80
"""Characters, without the number and the suffix."""
WIDTHS = (1.0, 20.0)
"""Allowed widths of a figure, in inches."""


def check_chart_files(
    folder: Path | None, kinds: str | None, inches: float | None
) -> None:
    """Refuse, before any run is read, what cannot be written."""
    if folder is None:
        for option, value in (("--format", kinds), ("--width", inches)):
            if value is not None:
                raise UserError(
                    f"{option} is for figures; name a folder: --figures DIR"
                )
        return
    formats(kinds)
    if inches is not None and not WIDTHS[0] <= inches <= WIDTHS[1]:
        raise UserError(f"--width {inches:g}: from 1 to 20 inches")
    check_folder("--figures", folder)
    # Whatever the files will be called.
    check_export("--figures", folder / "chart")


def formats(kinds: str | None) -> list[str]:
    """Return the formats in `pdf,png`; PDF if none is named."""
    chosen = [] if kinds is None else [kind.strip() for kind in kinds.split(",")]
    for kind in chosen:
        if kind not in FORMATS:
            raise UserError(f"--format {kind}: choose from {', '.join(FORMATS)}")
    return list(dict.fromkeys(chosen)) or ["pdf"]


def chart_files(
    sections: Sequence[Section], folder: Path, kinds: str | None, inches: float | None
) -> Iterator[tuple[Path, bytes]]:
    """Yield the path and content of every file."""
    for name, drawing in named(sections):
        for kind in formats(kinds):
            path = folder / f"{name}.{kind}"
            check_export("--figures", path)
            yield path, image(drawing, kind, inches=inches or COLUMN)


def named(sections: Sequence[Section]) -> Iterator[tuple[str, Drawing]]:
    """Yield each drawing with a name such as `accuracy-digits-20-clients`."""
    seen: dict[str, int] = {}
    for section in sections:
        for drawing in section.charts:
            # Characters that any system and any \includegraphics accepts.
            name = sub(r"[^a-z0-9]+", "-", drawing.title.lower()).strip("-")
            if not name.startswith(section.id):
                name = f"{section.id}-{name}"
            name = name[:LONGEST_NAME].strip("-")
            seen[name] = seen.get(name, 0) + 1
            # Charts with many lines are split into several with the same title.
            number = f"-{seen[name]}" if seen[name] > 1 else ""
            yield name + number, drawing


def image(
    drawing: Drawing,
    kind: str,
    *,
    inches: float = COLUMN,
    title: str = "",
    notes: Sequence[str] = (),
) -> bytes:
    """Return a drawing as a file's content, with a title and notes above it, if any."""
    import vl_convert

    spec = _still(drawing.spec, POINTS * inches)
    if title:
        spec["title"] = {"text": title, "subtitle": list(notes)}
    text = json.dumps(spec)
    if kind == "svg":
        drawn: str = vl_convert.vegalite_to_svg(text, config=PAPER)
        return drawn.encode()
    if kind == "pdf":
        return bytes(vl_convert.vegalite_to_pdf(text, config=PAPER))
    return bytes(vl_convert.vegalite_to_png(text, config=PAPER, ppi=PNG_DPI))


def _still(spec: Spec, width: float) -> Spec:
    """Return a description with its size, marks that fit it, and dashes for lines
    without markers.
    """
    smaller = width / PAGE_WIDTH
    layers = []
    for layer in spec["layer"]:
        mark = dict(layer["mark"])
        for name in LENGTHS:
            if name in mark:
                mark[name] *= min(1, smaller)
        layers.append({**layer, "mark": mark})
    if not any("shape" in layer["encoding"] for layer in layers):
        layers = [_dashed(layer) for layer in layers]
    return {
        **spec,
        "width": width,
        "height": max(60, spec["height"] * smaller),
        "autosize": {"type": "fit-x", "contains": "padding"},
        "layer": layers,
    }


def _dashed(layer: Spec) -> Spec:
    """Let lines of several series differ in dashes as well as in colour, also in the
    legend.
    """
    encoding: dict[str, Any] = layer["encoding"]
    colour = encoding.get("color")
    if layer["mark"]["type"] != "line" or colour is None or colour["legend"] is None:
        return layer
    legend = {**colour["legend"], "symbolType": "stroke", "symbolSize": 250}
    coloured = {**colour, "legend": legend}
    dashes = {**coloured, "scale": {**colour["scale"], "range": DASHES}}
    own = {"color": coloured, "strokeDash": dashes}
    return {**layer, "encoding": encoding | own}
