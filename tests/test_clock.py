"""Devices, the virtual clock, and what becomes of clients that are late, lost or away."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfed.config import RunConfig
from hpcfed.errors import UserError
from hpcfed.transit.availability import Availability
from hpcfed.transit.devices import Devices, devices_of
from hpcfed.transit.trace import read_trace
from tests.runs import mistake

HEADING = "client,speed,downlink,uplink"
DAY = "0-25200;79200-86400"
"""From 22:00 to 7:00."""


def config(**values: Any) -> RunConfig:
    return RunConfig.model_validate({"devices": "lognormal", **values})


def made(**values: Any) -> Devices:
    devices = devices_of(config(**values))
    assert devices is not None
    return devices


def trace(folder: Path, *lines: str, heading: str = HEADING) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join([heading, *lines, ""]))
    return path


def test_a_clients_time_is_worked_out_by_hand() -> None:
    devices = Devices(
        speed=np.array([1.0, 0.5, 2.0]),
        downlink=np.array([100.0, 50.0, 10.0]),
        uplink=np.array([10.0, 20.0, 5.0]),
        step_seconds=0.5,
    )
    # 4 × 0.5 / 0.5 + 100 / 50 + 40 / 20, and 6 × 0.5 / 2 + 100 / 10 + 40 / 5.
    found = devices.seconds(np.array([1, 2]), np.array([4, 6]), 100, 40)
    np.testing.assert_array_equal(found, [8.0, 19.5])


def test_runs_without_a_clock_have_no_devices() -> None:
    assert devices_of(RunConfig()) is None


def test_log_normal_devices_have_their_medians_and_spreads() -> None:
    found = made(clients=20_000, speed_spread=0.5, downlink="8Mb/s", link_spread=1.0)
    logs = np.log(found.speed)
    assert abs(np.median(logs)) < 0.02
    assert abs(logs.std() - 0.5) < 0.01
    assert abs(np.median(found.downlink) / 1e6 - 1) < 0.03
    assert abs(np.log(found.downlink).std() - 1) < 0.02
    # A client's two directions are fast or slow together.
    np.testing.assert_allclose(found.downlink / found.uplink, 1e6 / 250_000)


def test_uniform_devices_stay_within_their_spread() -> None:
    found = made(devices="uniform", clients=5000, speed_spread=0.5, uplink=100)
    assert 0.5 <= found.speed.min() < 0.51
    assert 1.49 < found.speed.max() <= 1.5
    assert 25 <= found.uplink.min() < found.uplink.max() <= 175


def test_a_clients_device_depends_on_seed_and_id_alone() -> None:
    few, many = made(clients=5, seed=3), made(clients=500, seed=3)
    np.testing.assert_array_equal(few.speed, many.speed[:5])
    np.testing.assert_array_equal(few.uplink, many.uplink[:5])
    assert (few.speed != made(clients=5, seed=4).speed).all()
    # Seeds that share their data share their clients.
    shared = made(clients=5, seed=4, data_seed=3)
    np.testing.assert_array_equal(few.speed, shared.speed)


def test_devices_of_ten_thousand_clients_take_milliseconds() -> None:
    made(clients=10)
    begin = time.perf_counter()
    made(clients=10_000)
    assert time.perf_counter() - begin < 0.1


def test_a_trace_gives_clients_their_lines_in_any_order(tmp_path: Path) -> None:
    path = trace(tmp_path, "1,0.5,20,2", "", "0,2,10,1e3")
    found = made(devices=f"file:{path}", clients=2)
    assert found.speed.tolist() == [2, 0.5]
    assert found.downlink.tolist() == [10, 20]
    assert found.uplink.tolist() == [1000, 2]
    assert found.available(1e9).tolist() == [0, 1]


def test_clients_beyond_a_trace_draw_a_line_of_it(tmp_path: Path) -> None:
    heading = f"{HEADING},available"
    path = trace(tmp_path, "0,1,10,1,0-5;7-9", "1,3,30,3,", heading=heading)
    found = made(devices=f"file:{path}", clients=200)
    assert found.speed[:2].tolist() == [1, 3]
    assert set(found.speed[2:].tolist()) == {1, 3}
    # What belongs together stays together.
    np.testing.assert_array_equal(found.uplink, found.speed)
    np.testing.assert_array_equal(found.downlink, 10 * found.speed)
    assert found.available(8.0).tolist() == list(range(200))
    np.testing.assert_array_equal(found.available(6.0), np.flatnonzero(found.speed > 2))
    # Fewer clients than lines are the first of them.
    assert made(devices=f"file:{path}", clients=1).speed.tolist() == [1]


def test_spans_come_again_in_every_period(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        f"0,1,1,1,{DAY},86400",
        "1,1,1,1,10-20,",
        heading=f"{HEADING},available,period",
    )
    found = read_trace(path).availability
    assert found is not None
    hour = 3600.0
    day = 24 * hour
    assert found.at(0.0).tolist() == [True, False]
    assert found.at(10.0).tolist() == [True, True]
    assert found.at(20.0).tolist() == [True, False]
    assert found.at(7 * hour).tolist() == [False, False]
    assert found.at(5 * day + 23 * hour).tolist() == [True, False]
    # Nobody from 7:00 to 22:00, of any day.
    assert found.next(7 * hour) == 22 * hour
    assert found.next(5 * day + 8 * hour) == 5 * day + 22 * hour
    assert found.next(5 * day + 23 * hour) == 5 * day + 23 * hour


def test_somebody_is_there_when_the_wait_is_over() -> None:
    """Also where the sum of moment and wait is rounded."""
    spans = Availability(
        1, np.array([0]), np.array([0.1]), np.array([0.2]), np.array([0.7])
    )
    for now in np.random.default_rng(0).uniform(0, 1e6, 500):
        following = spans.next(float(now))
        assert spans.at(following).all()
        assert now <= following <= now + 0.7


def test_nobody_is_there_after_the_last_span() -> None:
    once = Availability(
        1, np.array([0]), np.array([5.0]), np.array([9.0]), np.array([np.inf])
    )
    assert once.next(0.0) == 5
    assert once.next(9.0) == np.inf


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["0,1,1"], "line 2: 3 cells, but the heading has 4"),
        (["0,1,1,1", "0,1,1,1"], "line 3: client 0 was there before"),
        (["1,1,1,1"], "clients count from 0 without gaps, and 0 is missing"),
        (["-1,1,1,1"], "line 2: client must be a number from 0 on, got '-1'"),
        (["9999999999,1,1,1"], "line 2: client must be a number from 0 on"),
        (["0,0,1,1"], "line 2: speed must be from 1e-09 to 1e+15, got 0"),
        (["0,1,nan,1"], "line 2: downlink must be a number, got 'nan'"),
        (["0,1,1,1_0"], "line 2: uplink must be a number, got '1_0'"),
        (["0,1,1,"], "line 2: uplink must be a number, got ''"),
        (['0,1,1,"1'], "line 2: unexpected end of data"),
        ([], "there is no client below the heading"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(
    tmp_path: Path, lines: list[str], complaint: str
) -> None:
    path = trace(tmp_path, *lines)
    with pytest.raises(UserError) as refusal:
        read_trace(path)
    assert complaint in str(refusal.value)
    assert str(refusal.value).startswith(str(path))


@pytest.mark.parametrize(
    ("spans", "complaint"),
    [
        ("5,", "available must look like 0-3600, got '5'"),
        ("5-5,", "available must begin before it ends, got '5-5'"),
        ("-5-9,", "available must be a number, got ''"),
        ("5-inf,", "available must be a number, got 'inf'"),
        ("5-90,80", "available must end within the period of 80, got '5-90'"),
        ("5-90,-1", "period must be from 1e-09 to 1e+15, got -1"),
    ],
)
def test_wrong_spans_are_refused(tmp_path: Path, spans: str, complaint: str) -> None:
    heading = f"{HEADING},available,period"
    with pytest.raises(UserError) as refusal:
        read_trace(trace(tmp_path, f"0,1,1,1,{spans}", heading=heading))
    assert f"line 2: {complaint}" in str(refusal.value)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    for heading in ("a,b", f"{HEADING},speed", f"{HEADING},battery"):
        with pytest.raises(UserError, match="line 1: must name the columns client"):
            read_trace(trace(tmp_path, heading=heading))
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.csv: it is no UTF-8 text"):
        read_trace(binary)
    with pytest.raises(UserError, match="Is a directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--devices lognornal", "unknown --devices 'lognornal'; did you mean"),
        ("--devices phones", "known: none, lognormal, uniform, file:TRACE.csv"),
        ("--devices file:/nowhere.csv", "--devices file:/nowhere.csv: no such file"),
        ("--devices uniform --link-spread 1", "--link-spread 1.0: with --devices uni"),
        ("--deadline 9", "--deadline changes nothing without --devices lognormal"),
        ("--dropout-rate 0.1", "--dropout-rate changes nothing without --devices"),
        ("--downlink 5Mb/s", "--downlink changes nothing without --devices lognormal"),
        ("--devices lognormal --partial", "--partial changes nothing without --deadl"),
        ("--devices uniform --oversample 2", "--oversample changes nothing without a"),
        ("--devices uniform --oversample 0.9", "--oversample 0.9"),
        ("--devices uniform --dropout-rate 1", "--dropout-rate 1"),
        ("--devices uniform --uplink 5MB", "must be a number with a unit"),
    ],
)
def test_wrong_options_are_one_line(
    options: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complaint in mistake(capsys, "run", *options.split())


def test_links_are_numbers_or_have_units() -> None:
    assert config(uplink="5").uplink == 5
    assert config(uplink=5).uplink == 5
    assert config(uplink="8Mb/s").uplink == 1e6


def test_a_traces_path_is_recorded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config(devices="file:a/../t.csv").devices == f"file:{tmp_path}/t.csv"
    assert config(devices="file:~nobody-at-all/t.csv").trace is not None


def test_more_clients_are_invited_than_count() -> None:
    def invited(**values: Any) -> int:
        return config(clients=100, **values).invited_among(100)

    assert invited(cohort=10, oversample=1.3) == 13
    assert invited(cohort=10, oversample=1.25) == 13
    assert invited(cohort=50, oversample=1.1) == 55
    assert invited(cohort=90, oversample=1.3) == 100
    assert invited(cohort=10) == 10
