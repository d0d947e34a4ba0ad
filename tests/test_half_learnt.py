"""A learning of the server that is stopped goes on from where it was."""

import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
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
from hpcfed.results.folder import HALF_LEARNT, checkpoint_folders
from hpcfed.results.folder import LEARNING as SIGN
from hpcfed.results.stored import read_run
from hpcfed.runtime.signals import STOPPED
from hpcfed.server.bank import BankedRound, BankedRows
from hpcfed.server.columns import Columns
from hpcfed.server.half_learnt import HalfLearnt
from hpcfed.server.identity import Identity
from hpcfed.server.options import ServerOptions
from hpcfed.server.span import SpanDiffusion
from hpcfed.server.training_plan import RankSlot
from tests import halted_runs, jobs
from tests.conftest import Command, Finished, start
from tests.federations import assembled
from tests.halted_runs import (
    BY_DEEPSPEED,
    LAST,
    PLAIN,
    SPAN,
    StopWhileLearning,
    both,
    options_of,
    options_of_way,
    run_to,
)
from tests.pfedgpa_runs import losses
from tests.runs import SERVER, flags, same, started

SCRIPT = Path(halted_runs.__file__)
ROOT = SCRIPT.parents[1]


@pytest.fixture(scope="module")
def by_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every way to learn by DeepSpeed, made in one process."""
    folder = tmp_path_factory.mktemp("deepspeed")
    words = [str(SCRIPT), str(folder), "cpu", *BY_DEEPSPEED]
    made = start([sys.executable, *words], PYTHONPATH=str(ROOT))
    assert made.returncode == 0, made.stderr
    (folder / "told").write_text(made.stderr)
    return folder


@pytest.mark.parametrize("way", PLAIN)
def test_a_learning_goes_on_bit_for_bit(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often it is stopped, in whichever network."""
    seen = both(tmp_path / "runs", options_of_way(way))
    assert set(seen) == ({1} if way == "tokens" else {0, 1})
    told = capsys.readouterr().err
    for network in ["autoencoder"] * (way == "p-diff") + ["denoiser"]:
        assert re.search(rf"learning resumed at step \d of 5 \({network}\)", told)
    assert "anew" not in told
    assert_goes_on(tmp_path / "runs", seen)


@pytest.mark.parametrize("way", BY_DEEPSPEED)
def test_deepspeed_goes_on_bit_for_bit(way: str, by_deepspeed: Path) -> None:
    seen = json.loads((by_deepspeed / way / "seen.json").read_text())
    assert set(seen) == {1}
    assert_goes_on(by_deepspeed / way, seen)


def assert_goes_on(folder: Path, seen: list[int]) -> None:
    """The run that was stopped has the numbers of the whole one, and counts every step
    once.
    """
    whole, cut = folder / "whole", folder / "cut"
    same(whole, cut)
    for learning, expected in zip(
        read_run(cut).learnings, read_run(whole).learnings, strict=True
    ):
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


def test_clients_that_go_on_meanwhile_repeat_their_rounds(tmp_path: Path) -> None:
    """With an overlap: from the one in which the server began to learn."""
    options = {**options_of(**SPAN), "rounds": 4, "server_every": 2}
    options |= {"server_overlap": 1}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        folder.mkdir()
    run_setup(assembled(**options), whole, quiet=True)
    resumed: dict[str, Any] = {}
    stopped = 0
    while True:
        stop = StopWhileLearning(cut)
        run_setup(assembled(**options, **resumed), cut, quiet=True, stop=stop)
        if not stop.agreed:
            break
        # The first learning begins in the first round, before which nothing is kept.
        assert checkpoints.newest_rounds(cut) == 2 == read_run(cut).rounds_done - 1
        resumed = {"resume": str(cut), "out": str(cut)}
        stopped += 1
    assert stopped
    same(whole, cut)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "way", [*PLAIN, *BY_DEEPSPEED], ids=lambda way: way.replace(" ", "")
)
def test_a_gpu_goes_on(way: str, tmp_path: Path) -> None:
    """Also in captured steps, whose parameters must stay where they are in memory."""
    words = [str(SCRIPT), str(tmp_path), "cuda", way]
    made = start([sys.executable, *words], PYTHONPATH=str(ROOT))
    assert made.returncode == 0, made.stderr
    there = tmp_path / way
    assert json.loads((there / "seen.json").read_text())
    for network in ["autoencoder"] * ("p-diff" in way) + ["denoiser"]:
        np.testing.assert_allclose(
            losses(there / "cut", network), losses(there / "whole", network), rtol=0.01
        )


def test_without_checkpoints_a_learning_does_not_stop(tmp_path: Path) -> None:
    stop = StopWhileLearning(tmp_path / "run")
    options = options_of(**LAST, checkpoint_minutes=0)
    assert not run_to(tmp_path / "run", options, stop)
    assert read_run(tmp_path / "run").status == "complete"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "model.npz",
        "run.h5",
        "server.h5",
    }


def test_a_checkpoint_that_was_asked_for_outlives_those_for_learnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete run has the last two of the former, and none of the latter."""
    monkeypatch.setattr("hpcfed.runtime.signals.PAUSE", 0)  # as if rounds were long
    options = {**options_of(**SPAN), "rounds": 5, "checkpoint_every": 2}
    assert not run_to(tmp_path / "run", options)
    kept = [int(path.name) for path in checkpoint_folders(tmp_path / "run")]
    assert kept == [2, 4]


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
    words = flags(
        **options_of(
            **LAST,
            **SPAN,
            server_engine="deepspeed",
            zero_stage=2,
            server="tiny",
            denoiser_samples=2000,
        )
    )
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
