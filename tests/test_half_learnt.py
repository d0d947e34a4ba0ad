"""A learning of the server that is stopped goes on from where it was."""

import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcfed.experiment.run import run_setup
from hpcfed.results import checkpoints
from hpcfed.results.folder import HALF_LEARNT, LEARNING
from hpcfed.results.stored import read_run
from hpcfed.runtime.signals import STOPPED, Stop
from tests import jobs
from tests.conftest import Command, Finished
from tests.federations import assembled
from tests.pfedgpa_runs import losses
from tests.runs import flags, same, started
from tests.small_runs import OWN, SMALL

RUN: dict[str, Any] = {
    **SMALL,
    **OWN["pfedgpa"],
    "method": "pfedgpa",
    "clients": 3,
    "participation": 1.0,
    "rounds": 2,
    "bank_rounds": 2,
    "server_every": 1,
    "inversion_depth": 2,
    "diffusion_steps": 10,
    "deterministic": True,
}
"""Learns after both rounds, in 5 steps of each network."""
TOKENS = {"server_model": "tokens", "server": "tiny", "server_latent": 16}
WAYS: dict[str, dict[str, Any]] = {
    "p-diff": {},
    "span": {"server_model": "span"},
    "tokens": TOKENS,
    "p-diff, ZeRO 3": {"server_engine": "deepspeed", "zero_stage": 3},
    "span, ZeRO 2, bf16": {
        "server_model": "span",
        "server_engine": "deepspeed",
        "zero_stage": 2,
        "server_precision": "bf16",
    },
    "tokens, ZeRO 1": {**TOKENS, "server_engine": "deepspeed", "zero_stage": 1},
}


class StopWhileLearning(Stop):
    """Is asked to stop when the server, which learns, looks at it for the second time."""

    def __init__(self, folder: Path) -> None:
        self._sign, self._looks = folder / LEARNING, 0
        super().__init__()

    @property
    def asked(self) -> bool:
        # A sign is there while the server learns, and nothing else happens then.
        self._looks += self._sign.exists()
        return self._looks > 1

    @asked.setter
    def asked(self, value: bool) -> None: ...

    def after(self, round: int) -> bool:
        return False


def run_to(folder: Path, options: dict[str, Any], stop: Stop | None = None) -> None:
    """Begin a run, or go on with it."""
    resumed = {}
    if folder.exists():
        resumed = {"resume": str(folder), "out": str(folder)}
    folder.mkdir(exist_ok=True)
    run_setup(assembled(**options, **resumed), folder, quiet=True, stop=stop)


def stops(folder: Path, options: dict[str, Any]) -> Iterator[None]:
    """Stop and resume a run in one learning after another, until it is complete."""
    while True:
        stop = StopWhileLearning(folder)
        run_to(folder, options, stop)
        if not stop.agreed:
            return
        yield


@pytest.mark.parametrize("way", WAYS)
def test_a_learning_goes_on_bit_for_bit(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often it is stopped, in whichever network."""
    options = {**RUN, **WAYS[way]}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_to(whole, options)
    seen = []
    for _ in stops(cut, options):
        record = read_run(cut)
        assert record.status == "stopped"
        # The last checkpoint is of the round before.
        assert checkpoints.newest_rounds(cut) == record.rounds_done
        seen.append(record.rounds_done)
        assert (cut / HALF_LEARNT).is_file()
    assert set(seen) == {0, 1}
    networks = ["autoencoder"] * ("p-diff" in way) + ["denoiser"]
    told = capsys.readouterr().err
    for network in networks:
        assert f"({network})" in told and "learning resumed at step" in told
    assert "anew" not in told
    same(whole, cut)
    for learning, expected in zip(
        read_run(cut).learnings, read_run(whole).learnings, strict=True
    ):
        # The steps of all parts, each counted once.
        assert expected.earlier == 0 < learning.earlier < sum(learning.seconds.values())
        assert learning.seconds.keys() == expected.seconds.keys()
        assert min(learning.seconds.values()) >= 0
    assert not (cut / HALF_LEARNT).exists()
    with h5py.File(whole / "server.h5") as one, h5py.File(cut / "server.h5") as other:
        names: list[str] = []
        one.visit(names.append)
        for name in names:
            if isinstance(one[name], h5py.Dataset) and one[name].dtype.kind == "f":
                np.testing.assert_array_equal(one[name][()], other[name][()])


def test_a_signal_stops_server_ranks_while_they_learn(
    tmp_path: Path, mpirun: Callable[..., Finished], warm: Command
) -> None:
    """The worker, which waits, tells the first of them. The same ranks go on bit for
    bit, and one process alone up to rounding.
    """
    options = RUN | {
        "server_model": "span",
        "server_engine": "deepspeed",
        "zero_stage": 2,
        "server": "tiny",
        "denoiser_samples": 2000,
        "server_every": 0,
    }
    del options["autoencoder_samples"]
    words = flags(**options)
    whole, cut, alone = (tmp_path / name for name in ("whole", "cut", "alone"))
    ranks = [*words, "--server-ranks", 2, "--out"]
    result = mpirun(3, "-m", "hpcfed", "run", *ranks, whole)
    assert result.returncode == 0, result.stderr
    with jobs.begun(3, "run", *ranks, cut, start=warm) as job:
        while job.poll() is None and not (cut / LEARNING).exists():
            time.sleep(0.002)
        job.send_signal(signal.SIGUSR2)
        told = job.communicate(timeout=60)[1]
    assert job.returncode == STOPPED, told
    assert "go on with: hpcfed run --resume" in told
    [(stopped, of)] = re.findall(r"learning stopped at step (\d+) of (\d+)", told)
    assert 0 < int(stopped) < int(of) == 100
    assert read_run(cut).status == "stopped" and read_run(cut).rounds_done == 1
    shutil.copytree(cut, alone)
    result = mpirun(3, "-m", "hpcfed", "run", "--resume", cut)
    assert f"learning resumed at step {stopped} of 100" in result.stderr
    same(whole, cut)
    started("--resume", alone)
    found, expected = losses(alone, "denoiser")[0], losses(whole, "denoiser")[0]
    begin = int(stopped)
    np.testing.assert_array_equal(found[:begin], expected[:begin])
    # Adam makes a full step even of a gradient that is only a rounding error.
    np.testing.assert_allclose(found[begin:][:10], expected[begin:][:10], rtol=1e-2)
