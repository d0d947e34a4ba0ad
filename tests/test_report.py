"""Figures computed by hand, a cost model with known coefficients, and runs that cannot be
read.
"""

import csv
import json
import os
import shutil
from collections.abc import Callable, Sequence
from errno import EACCES, ENAMETOOLONG
from math import exp, isnan, log, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

from benchmarks.hostile import fuzz
from hpcfed import cli
from hpcfed.analysis import choices
from hpcfed.analysis.choices import Combination, distinguish
from hpcfed.analysis.collect import find
from hpcfed.analysis.command import content_of
from hpcfed.analysis.costmodel import CostModel, Measured, fit, hold_out
from hpcfed.analysis.groups import Group, groups
from hpcfed.analysis.labels import label
from hpcfed.analysis.render.run_page import learning as run_learning
from hpcfed.analysis.run_findings.learning import worst_tenth
from hpcfed.analysis.scaling import growths, scalings, slope
from hpcfed.analysis.statistics import (
    Estimate,
    difference,
    of_rounds,
    of_runs,
    of_seeds,
    ratio,
)
from hpcfed.errors import UserError, remark, say
from hpcfed.results.series import ROUND_SERIES, RoundSeries, agreed
from hpcfed.results.server import LatentMap
from hpcfed.results.stored import read_run
from hpcfed.results.study import Outcome, write_outcome
from hpcfed.studies.execute import gather
from hpcfed.studies.plan import points, read_study, trials
from tests.page import parsed
from tests.runs import mistake

NAN = float("nan")
T_OF_TWO, T_OF_THREE = 12.7062, 4.30265
"""Student's t for 95 % of two and of three values."""


def test_runs_by_student_on_logarithms() -> None:
    found = of_runs([2.0, 8.0])
    assert found.centre == pytest.approx(4.0)
    half = (
        T_OF_TWO * (log(8) - log(2)) / sqrt(2) / sqrt(2)
    )  # the deviation of two values is their distance by √2
    assert found.low == pytest.approx(4 * exp(-half), rel=1e-4)
    assert found.high == pytest.approx(4 * exp(half), rel=1e-4)
    alone = of_runs([3.0])
    assert alone.centre == pytest.approx(3.0) and not alone.bounded


def test_rounds_between_order_statistics() -> None:
    """The smallest and the largest of six hold the median with 1 − 2/64, the second from
    each end of nine with 1 − 20/512.
    """
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
    assert (skewed.low, skewed.high) == (pytest.approx(2), pytest.approx(4)), (
        "each end has its own distance"
    )
    assert isnan(ratio(Estimate(8), Estimate(2, 1, 4)).low)


def test_seeds_are_compared_in_pairs_or_by_welch() -> None:
    paired = difference({0: 0.9, 1: 0.5}, {1: 0.3, 0: 0.6})
    assert paired.centre == pytest.approx(0.25)
    # Differences 0.3 and 0.2: their deviation is 0.1 / √2, their mean's 0.05.
    assert paired.high - 0.25 == pytest.approx(T_OF_TWO * 0.05, rel=1e-4)
    apart = difference({0: 0.9, 1: 0.5}, {2: 0.6, 3: 0.3})
    # Variances of the means 0.04 and 0.0225; degrees of freedom 0.0625² / (0.04² +
    # 0.0225²) = 1.8546, between Student's t of two and of three values.
    assert apart.centre == pytest.approx(0.25)
    assert apart.high - 0.25 == pytest.approx(4.6426 * 0.25, rel=1e-3)
    assert not difference({0: 0.9}, {0: 0.6}).bounded


def labels(options: Sequence[dict[str, Any]]) -> list[str]:
    return [label(key) for key in distinguish([Combination(own) for own in options])]


def test_names_hold_what_differs_and_not_what_follows_from_it() -> None:
    common = {"clients": 4, "ranks": 1, "attack": "none", "attackers": 0.2, "lr": 0.1}
    one = common | {
        "method": "fedavg",
        "dataset": "mnist",
        "model": "small",
        "rounds": 5,
        "supplement": False,
    }
    two = one | {"dataset": "cifar10", "model": "deep", "rounds": 9}
    options = [
        one,
        two,
        one | {"supplement": True},
        two | {"attack": "ipm"},
        one | {"method": "genfed", "lr": 0.5},
    ]
    assert labels(options) == [
        "fedavg, dataset mnist, no supplement",
        "fedavg, dataset cifar10, no supplement",
        "fedavg, dataset mnist, supplement",
        "fedavg, dataset cifar10, attack ipm, no supplement",
        "genfed, dataset mnist",
    ], "network and rounds follow from the data set, lr from the method"
    key = distinguish([Combination(own) for own in options])[0]
    assert label(key.without("dataset")) == "fedavg, no supplement"
    more = labels([one | {"model": "deep"}, *options])
    assert more[1] == "fedavg, dataset mnist, model small, no supplement", (
        "now the data set does not tell it"
    )
    assert labels([one, one | {"method": "genfed", "model": "deep"}]) == [
        "fedavg, model small",
        "genfed, model deep",
    ], "of different networks"


def test_a_choice_is_a_key_by_its_values() -> None:
    one = Combination({"lr": 0.1, "widths": [8, 16], "odd": float("nan")})
    other = Combination({"odd": float("nan"), "widths": [8, 16], "lr": 0.1})
    assert one == other and {one: "found"}[other] == "found", "in any order"
    assert one != Combination({**one, "lr": 0.2})
    assert list(one.without("odd", "lr")) == ["widths"]
    assert list(one.only(["odd", "absent", "lr"])) == ["odd", "lr"]


def test_options_set_groups_apart_where_labels_do_not() -> None:
    """Labels have six digits; groups must not be put together by them."""
    common = {"method": "fedavg", "clients": 4, "ranks": 1}
    near = [Combination(common | {"lr": lr}) for lr in (0.1, 0.1 + 1e-9)]
    first, second = distinguish(near)
    assert first != second and label(first) == label(second) == "fedavg, lr 0.1"


def test_names_leave_out_an_option_that_is_unset() -> None:
    common = {"clients": 4, "ranks": 1, "attack": "none"}
    sizes = [
        {"server": "small", "server_latent": None},
        {"server": "paper", "server_latent": None},
    ]
    sizes.append({"server": "paper", "server_latent": 512})
    assert labels([common | own | {"method": "pfedgpa"} for own in sizes]) == [
        "pfedgpa, server small",
        "pfedgpa, server paper",
        "pfedgpa, server paper, server_latent 512",
    ]
    pulls = [common | {"method": "genefl", "lambda1": own} for own in (0.0, 0.5)]
    assert labels(pulls) == [
        "genefl, lambda1 0",
        "genefl, lambda1 0.5",
    ], "0 is not usual"


def test_names_have_what_was_asked_for_not_what_follows_from_it() -> None:
    """span has no autoencoder, so that its number of samples differs, too."""
    common = {"method": "pfedgpa", "clients": 4, "ranks": 1}
    models = [
        {"server_model": "p-diff", "autoencoder_samples": 200, "server": "tiny"},
        {"server_model": "span", "autoencoder_samples": None, "server": "tiny"},
    ]
    assert labels([common | own for own in models]) == [
        "pfedgpa, server_model p-diff",
        "pfedgpa, server_model span",
    ]


def test_names_of_many_groups_are_found_once_for_a_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Finding them looks at every option of every group: done for each group, a
    thousand runs took minutes.
    """
    common = {"clients": 4, "ranks": 1, "attack": "none"}
    every = [
        common | {"method": name, "lr": lr}
        for name in ("fedavg", "genfed")
        for lr in range(50)
    ]
    found, calls = choices._distinguishing, []
    monkeypatch.setattr(
        choices, "_distinguishing", lambda *words: calls.append(1) or found(*words)
    )
    assert len(set(labels(every))) == 100
    assert len(calls) == 2


class Timed(Group):
    """A group with times as given."""

    def __init__(self, clients: int, ranks: int, seconds: Estimate) -> None:
        object.__setattr__(self, "options", {"clients": clients, "ranks": ranks})
        object.__setattr__(self, "samples", ())
        object.__setattr__(self, "key", Combination({"method": "x"}))
        self.__dict__["seconds"] = seconds


def test_speed_up_and_efficiency() -> None:
    strong, weak = scalings([
        Timed(8, 2, Estimate(10.0, 10.0, 10.0)), Timed(8, 8, Estimate(4.0, 2.0, 8.0)), Timed(32, 8, Estimate(12.5)),
    ])  # fmt: skip
    assert (strong.kind, strong.ranks, strong.ideal) == ("strong", [2, 8], [1, 4])
    assert strong.speedup[0] == Estimate(1, 1, 1)
    assert strong.speedup[1].centre == pytest.approx(2.5)
    assert (strong.speedup[1].low, strong.speedup[1].high) == (
        pytest.approx(1.25),
        pytest.approx(5.0),
    )
    assert strong.efficiency[1].centre == pytest.approx(2.5 / 4)
    assert (strong.efficiency[1].low, strong.efficiency[1].high) == (
        pytest.approx(1.25 / 4),
        pytest.approx(5 / 4),
    )
    assert (weak.kind, weak.ranks) == ("weak", [2, 8])
    assert weak.speedup[1].centre == pytest.approx(4 * 10 / 12.5), (
        "four times the clients in 1.25 times the time"
    )
    assert weak.efficiency[1].centre == pytest.approx(0.8)


def test_the_power_of_clients() -> None:
    assert slope([10, 100, 1000], [2, 20, 200]) == pytest.approx(1)
    assert slope([10, 1000], [5, 5]) == pytest.approx(0)
    assert isnan(slope([10, 10], [1, 2]))


def test_points_with_the_same_clients_do_not_grow() -> None:
    """They differ in an option that does not act, which their keys omit."""
    alike = [Timed(8, 1, Estimate(seconds)) for seconds in (1.0, 2.0, 3.0)]
    assert growths(alike) == []


def known(clients: float, ranks: int, columns: float) -> Measured:
    seconds = (
        0.01
        + 0.002 * clients / ranks
        + 0.05 * clients / ranks * columns / 1e6
        + 0.004 * np.log2(ranks)
    )
    return Measured(clients, ranks, columns, float(seconds))


def test_the_cost_model_recovers_known_coefficients() -> None:
    points = [
        known(c, r, d) for c in (10, 100, 1000) for r in (1, 2, 4) for d in (4e3, 1e5)
    ]
    model = fit(points)
    assert model is not None
    expected = [0.01, 0.002, 0.05, 0.004, 0.0]
    np.testing.assert_allclose(
        list(model.coefficients.values()), expected, rtol=1e-6, atol=1e-9
    )
    assert model.error < 1e-9 and model.left_out_error < 1e-6
    assert model(known(2000, 64, 1e5)) == pytest.approx(known(2000, 64, 1e5).seconds), (
        "on more ranks than measured"
    )


def test_the_cost_model_tells_steps_from_clients() -> None:
    """A data set that is shared out among more clients gives each fewer steps: the time
    falls, as it should.
    """
    points = []
    for clients in (10, 30, 100):
        for ranks in (1, 2):
            steps = 1200 / clients
            seconds = 0.005 + 0.0003 * steps + 0.00001 * steps * clients / ranks
            points.append(Measured(clients, ranks, 1e4, seconds, steps))
    model = fit(points)
    assert model is not None and model.error < 1e-6
    np.testing.assert_allclose(
        list(model.coefficients.values())[:3], [0.005, 0.0003, 0.00001], rtol=1e-4
    )


def test_the_cost_model_is_checked_on_a_point_it_has_not_seen() -> None:
    points = [known(c, r, 1e4) for c in (10, 100) for r in (1, 2, 4)]
    slow = Measured(100, 8, 1e4, 2 * known(100, 8, 1e4).seconds)
    checked = hold_out([slow, *points])
    assert checked is not None and checked.point is slow
    assert checked.error == pytest.approx(-0.5, abs=1e-6), (
        "the slow point has not taught the model"
    )


def test_two_points_make_no_cost_model() -> None:
    assert fit([known(10, 1, 1e4), known(20, 1, 1e4)]) is None
    assert hold_out([known(10, 1, 1e4), known(20, 1, 1e4), known(40, 1, 1e4)]) is None
    assert isinstance(
        fit([known(10, 1, 1e4), known(20, 1, 1e4), known(40, 1, 1e4)]), CostModel
    )


def test_the_check_of_nesting_can_fail() -> None:
    with pytest.raises(AssertionError):
        parsed("<p><b>x</p></b>")
    with pytest.raises(AssertionError):
        parsed("<p>x")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("report", "report needs PATH, as in: hpcfed report "),
        ("report nowhere", "no such folder: nowhere"),
        ("report empty", "empty holds neither a run nor a study"),
        ("report empty --outt x", "--outt"),
    ],
)
def test_nothing_to_report_is_one_line(
    words: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert expected in mistake(capsys, *words.split())
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]


def test_what_counts_as_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint's copy of the record is no run of its own, a pipe is no file, and
    results are not written over.
    """
    run = tmp_path / "run"
    words = [
        "--model",
        "mlp",
        "--rounds",
        "2",
        "--clients",
        "2",
        "--checkpoint-every",
        "1",
        "--out",
        str(run),
    ]
    cli.main(["run", *words])
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "run.h5")
    found = find([tmp_path])
    assert (
        len(found.processes),
        found.single_runs,
        found.unfinished,
        found.unread,
    ) == (
        1,
        1,
        [],
        [],
    )
    capsys.readouterr()
    said = mistake(capsys, "report", run, "--csv", run / "run.h5")
    assert ".h5 is for results; name a file of another kind" in said
    assert len(find([run]).processes) == 1


@pytest.mark.parametrize("flag", ["--out", "--csv", "--json", "--extrap"])
def test_what_is_no_regular_file_is_not_replaced(
    flag: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Renaming a new file over a device, a pipe or a link would remove it; it is
    refused before any run is read.
    """
    monkeypatch.chdir(tmp_path)
    Path("target").write_text("mine")
    Path("link").symlink_to("target")
    Path("dangling").symlink_to("nowhere")
    os.mkfifo("pipe")
    before = {path.name: path.lstat() for path in tmp_path.iterdir()}
    for name, kind in {
        "link": "a link",
        "dangling": "a link",
        "pipe": "a pipe",
        "/dev/null": "a device",
    }.items():
        said = mistake(capsys, "report", "runs", flag, name)
        assert f"{flag} {name} is {kind}; name a regular file" in said
    assert {path.name: path.lstat() for path in tmp_path.iterdir()} == before
    assert "cannot write" in mistake(capsys, "report", "runs", flag, "x" * 300)


def test_a_figure_replaces_regular_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.png").symlink_to("nowhere.png")
    assert "is a pipe; name a regular file" in mistake(
        capsys, "attack", "idlg", "--out", tmp_path / "pipe.png"
    )
    assert "is a link; name a regular file" in mistake(
        capsys, "attack", "idlg", "--out", tmp_path / "link.png"
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedAvg, and two seeds of a run with a server."""
    folder = tmp_path_factory.mktemp("good")
    # On a slow machine they would last long enough for telemetry.
    size = [*fuzz.SIZE, "--rounds", "4", "--telemetry", "0", "--out"]
    server = [*fuzz.SERVER, *size]
    cli.main(["run", *size, str(folder / "plain")])
    cli.main(["run", *server, str(folder / "server")])
    cli.main(["run", "--seed", "1", *server, str(folder / "other")])
    return folder


def test_the_page_of_one_run_says_what_came_of_it(good: Path) -> None:
    """Three sentences, then sections that all have something to show."""
    of_all = ["accuracy", "clients", "classes", "time", "costs"]
    ends = ["environment", "reproduce"]
    of_server = [*of_all[:4], "server", "latents", *of_all[4:]]
    for name, expected in {"plain": of_all, "server": of_server}.items():
        found = find([good / name])
        content = content_of(groups(found.processes), found)
        assert [section.id for section in content.sections] == expected + ends
        for section in content.sections:
            assert section.charts or section.tables or section.listings
        accuracy, time, where = content.lead
        record = read_run(good / name)
        last = f"clients reach {100 * record.last('accuracy'):.3g} %"
        assert accuracy.startswith("Accuracy after 4 rounds: ") and last in accuracy
        assert "all 4 took " in time
        assert "train " in where or "server " in where
    both = find([good / "plain", good / "server"])
    assert "overview" in {one.id for one in content_of(groups(both.processes), both).sections}  # fmt: skip


def test_rounds_without_evaluation_show_the_next_one() -> None:
    accuracy = np.array([[NAN, NAN], [0.1, 0.2], [NAN, NAN], [0.3, NAN], [NAN, NAN]])
    run = SimpleNamespace(client_accuracy=accuracy)
    shown = run_learning.over_rounds(run)  # type: ignore[arg-type]
    np.testing.assert_array_equal(shown, accuracy[[1, 1, 3, 3]])
    assert worst_tenth(np.arange(30.0, 0, -1)) == 2, "of 1, 2 and 3"
    assert worst_tenth(np.array([5.0, 4.0])) == 4


def test_names_on_a_map_do_not_lie_on_each_other() -> None:
    """Client 0's newest upload is alone, those of 1 and 2 are close."""
    places = np.array([[5.0, 5], [0, 0], [10, 10], [10.1, 10.1]])
    found = LatentMap(np.array([0, 0, 1, 2]), places, np.array([0.9, 0.1]))
    assert run_learning.apart(found) == {1, 2}


def change(path: Path, name: str, content: object) -> None:
    """Puts other content in place of a dataset; a dict is merged into the JSON that is
    there.
    """
    with h5py.File(path, "r+") as file:
        old = file[name]
        if isinstance(content, dict):
            content = json.dumps(json.loads(old.asstr()[()]) | content)
        elif isinstance(content, float):
            content = np.full(old.shape, content)
        elif isinstance(content, type):
            content = np.ceil(old[()]).astype(content)
        elif isinstance(content, str):
            content = np.array(
                [content + name.decode() for name in old[()]], dtype=h5py.string_dtype()
            )
        del file[name]
        file[name] = content


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config", {"epochs": None}, "its option epochs is null"),
        ("config", {"batch_size": None}, "its option batch_size is null"),
        ("clients/train_samples", float("nan"), "clients/train_samples holds impossible numbers"),
        ("rounds/seconds", 5e-324, "rounds without seconds"),
        ("rounds/cohort", 5e-324, "rounds have impossible numbers of clients"),
        ("rounds/cohort", float("nan"), ""),
        ("server/phase_names", "my ", ""),
        ("rounds/seconds", np.int64, ""),
        ("rounds/seconds", np.float32, ""),
        ("rounds/global_loss", float("inf"), ""),
        ("environment", {"odd": [float("inf"), float("nan")]}, ""),
        ("config", {"odd": float("-inf")}, ""),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_a_damaged_run_costs_no_good_one(
    name: str,
    content: object,
    reason: str,
    good: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot be is left out by name, what is merely unusual is reported, and JSON
    stays JSON.
    """
    runs = tmp_path / "runs"
    shutil.copytree(good, runs)
    change(runs / "other/run.h5", name, content)
    shutil.copytree(runs / "other", tmp_path / "alone/other")
    for folders in ([runs], [tmp_path / "alone", good / "plain"]):
        exports = {flag: tmp_path / flag for flag in ("out", "csv", "json", "extrap")}
        words = [
            word for flag, path in exports.items() for word in (f"--{flag}", str(path))
        ]
        capsys.readouterr()
        if reason:
            with pytest.raises(SystemExit, match="1"):
                cli.main(["report", *map(str, folders), *words])
        else:
            cli.main(["report", *map(str, folders), *words])
        told = capsys.readouterr().err
        assert (
            (f"other/run.h5 cannot be read as a run: {reason}" in told)
            if reason
            else told == ""
        )
        groups = json.loads(exports["json"].read_text(), parse_constant=pytest.fail)[
            "groups"
        ]
        expected = {"fedavg"} | (
            {"pfedgpa"} if folders == [runs] or not reason else set()
        )
        assert {group["options"]["method"] for group in groups} == expected
        for line in exports["extrap"].read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)
        parsed(exports["out"].read_text())
    if not reason:
        cli.main(["show", "--json", str(runs / "other")])
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_a_damaged_run_in_a_study_costs_no_other_trial(
    good: Path, tmp_path: Path
) -> None:
    study = tmp_path / "study.toml"
    study.write_text("[common]\nmodel = 'mlp'\nrounds = 4\n[sweep]\nclients = [4, 5]\n")
    every = trials(read_study(study), points(read_study(study), study), tmp_path)
    for trial in every:
        shutil.copytree(good / "plain", trial.folder)
        write_outcome(trial.outcome, Outcome("complete"))
    change(every[0].folder / "run.h5", "rounds/seconds", 0.0)
    gather(tmp_path / "study.h5", read_study(study), "", every)
    found = find([tmp_path])
    assert [sample.source.rpartition(": ")[2] for sample in found.processes] == [
        "clients=5/repeat-0"
    ]
    assert found.unfinished == [("clients=4/repeat-0", "unreadable", "")]
    (why,) = found.unread
    assert (
        "study.h5 cannot be read as a study: trial clients=4/repeat-0: rounds without seconds"
        in why
    )


def test_an_interval_of_figures_far_apart_ends_where_floats_do() -> None:
    found = of_runs([1e-9, 1e30])
    assert ratio(found, found).high < float("inf")


def test_names_cannot_command_a_terminal(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of folders, titles and errors may come from others: what is told of them
    holds no escapes.
    """
    odd = tmp_path / "\x1b]0;mine\x07\x1b[31m\nhpcfed: all is well"
    shutil.copytree(good, odd)
    (odd / "other/run.h5").write_text("no run")
    with pytest.raises(SystemExit, match="1"):
        cli.main(["report", str(odd), "--out", str(odd / "page.html")])
    said = capsys.readouterr()
    assert "left out: " in said.err and said.err.count("\n") == 1
    assert "page.html: " in said.out and said.out.count("\n") == 1
    remark("\x1b[2Jdamaged\nline 2\r")
    say("\x1b[2J\x9b31m")
    last = capsys.readouterr()
    assert (
        last.err
        == "\N{REPLACEMENT CHARACTER}[2Jdamaged\nline 2\N{REPLACEMENT CHARACTER}\n"
    )
    for text in (said.err, said.out, last.out):
        assert not set("\x1b\x07\r\x9b") & set(text)


def test_swept_options_are_columns(good: Path, tmp_path: Path) -> None:
    """One line for a round of a run, as pandas wants it; the label alone would have to
    be taken apart.
    """
    for lr in (0.1, 0.2):
        shutil.copytree(good / "plain", tmp_path / f"runs/{lr}")
        change(tmp_path / f"runs/{lr}/run.h5", "config", {"lr": lr})
    table = tmp_path / "rounds.csv"
    cli.main(
        [
            "report",
            str(tmp_path / "runs"),
            "--out",
            str(tmp_path / "page.html"),
            "--csv",
            str(table),
        ]
    )
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["lr"], row["round"]) for row in rows] == [
        (lr, n) for lr in ("0.1", "0.2") for n in "1234"
    ]
    assert "epochs" not in rows[0] and "rank" not in rows[0]
    ranks = list(
        csv.DictReader((tmp_path / "rounds-ranks.csv").read_text().splitlines())
    )
    assert [(row["round"], row["rank"]) for row in ranks] == [
        (n, "0") for n in "1234"
    ] * 2


def test_a_new_series_needs_no_change_in_the_report(
    good: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line in the table of series is enough for the CSV and for show, also of files
    that were written before.
    """
    added = RoundSeries("novelty", "1", "a figure", agreed, total="all of it")
    monkeypatch.setitem(ROUND_SERIES, "novelty", added)
    cli.main(["show", "--json", str(good / "plain")])
    assert json.loads(capsys.readouterr().out)["novelty"] == [None] * 4
    cli.main(["show", str(good / "plain")])
    assert "all of it" in capsys.readouterr().out
    table = tmp_path / "rounds.csv"
    page = str(tmp_path / "page.html")
    cli.main(["report", str(good / "plain"), "--out", page, "--csv", str(table)])
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["novelty"] for row in rows] == ["nan"] * 4


def test_neither_file_of_a_table_replaces_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t-ranks.csv").symlink_to("nowhere")
    assert "t-ranks.csv is a link" in mistake(
        capsys, "report", "runs", "--csv", tmp_path / "t.csv"
    )
    words = ["--csv", tmp_path / "u.csv", "--json", tmp_path / "u-ranks.csv"]
    assert "named twice" in mistake(capsys, "report", "runs", *words)
    assert "must be a path" in mistake(capsys, "report", "runs", "--csv", "")


def test_show_has_what_a_run_measured(
    good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["show", "--json", str(good / "plain")])
    told, record = json.loads(capsys.readouterr().out), read_run(good / "plain")
    for name in ("global_loss", "cohort"):
        assert told[name] == record.rounds[name].tolist()
    assert told["excluded"] == [0.0] * 4
    assert told["client_accuracy"] == record.client_accuracy[-1].tolist(), (
        "of every client, after the last round"
    )


def test_a_run_and_seeds_in_one_folder_are_refused_by_all(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Show, report and resume read such a folder in ways of their own; now none of them
    guesses.
    """
    mixed = tmp_path / "mixed"
    shutil.copytree(good / "plain", mixed)
    (mixed / "seed-7").mkdir()
    cli.main(["show", str(mixed)])
    cli.main(["run", "--resume", str(mixed)])
    said = capsys.readouterr()
    assert (
        "status: complete" in said.out
        and "is complete; there is nothing to go on with" in said.err
    )
    shutil.copy(good / "server/run.h5", mixed / "seed-7")
    reason = f"{mixed} holds both a run (run.h5) and a seed of one (seed-7); move one of them elsewhere"
    for words in (
        ["show", mixed],
        ["show", "--json", mixed],
        ["run", "--resume", mixed],
    ):
        assert reason in mistake(capsys, *words)
    found = find([tmp_path])
    assert found.unread == [reason] and found.processes == []
    assert len(find([mixed / "seed-7"]).processes) == 1, (
        "asked for by name, it is a run as any other"
    )


@pytest.mark.parametrize(
    "words", ["show LONG", "report LONG", "run --out LONG", "run LONG", "study LONG"]
)
def test_a_name_that_no_file_can_have_is_one_line(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert os.strerror(ENAMETOOLONG) in mistake(
        capsys, *words.replace("LONG", "x" * 300).split()
    )


def test_a_folder_of_another_user_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a report says that runs may be missing."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()

    # Nothing is forbidden to root, who may run these tests.
    def refusing(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def reads(path: Any) -> Any:
            if Path(path) == theirs:
                raise PermissionError(EACCES, os.strerror(EACCES), str(path))
            return read(path)

        return reads

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    for words in (["show", theirs], ["run", "--out", theirs]):
        assert f"{theirs}: Permission denied" in mistake(capsys, *words)
    assert find([tmp_path]).unread == [f"{theirs} cannot be read: Permission denied"]
    # It does not hide that another path holds nothing.
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=f"{empty} holds neither a run nor a study"):
        find([tmp_path, empty])
