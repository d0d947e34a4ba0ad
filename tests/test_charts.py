"""Charts: what is drawn of which numbers, names that try to be more, and their files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from hpcfed.analysis.render.chart_files import image, named
from hpcfed.analysis.render.charts import (
    Axis,
    Drawing,
    Line,
    ScatterPoint,
    Stretch,
    areas,
    bars,
    heatmap,
    histogram,
    lines,
    scatter,
    stripes,
    timeline,
)
from hpcfed.analysis.render.charts.lines import MOST_MARKERS
from hpcfed.analysis.render.page import packed
from hpcfed.analysis.render.sections.section import Section
from tests.runs import mistake

NAN = float("nan")
HOSTILE = "</script><script>alert(1)</script>'\"\\ datum.x[0] \u2028"


def values(drawing: Drawing) -> list[dict[str, Any]]:
    return drawing.spec["data"]["values"]


def labels(drawing: Drawing, mark: str) -> list[str]:
    """What a screen reader says of the marks of a kind, in the file of a drawing."""
    root = ElementTree.fromstring(image(drawing, "svg"))
    found = []
    for node in root.iter():
        if node.get("aria-roledescription") == mark:
            found.append(node.get("aria-label", ""))
    return found


def test_lines_have_their_points_and_leave_out_what_is_unknown() -> None:
    seeds = Line("a", [1, 2, 3], [10.0, NAN, 30.0], [5.0, NAN, NAN], [15.0, NAN, NAN])
    drawn = lines("t", [seeds, Line("b", [1], [7.0])], Axis("x"), Axis("y"))
    assert values(drawn) == [
        {"series": "a", "x": 1, "y": 10, "low": 5, "high": 15},
        {"series": "a", "x": 3, "y": 30},
        {"series": "b", "x": 1, "y": 7},
    ]
    points = labels(drawn, "point")
    assert [one.split("; series")[0] for one in points] == ["x: 1; y: 10", "x: 3; y: 30", "x: 1; y: 7"]  # fmt: skip
    assert len(labels(drawn, "rule mark")) == 1, "one interval"
    logs = lines("t", [Line("a", [1, 2], [0.0, 5.0])], Axis("x"), Axis("y", log=True))
    assert [record["y"] for record in values(logs)] == [5], "0 has no logarithm"


def test_an_interval_far_away_does_not_press_the_points_together() -> None:
    near = Line("a", [1, 2], [10.0, 20.0], [9.0, 19.0], [11.0, 21.0])
    far = Line("a", [1, 2], [10.0, 20.0], [9.0, 19.0], [11.0, 900.0])
    scales = []
    for line in (near, far):
        drawn = lines("t", [line], Axis("x"), Axis("y"))
        scales.append(drawn.spec["layer"][0]["encoding"]["y"]["scale"])
    assert "domain" not in scales[0]
    assert scales[1]["domain"] == [9, 50], "two and a half times the highest point"


@pytest.mark.parametrize(("rounds", "shaped"), [(MOST_MARKERS, True), (60, False)])
def test_many_points_are_found_by_the_mouse_alone(rounds: int, shaped: bool) -> None:
    line = Line("a", list(range(rounds)), [1.0] * rounds)
    points = lines("t", [line], Axis("x"), Axis("y")).spec["layer"][-1]
    assert ("shape" in points["encoding"]) == shaped
    assert (points["mark"].get("opacity") == 0) == (not shaped)


def test_bars_lie_upon_each_other_and_a_segment_keeps_its_colour() -> None:
    segments = {"one": [1.0, 2.0], "none": [0.0, 0.0], "two": [3.0, 0.5]}
    upright = bars("t", ["a", "b"], segments, Axis("s"), "runs")
    drawn = labels(upright, "bar")
    assert drawn[0].startswith("runs: a; s: 1; series: one")
    assert len(drawn) == 4, "none of the segment that is zero everywhere"
    colour = upright.spec["layer"][0]["encoding"]["color"]
    assert colour["scale"]["domain"] == ["one", "none", "two"]
    assert colour["legend"]["values"] == ["one", "two"]
    lying = stripes("t", ["first", "second"], segments, Axis("ms"))
    root = ElementTree.fromstring(image(lying, "svg"))
    assert {"first", "second"} <= {node.text for node in root.iter()}


def test_intervals_end_in_a_cap_or_in_an_arrow() -> None:
    """Three lie within the chart, one goes on beyond it at both ends."""
    points = [10.0, 11.0, 12.0, 13.0]
    low = [9.0, 10.0, 11.0, 0.1]
    high = [11.0, 12.0, 13.0, 900.0]
    drawn = lines(
        "t", [Line("a", [1, 2, 3, 4], points, low, high)], Axis("x"), Axis("y")
    )
    shapes = [layer["mark"].get("shape") for layer in drawn.spec["layer"]]
    assert {"triangle-up", "triangle-down"} <= set(shapes)
    assert len(labels(drawn, "tick")) == 2 * 4, "clipped where they lie outside"
    arrows = {}
    for layer in drawn.spec["layer"]:
        if layer["mark"].get("shape"):
            arrows[layer["mark"]["shape"]] = layer["transform"][-1]["filter"]
    bottom, top = drawn.spec["layer"][0]["encoding"]["y"]["scale"]["domain"]
    assert arrows["triangle-up"] == f"datum.high > {top}" and 13 < top < 900
    assert arrows["triangle-down"] == f"datum.low < {bottom}" and 0.1 < bottom < 9


def test_points_have_intervals_in_both_directions() -> None:
    points = [
        ScatterPoint(1.0, 10.0, "a", x_ends=(0.5, 1.5), y_ends=(9.0, 12.0)),
        ScatterPoint(2.0, 20.0, "b"),
    ]
    drawn = scatter("t", points, Axis("x"), Axis("y"))
    assert values(drawn)[0] | {"x_low": 0.5, "y_high": 12} == values(drawn)[0]
    assert "x_low" not in values(drawn)[1]
    assert len(labels(drawn, "rule mark")) == 2 and len(labels(drawn, "tick")) == 4


def test_every_column_of_areas_is_as_wide_as_the_others() -> None:
    drawn = areas("t", [1, 2, 3], {"a": [5.0, 6.0, 7.0]}, Axis("x"), Axis("y"))
    edges = [record["x"] for record in values(drawn)]
    heights = [record["y"] for record in values(drawn)]
    assert edges == [0.5, 1.5, 2.5, 3.5] and heights == [5, 6, 7, 7]
    across = drawn.spec["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert across == [0.5, 3.5]


def test_a_large_map_is_drawn_in_means() -> None:
    """300 rows and 150 columns become 100 and 75 cells of 3 by 2 each."""
    table = np.arange(300.0)[:, None] + np.zeros(150)
    table[3:6, 2:4] = NAN
    table[0, 0] = NAN
    drawn = heatmap("t", table, Axis("round"), Axis("client"), Axis("v"), first=(1, 0))
    cells = {(one["x"], one["y"]): one["value"] for one in values(drawn)}
    assert len(cells) == 100 * 75 - 1, "an empty cell stays empty"
    assert (2.5, 2.5) not in cells
    assert cells[0.5, -0.5] == pytest.approx((0 + 1 + 1 + 2 + 2) / 5)
    assert cells[2.5, 5.5] == pytest.approx(7), "rows 6, 7 and 8"


def test_a_histogram_counts_all() -> None:
    drawn = histogram("t", [1, 1, 2, 5, NAN], Axis("v"), counted="clients", marks={"mean": 2.25})  # fmt: skip
    assert [one["y"] for one in values(drawn)] == [2, 1, 0, 1]
    assert len(labels(drawn, "rule mark")) == 1


def test_other_kinds_draw_a_mark_for_each_record() -> None:
    points = [
        ScatterPoint(1, 2, "n", "g"),
        ScatterPoint(0, 3, "m", "h"),
        ScatterPoint(3, 3, "o", "h"),
    ]
    cloud = scatter("t", points, Axis("s", log=True), Axis("y"), frontier=[(1, 2), (3, 3)])  # fmt: skip
    assert len(labels(cloud, "point")) == 2, "0 seconds have no logarithm"
    spans = [Stretch("rank 0", 0, 1, "train"), Stretch("rank 1", 1, 4, "wait")]
    assert len(labels(timeline("t", spans, Axis("ms")), "bar")) == 2
    shares = areas("t", [1, 2], {"a": [1, 2], "b": [3, 4]}, Axis("x"), Axis("y"))
    assert len(labels(shares, "area mark")) == 2


def test_names_stay_names() -> None:
    """On the page they end no script; in a file they are text."""
    drawn = lines(HOSTILE, [Line(HOSTILE, [1, 2], [1.0, 2.0]), Line("b", [1], [3.0])], Axis("x"), Axis("y"))  # fmt: skip
    text = packed([drawn])
    assert "<" not in text
    (back,) = json.loads(text)
    assert back["title"] == HOSTILE
    data = back["spec"]["data"]
    assert data["words"]["series"] == [HOSTILE, "b"], "each once"
    assert data["columns"] == {"series": [0, 0, 1], "x": [1, 2, 1], "y": [1, 2, 3]}
    root = ElementTree.fromstring(image(drawn, "svg"))
    assert any((node.text or "").startswith("</script>") for node in root.iter())


def test_names_have_a_colour_of_the_theme() -> None:
    """What Vega-Lite does not find in a style is black, also on a dark page."""
    ideal = Line("ideal", [1, 2], [3.0, 3.0], ideal=True)
    drawn = lines("t", [Line("a", [1, 2], [1.0, 2.0]), ideal], Axis("x"), Axis("y"))
    root = ElementTree.fromstring(image(drawn, "svg"))
    (name,) = (node for node in root.iter() if node.text == "ideal")
    assert name.get("fill") == "#333333"


def test_files_are_as_wide_as_a_column() -> None:
    drawn = lines("t", [Line("a", [1, 2], [1.0, 2.0])], Axis("x"), Axis("y"))
    assert b"/MediaBox [0 0 244.8 " in image(drawn, "pdf"), "3.4 inches of 72 points"
    svg = ElementTree.fromstring(image(drawn, "svg", inches=7))
    assert float(svg.get("width", "0")) == 504
    png = image(drawn, "png")
    assert int.from_bytes(png[16:20]) == 1020, "3.4 inches of 300 dots"


def test_every_chart_has_a_file_of_its_own_name() -> None:
    drawn = lines(
        "Digits, 20 clients: ü", [Line("a", [1], [1.0])], Axis("x"), Axis("y")
    )
    long = replace(drawn, title="../" + 500 * "x")
    sections = [Section("accuracy", "Accuracy", charts=[drawn, drawn, long])]
    names = [name for name, _ in named(sections)]
    assert names[:2] == ["accuracy-digits-20-clients", "accuracy-digits-20-clients-2"]
    assert names[2] == "accuracy-" + 71 * "x"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--format pdf", "--format is for figures; name a folder: --figures DIR"),
        ("--figures there --format gif", "--format gif: choose from pdf, svg, png"),
        ("--figures there --width 0.1", "--width 0.1: from 1 to 20 inches"),
        ("--figures file", "--figures file is a file; name a folder"),
    ],
)
def test_a_mistake_about_figures_is_one_line(
    words: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert expected in mistake(capsys, "report", "runs", *words.split())
