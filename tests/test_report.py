"""Figures computed by hand, a cost model with known coefficients, and the page made from real runs."""

import csv
import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from math import exp, isnan, log, sqrt
from pathlib import Path

import numpy as np
import pytest

from hpcfed import cli
from hpcfed.study.collect import Group, Sample, find, groups, scalings, slope
from hpcfed.study.costmodel import CostModel, Measured, fit, hold_out
from hpcfed.study.plots import Axis, Line, bars, chart
from hpcfed.study.statistics import Estimate, of_rounds, of_runs, of_seeds, ratio
from tests.conftest import Finished
from tests.test_cli import mistake

SECTIONS = (
    "overview", "accuracy", "target", "scaling", "clients", "phases", "memory", "bytes", "server", "attacks", "model",
    "environment", "reproduce",
)  # fmt: skip
VOID = {"meta", "path", "rect", "br"}
T_OF_TWO, T_OF_THREE = 12.7062, 4.30265
"""Student's t for 95 % of two and of three values."""


def test_runs_by_student_on_logarithms() -> None:
    found = of_runs([2.0, 8.0])
    assert found.centre == pytest.approx(4.0)
    half = T_OF_TWO * (log(8) - log(2)) / sqrt(2) / sqrt(2)  # the deviation of two values is their distance by √2
    assert found.low == pytest.approx(4 * exp(-half), rel=1e-4)
    assert found.high == pytest.approx(4 * exp(half), rel=1e-4)
    alone = of_runs([3.0])
    assert alone.centre == pytest.approx(3.0) and not alone.bounded


def test_rounds_between_order_statistics() -> None:
    """Of six, smallest and largest hold the median with 1 − 2/64; of nine, the second from each end (1 − 20/512)."""
    assert of_rounds([6, 1, 5, 2, 4, 3]) == Estimate(3.5, 1, 6)
    assert of_rounds([9, 1, 8, 2, 7, 3, 6, 4, 5]) == Estimate(5, 2, 8)
    five = of_rounds([1, 2, 3, 4, 5])
    assert five.centre == 3 and not five.bounded, "1 − 2/32 is below 95 %"


def test_seeds_by_student_within_limits() -> None:
    found = of_seeds([0.5, 0.6, 0.7], most=1)
    assert found.centre == pytest.approx(0.6)
    assert found.high - 0.6 == pytest.approx(T_OF_THREE * 0.1 / sqrt(3), rel=1e-4)
    assert of_seeds([0.9, 1.0], most=1).high == 1.0
    assert of_seeds([0.0, 0.1], most=1).low == 0.0


def test_a_ratio_adds_distances_as_squares() -> None:
    found = ratio(Estimate(8, 4, 16), Estimate(2, 1, 4))
    assert found.centre == 4
    assert found.low == pytest.approx(4 * exp(-sqrt(2) * log(2)))
    assert found.high == pytest.approx(4 * exp(sqrt(2) * log(2)))
    skewed = ratio(Estimate(8, 4, 8), Estimate(2, 2, 2))
    assert (skewed.low, skewed.high) == (pytest.approx(2), pytest.approx(4)), "each end has its own distance"
    assert isnan(ratio(Estimate(8), Estimate(2, 1, 4)).low)


class Timed(Group):
    """A group with times as given."""

    def __init__(self, clients: int, ranks: int, seconds: Estimate) -> None:
        object.__setattr__(self, "options", {"clients": clients, "ranks": ranks})
        object.__setattr__(self, "samples", ())
        object.__setattr__(self, "label", "x")
        self.__dict__["seconds"] = seconds


def test_speed_up_and_efficiency() -> None:
    strong, weak = scalings([
        Timed(8, 2, Estimate(10.0, 10.0, 10.0)), Timed(8, 8, Estimate(4.0, 2.0, 8.0)), Timed(32, 8, Estimate(12.5)),
    ])  # fmt: skip
    assert (strong.kind, strong.ranks, strong.ideal) == ("strong", [2, 8], [1, 4])
    assert strong.speedup[0] == Estimate(1, 1, 1)
    assert strong.speedup[1].centre == pytest.approx(2.5)
    assert (strong.speedup[1].low, strong.speedup[1].high) == (pytest.approx(1.25), pytest.approx(5.0))
    assert strong.efficiency[1].centre == pytest.approx(2.5 / 4)
    assert (strong.efficiency[1].low, strong.efficiency[1].high) == (pytest.approx(1.25 / 4), pytest.approx(5 / 4))
    assert (weak.kind, weak.ranks) == ("weak", [2, 8])
    assert weak.speedup[1].centre == pytest.approx(4 * 10 / 12.5), "four times the clients in 1.25 times the time"
    assert weak.efficiency[1].centre == pytest.approx(0.8)


def test_the_power_of_clients() -> None:
    assert slope([10, 100, 1000], [2, 20, 200]) == pytest.approx(1)
    assert slope([10, 1000], [5, 5]) == pytest.approx(0)
    assert isnan(slope([10, 10], [1, 2]))


def known(clients: float, ranks: int, columns: float) -> Measured:
    seconds = 0.01 + 0.002 * clients / ranks + 0.05 * clients / ranks * columns / 1e6 + 0.004 * np.log2(ranks)
    return Measured(clients, ranks, columns, float(seconds))


def test_the_cost_model_recovers_known_coefficients() -> None:
    points = [known(c, r, d) for c in (10, 100, 1000) for r in (1, 2, 4) for d in (4e3, 1e5)]
    model = fit(points)
    assert model is not None
    expected = [0.01, 0.002, 0.05, 0.004, 0.0]
    np.testing.assert_allclose(list(model.coefficients.values()), expected, rtol=1e-6, atol=1e-9)
    assert model.error < 1e-9 and model.left_out_error < 1e-6
    assert model(known(2000, 64, 1e5)) == pytest.approx(known(2000, 64, 1e5).seconds), "on more ranks than measured"


def test_the_cost_model_tells_steps_from_clients() -> None:
    """A data set that is shared out among more clients gives each fewer steps: the time falls, as it should."""
    points = []
    for clients in (10, 30, 100):
        for ranks in (1, 2):
            steps = 1200 / clients
            seconds = 0.005 + 0.0003 * steps + 0.00001 * steps * clients / ranks
            points.append(Measured(clients, ranks, 1e4, seconds, steps))
    model = fit(points)
    assert model is not None and model.error < 1e-6
    np.testing.assert_allclose(list(model.coefficients.values())[:3], [0.005, 0.0003, 0.00001], rtol=1e-4)


def test_the_cost_model_is_checked_on_a_point_it_has_not_seen() -> None:
    points = [known(c, r, 1e4) for c in (10, 100) for r in (1, 2, 4)]
    slow = Measured(100, 8, 1e4, 2 * known(100, 8, 1e4).seconds)
    checked = hold_out([slow, *points])
    assert checked is not None and checked.point is slow
    assert checked.error == pytest.approx(-0.5, abs=1e-6), "the slow point has not taught the model"


def test_two_points_make_no_cost_model() -> None:
    assert fit([known(10, 1, 1e4), known(20, 1, 1e4)]) is None
    assert hold_out([known(10, 1, 1e4), known(20, 1, 1e4), known(40, 1, 1e4)]) is None
    assert isinstance(fit([known(10, 1, 1e4), known(20, 1, 1e4), known(40, 1, 1e4)]), CostModel)


class Nesting(HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(html: str) -> Nesting:
    parser = Nesting()
    parser.feed(html)
    parser.close()
    assert parser.faults == [] and parser.open == []
    return parser


def test_the_check_of_nesting_can_fail() -> None:
    with pytest.raises(AssertionError):
        parsed("<p><b>x</p></b>")
    with pytest.raises(AssertionError):
        parsed("<p>x")


@pytest.fixture(scope="module")
def reported(tiny_study: tuple[Path, Finished], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page and the exports of the tiny study, of two stacked seeds with attackers, and of a run with a server."""
    folder = tmp_path_factory.mktemp("report")
    quick = ["--clients", "6", "--model", "mlp", "--epochs", "1", "--rounds", "3", "--out"]
    attack = ["--attack", "sign-flip", "--aggregation", "median", "--seeds", "0,1"]
    server = ["--method", "pfedgpa", "--server", "small", "--bank-rounds", "2", "--server-engine", "torch"]
    server += ["--autoencoder-samples", "200", "--denoiser-samples", "200", "--server-batch", "20"]
    cli.main(["run", *attack, *quick, str(folder / "runs/attacked")])
    cli.main(["run", *server, *quick, str(folder / "runs/server")])
    words = ["--out", "page.html", "--csv", "rounds.csv", "--json", "figures.json", "--extrap", "extrap.jsonl"]
    exports = [str(folder / word) if not word.startswith("--") else word for word in words]
    cli.main(["report", str(tiny_study[0] / "out"), str(folder / "runs"), *exports])
    return folder


def test_the_page_is_whole(reported: Path) -> None:
    html = (reported / "page.html").read_text()
    page = parsed(html)
    assert tuple(page.ids) == SECTIONS
    targets = [value for name, value in page.attributes if name == "href" and value]
    assert targets == [f"#{name}" for name in SECTIONS], "links stay on the page"
    assert "src" not in dict(page.attributes) and "<script" not in html and "url(" not in html, "nothing from outside"
    assert "<tiny>" not in html and "a &lt;tiny&gt; study" in html, "names are escaped"
    assert "prefers-color-scheme: dark" in html
    words = " ".join(page.text)
    for expected in (
        "ms per round", "parallel efficiency, %", "speed-up, times", "peak memory of a rank, MiB", "accuracy, %",
        "seconds of learning", "autoencoder", "sign-flip", "ideal", "MiB sent", "server's share of the run, %",
        "per step of a client of a rank", "mean over points, each predicted by a fit of the others",
        "hpcfed run --model mlp", "repeat-0 --overwrite", "not finished", "waiting",
    ):  # fmt: skip
        assert expected in words, expected
    assert len(html) < 300_000


def test_stacked_seeds_are_one_sample(reported: Path) -> None:
    found = find([reported / "runs"])
    assert found.unread == [] and len(found.samples) == 2
    attacked = next(group for group in groups(found.samples) if group.options["attack"] != "none")
    (sample,) = attacked.samples
    assert [run.facts["seed"] for run in sample.runs] == [0, 1] and len(attacked.seeds) == 2
    assert len(sample.seconds) == 2, "the first round warms up, and the second seed's times are the first's"


def test_labels_say_what_differs(reported: Path, tiny_study: tuple[Path, Finished]) -> None:
    made = groups(find([tiny_study[0] / "out", reported / "runs"]).samples)
    labels = {group.label for group in made}
    assert any("attack sign-flip" in label and "aggregation median" in label for label in labels)
    assert not any("attack none" in label or "attackers" in label for label in labels)
    strong = [one for one in scalings(made) if one.kind == "strong"]
    assert [one.ranks for one in strong] == [[1, 2], [1, 2]]
    assert {one.kind for one in scalings(made)} == {"strong", "weak"}, "4 clients on 1 rank and 8 on 2"


def test_csv_has_every_round_of_every_rank(reported: Path) -> None:
    with open(reported / "rounds.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 7 * 1 + 2 * 7 * 2 + 2 * 3 + 3
    one = [row for row in rows if row["clients"] == "8" and row["ranks"] == "2"]
    assert [(row["round"], row["rank"], row["counted"]) for row in one[:3]] == [
        ("1", "0", "0"),
        ("1", "1", "0"),
        ("2", "0", "1"),
    ]
    for row in one:
        phases = sum(
            float(value) for name, value in row.items() if name.endswith("_seconds") and name != "rank_seconds"
        )
        assert phases == pytest.approx(float(row["rank_seconds"]), rel=0.05, abs=1e-3)


def test_json_and_extrap_have_the_page_s_figures(reported: Path) -> None:
    figures = json.loads((reported / "figures.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert len(figures["groups"]) == 6 and len(figures["cost_models"]) == 1
    strong = next(one for one in figures["scaling"] if one["kind"] == "strong")
    speedup = strong["seconds"][0]["centre"] / strong["seconds"][1]["centre"]
    assert strong["speedup"][1]["centre"] == pytest.approx(speedup)
    lines = [json.loads(line) for line in (reported / "extrap.jsonl").read_text().splitlines()]
    rounds = [
        line for line in lines if line["params"] == {"clients": 8, "ranks": 2} and line["callpath"].endswith("->round")
    ]
    assert len(rounds) == 6 and all(line["metric"] == "time" and line["value"] > 0 for line in rounds)


def test_a_corrupt_file_among_good_ones_is_named_and_skipped(reported: Path, tmp_path: Path, hpcfed: Callable) -> None:
    shutil.copytree(reported / "runs", tmp_path / "runs")
    (tmp_path / "runs/broken").mkdir()
    (tmp_path / "runs/broken/run.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    (tmp_path / "runs/other").mkdir()
    (tmp_path / "runs/other/study.h5").write_text("no study")
    result = hpcfed("report", tmp_path / "runs", "--out", tmp_path / "page.html")
    assert result.returncode == 1
    assert result.stderr.count("left out: ") == 2 and "Traceback" not in result.stderr
    assert "runs/broken/run.h5 cannot be read as a run" in result.stderr
    assert "runs/other/study.h5 cannot be read as a study" in result.stderr
    words = " ".join(parsed((tmp_path / "page.html").read_text()).text)
    assert "sign-flip" in words and "runs/broken/run.h5 cannot be read" in words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("report", "required: PATH"),
        ("report nowhere", "no such folder: nowhere"),
        ("report empty", "empty holds no run and no study"),
        ("report empty --outt x", "--outt"),
    ],
)
def test_nothing_to_report_is_one_line(
    words: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert expected in mistake(capsys, *words.split())
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]


def test_warm_up_leaves_at_least_a_round(reported: Path) -> None:
    run = find([reported / "runs/server"]).samples[0].runs
    assert [len(Sample(run, warmup, "").seconds) for warmup in (0, 1, 2, 3, 9)] == [3, 2, 1, 1, 1]


def test_charts_escape_names_and_survive_gaps() -> None:
    nan = float("nan")
    lines = [Line("<i>", [1, 2, 3], [1.0, nan, 3.0], [0.5, nan, nan], [2.0, nan, nan]), Line("flat", [1], [5.0])]
    drawn = str(chart(lines, Axis("x & y", log=True), Axis("seconds", log=True)))
    parsed(drawn)
    assert "<i>" not in drawn and "&lt;i&gt;" in drawn and "x & y" not in drawn and "nan" not in drawn
    flat = str(chart([Line("zero", [1, 2], [0.0, 0.0])], Axis("x"), Axis("y")))
    assert "nan" not in flat and "inf" not in flat


def test_stacked_bars_reach_their_sum() -> None:
    drawn = bars(["a", "b"], {"one": [1.0, 2.0], "none": [0.0, 0.0], "two": [3.0, 0.0]}, Axis("s"), "runs")
    heights = [
        float(value) for name, value in parsed(str(drawn)).attributes if name == "height" and float(value) > 10.0
    ]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01), "two is three times one"
    assert heights[2] == pytest.approx(2 * heights[0], rel=0.01)
    assert ">none<" not in str(drawn) and 'class="f2"' in str(drawn), "a part keeps its colour"
