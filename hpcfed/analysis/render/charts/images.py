"""Charts as files for a paper: as wide as a column, in its font, with lines that differ
in more than their colours.
"""

import json
from collections.abc import Sequence
from typing import Any

from hpcfed.analysis.render.charts.drawing import Drawing, Spec
from hpcfed.analysis.render.charts.themes import PAPER

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
    """Return a description with its size, and with dashes for lines without markers."""
    smaller = width / PAGE_WIDTH
    layers = [_smaller(layer, smaller) for layer in spec["layer"]]
    if not any("shape" in layer["encoding"] for layer in layers):
        layers = [_dashed(layer) for layer in layers]
    return {
        **spec,
        "width": width,
        "height": max(60, spec["height"] * smaller),
        "autosize": {"type": "fit-x", "contains": "padding"},
        "layer": layers,
    }


def _smaller(layer: Spec, factor: float) -> Spec:
    """Return a layer whose marks fit the smaller drawing."""
    mark = layer["mark"]
    scaled = {}
    for name in LENGTHS:
        if name in mark:
            scaled[name] = min(1, factor) * mark[name]
    return {**layer, "mark": {**mark, **scaled}}


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
