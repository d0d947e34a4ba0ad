"""What is written down: every phase of every rank and round, with units, in files that
any HDF5 tool opens.
"""

import errno
import json
import os
import resource
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from hpcfed.errors import UserError
from hpcfed.experiment import loop
from hpcfed.experiment.recording import norm_figures
from hpcfed.experiment.run import run_setup
from hpcfed.results import blank, series
from hpcfed.results.folder import strangers
from hpcfed.results.format import Declared, create, round_arrays, write_rounds
from hpcfed.results.publish import (
    check_limit,
    check_target,
    hdf5_writing,
    publish,
    replace_quickly,
    replacing,
    write_plain,
)
from hpcfed.results.results import ResultsWriter
from hpcfed.results.snapshots import (
    PER_FILE,
    PER_ROW,
    SnapshotWriter,
    read_parameters,
)
from hpcfed.results.stored import read_run
from hpcfed.runtime import environment
from hpcfed.runtime.timer import PHASES, Timer
from hpcfed.version import checkout
from tests.conftest import Command, start
from tests.federations import assembled
from tests.runs import flags, started

NORMS = flags(clients=5, rounds=3, snapshot_every=1, precision="fp64")
"""A run whose every update can be reckoned from its snapshots."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, mpirun: Callable) -> Path:
    """A run on two real ranks, with snapshots."""
    folder = tmp_path_factory.mktemp("recorded")
    words = ["--clients=6", "--rounds=5", "--snapshot-every=2", "--participation=0.5"]
    words += [f"--out={folder / 'run'}", "+", *NORMS, f"--out={folder / 'norms'}"]
    script = Path(__file__).with_name("several_runs.py")
    result = mpirun(2, "-m", "mpi4py", script, *words)
    assert result.returncode == 0, result.stderr
    return folder / "run"


def test_every_phase_of_every_rank_and_round_adds_up_to_the_wall_time(
    recorded: Path,
) -> None:
    record = read_run(recorded)
    assert record.phases.shape == (5, 2, len(PHASES))
    assert not np.isnan(record.phases).any()
    claimed = record.phases[
        :, :, [PHASES.index(name) for name in PHASES if name != "other"]
    ].sum(2)
    np.testing.assert_allclose(record.phases.sum(2), record.wall, rtol=1e-3)
    # Most rounds: the system may let a process wait between two phases.
    assert np.median(claimed / record.wall) > 0.95
    for name in ("sample", "download", "train", "upload", "aggregate", "evaluate"):
        assert (record.phases[:, :, PHASES.index(name)] > 0).all(), name
    assert (record.phases[1:, :, PHASES.index("record")] > 0).all()


def test_every_dataset_has_a_unit_and_the_file_says_what_it_is(recorded: Path) -> None:
    with h5py.File(recorded / "run.h5") as file:
        assert dict(file.attrs) | {
            "status": "complete",
            "rounds_done": 5,
            "schema": 1,
            "method": "fedavg",
        } == dict(file.attrs)
        numeric = []
        file.visititems(
            lambda name, item: (
                numeric.append((name, item)) if hasattr(item, "dtype") else None
            )
        )
        for name, item in numeric:
            if item.dtype.kind in "fiu":
                assert item.attrs["units"], name
                assert item.dims[0].label, name
        config = json.loads(file["config"].asstr()[()])
        assert config["clients"] == 6 and config["participation"] == 0.5
        facts = json.loads(file["environment"].asstr()[()])
        assert facts["packages"]["torch"] == metadata.version("torch")
        assert (
            len(facts["ranks"]) == 2
            and facts["variables"]["OMPI_COMM_WORLD_SIZE"] == "2"
        )
        assert "gloo" in facts["backend"] and facts["backend_reason"]


def test_snapshots_hold_what_training_left_behind(recorded: Path) -> None:
    clients = []
    for rank in (0, 1):
        with h5py.File(recorded / f"params-{rank}.h5") as file:
            clients += list(file["client"][()])
            assert list(file["round"]) == [1, 3] and list(file["taken"]) == [1, 1]
            assert file["rows"].shape == (2, len(file["client"]), file.attrs["columns"])
            assert file["rows"].fletcher32 and file["rows"].chunks == (
                1,
                1,
                file.attrs["columns"],
            )
            assert ("global" in file) == (rank == 0)
    assert sorted(clients) == list(range(6))
    record = read_run(recorded)
    assert record.client_accuracy.shape == (5, 6)


@pytest.mark.skipif(
    shutil.which("h5ls") is None, reason="no h5ls on this machine (Debian: hdf5-tools)"
)
def test_h5ls_opens_the_files(recorded: Path) -> None:
    for name in ("run.h5", "params-0.h5"):
        listed = subprocess.run(
            ["h5ls", "-r", recorded / name], capture_output=True, text=True
        )
        assert listed.returncode == 0, listed.stderr
        assert ("/rounds/accuracy" if name == "run.h5" else "/rows") in listed.stdout


def writer(
    folder: Path, rounds: int, resumed: bool = False, **more: Any
) -> ResultsWriter:
    settings = {
        "method": "fedavg",
        "dataset": "digits",
        "clients": 2,
        "seed": 0,
        "rounds": rounds,
        "partition": "iid",
    }
    clients = {
        "rank": np.zeros(2, int),
        "train_samples": np.ones(2, int),
        "test_samples": np.ones(2, int),
    }
    return ResultsWriter(
        folder,
        settings=settings,
        environment={"command": ["hpcfed", "run"]},
        clients=clients,
        ranks=1,
        facts={"model": "mlp", "columns": 3, **more},
        resumed=resumed,
    )


def write_round(results: ResultsWriter, round: int, together: int = 1) -> bool:
    rank_values = {
        "wall": np.ones(1),
        "peak_memory": np.ones(1),
        "wire": np.ones(1),
        "halvings": np.zeros(1),
    }
    phases = np.ones((1, len(PHASES)))
    return results.write_round(
        round,
        {"seconds": 1.0},
        client_accuracy=None,
        rank_values=rank_values,
        phases=phases,
        together=together,
    )


def test_a_reader_sees_every_round_that_was_said_to_be_on_disk(tmp_path: Path) -> None:
    results = writer(tmp_path, 500)
    published = 0
    for round in range(500):
        if write_round(results, round):
            published += 1
            assert read_run(tmp_path).rounds_done == round + 1
            assert read_run(tmp_path).status == "running"
    assert 0 < published < 500, "publishing every round would cost too much"
    results.finish("complete")
    assert read_run(tmp_path).rounds_done == 500
    assert read_run(tmp_path).status == "complete"
    assert list(tmp_path.iterdir()) == [tmp_path / "run.h5"], "no temporary file stays"


def test_runs_of_one_process_have_files_of_their_own(tmp_path: Path) -> None:
    """They begin as copies of one blank file, also where an earlier run's file lies."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    (second / "run.h5").write_bytes(b"of an earlier run")
    ours, theirs = writer(first, 3), writer(second, 3)
    with h5py.File(tmp_path / "usual", "w", driver="core") as usual:
        assert ours._file.libver == usual.libver
    (tmp_path / "usual").unlink()
    blank._image.cache_clear()
    anew = writer(tmp_path, 3)
    write_round(ours, 0)
    for results in (ours, theirs, anew):
        results.finish("stopped")
    assert read_run(first).rounds["seconds"].tolist() == [1.0]
    assert read_run(second).rounds_done == 0
    with h5py.File(second / "run.h5") as copied, h5py.File(tmp_path / "run.h5") as made:
        for declared in round_arrays(3, ranks=1):
            one, other = copied[declared.name], made[declared.name]
            assert dict(one.attrs).keys() == dict(other.attrs).keys()
            assert (one.dtype, one.chunks, one.fletcher32) == (
                other.dtype,
                other.chunks,
                other.fletcher32,
            )
            assert np.isnan(one[:]).all() and one.shape == declared.shape


def test_older_records_have_one_number_of_runs_for_all_rounds(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    begun = writer(old, 4, stacked_seeds=3)
    write_round(begun, 0, together=3)
    write_round(begun, 1, together=3)
    begun.finish("stopped")
    with h5py.File(old / "run.h5", "r+") as file:
        del file["timing/stacked_seeds"]
    assert read_run(old).stacks.tolist() == [3, 3]
    results = writer(new, 4, stacked_seeds=2, resumed=True)
    results.restore(old / "run.h5", 2)
    write_round(results, 2, together=2)
    results.finish("stopped")
    assert read_run(new).stacks.tolist() == [3, 3, 2]
    for wrong in (0.0, float("nan"), -1.0):
        with h5py.File(new / "run.h5", "r+") as file:
            file["timing/stacked_seeds"][0] = wrong
        with pytest.raises(UserError, match="stacked_seeds holds impossible numbers"):
            read_run(new)


def test_time_on_cores_is_counted_from_round_to_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([1.0, 5.0, 5.5, 7.0])
    monkeypatch.setattr(time, "process_time", lambda: next(clock))
    found = Timer(torch.device("cpu"))  # begins at 1
    found.start()  # what came before does not count
    found.lap()
    assert found.on_cores == 0.5
    found.lap()
    assert found.on_cores == 1.5


def test_ranks_figures_are_reduced_as_the_table_says() -> None:
    ranks: list[dict[str, float]] = [
        {"loss_sum": 6, "samples_seen": 2, "bytes_up": 10, "cohort_size": 3, "wall": 1},
        {"loss_sum": 8, "samples_seen": 3, "bytes_up": 32, "cohort_size": 3, "wall": 4},
    ]
    ranks[0]["train_seconds"], ranks[1]["train_seconds"] = 1, 3
    gathered = np.stack([series.as_vector(figures) for figures in ranks])
    figures = series.round_figures(series.by_rank(gathered))
    assert figures.keys() == series.ROUND_SERIES.keys()
    known = {name: value for name, value in figures.items() if not np.isnan(value)}
    assert known == {
        "train_loss": 14 / 5,
        "bytes_up": 42,
        "cohort": 3,
        "seconds": 4,
        "imbalance": 1.5,
    }
    nobody = [{"loss_sum": 0.0, "samples_seen": 0.0, "train_seconds": 0.0}] * 2
    gathered = np.stack([series.as_vector(figures) for figures in nobody])
    assert np.isnan(list(series.round_figures(series.by_rank(gathered)).values())).all()
    alone = series.by_rank(np.arange(1.0, 1 + len(series.RANK_FIGURES))[None])
    for name, value in series.round_figures(alone).items():
        made = series.ROUND_SERIES[name]
        assert value == made.reduce(*(alone[figure] for figure in made.figures))
    with pytest.raises(AssertionError, match="no series is made of seconds_per_year"):
        series.as_vector({"seconds_per_year": 1.0})


def test_publishing_waits_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = writer(tmp_path, 10)
    assert write_round(results, 0), "the first round is published at once"
    now = time.monotonic()
    monkeypatch.setattr(results, "_next_publish", now + 3600)
    assert not write_round(results, 1)
    monkeypatch.setattr(results, "_next_publish", now)
    assert write_round(results, 2)
    results.finish("complete")


def test_a_reader_in_the_middle_keeps_the_file_it_opened(tmp_path: Path) -> None:
    publish(b"old" * 1000, tmp_path / "x")
    with open(tmp_path / "x", "rb", buffering=0) as reader:
        begin = reader.read(10)
        publish(b"new" * 10, tmp_path / "x")
        assert begin + reader.read() == b"old" * 1000
    assert (tmp_path / "x").read_bytes() == b"new" * 10


def test_a_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(b"old", tmp_path / "x")
    monkeypatch.setattr(
        "os.fsync",
        lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(OSError, match="No space left"):
        publish(b"new", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


def test_a_file_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that crashes leaves the old file or the new one; once `publish` returns,
    the new one.
    """
    done: list[object] = []
    fsync, rename = os.fsync, os.replace

    def synced(file: int) -> None:
        kind = os.fstat(file)
        done.append("folder" if stat.S_ISDIR(kind.st_mode) else kind.st_size)
        fsync(file)

    def renamed(old: Path, new: Path) -> None:
        done.append(new)
        rename(old, new)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr("os.replace", renamed)
    publish(b"three", tmp_path / "x")
    assert done == [5, tmp_path / "x", "folder"]


def test_hidden_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    """Those of this host, whose processes one can look up, and only of this name."""
    dead, alive, host = 2**31, os.getppid(), socket.gethostname()
    stay = [f".x.elsewhere.{dead}.tmp", f".x.{host}.{alive}.tmp", f".x.{host}.a.tmp"]
    stay += [f".y.{host}.{dead}.tmp", f".x.{host}.{dead}"]
    for name in (*stay, f".x.{host}.{dead}.tmp"):
        (tmp_path / name).touch()
    publish(b"", tmp_path / "x")
    assert {path.name for path in tmp_path.iterdir()} == {"x", *stay}


def test_a_hidden_file_that_somebody_has_removed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while an error is on its way, nor when two processes clean up."""
    with pytest.raises(KeyError), replacing(tmp_path / "x"):
        next(tmp_path.iterdir()).unlink()
        raise KeyError
    (tmp_path / f".x.{socket.gethostname()}.{2**31}.tmp").touch()
    unlink = Path.unlink

    def twice(path: Path, missing_ok: bool = False) -> None:
        unlink(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", twice)
    publish(b"", tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError) as full, replacing(tmp_path / "x"):
        raise OSError(28, "No space left on device")
    assert full.value.filename == str(tmp_path / "x")
    with pytest.raises(OSError) as other, replacing(tmp_path / "x"):
        raise OSError(2, "No such file", "elsewhere")
    assert other.value.filename == "elsewhere"
    # h5py has the number in its words, if at all.
    with pytest.raises(OSError) as found, hdf5_writing(tmp_path / "x"):
        raise RuntimeError("write failed (errno = 28, error message = 'No space')")
    assert (found.value.errno, found.value.filename) == (28, str(tmp_path / "x"))
    with pytest.raises(ValueError, match="no number"), hdf5_writing(tmp_path / "x"):
        raise ValueError("no number")


def test_a_plain_file_is_written_through_no_link_and_into_no_pipe(
    tmp_path: Path,
) -> None:
    path, other, link = tmp_path / "x", tmp_path / "other", tmp_path / "link"
    for content in ("a long text", "short"):
        write_plain(content, path)
        assert path.read_text() == content
    replace_quickly("quick", path)
    assert path.read_text() == "quick"
    assert list(tmp_path.iterdir()) == [path]
    other.touch()  # as others make files: everybody may read them, or as umask says
    assert path.stat().st_mode == other.stat().st_mode
    link.symlink_to(other)
    with pytest.raises(OSError, match="symbolic"):
        write_plain("words", link)
    assert other.read_text() == ""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):  # nobody reads, nobody waits
        write_plain("words", tmp_path / "pipe")
    replace_quickly("words", tmp_path / "nowhere" / "x")
    assert not (tmp_path / "nowhere").exists()


def test_only_files_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    check_target("--json", path)
    path.touch()
    check_target("--json", path)
    check_target("--json", path / "in a file")
    for name, make, kind in (
        ("folder", Path.mkdir, "a folder"),
        ("link", lambda at: at.symlink_to(path), "a link"),
        ("pipe", os.mkfifo, "a pipe"),
    ):
        make(tmp_path / name)
        with pytest.raises(UserError, match=f"--json .*{name} is {kind}; name a"):
            check_target("--json", tmp_path / name)
    with pytest.raises(UserError, match="is a device"):
        check_target("--json", Path("/dev/null"))
    with pytest.raises(UserError, match=r"cannot write --json .*too long"):
        check_target("--json", tmp_path / ("x" * 300))


def test_a_file_may_have_just_as_many_bytes_as_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, -1))
    check_limit(tmp_path, 100)
    with pytest.raises(OSError, match="too large") as refused:
        check_limit(tmp_path, 101)
    assert refused.value.errno == errno.EFBIG
    assert "ulimit -f allows 100" in str(refused.value.__notes__)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, -1))
    check_limit(tmp_path, 2**60)


COLUMNS: Any = SimpleNamespace(
    num_columns=3,
    entries=(SimpleNamespace(name="w", start=0), SimpleNamespace(name="b", start=2)),
)
"""A network of two tensors, as snapshots know it."""


def snapshots_of(
    folder: Path,
    clients: list[int],
    rounds: list[int],
    *,
    rank: int = 0,
    first: int = 0,
    layout: Any = COLUMNS,
) -> SnapshotWriter:
    found = SnapshotWriter(
        folder,
        rank,
        clients=np.array(clients),
        layout=layout,
        rounds=np.array(rounds),
        dtype=np.dtype(np.float64),
        root=rank == 0,
    )
    barriers: list[int] = []
    found.begin(first, lambda: barriers.append(1))
    assert barriers == [1]
    return found


def rows_of(round: int, clients: list[int]) -> np.ndarray:
    return np.array([[round, client, 0.5] for client in clients])


def take(writers: list[SnapshotWriter], clients: list[list[int]], round: int) -> None:
    for writer, own in zip(writers, clients, strict=True):
        writer.write_rows(round, np.arange(len(own)), rows_of(round, own))
        writer.close_round(round, np.full(3, round + 0.5))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_rows_of_all_ranks_are_read_in_the_order_of_clients(tmp_path: Path) -> None:
    clients, rounds = [[0, 3], [1, 2]], [1, 3, 5]
    with pytest.raises(UserError, match="has no rows of clients; run it with"):
        read_parameters(tmp_path)
    writers = [
        snapshots_of(tmp_path, own, rounds, rank=r) for r, own in enumerate(clients)
    ]
    assert [r for r in range(7) if writers[0].due(r)] == rounds
    with pytest.raises(UserError, match="no rows of round None; it has no round yet"):
        read_parameters(tmp_path)
    take(writers, clients, 1)
    writers[0].write_rows(3, np.array([1]), rows_of(3, [3]))
    for writer, row in zip(writers, (np.full(3, np.nan), None), strict=True):
        writer.close_round(3, row)
    writers[0].write_rows(5, np.array([0]), rows_of(5, [0]))  # killed before its end
    for writer in writers:
        writer.close()
    found = read_parameters(tmp_path)
    assert found.round == 4 and found.clients.tolist() == [0, 1, 2, 3]
    assert found.global_row is None
    np.testing.assert_array_equal(found.rows[3:], rows_of(3, [3]))
    assert np.isnan(found.rows[:3]).all()
    first = read_parameters(tmp_path, 2)
    np.testing.assert_array_equal(first.rows, rows_of(1, [0, 1, 2, 3]))
    np.testing.assert_array_equal(first.global_row, [1.5, 1.5, 1.5])
    assert first.columns == {"w": slice(0, 2), "b": slice(2, 3)}
    np.testing.assert_array_equal(first["b"], np.full((4, 1), 0.5))
    with pytest.raises(KeyError, match="no tensor 'x'; there are w, b"):
        first["x"]
    for round in (1, 6):
        with pytest.raises(UserError, match=f"of round {round}; it has 2, 4"):
            read_parameters(tmp_path, round)


def test_a_file_of_snapshots_appears_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run that met a full disk could not go on in it once there is room."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(SnapshotWriter, "_create", full)
        with pytest.raises(OSError, match="No space left"):
            snapshots_of(tmp_path, [0, 1], [1, 3])
    assert list(tmp_path.iterdir()) == []
    # As if it had been killed in between.
    left = tmp_path / ".params-0.h5.new.tmp"
    left.write_bytes(b"torn")
    assert not strangers(tmp_path)
    snapshots_of(tmp_path, [0, 1], [1, 3]).close()
    assert [path.name for path in tmp_path.iterdir()] == ["params-0.h5"]


def test_snapshots_that_are_made_again_are_removed_first(tmp_path: Path) -> None:
    """A resumed run goes on in its file if it has the same clients and rounds."""
    own, rounds = [0, 1], [1, 3, 5]
    writer = snapshots_of(tmp_path, own, rounds)
    take([writer], [own], 1)
    take([writer], [own], 3)
    writer.close()
    again = snapshots_of(tmp_path, own, rounds, first=3)
    with pytest.raises(UserError, match="of round 4; it has 2"):
        read_parameters(tmp_path, 4)
    assert [r for r in range(7) if again.due(r)] == [3, 5]
    again.write_rows(3, np.arange(2), rows_of(30, own))
    again.close_round(3, None)
    take([again], [own], 5)
    again.close()
    assert names_in(tmp_path) == ["params-0.h5"]
    for round, expected in ((2, 1), (4, 30), (6, 5)):
        found = read_parameters(tmp_path, round)
        np.testing.assert_array_equal(found.rows, rows_of(expected, own))
    # Nothing is left to come: no file is opened, and the earlier ones stay.
    snapshots_of(tmp_path, own, rounds, first=6).close()
    assert read_parameters(tmp_path).round == 6
    # All is made again: files without an earlier snapshot go.
    snapshots_of(tmp_path, own, [], first=0).close()
    assert names_in(tmp_path) == []


def test_other_clients_and_more_rounds_take_another_file(tmp_path: Path) -> None:
    writer = snapshots_of(tmp_path, [0, 1], [1, 3])
    take([writer], [[0, 1]], 1)
    writer.close()
    others = snapshots_of(tmp_path, [0, 1, 2], [1, 3], first=2)
    take([others], [[0, 1, 2]], 3)
    others.close()
    assert names_in(tmp_path) == ["params-0-after-2.h5", "params-0.h5"]
    longer = snapshots_of(tmp_path, [0, 1, 2], [1, 3, 5], first=4)
    take([longer], [[0, 1, 2]], 5)
    longer.close()
    assert len(names_in(tmp_path)) == 3
    for round, clients in ((1, [0, 1]), (3, [0, 1, 2]), (5, [0, 1, 2])):
        found = read_parameters(tmp_path, round + 1)
        np.testing.assert_array_equal(found.rows, rows_of(round, clients))
    shorter = snapshots_of(tmp_path, [0, 1, 2], [1, 3, 5], first=5)
    take([shorter], [[0, 1, 2]], 5)
    shorter.close()
    # The one that was begun after round 4 has nothing that stays.
    names = [f"params-0{rest}.h5" for rest in ("-after-2", "-after-5", "")]
    assert names_in(tmp_path) == names


@pytest.mark.parametrize(
    "harm", ["rounds", "columns", "taken", "kind", "chunks", "global"]
)
def test_a_file_that_does_not_fit_the_run_is_refused(harm: str, tmp_path: Path) -> None:
    writer = snapshots_of(tmp_path, [0, 1], [1, 3, 5])
    take([writer], [[0, 1]], 1)
    writer.close()
    with h5py.File(tmp_path / "params-0.h5", "r+") as file:
        if harm == "rounds":
            file["round"][()] = [1, 4, 5]
        elif harm == "columns":
            del file["rows"]
            file["rows"] = np.zeros((3, 2, 4))
        elif harm == "kind":
            del file["rows"]
            file["rows"] = np.zeros((3, 2, 3), np.int64)
        elif harm == "chunks":
            del file["rows"]
            file.create_dataset("rows", (3, 2, 3), float, chunks=(1, 1, 3))
        elif harm == "global":
            del file["global"]
            file["global"] = np.zeros((2, 3))
        else:
            del file["taken"]
            file["taken"] = np.array([1, 0, 0], np.int64)
    said = {"rounds": "other rounds", "chunks": "lost some of its rows"}
    with pytest.raises(UserError, match=said.get(harm, "another shape or type")):
        snapshots_of(tmp_path, [0, 1], [1, 3, 5], first=2)


def test_snapshots_of_a_killed_run_can_be_read(tmp_path: Path) -> None:
    """At any moment: a copy of the open file is what a killed run would leave."""
    (tmp_path / "run").mkdir()
    writer = snapshots_of(tmp_path / "run", [0, 1], [1, 3])

    def left() -> dict[str, Any]:
        shutil.copy(tmp_path / "run" / "params-0.h5", tmp_path / "copy.h5")
        with h5py.File(tmp_path / "copy.h5") as file:
            assert file["taken"].attrs["description"] == "1 once the snapshot is whole"
            assert (
                file["rows"].attrs["units"]
                == file["global"].attrs["units"]
                == "parameter"
            )
            assert [dim.label for dim in file["rows"].dims] == [
                "snapshot",
                "client",
                "column",
            ]
            assert [dim.label for dim in file["global"].dims] == ["snapshot", "column"]
            assert file.attrs["columns"] == 3 and np.isnan(file["rows"][1]).all()
            return {
                name: file[name][0].tolist() for name in ("taken", "rows", "global")
            }

    assert left()["taken"] == 0
    take([writer], [[0, 1]], 1)
    rows = rows_of(1, [0, 1]).tolist()
    assert left() == {"taken": 1, "rows": rows, "global": [1.5] * 3}
    writer.close()


def test_snapshots_that_the_limit_on_files_forbids_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for what HDF5 adds, and none of it is written."""
    need = 2 * (3 + 1) * (3 * 8 + PER_ROW) + PER_FILE
    monkeypatch.setattr(resource, "getrlimit", lambda _: (need - 1, need))
    with pytest.raises(OSError, match="too large"):
        snapshots_of(tmp_path, [0, 1, 2], [1, 3])
    assert names_in(tmp_path) == []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (need, need))
    writer = snapshots_of(tmp_path, [0, 1, 2], [1, 3])
    take([writer], [[0, 1, 2]], 1)
    take([writer], [[0, 1, 2]], 3)
    writer.close()
    size = (tmp_path / "params-0.h5").stat().st_size
    assert size <= need
    monkeypatch.setattr(resource, "getrlimit", lambda _: (size - 1, need))
    for first in (2, 4):
        with pytest.raises(OSError, match="too large"):
            snapshots_of(tmp_path, [0, 1, 2], [1, 3], first=first)
    # A rank that is not the first looks at its own file alone.
    os.rename(tmp_path / "params-0.h5", tmp_path / "params-1.h5")
    with pytest.raises(OSError, match="too large"):
        snapshots_of(tmp_path, [0, 1, 2], [1, 3], rank=1, first=2)


def test_the_outermost_phase_counts_and_rounds_leave_no_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    clock = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now)
    monkeypatch.setattr("hpcfed.runtime.timer.time", clock)
    timer = Timer(torch.device("cpu"))
    now += 64
    timer.start()
    with timer.phase("evaluate"):
        now += 2
        with timer.phase("train"):
            now += 4
    now += 1
    first, wall = timer.lap()
    now += 8
    with timer.phase("record"):
        now += 16
    second, next_wall = timer.lap()
    named = [dict(zip(PHASES, seconds, strict=True)) for seconds in (first, second)]
    assert {n: s for n, s in named[0].items() if s} == {"evaluate": 6, "other": 1}
    assert {n: s for n, s in named[1].items() if s} == {"other": 8, "record": 16}
    assert (wall, next_wall) == (7, 24)


def test_the_environment_keeps_secrets_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JWT", "private")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "private")
    facts = environment.capture(
        locations=[], backend="none", reason="", launcher="", threads=1
    )
    assert facts["variables"]["SLURM_JOB_ID"] == "17"
    assert "private" not in json.dumps(facts)


def test_the_checkout_is_looked_at_and_not_written_to(tmp_path: Path) -> None:
    """git would write its index anew; one that is killed meanwhile, as by `ulimit -f`,
    leaves the checkout locked.
    """
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("same")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    os.utime(tmp_path / "file", (1e9, 1e9))
    index = (tmp_path / ".git/index").read_bytes()
    source = environment.source_of(tmp_path / "hpcfed")
    assert source["changed"] is False
    assert (tmp_path / ".git/index").read_bytes() == index


def test_compiled_files_do_not_change_a_checkout_but_ignored_modules_do(
    tmp_path: Path,
) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    room = tmp_path / "hpcfed/room"
    (room / "__pycache__").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("__pycache__/\nown.py\n")
    (room / "module.py").write_text("one = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    (room / "__pycache__/module.cpython-313.pyc").write_bytes(b"compiled")
    (tmp_path / "notes.py").write_text("not of the package\n")

    def changed() -> bool:
        found = checkout(tmp_path)
        assert found is not None
        return found[1]

    assert not changed()
    (room / "own.py").write_text("imported all the same\n")
    assert changed()
    (room / "own.py").unlink()
    assert not changed()
    (room / "module.py").write_text("one = 2\n")
    assert changed()


def test_a_killed_run_leaves_readable_files(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [
        "--model",
        "mlp",
        "--clients",
        "5",
        "--rounds",
        "5000",
        "--snapshot-every",
        "1",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcfed", "run", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    reported = next(
        line
        for line in process.stderr
        if line.startswith("round ") and not line.startswith("round 1/")
    )
    assert read_run(out).status == "running"
    process.kill()
    process.wait()
    rounds = int(reported.removeprefix("round ").partition("/")[0])
    record = read_run(out)
    assert record.status == "interrupted"
    assert record.rounds_done >= rounds, (
        "every round that the user has read about must be there"
    )
    with h5py.File(out / "params-0.h5") as file:
        taken = int(file["taken"][()].sum())
        assert taken >= rounds
        assert np.isfinite(file["rows"][:taken]).all(), (
            "reading checks every row's checksum"
        )


def test_a_failed_run_says_so_and_keeps_its_rounds(
    tmp_path: Path, hpcfed: Callable, warm: Command
) -> None:
    """The disk takes the first snapshot and refuses the second."""
    program = (
        "from hpcfed import cli\nfrom hpcfed.results.snapshots import SnapshotWriter as "
        "W\noriginal = W.close_round\n"
        "def full(self, round, row):\n"
        "    if round == 3: raise OSError(28, 'No space left on device')\n"
        "    original(self, round, row)\n"
        "W.close_round = full\ncli.main()\n"
    )
    script = tmp_path / "full_disk.py"
    script.write_text(program)
    out = tmp_path / "run"
    words = [
        "run",
        "--model",
        "mlp",
        "--clients",
        3,
        "--rounds",
        6,
        "--snapshot-every",
        2,
        "--out",
        out,
    ]
    result = start(warm(script, *words))
    assert result.returncode == 1
    assert "failed in phase record: OSError" in result.stderr.splitlines()[-1]
    record = read_run(out)
    assert record.status == "failed" and "No space left on device" in record.error
    assert record.rounds_done == 3, "rounds that ended before the failure are there"
    with h5py.File(out / "params-0.h5") as file:
        assert list(file["taken"]) == [1, 0, 0]
    shown = hpcfed("show", out)
    assert shown.returncode == 0 and "failed, 3 of 6 rounds" in shown.stdout


@pytest.mark.parametrize("kilobytes", [4, 200])
def test_a_limit_on_files_is_one_line(kilobytes: int, tmp_path: Path) -> None:
    """libhdf5 crashes over the smaller one, which leaves no room for the headers of a
    file.
    """
    words = [
        "run",
        "--model",
        "mlp",
        "--clients",
        3,
        "--rounds",
        6,
        "--snapshot-every",
        1,
        "--out",
        tmp_path / "run",
    ]
    command = f"ulimit -f {kilobytes}; exec {shlex.join([sys.executable, '-m', 'hpcfed', *map(str, words)])}"
    result = start(["bash", "-c", command])
    assert result.returncode == 1, result.stderr
    line = result.stderr.splitlines()[-1]
    file = "params-0.h5" if kilobytes == 200 else "run.h5"  # which comes first
    assert (
        line.startswith("hpcfed: rank 0")
        and f"File too large: '{tmp_path}/run/{file}'" in line
    )
    assert not (tmp_path / "run/params-0.h5").exists()
    if kilobytes == 200:
        assert f"ulimit -f allows {1024 * kilobytes:,}" in line
        record = read_run(tmp_path / "run")
        assert record.status == "failed" and "File too large" in record.error


def test_the_first_rank_that_failed_is_told(tmp_path: Path) -> None:
    """Others may have failed because it was gone, whatever their numbers."""
    write_round(results := writer(tmp_path, 2), 0)
    results.finish("failed", error="somewhere")
    for rank, when in ((0, 30), (1, 20), (2, 40)):
        (tmp_path / f"error-{rank}.txt").write_text(f"rank {rank} failed\n\ntrace")
        os.utime(tmp_path / f"error-{rank}.txt", (when, when))
    record = read_run(tmp_path)
    assert (record.status, record.error) == ("failed", "rank 1 failed")


def test_what_a_run_has_not_asked_for_is_not_there(recorded: Path) -> None:
    rounds = read_run(recorded).rounds
    for name in ("virtual_seconds", "arrived", "staleness", "clip_norm", "epsilon"):
        assert len(rounds[name]) == 5 and np.isnan(rounds[name]).all(), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_norms_of_updates_are_those_of_the_rows(
    ranks: int, recorded: Path, tmp_path: Path
) -> None:
    """An update is what training leaves less the global row before the round."""
    folder = recorded.parent / "norms"
    if ranks == 1:
        folder = started(*NORMS, "--out", tmp_path / "run")
    norms = []
    for rank in range(ranks):
        with h5py.File(folder / f"params-{rank}.h5") as file:
            rows = file["rows"][1:]
            if rank == 0:
                before = file["global"][:-1][:, None]
        norms.append(np.linalg.norm(rows - before, axis=2))
    of_all = np.concatenate(norms, axis=1)
    record = read_run(folder)
    assert record.facts["ranks"] == ranks
    assert record.rounds["update_norm"][1:] == pytest.approx(of_all.mean(1))
    assert record.rounds["update_norm_max"][1:] == pytest.approx(of_all.max(1))


def test_updates_that_are_not_finite_have_no_norm() -> None:
    figures = norm_figures(np.array([3.0, np.nan, 5.0, np.inf], np.float32))
    assert figures == {"update_norm_sum": 8, "num_updates": 2, "update_norm_max": 5}
    figures = norm_figures(np.array([np.nan]))
    assert figures["num_updates"] == 0 and np.isnan(figures["update_norm_max"])
    assert np.isnan(series.largest(np.array([np.nan, np.nan])))
    assert series.largest(np.array([np.nan, 2.0])) == 2


def test_rounds_without_figures_take_no_room(tmp_path: Path) -> None:
    """The file holds the one evaluated round, not a hundred empty ones of many clients."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        shape = (100, 20_000)
        create(file, Declared("wide", shape, ("round", "client"), "1", "", "f4"))
        data = file["wide"]
        array = np.full(shape, np.nan, "f4")
        array[7] = 0.5
        write_rounds(data, array, slice(0, 60))
        assert data.id.get_num_chunks() == 1
        np.testing.assert_array_equal(data[()], array)


def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which names the file; what was recorded before stays."""

    def full(folder: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(folder / "model.npz"))

    monkeypatch.setattr(loop, "save_model", full)
    with pytest.raises(SystemExit):
        started(*flags(clients=3, rounds=2, epochs=1, out=tmp_path / "run"))
    said = capsys.readouterr().err
    assert "No space left on device" in said.splitlines()[-1]
    assert "model.npz" in said.splitlines()[-1] and "Traceback" not in said
    record = read_run(tmp_path / "run")
    assert record.status == "failed" and record.rounds_done == 2


def test_what_a_round_measures_is_recorded(tmp_path: Path) -> None:
    """A figure that the table of series names needs no other code."""
    s = assembled(clients=2, rounds=2, epochs=1)
    plain = s.method.round

    def measuring(fed: Any, state: Any, cohort: Any) -> Any:
        cohort.log.measured["staleness"] = 0.5 + cohort.round
        return plain(fed, state, cohort)

    s.method = replace(s.method, round=measuring)
    run_setup(s, tmp_path, quiet=True)
    assert read_run(tmp_path).rounds["staleness"].tolist() == [0.5, 1.5]
