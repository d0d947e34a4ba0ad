"""What reports say of virtual time, privacy and compression, worked out by hand; and that
they say nothing of it where a run has none.
"""

import json
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hpcfed import cli
from hpcfed.analysis.collect import Found
from hpcfed.analysis.comparison.comparison import VIRTUAL, PointPair
from hpcfed.analysis.curves import Climb, curve_over
from hpcfed.analysis.findings import Table
from hpcfed.analysis.groups import Group, Process, groups
from hpcfed.analysis.labels import label
from hpcfed.analysis.render.exports import points_csv_text
from hpcfed.analysis.render.run_page import run_content
from hpcfed.analysis.render.run_page import verdict as page_verdict
from hpcfed.analysis.render.sections import sections
from hpcfed.analysis.render.sections.section import Section
from hpcfed.analysis.render.show import show, show_seeds
from hpcfed.analysis.run_findings.costs import of_virtual_time
from hpcfed.analysis.study_points import show_study
from hpcfed.analysis.verdicts import verdicts
from hpcfed.options import facts_of, named
from hpcfed.options.compression import CompressionOptions
from hpcfed.results.as_json import run_summary
from hpcfed.results.run import RunRecord
from hpcfed.results.study import Outcome, StudyRecord, TrialRecord
from hpcfed.words import flops_text, number, seconds_text, time_text
from tests.points import process_of, run_of
from tests.test_watch import begun, take_down

NAN = float("nan")
CLIMB = [0.2, 0.4, 0.6, 0.8]
"""Accuracies of four rounds."""
HOUR = 3600.0


def four_rounds(**figures: Any) -> RunRecord:
    """Return a run of four rounds with a target of 55 %, which the third reaches."""
    series = {"accuracy": CLIMB} | figures.pop("series", {})
    return run_of(seconds=[2.0] * 4, series=series, target_accuracy=55, **figures)


def clocked(seconds: float, **figures: Any) -> RunRecord:
    """Return such a run whose rounds take these virtual seconds each."""
    series = {"virtual_seconds": seconds * np.arange(1, 5)} | figures.pop("series", {})
    return four_rounds(series=series, devices="lognormal", **figures)


def shown(record: RunRecord) -> str:
    console = Console(width=200)
    with console.capture() as caught:
        show(record, console)
    return caught.get()


def page_of(every: list[Group]) -> dict[str, Section]:
    return {section.id: section for section in sections(every, Found())}


def cells(table: Table, row: int = 0) -> dict[str, str]:
    return dict(zip(table.columns, map(str, table.rows[row]), strict=True))


def grouped(*runs: RunRecord) -> list[Group]:
    return groups([Process((run,), 0, str(number)) for number, run in enumerate(runs)])


def test_times_in_words() -> None:
    told = [time_text(seconds) for seconds in (47.31, 200, 7500, 273_600, NAN)]
    assert told == ["47.3 s", "3 min 20 s", "2 h 5 min", "3 d 4 h", "–"]


def test_operations_in_words() -> None:
    told = [flops_text(number) for number in (7.61e9, 1.2345e13, 4e15, 5.8e7, 0.0)]
    assert told == ["7.61 GFLOP", "12.3 TFLOP", "4 PFLOP", "0.058 GFLOP", "0 GFLOP"]


def test_three_digits_that_round_up_are_no_power_of_ten() -> None:
    """With three digits 999.7 is 1e+03, which nobody reads as a time."""
    assert [number(value) for value in (999.4, 999.7, -999.7)] == [
        "999",
        "1,000",
        "-1,000",
    ]
    told = [seconds_text(value) for value in (9.997e-4, 0.9997, 599.8, 4e6)]
    assert told == ["1 ms", "1 s", "10 min", "1,111 h"]
    assert [flops_text(value) for value in (9.998e11, 2e18)] == [
        "1 TFLOP",
        "2,000 PFLOP",
    ]


def test_the_target_is_reached_by_both_clocks() -> None:
    reached = clocked(HOUR).reached()
    assert reached is not None and reached.rounds == 3
    assert (reached.seconds, reached.virtual_seconds) == (6.0, 3 * HOUR)
    assert reached.bytes == 3 * 2 * 100
    told = run_summary(clocked(HOUR))["reached_target"]
    assert told["virtual_seconds"] == 3 * HOUR
    without = run_summary(four_rounds())["reached_target"]
    assert without["virtual_seconds"] is None
    json.dumps(without, allow_nan=False)


def test_the_verdict_tells_who_reached_the_target() -> None:
    missed = {"series": {"accuracy": [0.1, 0.2, 0.3, 0.4]}}

    def told(*runs: RunRecord) -> str:
        group = groups([Process(runs, 0, "one")])[0]
        return " ".join(page_verdict(group))

    target = "The target of 55 % was"
    held = f"{target} reached after 3 rounds, and held from round 3 on."
    assert held in told(four_rounds())
    assert f"{target} not reached." in told(four_rounds(**missed))
    both = four_rounds(seed=0), four_rounds(seed=1, **missed)
    reached = f"{target} reached by 1 of 2 seeds, and held to the end by 1."
    assert reached in told(*both)


def test_show_tells_of_what_a_run_has_had() -> None:
    series = {
        "arrived": [3, 4, 2, 3],
        "cohort": [4] * 4,
        "epsilon": [0.5, 1.0, 1.5, 2.0],
        "clip_norm": [1.0, 0.9, 0.8, 0.7],
    }
    run = clocked(HOUR, series=series, facts={"delta": 1e-6})
    lines = [line.split("   ") for line in shown(run).splitlines()]
    rows = {line[0].strip(): line[-1].strip() for line in lines}
    assert rows["virtual time of all rounds"] == "4 h 0 min"
    assert rows["uploads that arrived in time"] == "12 (75.0%)"
    assert rows["norm that updates were clipped to"] == "0.7"
    assert rows["privacy spent"] == "ε 2 at δ 1e-06"
    target = next(line for line in lines if line[0] == "reached after")
    assert [cell.strip() for cell in target if cell][-2:] == ["3 h 0 min", "3"]
    # All that a round of FedBuff has are uploads that came, whoever was lost meanwhile.
    came = clocked(HOUR, series=series | {"staleness": [0, 1, 2, 3]}, server_ranks=1)
    lines = [line.split("   ") for line in shown(came).splitlines()]
    rows = {line[0].strip(): line[-1].strip() for line in lines}
    assert rows["versions that an upload was behind"] == "1.50"
    assert rows["uploads that arrived"] == "12" and isnan(came.arrived_share())
    assert "time on cores, ranks that host clients" in rows
    plain = shown(four_rounds())
    assert "time on cores, all ranks" in plain
    for word in ("virtual", "arrived", "behind", "clipped", "privacy"):
        assert word not in plain, word


def test_show_tells_when_seeds_reached_the_target(tmp_path: Path) -> None:
    console = Console(width=200)
    with console.capture() as caught:
        sample = {"evaluated": np.arange(3), "client_accuracy": np.ones((4, 3))}
        seeds = [clocked(HOUR), clocked(2 * HOUR, seed=1)]
        seeds = [replace(one, **sample) for one in seeds]
        show_seeds(seeds, tmp_path, console)
    rows = {line[:6]: line.split() for line in caught.get().splitlines()}
    assert "virtual time" in caught.get()
    assert "clients are judged by a sample of 3 clients" in caught.get()
    assert rows["seed 1"][-5:] == ["6", "h", "0", "min", "3"]
    assert rows["mean ±"][-7:-3] == ["4", "h", "30", "min"]


def test_seeds_of_the_same_length_have_one_status(tmp_path: Path) -> None:
    console = Console(width=200)
    with console.capture() as caught:
        show_seeds([four_rounds(), four_rounds(seed=1)], tmp_path, console)
    assert caught.get().count("status: ") == 1 and "fewer seeds" not in caught.get()


def test_memory_before_a_resume_on_other_ranks_is_not_counted() -> None:
    """The peaks of those ranks are unknown, as are their phases."""
    resumed = four_rounds(ranks=2)
    resumed.phases[:3] = NAN
    told = shown(resumed)
    assert "peak memory of a rank, from round 4 on " in told
    assert "peak memory of a rank, mean, from round 4 on " in told
    (group,) = grouped(resumed)
    page = {section.id: section for section in run_content(group, Found()).sections}
    titles = [chart.title for chart in page["costs"].charts]
    assert "peak memory of every rank, from round 4 on" in titles
    told = shown(four_rounds(ranks=2))
    assert "peak memory of a rank  " in told and ", from round" not in told


def test_a_page_warns_of_any_seed_that_is_not_complete() -> None:
    seeds = [four_rounds(), replace(four_rounds(seed=1), status="failed", error="no")]
    (group,) = groups([Process(tuple(seeds), 1, "run")])
    *_, last = run_content(group, Found()).warnings
    assert last.startswith("seed 1: status: failed") and last.endswith(": no")


def test_curves_are_means_where_all_seeds_have_a_value() -> None:
    """One seed is evaluated at 1, 2 and 4, another at 2 and 3 alone: both have a value
    from 2 to 3, where the first climbs by 0.05 in a unit of time.
    """
    one = Climb(np.array([1.0, 2, 4]), np.array([0.2, 0.4, 0.5]))
    other = Climb(np.array([2.0, 2.5, 3]), np.array([0.6, NAN, 0.8]))
    line = curve_over("", [one, other], scale=100, across=10)
    assert list(line.x) == [20, 30]
    assert list(line.y) == pytest.approx([50, 62.5])
    apart = Climb(np.array([5.0]), np.array([0.9]))
    assert not curve_over("", [one, apart]).x, "they have no time in common"
    never = Climb(np.array([5.0]), np.array([NAN]))
    assert not curve_over("", [one, never]).x and not curve_over("", []).x


def test_a_long_curve_has_points_at_even_distances() -> None:
    spent = np.arange(1.0, 201)
    line = curve_over("", [Climb(spent, spent / 1000)])
    assert len(line.x) == 60 and list(line.y) == pytest.approx(np.array(line.x) / 1000)
    assert np.ptp(np.diff(line.x)) == pytest.approx(0, abs=1e-9)
    line = curve_over("", [Climb(spent, spent / 1000)], log=True)
    assert (line.x[0], line.x[-1]) == (1, 200)
    assert np.ptp(np.diff(np.log(line.x))) == pytest.approx(0, abs=1e-9)


def test_the_page_of_a_study_with_a_clock() -> None:
    late = {"arrived": [3, 4, 2, 3], "cohort": [4] * 4}
    every = grouped(
        clocked(HOUR),
        clocked(3 * HOUR, seed=1),
        clocked(60, deadline=60.0, series=late),
    )
    page = page_of(every)
    (chart,) = page["virtual-time"].charts
    waits = [point for point in chart.spec["data"]["values"] if "low" in point]
    # Of the seeds that wait, at 3 to 4 hours: rounds 3 to 4, and round 1 to 4/3.
    assert [point["x"] for point in waits] == [3, 4]
    assert [point["y"] for point in waits] == pytest.approx([40, 53.333], rel=1e-4)
    clock = page["virtual-time"].tables[0]
    assert cells(clock, 0)["virtual time"] == "8 h 0 min"
    assert cells(clock, 0)["arrived, %"] == "–"
    assert (
        cells(clock, 1)["a round"] == "60 s" and cells(clock, 1)["arrived, %"] == "75"
    )
    target = page["target"].tables[0]
    assert [cells(target, row)["virtual time"] for row in (0, 1)] == [
        "6 h 0 min",
        "3 min 0 s",
    ]
    told = " ".join(sentence for one in verdicts(every) for sentence in one.answers)
    assert "deadline 60 is first in virtual time, after 3 min 0 s" in told


def test_the_page_of_a_study_of_privacy() -> None:
    every = grouped(
        four_rounds(privacy="none"),
        *(
            four_rounds(
                privacy="central",
                target_epsilon=epsilon,
                noise_cohort=1000,
                facts={"delta": 1e-6},
                series={"accuracy": [0.1, 0.2, 0.3, last], "epsilon": [epsilon] * 4},
            )
            for epsilon, last in ((8.0, 0.7), (2.0, 0.5))
        ),
    )
    section = page_of(every)["privacy"]
    (chart,) = section.charts
    points = [(point["x"], point["y"]) for point in chart.spec["data"]["values"]]
    assert points == [(2, 50), (8, 70)]
    dashed = chart.spec["layer"][-2]["data"]["values"]
    assert [(point["x"], point["y"]) for point in dashed] == [(2, 80), (8, 80)]
    assert dashed[0]["series"] == "fedavg without noise"
    row = cells(section.tables[0])
    assert (row["ε"], row["δ"], row["lost by noise"]) == ("2", "1e-06", "30")
    assert "that of a federation of this size" in section.text[-1]


def test_the_page_of_a_study_of_compression() -> None:
    dense = {"bytes_up": [2.0**21] * 4, "bytes_down": [2.0**21] * 4}
    packed = {"bytes_up": [2.0**18] * 4, "bytes_down": [2.0**21] * 4}
    every = grouped(
        four_rounds(compress="none", series=dense),
        four_rounds(compress="topk", series=packed),
    )
    section = page_of(every)["compression"]
    (chart,) = section.charts
    ends = {}
    for point in chart.spec["data"]["values"]:
        ends[point["series"]] = (point["x"], point["y"])
    assert ends == {"fedavg": (8, 80), "fedavg, compress topk": (1, 80)}
    assert chart.spec["layer"][0]["encoding"]["x"]["scale"]["type"] == "log"
    row = cells(section.tables[0], 1)
    assert (row["up, MiB"], row["down, MiB"]) == ("1", "8")
    assert row["times less up"] == "8"
    assert row["times less in all"] == "1.78", "16 MiB by 9 MiB"
    assert cells(section.tables[0], 0)["times less up"] == "–"


def test_options_of_a_part_that_is_off_are_in_no_name() -> None:
    every = grouped(
        four_rounds(compress="none", keep=0.01, levels=15),
        four_rounds(compress="topk", keep=0.01, levels=15),
        four_rounds(compress="topk", keep=0.1, levels=15),
        four_rounds(compress="qsgd", keep=0.01, levels=15),
        four_rounds(compress="qsgd", keep=0.01, levels=3),
    )
    assert [label(group.key) for group in every] == [
        "fedavg",
        "fedavg, compress qsgd, levels 15",
        "fedavg, compress qsgd, levels 3",
        "fedavg, compress topk, keep 0.01",
        "fedavg, compress topk, keep 0.1",
    ]


def test_rounds_that_wait_for_all_have_nothing_in_their_name() -> None:
    # --oversample acts only on a cohort of fewer than all clients.
    half = {"participation": 0.5}
    late, more = clocked(1, deadline=1.5, **half), clocked(1, oversample=1.3, **half)
    every = grouped(clocked(1, **half), late, more)
    assert [label(group.key) for group in every] == [
        "fedavg",
        "fedavg, deadline 1.5",
        "fedavg, oversample 1.3",
    ]


def test_every_option_of_a_compressor_needs_one() -> None:
    own = CompressionOptions.declared()
    without = {name for name, field in own.items() if not facts_of(field).needs}
    assert without == set(named(told="always")) & own.keys()


def test_what_turns_a_part_on_tells_before_its_options_do() -> None:
    private = {"privacy": "central", "accountant": "rdp", "clip_norm": 0.5}
    every = grouped(
        four_rounds(),
        four_rounds(**private, target_epsilon=2.0),
        four_rounds(**private, target_epsilon=8.0),
    )
    assert [label(group.key) for group in every] == [
        "fedavg",
        "fedavg, privacy central, target_epsilon 2",
        "fedavg, privacy central, target_epsilon 8",
    ]


def test_the_page_of_a_run_has_what_the_run_has_had() -> None:
    series = {"staleness": [0, 1, 2, 3], "epsilon": [1, 2, 3, 4]}
    # Nobody took part in the first round.
    series |= {"cohort": [0, 4, 4, 4], "arrived": [0, 4, 3, 2]}
    (group,) = grouped(clocked(HOUR, series=series))
    page = {section.id: section for section in run_content(group, Found()).sections}
    titles = [chart.title for chart in page["virtual-time"].charts]
    # Every round takes an hour: that is no curve.
    assert titles == [
        "accuracy over virtual time",
        "uploads that arrived",
        "versions that uploads were behind",
    ]
    rows = dict(page["virtual-time"].tables[0].texts)
    assert rows["median round"] == "60 min 0 s"
    assert [chart.title for chart in page["privacy"].charts] == ["ε spent"]


def test_the_page_of_a_run_tells_how_clients_times_are_spread() -> None:
    """Eleven clients take 0 to 10 s for their uploads, and one has vanished."""
    seconds = np.arange(12.0)
    upload = np.where(seconds < 11, seconds, NAN)
    times = {"download": seconds, "train": 0 * seconds + 60, "upload": upload}
    run = clocked(HOUR)
    _, spread = of_virtual_time(run, times)
    rows = {name: figures for name, *figures in spread.texts}
    assert rows["uploads"] == ["1 s", "5 s", "9 s", "10 s"]
    assert rows["in all"] == ["62 s", "70 s", "78 s", "80 s"]
    assert len(list(of_virtual_time(run, {}))) == 1, "they were not recorded"
    unknown = {name: np.full(3, NAN) for name in times}
    assert len(list(of_virtual_time(run, unknown))) == 1, "there are no rounds"


def test_the_page_of_a_run_says_what_epsilon_covers() -> None:
    def text(**series: list[float]) -> str:
        (group,) = grouped(four_rounds(series=series))
        found = {one.id: one for one in run_content(group, Found()).sections}
        return " ".join(found["privacy"].text)

    private = text(epsilon=[1, 2, 3, 4], clip_norm=[1.0] * 4)
    for uncovered in ("accuracy", "arrived", "excluded", "norms", "a run ended"):
        assert uncovered in private.partition("does not cover")[2]
    assert "no ε holds" in text(clip_norm=[1.0] * 4)


def test_pages_of_runs_without_have_nothing_of_it() -> None:
    every = grouped(four_rounds(), four_rounds(method="fedper"))
    page = page_of(every)
    assert not {"virtual-time", "privacy", "compression"} & page.keys()
    assert "virtual time" not in page["target"].tables[0].columns
    (group,) = grouped(four_rounds())
    ids = {section.id for section in run_content(group, Found()).sections}
    assert not {"virtual-time", "privacy"} & ids


def test_two_sides_are_compared_by_the_virtual_clock() -> None:
    (before,) = grouped(clocked(HOUR))
    (after,) = grouped(clocked(HOUR / 2))
    figure = PointPair(before, after, before.key).ratio(VIRTUAL)
    assert figure is not None and figure.change.centre == pytest.approx(0.5)
    assert figure.told_apart, "the clock has no noise"
    (plain,) = grouped(four_rounds())
    names = [figure.name for figure in PointPair(plain, plain, plain.key).costs]
    assert not any("virtual" in name or "ε" in name for name in names)


def test_points_have_virtual_time_and_privacy_in_the_csv() -> None:
    every = groups([process_of(series={"virtual_seconds": np.arange(10.0)})])
    head, line = points_csv_text(every).splitlines()
    row = dict(zip(head.split(","), line.split(","), strict=True))
    assert (row["virtual_seconds"], row["epsilon"]) == ("9.0", "nan")


def test_points_of_a_study_have_virtual_time_where_they_have_a_clock() -> None:
    def listed(run: RunRecord) -> str:
        trial = TrialRecord("lr=1/repeat-0", Outcome("complete"), {}, (run,))
        console = Console(width=200)
        with console.capture() as caught:
            show_study(StudyRecord(Path("s/study.h5"), "", 0, "", (trial,)), console)
        return caught.get()

    assert "virtual time" in listed(clocked(HOUR))
    assert "4 h 0 min" in listed(clocked(HOUR)) and "ε" not in listed(clocked(HOUR))
    assert "virtual" not in listed(four_rounds())


def test_watching_tells_virtual_time_and_privacy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = begun(tmp_path / "run")
    take_down(results, 0, virtual_seconds=90.0, epsilon=0.25)
    results.publish()
    cli.main(["watch", str(tmp_path / "run"), "--once"])
    assert "virtual time 90 s · ε 0.25" in capsys.readouterr().out
