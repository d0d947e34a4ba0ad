"""The look of charts: on a light page, on a dark page, and on paper."""

from typing import Any

Theme = dict[str, Any]
"""A Vega-Lite configuration."""

# Okabe and Ito's colours, which colour-blind readers can distinguish, made darker or
# lighter where they would be faint on the page.
ON_LIGHT = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#5b4b9a",
    "#b3263b", "#4d4d4d", "#999999",
)  # fmt: skip
ON_DARK = (
    "#56b4e9", "#ff9248", "#2fd0a0", "#e79ac6", "#f0e442", "#8fb8ff", "#b6a5ff",
    "#ff7b8a", "#d5d5d5", "#8c8c8c",
)  # fmt: skip


SANS = "Helvetica, Arial, 'Liberation Sans', sans-serif"
"""The last font but one comes with the library that writes the files."""


def _theme(
    colours: tuple[str, ...],
    *,
    paper: str,
    ink: str,
    soft: str,
    rule: str,
    size: float,
    font: str = "system-ui, sans-serif",
) -> Theme:
    """Return a theme; `size` is the font size."""
    name = {"color": ink, "fontSize": size, "align": "left", "baseline": "middle"}
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None},
        "range": {"category": list(colours), "heatmap": {"scheme": "viridis"}},
        "axis": {
            "labelColor": soft,
            "titleColor": ink,
            "gridColor": rule,
            "domainColor": soft,
            "tickColor": soft,
            "labelFontSize": size,
            "titleFontSize": size,
            "titleFontWeight": "normal",
            "labelLimit": 140,
            "labelOverlap": True,
        },
        # Vega's default number of ticks is too high for a chart of half a page.
        "axisQuantitative": {"tickCount": 7},
        "legend": {
            "orient": "bottom",
            "labelColor": ink,
            "titleColor": ink,
            "labelFontSize": size,
            "titleFontSize": size,
            "titleFontWeight": "normal",
            "symbolSize": 8 * size,
            "labelLimit": 27 * size,
            "symbolLimit": 60,
            "symbolOpacity": 1,
        },
        "title": {
            "anchor": "start",
            "color": ink,
            "subtitleColor": soft,
            "fontSize": size + 1,
            "subtitleFontSize": size,
        },
        "line": {"strokeWidth": size / 6},
        "bar": {"color": colours[0]},
        "point": {"opacity": 1},
        "rule": {"color": ink},
        "style": {
            # A gap between a histogram's columns, in the page's colour or transparent.
            "bin": {"color": colours[0], "stroke": paper, "strokeWidth": 1},
            "ideal": {"color": soft, "strokeDash": [5, 4], "strokeWidth": 1.5},
            "ideal-name": {
                "color": soft,
                "fontSize": size,
                "align": "right",
                "baseline": "bottom",
                "dy": -4,
            },
            "bar-name": name,
            "point-name": {**name, "dx": 7},
            "point-rim": {**name, "dx": 7, "stroke": paper, "strokeWidth": 3},
        },
    }


LIGHT = _theme(
    ON_LIGHT, paper="#ffffff", ink="#1b1f24", soft="#59636e", rule="#e3e7eb", size=12
)
DARK = _theme(
    ON_DARK, paper="#14181d", ink="#e6e9ed", soft="#a2acb7", rule="#2c343d", size=12
)
PAPER = _theme(
    ON_LIGHT,
    paper="#ffffff",
    ink="#000000",
    soft="#333333",
    rule="#dddddd",
    size=8,
    font=SANS,
) | {"background": "white"}
