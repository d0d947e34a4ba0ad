"""A learning of the server that is stopped goes on from where it was."""

import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

from hpcfed.errors import Halted, UserError
from hpcfed.experiment.run import run_setup
from hpcfed.results import checkpoints
from hpcfed.results.folder import HALF_LEARNT
from hpcfed.results.folder import LEARNING as SIGN
from hpcfed.results.stored import read_run
from hpcfed.runtime.signals import STOPPED, Stop
from hpcfed.server.bank import BankedRound, BankedRows
from hpcfed.server.columns import Columns
from hpcfed.server.half_learnt import HalfLearnt
from hpcfed.server.identity import Identity
from hpcfed.server.options import ServerOptions
from hpcfed.server.span import SpanDiffusion
from hpcfed.server.training_plan import RankSlot
from tests import jobs
from tests.conftest import Command, Finished
from tests.federations import assembled
from tests.pfedgpa_runs import losses
from tests.runs import SERVER, flags, same, started
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
LAST = {"server_every": 0}
"""Learns only after the last round, which takes half of the time."""
TOKENS = {**LAST, "server_model": "tokens", "server": "tiny", "server_latent": 16}
WAYS: dict[str, dict[str, Any]] = {
    "p-diff": {},
    "span": {"server_model": "span"},
    "tokens": TOKENS,
    "span, late": {
        "server_model": "span",
        "rounds": 4,
        "server_every": 2,
        "server_overlap": 1,
    },
    "p-diff, ZeRO 3": {**LAST, "server_engine": "deepspeed", "zero_stage": 3},
    "span, ZeRO 2, bf16": {
        **LAST,
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
        self._sign, self._looks = folder / SIGN, 0
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
        # The last checkpoint is of the round before; with an overlap clients have made
        # rounds since.
        newest = checkpoints.newest_rounds(cut)
        assert record.rounds_done == newest + options.get("server_overlap", 0)
        seen.append(newest)
        assert (cut / HALF_LEARNT).is_file()
    assert set(seen) == {"p-diff": {0, 1}, "span": {0, 1}, "span, late": {2}}.get(
        way, {1}
    )
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
        resumed = 0 < learning.earlier < sum(learning.seconds.values())
        assert expected.earlier == 0 and resumed == (learning.round in seen)
        assert learning.seconds.keys() == expected.seconds.keys()
        assert min(learning.seconds.values()) >= 0
    assert not (cut / HALF_LEARNT).exists()
    with h5py.File(whole / "server.h5") as one, h5py.File(cut / "server.h5") as other:
        names: list[str] = []
        one.visit(names.append)
        for name in names:
            if isinstance(one[name], h5py.Dataset) and one[name].dtype.kind == "f":
                np.testing.assert_array_equal(one[name][()], other[name][()])


def test_without_checkpoints_a_learning_does_not_stop(tmp_path: Path) -> None:
    stop = StopWhileLearning(tmp_path / "run")
    run_to(tmp_path / "run", {**RUN, **LAST, "checkpoint_minutes": 0}, stop)
    assert not stop.agreed and read_run(tmp_path / "run").status == "complete"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "model.npz",
        "run.h5",
        "server.h5",
    }


WIDTHS = [40, 24]
LEARNING = ServerOptions(
    **{name: value for name, value in SERVER.items() if "autoencoder" not in name},
    server_model="span",
)
"""Five steps of the denoiser."""


def bank_of(rows: Tensor, clients: Sequence[int] = range(8)) -> BankedRows:
    banked = BankedRound(np.array(clients), rows)
    return BankedRows([banked], Columns.all_of(WIDTHS))


ROWS = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))


def learn(
    path: Path,
    bank: BankedRows,
    options: ServerOptions = LEARNING,
    *,
    every: float = 1e9,
    asked: bool = False,
) -> np.ndarray:
    """Return the losses of a learning that is kept in this file."""
    model = SpanDiffusion(bank.columns, options, RankSlot(torch.device("cpu")), seed=1)
    identity = Identity.of(bank, options, model.streams.learnings)
    half = HalfLearnt(path, identity, every=every, asked=lambda: asked)
    return model.learn(bank, half=half).losses["denoiser"]


def test_it_goes_on_with_the_same_learning_up_to_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row by a tenth, which is what a flipped ReLU may do to a repeated update."""
    path = tmp_path / HALF_LEARNT
    whole = learn(path, bank_of(ROWS))
    assert not path.exists()
    with pytest.raises(Halted):
        learn(path, bank_of(ROWS), asked=True)
    assert "learning stopped at step 1 of 5 (denoiser)" in capsys.readouterr().err
    kept = path.read_bytes()
    other = ROWS + 1e-6 * ROWS.flip(1)
    other[2] += 0.1 * ROWS[3]
    found = learn(path, bank_of(other))
    assert "learning resumed at step 1 of 5 (denoiser)" in capsys.readouterr().err
    assert found[0] == whole[0] and not path.exists()
    lr = LEARNING.model_copy(update={"server_lr": 1e-4})
    for bank, options, why in (
        (bank_of(ROWS.roll(1, 0)), LEARNING, "its uploads differ"),
        (bank_of(ROWS, range(1, 9)), LEARNING, "its clients differ"),
        (bank_of(ROWS), lr, "its options differ"),
    ):
        path.write_bytes(kept)
        learn(path, bank, options)
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and "the learning begins anew" in told
        assert why in told and not path.exists()


@pytest.mark.parametrize("harm", ["cut", "flipped", "text", "version", "steps"])
def test_a_damaged_file_is_one_line(
    harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / HALF_LEARNT
    whole = learn(path, bank_of(ROWS))
    with pytest.raises(Halted):
        learn(path, bank_of(ROWS), asked=True)
    content = bytearray(path.read_bytes())
    if harm == "cut":
        del content[len(content) // 2 :]
    elif harm == "flipped":
        # In the numbers of the largest array.
        with h5py.File(path) as file:
            data = file["state/exp_avg/stages.0.widen.weight"]
            content[data.id.get_chunk_info(0).byte_offset + 8] ^= 64
    elif harm == "text":
        content[:] = b"not HDF5"
    path.write_bytes(content)
    if harm in ("version", "steps"):
        with h5py.File(path, "r+") as file:
            if harm == "version":
                file.attrs["schema"] = 99
            else:
                facts = file["facts"].asstr()[()].replace('"step": 1', '"step": 5')
                file["facts"][()] = facts
    capsys.readouterr()
    np.testing.assert_array_equal(learn(path, bank_of(ROWS)), whole)
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "the learning begins anew" in told


def test_a_file_of_other_networks_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / HALF_LEARNT
    with pytest.raises(Halted):
        learn(path, bank_of(ROWS), asked=True)
    with h5py.File(path, "r+") as file:
        del file["state/exp_avg/last.bias"]
        file["state/exp_avg/last.bias"] = np.zeros(1, np.float32)
    with pytest.raises(UserError, match="remove it to begin the learning anew"):
        learn(path, bank_of(ROWS))


def test_it_is_saved_by_time_and_a_full_disk_does_not_end_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / HALF_LEARNT
    whole = learn(path, bank_of(ROWS), every=1e-9)
    told = capsys.readouterr().err
    assert told.count("cannot save how far it has learnt") == 1
    np.testing.assert_array_equal(
        learn(path, bank_of(ROWS), every=0, asked=True), whole
    )
    assert capsys.readouterr().err == ""
    path.parent.mkdir()
    sizes = []
    bank = bank_of(ROWS)
    model = SpanDiffusion(bank.columns, LEARNING, RankSlot(torch.device("cpu")), seed=1)
    half = HalfLearnt(path, Identity.of(bank, LEARNING, 0), every=1e-9)
    model.learn(bank, lambda *_: sizes.append(path.exists()), half)
    # Not again at once: writing takes at most a hundredth of the time.
    assert sizes == [False, True, True, True, True] and not path.exists()


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
        while job.poll() is None and not (cut / SIGN).exists():
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
