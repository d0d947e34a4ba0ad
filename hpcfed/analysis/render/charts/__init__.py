"""Charts of the report, described once: the page draws them on screen,
`chart_files` writes them for a paper.

Every function returns a `Drawing`. Its description is Vega-Lite's own JSON, because
building it through Altair's classes took 0.2 s per chart and 1.6 s to load. Names from
runs are values of its data, never field names or part of an expression.
"""

from hpcfed.analysis.render.charts.bars import (
    Segments,
    Stretch,
    bars,
    heatmap,
    histogram,
    stripes,
    timeline,
)
from hpcfed.analysis.render.charts.drawing import Axis, Drawing, spread
from hpcfed.analysis.render.charts.lines import Line, areas, lines
from hpcfed.analysis.render.charts.points import Mark, ScatterPoint, rows, scatter

__all__ = [
    "Axis", "Drawing", "Line", "Mark", "ScatterPoint", "Segments", "Stretch", "areas",
    "bars", "heatmap", "histogram", "lines", "rows", "scatter", "spread", "stripes",
    "timeline",
]  # fmt: skip
