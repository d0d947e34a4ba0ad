"""Devices, the virtual clock, and what becomes of clients that are late, lost or away."""

import hashlib
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

import hpcfed
from hpcfed import cli, methods
from hpcfed.analysis.findings import TIME
from hpcfed.analysis.run_findings import costs
from hpcfed.clients import stacks
from hpcfed.errors import UserError
from hpcfed.experiment.assemble import Setup
from hpcfed.experiment.run import run_setup
from hpcfed.federation.channel import Memory
from hpcfed.federation.channel.clock import MembersTime, VirtualClock, arrivals
from hpcfed.federation.channel.devices import Devices, devices_of
from hpcfed.federation.channel.trace import Availability, read_trace
from hpcfed.federation.log import RoundLog
from hpcfed.methods import load
from hpcfed.options import RunConfig
from hpcfed.results.format import clock_arrays, take_down_clock
from hpcfed.results.stored import changed_files, read_run
from tests.federations import assembled, rounds
from tests.runs import SERVER, flags, mistake, same, started
from tests.stopped_run import StopAfter
from tests.test_resume import OWN, SMALL
from tests.uneven import HARSH, TAUT, Case

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


def test_devices_take_no_calls_of_their_own() -> None:
    def calls(clients: int) -> int:
        """Return how many functions are called, Python's and C's."""
        settings, counted = config(clients=clients), 0

        def count(frame: object, event: str, of: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            devices_of(settings)
        finally:
            sys.setprofile(before)
        return counted

    calls(10)  # the first may import
    assert 0 < calls(10_000) < 2 * calls(10)


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


def test_a_run_ends_with_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Complete and evaluated, after the rounds for which anybody was there."""
    lines = [f"{client},1,1e9,1e9,0-10," for client in range(4)]
    path = trace(tmp_path, *lines, heading=f"{HEADING},available,period")
    words = flags(
        clients=4, rounds=50, epochs=1, devices=f"file:{path}", step_seconds=1,
        evaluate_every=20, out=tmp_path / "run", partition="iid",
    )  # fmt: skip
    record = read_run(started(*words))
    assert record.status == "complete" and 0 < record.rounds_done < 20
    assert np.isfinite(record.last("accuracy"))
    said = capsys.readouterr().err
    ended = f"no client is there any more: ended with round {record.rounds_done}"
    assert ended in said
    cli.main(["show", str(tmp_path / "run")])
    assert "of 50 rounds, no client is there any more" in capsys.readouterr().out
    # Nobody comes back, however many rounds there are to be.
    started("--resume", tmp_path / "run", "--rounds", 60)
    again = read_run(tmp_path / "run")
    assert again.status == "complete" and again.rounds_done == record.rounds_done
    assert ended in capsys.readouterr().err


def test_a_server_that_has_not_learnt_when_the_trace_ends(tmp_path: Path) -> None:
    """The run is complete; it judges nothing that the server would generate, saves no
    server, and new clients train without guidance.
    """
    lines = [f"{client},1,1e9,1e9,0-10," for client in range(4)]
    path = trace(tmp_path, *lines, heading=f"{HEADING},available,period")
    options = SERVER | {"method": "pfedgpa", "memorisation": True, "new_clients": 2}
    words = flags(
        clients=4, rounds=50, epochs=1, devices=f"file:{path}", step_seconds=1,
        evaluate_every=20, out=tmp_path / "run", partition="iid", bank_rounds=2,
        model="mlp", new_updates=1, **options,
    )  # fmt: skip
    record = read_run(started(*words))
    assert record.status == "complete" and record.rounds_done < 20
    assert set(record.finals) == {"FedAvg", "FedAvg-FT"}
    assert not (tmp_path / "run/server.h5").exists()
    curves = record.newcomers
    np.testing.assert_array_equal(curves["random, guided"], curves["random"])


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["0,1,1"], "line 2: 3 cells, but the heading has 4"),
        (["0,1,1,1", "0,1,1,1"], "line 3: client 0 is listed twice"),
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


def test_a_spreadsheets_byte_order_mark_is_no_part_of_the_heading(
    tmp_path: Path,
) -> None:
    path = trace(tmp_path, "0,4,1,1", heading=f"\ufeff{HEADING}")
    assert read_trace(path).speed.tolist() == [4.0]


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    for heading in ("a,b", f"{HEADING},speed", f"{HEADING},battery"):
        with pytest.raises(UserError, match="line 1: must name the columns client"):
            read_trace(trace(tmp_path, heading=heading))
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.csv: it is not UTF-8 text"):
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
        ("--devices uniform --uplink 1e-10", "--uplink 1e-10"),
        ("--devices uniform --downlink 1e16", "--downlink 1e16"),
        ("--devices uniform --step-seconds 1e10", "--step-seconds 1e10"),
        ("--devices uniform --deadline 1e16", "--deadline 1e16"),
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


@pytest.mark.parametrize(
    ("seconds", "lost", "wanted", "deadline", "came", "end"),
    [
        # The server waits for all; for the first two; until the deadline.
        ([3, 1, 2], [], 3, np.inf, [0, 1, 2], 3),
        ([3, 1, 2], [], 2, np.inf, [1, 2], 2),
        ([3, 1, 2], [], 3, 2.5, [1, 2], 2.5),
        # All are there before the deadline, or all that are wanted.
        ([3, 1, 2], [], 3, 9, [0, 1, 2], 3),
        ([3, 1, 2], [], 1, 9, [1], 1),
        # Fewer are there than are wanted.
        ([3, 1], [], 5, 9, [0, 1], 3),
        # Nobody is in time: the first counts, when it comes.
        ([3, 1, 2], [], 3, 0.5, [1], 1),
        # One vanishes: the server waits to the deadline, or for all others.
        ([3, 1, 2], [1], 3, 9, [0, 2], 9),
        ([3, 1, 2], [1], 3, np.inf, [0, 2], 3),
        ([3, 1, 2], [1], 2, 9, [0, 2], 3),
        ([3, 1, 2], [1], 3, 0.5, [2], 2),
        # All vanish: the fastest comes back.
        ([3, 1, 2], [0, 1, 2], 3, np.inf, [1], 1),
        # Of equally fast ones the smaller id counts.
        ([2, 2, 2], [], 2, np.inf, [0, 1], 2),
        # Just in time, but for a rounding.
        ([2, 3 * (1 + 1e-15)], [], 2, 3, [0, 1], 3),
        ([2, 3 * (1 + 1e-15), 9], [], 3, 3, [0, 1], 3),
    ],
)
def test_who_counts_and_when_a_round_ends(
    seconds: list[float],
    lost: list[int],
    wanted: int,
    deadline: float,
    came: list[int],
    end: float,
) -> None:
    vanished = np.isin(np.arange(len(seconds)), lost)
    found, duration = arrivals(
        np.array(seconds, float), vanished, wanted=wanted, deadline=deadline
    )
    assert found.tolist() == came
    assert duration == end


def members(**values: Any) -> MembersTime:
    """Clients 2, 5 and 7, of which a step takes 1, 0.5 and 4 s, a byte 0.1 s either way."""
    speed = np.zeros(8)
    speed[[2, 5, 7]] = 1, 2, 0.25
    usual = {
        "devices": Devices(
            speed=speed, downlink=np.full(8, 10.0), uplink=np.full(8, 10.0), step_seconds=1.0
        ),
        "clients": np.array([2, 5, 7]), "begin": 100.0, "lost": np.zeros(3, bool), "wanted": 3,
        "needs_one": True, "deadline": np.inf, "partial": False, "expected_upload": 0.0,
    }  # fmt: skip
    return MembersTime(**{**usual, **values})


def test_the_time_of_members_by_hand() -> None:
    time = members(lost=np.array([False, False, True]), deadline=30.0)
    every = time.clients
    time.download(every, 20.0, 40.0)
    time.download(np.array([5]), np.array([10.0]), 10.0)
    step = time.devices.train_seconds(every, 1)
    assert time.train(every, np.array([3, 4, 1])) is None
    assert time.train(np.array([2, 7]), np.array([1, 1])) is None
    time.upload(every, np.array([30.0, 20.0, 10.0]))
    time.upload(np.array([7]), 10.0)
    assert time.sent.tolist() == [30, 20, 20]
    assert time.steps_in_time(every, np.array([9, 8, 7])).tolist() == [9, 8, 7]
    time.close()
    expected = np.array([2 + 3, 3 + 2, 2 + 2]) + step * [4, 4, 2]
    table = time.table()
    assert table["steps"].tolist() == [4, 4, 2] and table["arrived"].tolist() == [
        1,
        1,
        0,
    ]
    np.testing.assert_allclose(table["download"], [2, 3, 2])
    np.testing.assert_allclose(table["train"], step * [4, 4, 2])
    np.testing.assert_allclose(table["upload"], [3, 2, 2])
    np.testing.assert_allclose(table["arrival"], [*(100 + expected[:2]), np.nan])
    assert time.end == 130.0, "it waits for the one that has vanished"
    assert time.came(np.array([5, 7])).tolist() == [True, False]
    (taken,) = costs._members(table)
    assert str(taken.rows[0][1]) == str(TIME(2.1)), "of the two that came"
    assert str(taken.rows[1][4]) == str(TIME(float(step[0]) * 4))
    back = members(lost=np.ones(3, bool))
    back.close()
    assert np.isfinite(back.table()["arrival"]).tolist() == [True, False, False]


@pytest.mark.parametrize(("expected", "bytes_up"), [(0.0, 20.0), (50.0, 50.0)])
def test_who_has_time_for_how_many_steps(expected: float, bytes_up: float) -> None:
    """Until the deadline, less the upload that is expected; one step in any case."""
    time = members(partial=True, deadline=16.0, expected_upload=expected)
    every, step = time.clients, time.devices.train_seconds(time.clients, 1)
    time.download(every, 10.0, 20.0)
    left = 16 - 1 - bytes_up / 10
    limits = np.maximum(1, (left * (1 + 1e-9)) // step).astype(int)
    asked = np.array([2, 1000, 1000])
    assert (
        time.steps_in_time(every, asked).tolist() == np.minimum(asked, limits).tolist()
    )
    first = time.train(every, asked)
    assert first is not None and first.tolist() == np.minimum(asked, limits).tolist()
    none = time.train(every, np.array([0, 0, 0]))
    assert none is not None and none.tolist() == [0, 0, 0]
    rest = time.train(np.array([2, 7]), np.array([1000, 5]))
    assert rest is not None and rest.tolist() == [limits[0] - 2, 0]


def test_the_next_round_expects_the_largest_upload_of_the_last() -> None:
    """A private one expects as many bytes as were sent down."""
    for privacy, expected in (("none", 30.0), ("central", 0.0)):
        asked = config(clients=8).model_copy(update={"privacy": privacy})
        clock = VirtualClock(asked, members().devices, np.array([2, 5, 7]), Memory(8))
        assert (
            clock.now == 0 and clock.begin(0, np.array([2]), 0.0).expected_upload == 0
        )
        round = clock.begin(0, np.array([2, 5, 7]), clock.next_moment())
        round.upload(round.clients, np.array([10.0, 30.0, 20.0]))
        assert clock.end(round).tolist() == [2, 5, 7]
        assert clock.now == round.end == 3.0
        later = clock.begin(1, np.array([2]), clock.now)
        assert later.expected_upload == expected and later.begin == 3.0


def test_a_step_that_just_fits_is_taken() -> None:
    step = float(members().devices.train_seconds(np.array([2]), 1)[0])
    for slack, steps in ((-1e-8, 2), (-1e-10, 3), (0.0, 3)):
        time = members(partial=True, deadline=3 * step * (1 + slack))
        assert time.steps_in_time(time.clients, np.full(3, 9))[0] == steps
    endless = members(partial=True, deadline=1e300)
    most = endless.steps_in_time(endless.clients, np.full(3, 2**62))
    assert most.tolist() == [2**53] * 3


@pytest.mark.parametrize(
    ("lost", "deadline", "end"),
    [
        ([], 0.5, 0.5),
        ([0, 1, 2], 9, 9),
        ([0, 1, 2], np.inf, 3),  # when the last should have come
    ],
)
def test_a_private_round_may_go_without_any_upload(
    lost: list[int], deadline: float, end: float
) -> None:
    """Whose upload counts must not depend on who else is there."""
    vanished = np.isin(np.arange(3), lost)
    found, duration = arrivals(
        np.array([3.0, 1, 2]), vanished, wanted=3, deadline=deadline, needs_one=False
    )
    assert not len(found) and duration == end


def test_all_that_poisson_sampling_draws_are_waited_for(tmp_path: Path) -> None:
    """Also where they are more than the cohort, and in the table of the record."""
    words = flags(clients=5, cohort=2, sampling="poisson", devices="uniform", rounds=6)
    run = started(*words, "--out", tmp_path / "run")
    record = read_run(run)
    cohort = record.rounds["cohort"]
    assert cohort.max() > 2, "the case needs a round with more"
    np.testing.assert_array_equal(record.rounds["arrived"], cohort)
    counts = np.bincount(hpcfed.open(run).clock["round"].to_numpy())[1:]
    np.testing.assert_array_equal(counts, cohort)


def test_a_private_run_learns_nothing_where_nobody_is_in_time(tmp_path: Path) -> None:
    words = flags(
        clients=5,
        rounds=2,
        privacy="central",
        noise_multiplier=1,
        accountant="rdp",
        devices="uniform",
        deadline=1e-6,
    )
    record = read_run(started(*words, "--out", tmp_path / "run"))
    assert record.rounds["arrived"].tolist() == [0, 0]
    assert record.rounds["virtual_seconds"].tolist() == pytest.approx([1e-6, 2e-6])


SPEED = np.array([1, 0.25, 4, 0.5])
DOWN = np.array([8e4, 4e5, 2e5, 1e9])
UP = np.array([4e4, 1e5, 2e5, 1e9])
DEVICES = [f"{i},{SPEED[i]},{DOWN[i]},{UP[i]}" for i in range(4)]


def timed(folder: Path, *lines: str, heading: str = HEADING, **values: Any) -> Setup:
    """A federation with these devices."""
    path = trace(folder, *(lines or DEVICES), heading=heading)
    values = {"epochs": 1, "batch_size": 60, "step_seconds": 0.5, **values}
    return assembled(devices=f"file:{path}", **values)


def one_round(s: Setup) -> tuple[Any, RoundLog]:
    logs: list[RoundLog] = []
    [(_, state)] = rounds(s, 1, logs)
    return state, logs[0]


def mean_of(s: Setup, members: list[int], steps: list[int] | None = None) -> Tensor:
    """FedAvg's row after the first round of these clients, each trained alone."""
    fed, start = s.federation, s.federation.initial_row()
    expected = torch.zeros_like(start)
    for number, client in enumerate(members):
        recipe = fed.recipe(0)
        if steps is not None:
            recipe = replace(recipe, epochs=0, steps=steps[number])
        row = fed.train_alone(start, client, 0, recipe=recipe)
        expected += float(fed.sizes[client] / fed.sizes[members].sum()) * row
    return expected


def test_a_round_takes_as_long_as_its_slowest_client(tmp_path: Path) -> None:
    s = timed(tmp_path)
    state, log = one_round(s)
    bytes_each = 8 * s.federation.layout.num_columns
    steps = -(-s.federation.sizes // 60)
    table = log.times
    np.testing.assert_array_equal(table["client"], [0, 1, 2, 3])
    np.testing.assert_array_equal(table["steps"], steps)
    # 0.5 s a step at speed 1; each link by its own bytes per second.
    np.testing.assert_allclose(table["train"], steps * 0.5 / SPEED)
    np.testing.assert_allclose(table["download"], bytes_each / DOWN)
    np.testing.assert_allclose(table["upload"], bytes_each / UP)
    total = table["train"] + table["download"] + table["upload"]
    np.testing.assert_allclose(table["arrival"], total)
    assert log.virtual_seconds == pytest.approx(total.max(), rel=1e-12)
    assert log.arrived is not None and log.arrived.tolist() == [0, 1, 2, 3]
    assert table["arrived"].tolist() == [1, 1, 1, 1]
    torch.testing.assert_close(state.w, mean_of(s, [0, 1, 2, 3]), rtol=1e-10, atol=0)


def test_a_clock_alone_changes_no_number() -> None:
    plain = assembled(clients=6, participation=0.5)
    clocked = assembled(clients=6, participation=0.5, devices="lognormal")
    for (_, one), (_, other) in zip(rounds(plain, 3), rounds(clocked, 3), strict=True):
        assert torch.equal(one.w, other.w)


def test_who_misses_the_deadline_does_not_count(tmp_path: Path) -> None:
    waiting = timed(tmp_path)
    _, log = one_round(waiting)
    table = log.times
    total = table["train"] + table["download"] + table["upload"]
    slowest = int(total.argmax())
    deadline = float(np.sort(total)[-2:].mean())
    s = timed(tmp_path, deadline=deadline)
    state, log = one_round(s)
    others = [client for client in range(4) if client != slowest]
    assert log.arrived is not None and log.arrived.tolist() == others
    assert log.virtual_seconds == deadline
    torch.testing.assert_close(state.w, mean_of(s, others), rtol=1e-10, atol=0)


def test_the_first_uploads_count_of_more_that_were_invited(tmp_path: Path) -> None:
    s = timed(tmp_path, cohort=2, oversample=2)
    state, log = one_round(s)
    assert log.cohort_size == 4
    assert log.arrived is not None
    table = log.times
    total = table["train"] + table["download"] + table["upload"]
    first = np.sort(np.argsort(total)[:2])
    assert log.arrived.tolist() == first.tolist()
    assert log.virtual_seconds == pytest.approx(np.sort(total)[1])
    torch.testing.assert_close(state.w, mean_of(s, first.tolist()), rtol=1e-10, atol=0)


def test_vanished_clients_do_not_count_and_take_no_time(tmp_path: Path) -> None:
    s = timed(tmp_path, dropout_rate=0.5, seed=2)
    logs: list[RoundLog] = []
    gone = 0
    for _ in rounds(s, 30, logs):
        pass
    for log in logs:
        assert log.arrived is not None
        table = log.times
        vanished = np.isnan(table["arrival"])
        assert table["client"][~vanished].tolist() == log.arrived.tolist()
        gone += int(vanished.sum())
    # 120 times with probability 1/2, and in all rounds somebody is left.
    assert 40 <= gone <= 75
    assert all(len(log.arrived) for log in logs if log.arrived is not None)


def test_partial_work_is_that_of_fewer_steps(tmp_path: Path) -> None:
    """Also in the second round, where the expected upload is that of the first."""
    s = timed(tmp_path, deadline=3.0, partial=True, batch_size=20, momentum=0.9)
    state, log = one_round(s)
    bytes_each = 8 * s.federation.layout.num_columns
    free = 3 - bytes_each / DOWN
    free -= bytes_each / UP
    fit = np.maximum(np.floor(free / (0.5 / SPEED)), 1)
    planned = -(-s.federation.sizes // 20)
    steps = np.minimum(planned, fit).astype(int)
    assert (steps < planned).any(), "somebody is cut short"
    assert log.arrived is not None
    np.testing.assert_array_equal(log.times["steps"], steps)
    in_time = log.arrived.tolist()
    expected = mean_of(s, in_time, steps[in_time].tolist())
    torch.testing.assert_close(state.w, expected, rtol=1e-10, atol=1e-14)
    assert log.virtual_seconds <= 3
    cohort = s.federation.sample(1)
    s.method.round(s.federation, state, cohort)
    assert cohort.in_flight.clock is not None
    np.testing.assert_array_equal(cohort.in_flight.clock.table()["steps"], steps)


def test_fednova_divides_by_the_steps_that_were_taken(tmp_path: Path) -> None:
    s = timed(
        tmp_path,
        *("0,1,1e9,1e9", "1,0.4,1e9,1e9"),
        method="fednova",
        clients=2,
        deadline=3.0,
        partial=True,
        batch_size=20,
        momentum=0.0,
    )
    fed, w = s.federation, s.federation.initial_row()
    state, log = one_round(s)
    assert log.times["steps"].tolist() == [5, 2], "3 / 0.5 and 3 / 1.25, less links"
    weights = fed.sizes / fed.sizes.sum()
    tau = weights @ [5, 2]
    expected = w.clone()
    for client, steps in enumerate((5, 2)):
        recipe = replace(fed.recipe(0), epochs=0, steps=steps)
        row = fed.train_alone(w, client, 0, recipe=recipe)
        expected += float(weights[client] * tau / steps) * (row - w)
    torch.testing.assert_close(state.w, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("mode", ["batched", "loop"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_limited_clients_stop_after_so_many_steps(
    mode: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and losses of uneven clients, in stacks of two."""
    case = Case(device=device)
    engine = case.engine(mode)
    monkeypatch.setattr(stacks, "CPU_ACTIVATIONS", 2 * 4 * engine.cost.activations)
    everyone = np.full(5, 2)
    limits = np.array([3, 1, 5, 0, 99])
    # On a GPU: plain, captured, and replayed with other limits than before.
    for now in (everyone, everyone, limits) if device == "cuda" else (limits,):
        trained, losses = engine.train(case.job(HARSH, limits=now))
    whole, _ = engine.train(case.job(HARSH))
    trained, whole = trained.cpu(), whole.cpu()
    # Two epochs of 5, 9, 0, 12 and 3 samples in batches of 4: so many are seen.
    assert losses.seen.tolist() == [4 + 1 + 4, 4, 0, 0, 2 * 3]
    for client, steps in ((0, 3), (1, 1)):
        expected = case.alone(client, replace(HARSH, epochs=0, steps=steps))
        torch.testing.assert_close(trained[client], expected, **TAUT)
    assert torch.equal(trained[2], case.rows[2])
    assert torch.equal(trained[3], case.rows[3]), "no time for a step"
    torch.testing.assert_close(trained[4], whole[4], **TAUT)


def test_only_clients_that_are_there_are_invited(tmp_path: Path) -> None:
    lines = ["0,1,1e9,1e9,0-4", "1,1,1e9,1e9,100-200", "2,1,1e9,1e9,100-104"]
    s = timed(tmp_path, *lines, heading=f"{HEADING},available", clients=3)
    fed, state = s.federation, s.method.init(s.federation)
    seen = []
    for round in range(3):
        cohort = fed.sample(round)
        state = s.method.round(fed, state, cohort)
        fed.close_round(cohort)
        seen.append((cohort.clients.tolist(), cohort.log.virtual_seconds))
    steps = -(-fed.sizes // 60)
    # Client 0 takes more than 4 s; then nobody is there until 100 s have passed.
    first, second, third = seen
    assert first == ([0], pytest.approx(steps[0] * 0.5, rel=1e-3))
    both = max(steps[1:]) * 0.5
    assert second == ([1, 2], pytest.approx(100 + both, rel=1e-3))
    assert third == ([1], pytest.approx(100 + both + steps[1] * 0.5, rel=1e-3))


COMING = ["1,1,1e9,1e9,0-4;9-14", "2,1,1e9,1e9,4-19"]
"""Two clients that come and go, behind one whose device a test chooses."""


def private_members(folder: Path, first: str, **values: Any) -> list[tuple[Any, float]]:
    """Who of the others takes part in each of five private rounds, and its end."""
    values = {"privacy": "central", "noise_multiplier": 1.0, **values}
    heading = f"{HEADING},available"
    s = timed(folder, first, *COMING, heading=heading, clients=3, **values)
    fed, state, seen = s.federation, s.method.init(s.federation), []
    for round in range(5):
        cohort = fed.sample(round)
        state = s.method.round(fed, state, cohort)
        fed.close_round(cohort)
        others = [client for client in cohort.clients.tolist() if client]
        seen.append((others, cohort.log.virtual_seconds))
    return seen


def test_a_private_rounds_end_depends_on_nobody(tmp_path: Path) -> None:
    """Else a client's time would decide who is there in the next round, which no ε
    counts.
    """
    options = {"accountant": "rdp", "deadline": 5.0}
    there = private_members(tmp_path, "0,1,1e9,1e9,", **options)
    # At 0, 5, 10, 15 and 20 s.
    members = [[1], [2], [1, 2], [2], []]
    assert there == list(zip(members, [5.0, 10.0, 15.0, 20.0, 25.0], strict=True))
    # A phone that never comes in time, and one that is gone at once.
    for first in ("0,1e-6,1e9,1e9,", "0,1,1e9,1e9,0-1"):
        assert private_members(tmp_path, first, **options) == there
    with pytest.raises(
        UserError, match="give --deadline, as in 30, so that rounds end"
    ):
        private_members(tmp_path, "0,1,1e9,1e9,", accountant="rdp")


def test_private_clients_reserve_the_same_time_in_every_round(tmp_path: Path) -> None:
    """The last round's largest upload, which packing makes smaller, is there only if
    somebody took part.
    """
    options = {
        "privacy": "central",
        "noise_multiplier": 1.0,
        "accountant": "rdp",
        "compress": "sign",
        "deadline": 2.0,
        "partial": True,
    }
    steps = []
    for drawn in ([1], []):
        fed = (s := timed(tmp_path, **options)).federation
        state = s.method.init(fed)
        for round, clients in enumerate((drawn, [0, 1, 2, 3])):
            cohort = fed.invite(round, np.array(clients, np.int64))
            clock = fed.channel.clock
            if clients and clock is not None:
                cohort.in_flight.clock = clock.begin(round, cohort.clients, 0.0)
            state = s.method.round(fed, state, cohort)
            fed.close_round(cohort)
        steps.append(cohort.log.times["steps"].tolist())
    assert steps[0] == steps[1]


def test_a_trace_that_ends_says_so(tmp_path: Path) -> None:
    lines = ["0,1,1e9,1e9,0-1", "1,1,1e9,1e9,0-1"]
    s = timed(tmp_path, *lines, heading=f"{HEADING},available", clients=2)
    fed = s.federation
    s.method.round(fed, s.method.init(fed), fed.sample(0))
    with pytest.raises(UserError, match="no client with data is available after"):
        fed.sample(1)


LATE = {"devices": "lognormal", "speed_spread": 2.0, "dropout_rate": 0.2}


@pytest.mark.parametrize(
    "method", [name for name in methods.names() if not load(name).Options.asynchronous]
)
def test_every_method_runs_although_clients_are_late(method: str) -> None:
    options = {**SMALL, **LATE, "deadline": 0.4, "oversample": 1.5}
    # With half of the time, so that some are late although they do what they can.
    if load(method).Options.divides_training:
        options |= {"partial": True, "deadline": 0.2}
    own = {**OWN.get(method, {}), "method": method, "rounds": 3}
    s = assembled(**{**options, **own})
    fed, state = s.federation, s.method.init(s.federation)
    late = 0
    for round in range(3):
        cohort = fed.sample(round)
        state = s.method.round(fed, state, cohort)
        fed.close_round(cohort)
        log = cohort.log
        assert log.arrived is not None
        late += len(cohort.clients) - len(log.arrived)
        for field in fields(state):
            assert torch.isfinite(getattr(state, field.name)).all(), field.name
    assert late > 0
    assert log.virtual_seconds > 0


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_the_servers_mean_of_what_clients_keep_stays_one(method: str) -> None:
    """Whoever comes late keeps what it had, as the server does of it."""
    s = assembled(**{**SMALL, **LATE, "deadline": 0.4, "method": method})
    fed = s.federation
    late = 0
    for _, state in rounds(s, 4, logs := []):
        weights = torch.from_numpy(fed.sizes / fed.sizes.sum()).to(state.own)
        kept = state.c if method == "scaffold" else state.h
        torch.testing.assert_close(kept, weights @ state.own, rtol=1e-4, atol=1e-6)
        late += logs[-1].cohort_size - len(logs[-1].arrived)
    assert late > 0


def test_fedau_counts_those_who_came() -> None:
    s = assembled(**{**SMALL, **LATE, "deadline": 0.4, "method": "fedau"})
    [(_, state)] = rounds(s, 1, logs := [])
    ended = np.flatnonzero(state.intervals.numpy())
    assert ended.tolist() == logs[0].arrived.tolist()
    assert len(ended) < logs[0].cohort_size


def test_turns_and_indivisible_training_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "run --devices lognormal --method pfedhn --hn-combine turns"
    assert "--hn-combine turns: clients that wait" in mistake(capsys, *words.split())
    words = "run --devices lognormal --deadline 3 --partial --method"
    for method in ("apfl", "per-fedavg", "pfedme"):
        refusal = mistake(capsys, *words.split(), method)
        assert f"--partial: clients of method {method} do something" in refusal


def test_what_each_client_sends_counts_for_its_time() -> None:
    """FedLP's clients send different layers."""
    s = assembled(
        **{**SMALL, "method": "fedlp", "devices": "uniform", "link_spread": 0.0}
    )
    [_] = rounds(s, 1, logs := [])
    sent = int(logs[0].bytes_up_here)
    uploads = logs[0].times["upload"] * s.settings.config.uplink
    assert len(set(uploads.round().tolist())) > 1
    assert uploads.sum() == pytest.approx(sent)


def test_what_late_clients_send_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even NaN, for which nobody is excluded."""
    s = assembled(**{**SMALL, **LATE, "deadline": 0.4, "participation": 1.0})
    fed = s.federation
    [(_, expected)] = rounds(s, 1, logs := [])
    late = np.setdiff1d(np.arange(5), logs[0].arrived)
    assert 0 < len(late) < 5
    honest = fed.train

    def train(rows: Tensor, cohort: Any, **how: Any) -> Tensor:
        trained = honest(rows, cohort, **how).clone()
        trained[late] = float("nan")
        return trained

    monkeypatch.setattr(fed, "train", train)
    [(_, state)] = rounds(s, 1, logs)
    assert torch.equal(state.w, expected.w)
    assert logs[-1].excluded == set()


LATE_WORDS = (
    "--devices lognormal --deadline 0.6 --partial --oversample 1.5 --dropout-rate 0.2 "
    "--cohort 3 --clients 6 --epochs 1 --batch-size 64 --model mlp --device cpu"
)


def late_run(folder: Path, *words: object) -> Path:
    return started(*LATE_WORDS.split(), "--out", folder, *words)


def test_a_resumed_clock_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Bit for bit, time and what is expected of uploads included."""
    options = {**SMALL, **LATE, "deadline": 0.6, "oversample": 1.5, "partial": True}
    options |= {"method": "fedlp", "rounds": 4}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    run_setup(assembled(**options), whole, quiet=True)
    run_setup(assembled(**options), cut, quiet=True, stop=StopAfter(2))
    run_setup(assembled(**options, resume=str(cut), out=str(cut)), cut, quiet=True)
    same(whole, cut)
    seconds = read_run(whole).rounds["virtual_seconds"]
    assert (np.diff(seconds) > 0).all()


def test_a_checkpoints_time_is_checked() -> None:
    s = assembled(devices="lognormal")
    for wrong in (-1.0, np.nan, np.inf):
        s.federation.channel.memory.keep("clock", torch.tensor([wrong, 0.0]).double())
        with pytest.raises(UserError, match="clock holds impossible numbers"):
            s.federation.sample(0)


def test_seeds_together_keep_their_own_time(tmp_path: Path) -> None:
    words = ["--rounds", 2, "--precision", "fp64"]
    late_run(tmp_path / "both", *words, "--seeds", "0,1")
    for seed in (0, 1):
        alone = late_run(tmp_path / f"alone-{seed}", *words, "--seed", seed)
        one, other = read_run(alone), read_run(tmp_path / "both" / f"seed-{seed}")
        for name in ("virtual_seconds", "arrived", "bytes_up"):
            np.testing.assert_array_equal(one.rounds[name], other.rounds[name])
        np.testing.assert_allclose(
            one.rounds["train_loss"], other.rounds["train_loss"], rtol=1e-10
        )
        with h5py.File(alone / "run.h5") as a, h5py.File(other.folder / "run.h5") as b:
            for name in a["clock"]:
                np.testing.assert_array_equal(a[f"clock/{name}"], b[f"clock/{name}"])


def test_the_clock_is_recorded_by_round_and_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = late_run(tmp_path / "run", "--rounds", 3)
    assert "virtual 0:0" in capsys.readouterr().err
    run = hpcfed.open(folder)
    clock = run.clock
    # Five are invited for three.
    assert len(clock["round"]) == 15
    assert np.unique(clock["round"]).tolist() == [1, 2, 3]
    counted = np.asarray(clock["arrived"]) == 1
    rounds = run.rounds
    for number in (1, 2, 3):
        here = np.asarray(clock["round"]) == number
        end = rounds["virtual_seconds"][number - 1]
        assert (here & counted).sum() == rounds["arrived"][number - 1] <= 3
        assert (clock["arrival"][here & counted] <= end * (1 + 1e-9)).all()
    parts = clock["download"] + clock["train"] + clock["upload"]
    first = np.asarray(clock["round"]) == 1
    whole = np.asarray(clock["arrival"])[first]
    there = ~np.isnan(whole)
    np.testing.assert_allclose(np.asarray(parts)[first][there], whole[there], rtol=1e-5)
    with h5py.File(folder / "run.h5") as file:
        devices = devices_of(config(clients=6))
        assert devices is not None
        np.testing.assert_array_equal(file["clients/speed"], devices.speed)
        assert file["clients/uplink"].attrs["units"] == "bytes/s"


def test_a_run_without_a_clock_records_none(tmp_path: Path) -> None:
    folder = started("--rounds", 1, "--clients", 2, "--out", tmp_path / "run")
    assert len(hpcfed.open(folder).clock["round"]) == 0
    with h5py.File(folder / "run.h5") as file:
        assert "clock" not in file and "clients/speed" not in file
        assert np.isnan(file["rounds/virtual_seconds"][:]).all()


def test_a_clock_that_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = late_run(tmp_path / "run", "--rounds", 1)
    with h5py.File(folder / "run.h5", "r+") as file:
        file["clock/train"][0, 0] = -1
    with pytest.raises(UserError, match="clock/train holds impossible numbers"):
        _ = hpcfed.open(folder).clock


def test_a_long_table_is_left_out() -> None:
    assert len(list(clock_arrays(1000, 2000))) == 7
    assert not list(clock_arrays(1000, 2001))


def test_a_table_takes_as_many_members_as_it_has_room_for(tmp_path: Path) -> None:
    """Poisson sampling may draw any number."""
    arrays = {a.name: np.full(a.shape, np.nan, a.dtype) for a in clock_arrays(2, 3)}
    take_down_clock(arrays, 1, {"client": np.arange(5), "train": np.arange(2)})
    assert arrays["clock/client"][1].tolist() == [0, 1, 2]
    assert arrays["clock/train"][1, :2].tolist() == [0, 1]
    assert np.isnan(arrays["clock/client"][0]).all()
    folder = late_run(tmp_path / "run", "--rounds", 2, "--sampling", "poisson")
    with h5py.File(folder / "run.h5") as file:
        assert file["clock/client"].shape == (2, 6)


@pytest.mark.parametrize("spread", [0, 10])
def test_the_slowest_devices_leave_times_that_can_be_read(
    tmp_path: Path, spread: float
) -> None:
    slow = ["--uplink", 1e-9, "--downlink", 1e-9, "--step-seconds", 1e9]
    spreads = ["--speed-spread", spread, "--link-spread", spread]
    words = ["--devices", "lognormal", "--clients", 4, "--rounds", 2, *slow, *spreads]
    folder = started(*words, "--out", tmp_path / "run")
    assert np.isfinite(hpcfed.open(folder).clock["upload"]).all()


def test_a_traces_checksum_is_recorded(tmp_path: Path) -> None:
    path = trace(tmp_path, *DEVICES)
    words = ["--devices", f"file:{path}", "--clients", 4, "--rounds", 1]
    folder = started(*words, "--out", tmp_path / "run")
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_run(folder).environment["files"] == {str(path): checksum}
    assert changed_files(read_run(folder)) == []
    path.write_text(path.read_text() + "\n")
    assert changed_files(read_run(folder)) == [str(path)]
