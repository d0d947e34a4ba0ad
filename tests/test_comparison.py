"""Comparison of two paths: figures worked out by hand, and what a regression check does
with them.
"""

import csv
import io
import json
import shutil
from dataclasses import replace
from math import exp, inf, log, sqrt
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from rich.console import Console

import hpcfed
from hpcfed import cli
from hpcfed.analysis.collect import find
from hpcfed.analysis.comparison.comparison import Comparison, compare
from hpcfed.analysis.comparison.conditions import judge_all, read_conditions
from hpcfed.analysis.comparison.shown import NOISE, print_comparison
from hpcfed.analysis.comparison.shown import verdicts as sentences
from hpcfed.analysis.findings import Cell
from hpcfed.analysis.groups import Process, groups
from hpcfed.analysis.labels import label, server_text
from hpcfed.analysis.outcomes import mean_to_target, run_energy, run_seconds
from hpcfed.analysis.render.charts import Axis, Mark, rows
from hpcfed.analysis.render.console import Output
from hpcfed.analysis.render.exports import csv_text
from hpcfed.analysis.render.run_page import learning as learning_page
from hpcfed.analysis.render.run_page import verdict
from hpcfed.analysis.render.run_page.costs import traffic_and_memory
from hpcfed.analysis.render.sections.comparison import comparison as section_of
from hpcfed.analysis.render.sections.costs import phases as phases_of
from hpcfed.analysis.render.sections.server import server as server_section
from hpcfed.analysis.render.show import show
from hpcfed.analysis.run_findings import RunFiles, run_findings
from hpcfed.analysis.run_findings.costs import of_phases, of_server
from hpcfed.analysis.server_costs import server_costs
from hpcfed.analysis.statistics import Measurements, divide, subtract
from hpcfed.options import RunConfig
from hpcfed.results.learnings import LearningRecord
from hpcfed.results.pace import MS_PER_ROUND, SECONDS_PER_ROUND
from hpcfed.results.run import RunRecord
from hpcfed.results.stored import timed_run
from hpcfed.runtime.timer import PHASES
from tests.page import parsed
from tests.points import process_of, run_of
from tests.runs import ending, flags, mistake, without_reader

T_OF_TWO, T_OF_THREE = 12.7062, 4.30265
"""Student's t for 95 % of two and of three values."""
BOTH = [Path("a"), Path("b")]


def measurements(*values: float, seeds: tuple[int, ...] = (0, 1, 2)) -> Measurements:
    """Return measurements by seed; equal seeds are repeats."""
    keys = [((seed,), seeds[:number].count(seed)) for number, seed in enumerate(seeds)]
    return dict(zip(keys, values, strict=False))


def test_equal_seeds_are_compared_in_pairs_on_logarithms() -> None:
    """Two seeds of very different cost: B takes 1.1 and 1.21 times as long."""
    found = divide(measurements(1.0, 10.0), measurements(1.1, 12.1))
    # Logarithms of the ratios are h and 2 h: their mean 1.5 h, its error h / 2.
    h = log(1.1)
    assert found.change.centre == pytest.approx(1.1**1.5)
    assert found.change.high == pytest.approx(exp(1.5 * h + T_OF_TWO * h / 2), rel=1e-4)
    assert found.over_runs and found.basis == "2 pairs of runs"


def test_other_seeds_and_repeats_of_one_are_not_paired() -> None:
    """Equal spreads of three values each: Welch's t has 4 degrees of freedom."""
    before = measurements(1.0, 2.0, 3.0)
    for seeds in ((3, 4, 5), (0, 0, 0)):
        ours = measurements(1.0, 2.0, 3.0, seeds=(0, 0, 0)) if seeds[0] == 0 else before
        found = subtract(ours, measurements(2.0, 3.0, 4.0, seeds=seeds))
        assert found.change.centre == pytest.approx(1.0)
        half = 2.77645 * sqrt(2 / 3)
        assert found.change.high == pytest.approx(1.0 + half, rel=1e-4)
        assert found.basis == "3 and 3 runs"
    # In pairs, every difference is 1, without any spread.
    paired = subtract(before, measurements(2.0, 3.0, 4.0))
    assert paired.change.low == paired.change.high == pytest.approx(1.0)


def test_what_is_sent_from_nothing_is_infinitely_more() -> None:
    assert divide(measurements(0.0), measurements(5.0)).change.centre == inf
    assert divide(measurements(0.0), measurements(0.0)).change.centre == 1.0


def process(
    seconds: float = 0.1,
    *,
    seed: int = 0,
    accuracy: float = 0.9,
    sent: float = 2.0**20,
    torch: str = "2.11",
    data: str = "",
    **options: Any,
) -> Process:
    """Return a run of seven equal rounds on one rank, without a global model."""
    config = RunConfig().model_dump(mode="json") | {"clients": 4} | options
    shares = np.zeros((7, 1, len(PHASES)))
    shares[:, :, PHASES.index("train")] = seconds
    unknown = np.full(7, np.nan)
    run = RunRecord(
        folder=Path("somewhere"),
        status="complete",
        error="",
        facts={
            "seed": seed,
            "ranks": 1,
            "model": "mlp",
            "method": config["method"],
            "clients": config["clients"],
            "data": data,
        },
        config=config,
        environment={"packages": {"torch": torch}, "ranks": [{"host": "h"}]},
        rounds={
            "seconds": np.full(7, seconds),
            "accuracy": np.full(7, accuracy),
            "global_accuracy": unknown,
            "bytes_up": np.full(7, sent),
            "bytes_down": np.zeros(7),
        },
        phases=shares,
        wall=np.full((7, 1), seconds),
        stacks=np.ones(7, int),
        peak_memory=np.array([1e6]),
        client_accuracy=np.full((7, 4), accuracy),
        train_samples=np.full(4, 10),
        energy=None,
        moves=(),
        finals={},
        newcomers={},
        learnings=(),
        evaluated=np.arange(4),
        client_metrics={},
        class_accuracy={},
    )
    return Process((run,), 1, "somewhere")


def test_a_page_says_if_only_a_sample_of_clients_was_judged() -> None:
    run = run_of(clients=20)
    told = " ".join(verdict(groups([Process((run,), 0, "a")])[0]))
    assert "test data, clients reach 50 %" in told
    assert "worst tenth of the clients is" in told
    accuracy = np.full((10, 12), 0.5)
    few = replace(run, evaluated=np.arange(12), client_accuracy=accuracy)
    told = " ".join(verdict(groups([Process((few,), 0, "a")])[0]))
    assert "test data, a sample of 12 of 20 clients reaches 50 %" in told
    assert "worst tenth of these is" in told


def test_runs_that_ended_early_are_told() -> None:
    """Both planned 40 rounds. A's seeds reached their targets after 3 and 5."""

    def ended(rounds: int, seed: int = 0) -> RunRecord:
        return run_of(seconds=[1.0] * rounds, rounds=40, seed=seed)

    ours = groups([Process((ended(3), ended(5, seed=1)), 1, "a")])
    theirs = groups([Process((ended(6),), 1, "b")])
    found = compare(("a", "b"), ours, theirs)
    assert found is not None
    told = "Runs ended early, and are judged at their ends: A after 3 to 5 rounds, B after "
    assert f"{told}6 rounds." in sentences(found)
    same = compare(("a", "b"), theirs, theirs)
    assert same is not None
    assert not any("ended early" in sentence for sentence in sentences(same))


def compared(before: list[Process], after: list[Process]) -> Comparison:
    found = compare(("a", "b"), groups(before), groups(after))
    assert found is not None
    return found


def test_sides_of_other_lengths_are_judged_at_the_last_common_round() -> None:
    """A has ten rounds and climbs to 0.8; B has five, and ends at 0.3."""
    before = process_of(accuracy=0.8, rounds=10)
    after = process_of(accuracy=0.3, rounds=5, seconds=[1.0] * 5)
    found = compared([before], [after])
    (judged,) = found.headlines
    # After five of ten rounds, A is at 0.8 * 0.5.
    assert judged.before == pytest.approx(40.0) and judged.after == pytest.approx(30.0)
    text = " ".join(section_of(found).text)
    assert "both sides are judged after round 5" in text


def test_an_option_that_an_older_run_lacks_has_not_changed() -> None:
    """B's record has a server's option that came later: first with its default, then with
    another value.
    """
    before = process_of(method="pfedgpa", seconds=1.0)
    assert "token_window" not in before.runs[0].config
    for window, expected in ((256, []), (128, ["token_window"])):
        after = process_of(method="pfedgpa", seconds=2.0, token_window=window)
        found = compared([before], [after])
        assert [change.name for change in found.options] == expected
        assert len(found.points) == 1, "they match"


def test_points_are_matched_but_for_what_changed_as_a_whole() -> None:
    """Both sweep lr; A has epochs 1 throughout, B has 2. One lr is in both."""
    before = [process(0.1, lr=0.1, epochs=1), process(0.2, lr=0.2, epochs=1)]
    after = [process(0.3, lr=0.2, epochs=2), process(0.4, lr=0.3, epochs=2)]
    found = compared(before, after)
    (point,) = found.points
    assert point.seconds.change.centre == pytest.approx(1.5)
    assert [group.options["lr"] for group in found.only_before] == [0.1]
    assert [group.options["lr"] for group in found.only_after] == [0.3]
    changes = {change.name: change for change in found.options}
    assert (changes["epochs"].before, changes["epochs"].after) == ("1", "2")
    assert changes["epochs"].default == str(RunConfig().epochs)
    assert (changes["lr"].before, changes["lr"].after) == ("0.1, 0.2", "0.2, 0.3")
    assert compare(("a", "b"), groups(before[:1]), groups(before[1:])) is not None
    none = compare(
        ("a", "b"), groups(before), groups([process(lr=0.5), process(lr=0.6)])
    )
    assert none is None, "both sweep lr, over other values"


def test_all_points_together_by_the_geometric_mean() -> None:
    """Ratios 2 and 1/2 of two points cancel out; their spread is the interval."""
    before = [process(0.1, lr=0.1), process(0.1, lr=0.2)]
    after = [process(0.2, lr=0.1), process(0.05, lr=0.2)]
    seconds = compared(before, after).costs[0]
    assert seconds.change.centre == pytest.approx(1.0)
    # Logarithms ± log 2: the error of their mean is log 2.
    assert seconds.change.high == pytest.approx(2**T_OF_TWO, rel=1e-3)
    # What is sent is counted: that points differ is no noise.
    sparse = [process(lr=0.1), process(lr=0.2, sent=2.0**22)]
    (sent,) = (
        figure
        for figure in compared(before, sparse).costs
        if figure.name.startswith("sent ")
    )
    assert sent.change.centre == pytest.approx(2.0) and sent.told_apart
    # Where every point is repeated, distances add up as squares, by two points.
    logs = (log(1.0), log(1.1), log(1.21))
    repeated = []
    for lr in (0.1, 0.2):
        repeated += [process(exp(h), seed=n, lr=lr) for n, h in enumerate(logs)]
    base = [process(1.0, seed=n, lr=lr) for lr in (0.1, 0.2) for n in range(3)]
    whole = compared(base, repeated).costs[0]
    one_half = T_OF_THREE * log(1.1) / sqrt(3)
    assert whole.change.centre == pytest.approx(1.1)
    high = log(whole.change.high / 1.1)
    assert high == pytest.approx(sqrt(2) * one_half / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "times", "outcome"),
    [
        ("slower=5%", (1.1, 1.11, 1.12), "holds"),
        ("slower=20%", (1.1, 1.11, 1.12), "does not hold"),  # not by so much
        ("slower=5%", (0.5, 1.1, 3.0), "does not hold"),  # not beyond the noise
        ("slower=5%", (1.1,), "undecided"),  # one run, which a load may have slowed
        ("slower=5%", (1.04,), "does not hold"),
        ("less-accurate=1", (1.0, 1.0, 1.0), "holds"),
        ("less-accurate=3", (1.0, 1.0, 1.0), "does not hold"),
        ("less-accurate=1", (1.0,), "undecided"),
        ("more-bytes=10%", (1.0,), "holds"),
        ("more-bytes=25%", (1.0,), "does not hold"),
    ],
)
def test_a_condition_holds_beyond_the_noise(
    text: str, times: tuple[float, ...], outcome: str
) -> None:
    """B loses 2 points of accuracy with every seed, and sends a fifth more."""
    before, after = [], []
    for seed, seconds in enumerate(times):
        before.append(process(1.0, seed=seed, accuracy=0.9 + 0.01 * seed))
        after.append(
            process(seconds, seed=seed, accuracy=0.88 + 0.01 * seed, sent=1.2 * 2**20)
        )
    conditions, found = read_conditions([text], BOTH), compared(before, after)
    (judged,) = judge_all(conditions, found)
    assert judged.line.startswith(f"--fail-if {text}: {outcome}: ")
    (asked,) = judge_all(conditions, found, one_run_decides=True)
    decided = "holds" if outcome == "undecided" else outcome
    assert asked.line.startswith(f"--fail-if {text}: {decided}: ")
    # What is counted has no noise.
    alone = len(times) == 1 and "bytes" not in text
    assert ("cannot tell noise" in judged.line) is alone


def test_what_changed_is_named_and_what_is_equal_is_not() -> None:
    before = process(torch="2.11", data="f5f8")
    found = compared([before], [process(torch="2.12", data="bba5", method="fedprox")])
    assert [(one.name, one.before, one.after) for one in found.code] == [
        ("samples, fingerprint", "f5f8", "bba5"),
        ("torch", "2.11", "2.12"),
    ]
    assert found.options[0].name == "method"
    same = compared([process()], [process()])
    assert same.options == same.code == []
    assert not any(figure.told_apart for figure in (*same.costs, *same.headlines))


def test_two_files_of_one_name_are_told_apart_by_their_sides() -> None:
    before = replace(process(method="/before/mine.py"), side="A")
    after = replace(process(method="/after/mine.py"), side="B")
    names = [label(group.key) for group in groups([before, after])]
    assert names == ["mine, side A", "mine, side B"]
    other = replace(process(method="fedprox"), side="B")
    names = [label(group.key) for group in groups([before, other])]
    assert names == ["fedprox", "mine"], "a side is named where it is needed"


def test_names_cannot_command_a_terminal() -> None:
    evil = "\x1b[2J[red]</script>," + "x" * 500
    found = compare(
        (evil, "b"), groups([process(dataset=evil)]), groups([process(torch=evil)])
    )
    assert found is not None
    console = Output()
    console.file = io.StringIO()
    print_comparison(found, console)
    said = console.file.getvalue()
    assert "\x1b" not in said and "[red]</script>" in said
    changed = [line for line in said.splitlines() if line.startswith("dataset ")]
    assert len(changed) == 1 and len(changed[0]) < 200, "cells of tables are cut"


def test_terminal_page_and_json_have_the_same_rows() -> None:
    """Every cell of the page is printed, and stands in the JSON with its raw value."""
    before = [process(0.1, lr=0.1), process(0.2, lr=0.2)]
    after = [process(0.15, lr=0.1, accuracy=0.8), process(0.3, lr=0.2, sent=2.0**22)]
    found = compared(before, after)
    section = section_of(found)
    console = Output()
    console.file = io.StringIO()
    print_comparison(found, console)
    said = console.file.getvalue()
    for table in section.tables:
        exported = json.loads(json.dumps(table.json))
        assert exported["columns"] == list(table.columns)
        for row, values in zip(table.rows, exported["rows"], strict=True):
            assert all(str(cell) in said for cell in row)
            for cell, value in zip(row, values, strict=True):
                raw = value["value"] if isinstance(value, dict) else value
                assert raw == (cell.number if isinstance(cell, Cell) else cell)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of four clients, of which half and all take part."""
    folder = tmp_path_factory.mktemp("compared")
    for name, share in {"half": 0.5, "all": 1.0}.items():
        words = flags(clients=4, rounds=3, epochs=1, participation=share)
        cli.main(["run", *words, "--out", str(folder / name)])
    return folder


def test_a_regression_ends_with_1(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All clients send twice as much as half of them; the page begins with that."""
    page, figures = runs / "page.html", runs / "figures.json"
    words = ["report", str(runs / "half"), str(runs / "all"), "--out", str(page)]
    words += ["--json", str(figures)]
    capsys.readouterr()
    cli.main([*words, "--fail-if", "more-bytes=110%"])
    said = capsys.readouterr().out
    assert "more-bytes=110%: does not hold: " in said and "2.000 times" in said
    with pytest.raises(SystemExit, match="1"):
        cli.main(
            [*words, "--fail-if", "more-bytes=110%", "--fail-if", "more-bytes=90%"]
        )
    assert "more-bytes=90%: holds: " in capsys.readouterr().out
    shown = parsed(page.read_text())
    assert shown.ids[0] == "comparison"
    assert "participation 0.5 → 1" in " ".join(shown.text)
    costs = json.loads(figures.read_text())["comparison"]["costs"]
    sent = [one for one in costs if one["name"].startswith("sent ")]
    assert (sent[0]["change"]["centre"], sent[0]["verdict"]) == (2.0, "more")


def test_a_reader_that_leaves_changes_neither_files_nor_the_exit_code(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is `head` in `hpcfed report A B --fail-if … --json x.json | head -1`."""
    names = ("page.html", "rounds.csv", "figures.json")
    page, rounds, figures = (tmp_path / name for name in names)
    words = ["report", str(runs / "half"), str(runs / "all"), "--out", str(page)]
    words += ["--csv", str(rounds), "--json", str(figures)]
    for limit, code in (("110%", 0), ("90%", 1)):
        with without_reader(monkeypatch):
            assert ending(*words, "--fail-if", f"more-bytes={limit}") == code
        for path in (page, rounds, figures):
            assert path.stat().st_size
            path.unlink()


def test_one_run_of_a_side_leaves_it_undecided(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same run, once with rounds that took ten times as long; and bytes that tell."""
    slow = tmp_path / "slow"
    shutil.copytree(runs / "half", slow)
    with h5py.File(slow / "run.h5", "r+") as file:
        for name in ("rounds/seconds", "timing/wall", "timing/phases"):
            file[name][...] = 10 * file[name][...]
    words = ["report", str(runs / "half"), str(slow), "--out", str(tmp_path / "p.html")]
    words += ["--fail-if", "slower=5%"]
    with pytest.raises(SystemExit, match="3"):
        cli.main(words)
    assert "slower=5%: undecided: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        cli.main([*words, "--one-run-decides"])
    assert "slower=5%: holds: " in capsys.readouterr().out
    assert "no --fail-if" in mistake(capsys, *words[:-2], "--one-run-decides")
    # What holds is not hidden by what is undecided.
    words[2] = str(runs / "all")
    with pytest.raises(SystemExit, match="1"):
        cli.main([*words, "--fail-if", "more-bytes=90%"])


def test_a_copy_of_a_run_is_no_repeat(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a backup would give intervals without width. The copy that went on counts."""
    for side in ("a", "b"):
        for number in "12":
            shutil.copytree(runs / "half", tmp_path / side / number)
    for number in "12":
        with h5py.File(tmp_path / f"b/{number}/run.h5", "r+") as file:
            for name in ("rounds/seconds", "timing/wall", "timing/phases"):
                file[name][...] = 10 * file[name][...]
    words = [
        "report",
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        "--fail-if",
        "slower=5%",
    ]
    with pytest.raises(SystemExit, match="3"):
        cli.main([*words, "--out", str(tmp_path / "p.html")])
    said, told = capsys.readouterr()
    assert "slower=5%: undecided: " in said
    for side in ("a", "b"):
        first = tmp_path / side / "1"
        line = f"{tmp_path / side / '2'}: a copy of {first}, counted once"
        assert line in told and line in (tmp_path / "p.html").read_text()
    cli.main(["run", "--resume", str(tmp_path / "a/2"), "--rounds", "4"])
    found = find([tmp_path / "a", runs / "all"])
    assert [process.source for process in found.processes] == [
        str(tmp_path / "a/2"),
        str(runs / "all"),
    ]


def test_a_run_beside_itself_is_the_same(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(runs / "half")
    page = runs / "twice.html"
    capsys.readouterr()
    cli.main(["report", folder, folder, "--out", str(page), "--fail-if", "slower=0%"])
    said = capsys.readouterr().out
    assert "Nothing changed in options, code or machine." in said
    assert "Speed is not told apart: B takes 1.000" in said
    assert "slower=0%: does not hold: " in said
    text = " ".join(parsed(page.read_text()).text)
    assert "side A" in text and "side B" in text, "they are no repeats of each other"


@pytest.mark.parametrize(
    ("paths", "condition", "expected"),
    [
        (["half"], "slower=5%", "two paths, A and B; 1 path given"),
        (["half", "all", "."], "slower=5%", "two paths, A and B; 3 paths given"),
        (["half", "all"], "slower=5", "as in slower=5%"),
        (["half", "all"], "slower=-5%", "as in slower=5%"),
        (["half", "all"], "slower=nan%", "as in slower=5%"),
        (["half", "all"], "less-accurate=1%", "as in less-accurate=1"),
        (["half", "all"], "less-accurate", "as in less-accurate=1"),
        (["half", "all"], "slowr=5%", "did you mean 'slower'"),
        (
            ["half", "all"],
            "more-energy=5%",
            "not all runs of both sides have recorded it",
        ),
    ],
)
def test_conditions_that_make_no_sense_are_one_line(
    paths: list[str],
    condition: str,
    expected: str,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = [runs / path for path in paths]
    out = runs / "none.html"
    said = mistake(capsys, "report", *folders, "--out", out, "--fail-if", condition)
    assert expected in said and not out.exists()


def test_a_comparison_from_python(runs: Path) -> None:
    found = hpcfed.compare(runs / "half", runs / "all")
    sent = [row for row in _rows(found.speed) if row["name"].startswith("sent ")]
    assert [row["change"] for row in sent] == [2.0]
    (changed,) = _rows(found.options)
    assert (changed["name"], changed["a"], changed["b"]) == (
        "participation",
        "0.5",
        "1",
    )
    assert len(_rows(found.code)) == 0 and found.verdicts[0] in repr(found)
    assert {row["name"] for row in _rows(found.points)} > {SECONDS_PER_ROUND}
    with pytest.raises(hpcfed.UserError, match="neither a run nor a study"):
        hpcfed.compare(runs / "half", Path(__file__).parent / "own")


def _rows(table: Any) -> list[dict[str, Any]]:
    return list(table.to_dict("records"))


def test_a_chart_has_the_points_that_differ_most() -> None:
    """The last four of twenty points took as long as before."""
    before, after = [], []
    for number in range(20):
        before.append(process(1.0, lr=0.1 + number))
        after.append(process(0.5 if number < 16 else 1.0, lr=0.1 + number))
    (drawn,) = section_of(compared(before, after)).charts
    shown = [row["x"] for row in drawn.spec["data"]["values"]]
    assert shown == [0.5] * 16 and "16 of 20" in drawn.title


def test_dots_have_their_intervals_and_a_line_at_no_change() -> None:
    """Names out of runs are data alone, and an end that is far away is cut."""
    evil = "</script>"
    every = [
        Mark(evil, 1.1, "slower", 1.05, 1.15),
        Mark("x" * 500, 0.9, "not told apart", -1e9, 1e9),
        Mark("gone", float("inf"), "more"),
    ]
    drawn = rows("ratios", every, Axis("B / A"), line=1.0, order=["slower", "more"])
    values = drawn.spec["data"]["values"]
    assert [row["name"] for row in values] == [evil, "x" * 500]
    assert values[0] | {"low": 1.05, "high": 1.15} == values[0]
    (line, *others) = drawn.spec["layer"]
    assert line["data"]["values"] == [{"x": 1.0}]
    # Dots and line span 0.9 to 1.1; the axis follows ends as far, with some room.
    low, high = others[0]["encoding"]["x"]["scale"]["domain"]
    assert 0.6 < low < 0.7 and 1.3 < high < 1.4
    del drawn.spec["data"]
    assert evil not in json.dumps(drawn.spec)


LEARNT_LATE = run_of(seconds=[9.0, 1.0, 1.0, 2.0, 1.0, 31.0])
"""The first round warms up, and in the last one the server learns for 30 seconds."""
LEARNT_LATE.phases[-1, :, :] = 0.0
LEARNT_LATE.phases[-1, :, PHASES.index("train")] = 1.0
LEARNT_LATE.phases[-1, :, PHASES.index("server")] = 30.0


@pytest.mark.parametrize(
    ("done", "usual", "in_all"),
    [
        (3, "round 3, first on these ranks", "s in round 3"),
        (4, "round, after round 3", "s in rounds 3 to 4"),
    ],
)
def test_rounds_since_a_resume_on_other_ranks_are_named(
    done: int, usual: str, in_all: str
) -> None:
    resumed = run_of(seconds=[1.0] * done, ranks=2)
    resumed.phases[:2] = np.nan
    table = of_phases(resumed)
    assert (table.rows[-1][0], table.columns[2]) == (usual, in_all)
    # One rank is always as slow as the mean.
    resumed.rounds["imbalance"][:] = [1.0, 1.0, *[1.5] * (done - 2)]
    assert resumed.imbalance() == 1.5


def test_a_time_per_round_is_the_same_figure_wherever_it_stands() -> None:
    """The median of 1, 1, 2, 1 and 31 seconds; their mean would be 7.2."""
    group = groups([Process((LEARNT_LATE,), 1, "run")])[0]
    found = compare(("a", "b"), [group], [group])
    assert found is not None
    seconds = found.costs[0]
    assert (seconds.name, seconds.before) == (SECONDS_PER_ROUND, 1000)
    assert group.seconds.centre == 1
    text = io.StringIO()
    show(LEARNT_LATE, Console(file=text, width=200))
    lines = {
        line.partition("  ")[0]: line.split() for line in text.getvalue().split("\n")
    }
    assert MS_PER_ROUND in text.getvalue()
    assert lines["round, after the first"][-2:] == ["1000.00", "45.000"]
    table = of_phases(LEARNT_LATE)
    assert table.columns[1] == MS_PER_ROUND and str(table.rows[-1][1]) == "1000.00"
    # Its times count from the fifth round on, if it was resumed there on other ranks.
    before = replace(LEARNING, round=1)
    late = replace(LEARNT_LATE, learnings=(before, LEARNING))
    assert server_text(late) == "30 s in 2 of 6 rounds"
    elsewhere = late.phases.copy()
    elsewhere[:4] = np.nan
    elsewhere[-1, :, PHASES.index("server")] = 1500.0
    assert server_text(replace(late, phases=elsewhere)) == "1,500 s once"


def test_times_of_seeds_are_those_of_the_one_that_was_there_to_the_end() -> None:
    """The first seed reached its target, and ended after two rounds."""
    energy = {"facts": {"stacked_seeds": 2}, "target_accuracy": 1}
    short = run_of(seconds=[1.0, 2.0], energy=5.0, **energy)
    whole = run_of(seconds=[1.0, 2.0, 3.0, 4.0], energy=9.0, seed=1, **energy)
    process = Process((short, whole), 1, "run")
    assert process.seconds.tolist() == [2, 3, 4]
    (group,) = groups([process])
    assert run_seconds(group).centre == pytest.approx(10)
    assert run_energy(group).centre == pytest.approx(9)
    found = run_findings((short, whole), RunFiles())
    cells = {str(row[0]): str(row[1]) for row in found["costs"][0].rows}
    assert cells["wall time of all rounds"] == "10.00 s"
    assert cells["energy of all GPUs"].startswith("9")
    assert str(found["time"][0].rows[-1][2]) == "10.000"
    told = " ".join(verdict(group))
    assert "after 2 to 4 rounds" in told and "all 4 took 10 s for 2 runs" in told
    lines = list(csv.DictReader(csv_text([group]).splitlines()))
    assert [line["counted"] for line in lines] == [*"01", *"0111"], "no first round"
    ends = "Curves end where the first seed ends."
    assert ends in learning_page.learning(group).text
    assert (
        ends not in learning_page.learning(groups([Process((whole,), 1, "")])[0]).text
    )
    large = replace(whole, peak_memory=np.array([2.0**20, 7 * 2.0**20]))
    *_, memory = traffic_and_memory(short, large).charts
    assert [one["y"] for one in memory.spec["data"]["values"]] == [1, 7]


def test_of_a_run_that_is_new_on_its_ranks_no_phase_is_told() -> None:
    """It was resumed on other ranks, and stopped in its first round there."""
    known = run_of(seconds=[1.0] * 3, rounds=6)
    new = replace(
        run_of(seconds=[2.0] * 3, rounds=6), phases=np.full_like(known.phases, np.nan)
    )
    ours, theirs = (groups([Process((one,), 1, "")]) for one in (known, new))
    for before, after, times in ((ours, theirs, "2.000"), (theirs, ours, "0.500")):
        found = compare(("a", "b"), before, after)
        assert found is not None
        told = f"B took {times} times A's seconds per round: {NOISE}."
        assert told in sentences(found)


LEARNING = LearningRecord(
    round=5,
    rows=4,
    seconds={"collect": 3.0},
    samples_per_second={"denoiser": 1.0},
    parameters={"denoiser": 1},
    flops={"denoiser": 1.0},
    utilisation={"denoiser": np.nan},
    peak_memory=np.ones(1),
)


def test_costs_go_by_the_runs_that_shared_each_round() -> None:
    """Four rounds of 2 s beside another run, then two alone, of each of two seeds: 16 s in
    all, of which their servers took 6.
    """
    ended = replace(
        run_of(seconds=[2.0] * 6, rounds=6, target_accuracy=1),
        stacks=np.array([2, 2, 2, 2, 1, 1]),
        learnings=(LEARNING,),
    )
    apart = replace(ended, facts=ended.facts | {"resumed": [4]})
    other = replace(apart, facts={**apart.facts, "seed": 1})
    (table,) = of_server([apart, other])
    assert [str(cell) for cell in table.rows[0][1:3]] == ["6.00", "37.5%"]
    assert [str(cell) for cell in table.rows[-1][:3]] == [
        "clients and the rest", "10.00", "62.5%"
    ]  # fmt: skip
    assert table.caption.startswith("2 trainings of 2 seeds;")
    (table,) = of_server([apart])
    assert [str(cell) for cell in table.rows[0][1:3]] == ["3.00", "25.0%"]
    assert str(table.rows[-1][0]) == "clients, other runs and the rest"
    (group,) = groups([Process((apart, other), 0, "run")])
    shares = server_section([group], []).tables[-1].rows
    assert [str(row[-1]) for row in shares] == ["37.5"], "of the time of both seeds"
    (group,) = groups([Process((apart,), 0, "run")])
    (cost,) = server_costs([group])
    assert cost.between == 6 * 2.0, "of the last rounds, which are all its own"
    # Seconds of rounds that others shared do not add up with those of its own.
    assert np.isnan([run_seconds(group).centre, mean_to_target(group, "seconds")]).all()
    assert mean_to_target(group, "rounds") == 1
    # One process made these rounds; the other run has ended after four of them.
    (group,) = groups([Process((ended,), 0, "run")])
    assert run_seconds(group).centre == 12 and mean_to_target(group, "seconds") == 2


def test_what_a_stacked_seed_does_besides_its_phases_is_a_wait_for_the_others() -> None:
    """Each round trains for 0.5 s, and is 1.5 s outside of all phases."""
    phases = np.zeros((6, 1, len(PHASES)))
    phases[:, :, PHASES.index("train")] = 0.5
    phases[:, :, PHASES.index("other")] = 1.5
    run = replace(run_of(seconds=[2.0] * 6, rounds=6), phases=phases)
    for together, between in ((2, 6 * 0.5 / 2), (1, 6 * 2.0)):
        stacked = replace(run, stacks=np.full(6, together), learnings=(LEARNING,))
        (group,) = groups([Process((stacked,), 0, "run")])
        (cost,) = server_costs([group])
        assert cost.between == pytest.approx(between)
        told = of_phases(stacked).caption + " ".join(verdict(group))
        wait = "other, with the wait for the runs beside it, 75%"
        assert (wait in told) == (together > 1) == ("; other: with" in told)


def test_servers_of_stacked_seeds_are_no_wait() -> None:
    """A seed spends 3 s outside of its phases: 2 s are another's server; the
    other has ended after two of four rounds.
    """

    def seed(number: int, rounds: int, server: float, other: float) -> RunRecord:
        phases = np.zeros((rounds, 1, len(PHASES)))
        phases[:, :, PHASES.index("server")] = server
        phases[:, :, PHASES.index("other")] = other
        each = {"seed": number, "facts": {"stacked_seeds": 2}}
        return replace(run_of(seconds=[4.0] * rounds, **each), phases=phases)

    seeds = seed(0, 2, server=2.0, other=2.0), seed(1, 4, server=1.0, other=3.0)
    totals = timed_run(seeds).phase_totals()
    assert (totals["server"], totals["other"]) == (4 * 1 + 2 * 2, 4 * 3 - 2 * 2)
    (group,) = groups([Process(seeds, 0, "run")])
    assert group.phase_means["server"] == 2.0
    assert seeds[1].phase_totals()["server"] == 4.0, "by itself it does not know"


def test_phases_are_medians_beside_a_median_and_seldom_ones_are_named() -> None:
    group = groups([Process((LEARNT_LATE,), 1, "run")])[0]
    found = compare(("a", "b"), [group], [group])
    assert found is not None
    phases = {figure.name: figure.before for figure in found.phases}
    assert phases["phase train"] == 750, "of 0.75, 0.75, 1.5, 0.75 and 1 seconds"
    assert phases["phase server, mean of all rounds"] == pytest.approx(6000)
    assert LEARNT_LATE.phase_seconds()["server"] == 0
    assert LEARNT_LATE.phase_totals()["server"] == 30
    section = phases_of([group], [])
    (table,) = section.tables
    cells = dict(zip(table.columns, map(str, table.rows[0]), strict=True))
    assert (cells["train"], cells["server, mean"]) == ("750", "6,000")
    assert "server" not in cells and "Few rounds go through server" in section.text[1]
