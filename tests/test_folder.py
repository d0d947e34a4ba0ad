"""A run's folder: what is the run's own, who may write to it, and what a folder that
was handed in can do.
"""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

from hpcfed import cli, version
from hpcfed.errors import UserError
from hpcfed.experiment import resume
from hpcfed.experiment.run import run
from hpcfed.options import RunConfig, facts
from hpcfed.results import checkpoints
from hpcfed.results.claim import (
    begun_by,
    claimed,
    hold,
    is_abandoned,
    is_held,
    sign,
    this_job,
    was_requeued,
)
from hpcfed.results.folder import (
    CLAIM,
    JOB,
    RECORD,
    STUDY_CLAIM,
    check_export,
    check_out,
    checkpoint_folder,
    checkpoint_folders,
    empty,
    runs,
    strangers,
)
from hpcfed.results.publish import make_durably
from hpcfed.results.stored import read_run, read_seeds
from hpcfed.runtime import environment
from hpcfed.runtime.signals import STOPPED, Stop
from tests.runs import (
    SERVER,
    assert_same_run,
    flags,
    mistake,
    same,
    same_newcomers,
    started,
)
from tests.stopped_run import StopAfter

QUICK = flags(clients=4, rounds=4, method="fedper")


def stopped(out: Path, *words: object, after: int = 2) -> Path:
    """A run that was stopped after some rounds."""
    with pytest.raises(SystemExit) as ended:
        run(
            cli.parse_run([*QUICK, *map(str, words), "--out", str(out)]),
            StopAfter(after),
        )
    assert ended.value.code == STOPPED
    return out


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def without_checkpoints(out: Path) -> Path:
    """A run that was killed before its first checkpoint."""
    stopped(out)
    for path in sorted(out.glob("checkpoints/**/*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return out


def test_what_was_recorded_is_not_replaced_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a checkpoint, --resume begins anew only when it is told to overwrite."""
    out = without_checkpoints(tmp_path / "run")
    before = contents(out)
    capsys.readouterr()
    assert "2 recorded rounds would be lost; add --overwrite" in mistake(
        capsys, "run", "--resume", out
    )
    assert contents(out) == before
    started("--resume", out, "--overwrite")
    assert read_run(out).status == "complete"


def test_damaged_checkpoints_are_no_reason_to_begin_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = stopped(tmp_path / "run")
    for marker in out.glob(f"checkpoints/*/{checkpoints.MARKER}"):
        marker.write_text("[" * 100_000)
    record = (out / "run.h5").read_bytes()
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--resume", str(out)])
    said = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and "add --overwrite to begin anew" in said
        and "Traceback" not in said
    )
    assert (out / "run.h5").read_bytes() == record


def test_an_early_interrupt_is_one_line() -> None:
    """From the moment that the program's own handlers are there."""
    for seconds in (0, 0.1, 0.2, 0.3):
        words = [sys.executable, "-m", "hpcfed", "run"]
        with subprocess.Popen(
            words,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_signals,
        ) as process:
            while not _ignores_hangups(process.pid):
                time.sleep(0.001)  # Python itself is starting
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            told = process.communicate(timeout=30)[1]
        assert (process.returncode, told) == (130, "hpcfed: interrupted\n")


def _hear_signals() -> None:
    """Undo what nohup and a script's background jobs make the tests ignore."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _ignores_hangups(process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    ignored = next(
        line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")
    )
    return bool(int(ignored, 16) & 1 << signal.SIGHUP - 1)


def test_a_checkpoint_is_written_when_the_last_is_old(tmp_path: Path) -> None:
    """After some minutes, in rounds that all seeds share."""
    words = [*QUICK, "--seeds", "0,1", "--out", str(tmp_path / "run")]
    run(cli.parse_run(words), Stop(1e-6))
    for seed in (0, 1):
        assert (
            checkpoints.newest(tmp_path / f"run/seed-{seed}", say=pytest.fail)
            is not None
        )
    assert not Stop(0).is_due(3) and not Stop(60).is_due(3)


def test_a_resumed_run_knows_how_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["hpcfed", "run", "--first"])
    stopped(out)
    with h5py.File(out / "checkpoints/00000002/run.h5") as file:
        before = file.attrs["seconds"]
    monkeypatch.setattr(sys, "argv", ["hpcfed", "run", "--resume"])
    time.sleep(0.2)
    started("--resume", out)
    about = read_run(out).environment
    assert about["command"] == ["hpcfed", "run", "--first"]
    assert about["resumed_by"] == [["hpcfed", "run", "--resume"]]
    with h5py.File(out / "run.h5") as file:
        assert file.attrs["seconds"] > before > 0


@pytest.mark.parametrize("ignored", [False, True])
def test_an_added_method_is_a_change(
    ignored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "hpcfed"
    package.mkdir()
    (package / "version.py").write_text("")
    (tmp_path / ".gitignore").write_text("mine.py\n" if ignored else "")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(version, "PACKAGE", package)
    first = environment.source_of(package)
    assert first["changed"] is False and len(first["commit"]) == 40
    (tmp_path / "notes.txt").write_text("no part of the program")
    assert environment.source_of(package) == first
    short = f"{version.__version__} (commit {first['commit'][:10]}"
    assert version.source.__wrapped__() == f"{short})"
    (package / "mine.py").write_text("x = 1")
    second = environment.source_of(package)
    assert second["changed"] is True and second["sha256"] != first["sha256"]
    assert version.source.__wrapped__() == f"{short}, changed)"


def test_a_wheel_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "hpcfed"
    package.mkdir()
    about = environment.source_of(package)
    assert set(about) == {"version", "sha256"} and len(about["sha256"]) == 64
    monkeypatch.setattr(version, "PACKAGE", package)
    number = version.__version__
    assert version.source.__wrapped__() == f"{number} (a copy without git)"
    (tmp_path / f"hpcfed-{number}.dist-info").mkdir()
    assert version.source.__wrapped__() == f"{number} (wheel)"


FILES = ["run.h5", "server.h5", ".claim", "params-0.h5", "error-0.txt", "profile.json"]
LINKED = [*FILES, "seed-3", "checkpoints/00000009"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that is complete, and one that was stopped."""
    folder = tmp_path_factory.mktemp("made")
    started(*QUICK, "--out", folder / "complete")
    stopped(folder / "stopped")
    return folder


@pytest.mark.parametrize("name", LINKED)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_no_link_is_followed(
    name: str,
    kind: str,
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither going on nor overwriting touches what is elsewhere, or waits for a pipe."""
    elsewhere = made / "complete"
    out = shutil.copytree(made / "stopped", tmp_path / "run")
    (out / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(out / name)
    else:
        (out / name).symlink_to(elsewhere / "run.h5" if "." in name else elsewhere)
    before = contents(elsewhere)
    for words in (["--resume", out], [*QUICK, "--out", out, "--overwrite"]):
        said = mistake(capsys, "run", *words)
        assert str(out / name) in said and (
            "is a link, which is not followed" in said or "is not a f" in said
        )
    assert contents(elsewhere) == before


def test_overwriting_removes_only_what_a_run_has_made(tmp_path: Path) -> None:
    out = stopped(tmp_path / "run", "--snapshot-every", 1)
    own = [
        "params-mine.h5",
        "error-bars.txt",
        "notes.md",
        "checkpoints/why.txt",
        "seed-bank/run.h5",
        "data/a.npz",
    ]
    for name in own:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    empty(out)
    left = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert left == set(own)


def test_a_record_that_cannot_be_read_now_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be whole: a study would run its trial again, and a requeued job anew."""
    record = tmp_path / "seed-1" / RECORD
    record.parent.mkdir()
    record.write_bytes(b"a run")
    other = tmp_path / "model.npz"
    other.touch()
    failing = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    with monkeypatch.context() as disk, pytest.raises(UserError, match="not replaced"):
        disk.setattr(Path, "open", failing)
        empty(tmp_path)
    assert record.exists() and other.exists()
    empty(tmp_path)
    assert not record.exists() and not other.exists()


def test_a_killed_run_can_be_overwritten_beside_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before its first round, it has left its claim; a folder without one is
    somebody's own.
    """
    out = tmp_path / "run"
    out.mkdir()
    (out / "report.html").write_text("mine")
    assert "is not empty and holds no run" in mistake(
        capsys, *("run", *QUICK, "--out", out, "--overwrite")
    )
    (out / ".claim").touch()
    check_out(out, overwrite=True)
    started(*QUICK, "--out", out, "--overwrite")
    assert (out / "report.html").read_text() == "mine" and read_run(
        out
    ).status == "complete"


def test_a_run_is_known_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpcfed.experiment.checkpointing.check_shared", fail)
    with pytest.raises(KeyboardInterrupt):
        started(*QUICK, "--out", tmp_path / "run")
    record = read_run(tmp_path / "run")
    assert (record.status, record.error) == ("failed", "interrupted")


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    """A lock that ends with its block, or with its process, and leaves nothing open."""
    path, open_before = tmp_path / CLAIM, len(os.listdir("/proc/self/fd"))
    assert not is_held(path) and not is_abandoned(tmp_path)
    for _ in range(2):
        with claimed(tmp_path):
            assert is_held(path) and not is_abandoned(tmp_path)
            with pytest.raises(UserError, match="another run is"), claimed(tmp_path):
                raise AssertionError
            with claimed(tmp_path, STUDY_CLAIM):
                refused = pytest.raises(UserError, match="another study is writing to")
                with refused, claimed(tmp_path, STUDY_CLAIM):
                    raise AssertionError
        assert list(tmp_path.iterdir()) == []
    path.touch()  # as a killed run leaves it
    assert is_abandoned(tmp_path) and not is_held(path)
    with open(path) as file:
        hold(file.fileno())
        assert is_held(path) and not is_abandoned(tmp_path)
        hold(file.fileno())  # again, which changes nothing
    with claimed(tmp_path):
        path.unlink()  # by somebody else
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_claim_is_a_file_that_others_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last owner removes its file just before it is locked."""
    path, flock = tmp_path / CLAIM, fcntl.flock
    owners = [tmp_path]

    def too_late(file: int, how: int) -> None:
        if owners:
            owners.pop()
            path.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with claimed(tmp_path):
        assert is_held(path)


def test_claims_follow_no_link_and_need_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, path = tmp_path / "other", tmp_path / CLAIM
    path.symlink_to(other)
    with pytest.raises(OSError, match="symbolic"), claimed(tmp_path):
        raise AssertionError
    assert not other.exists()
    other.touch()
    assert not is_abandoned(tmp_path), "a link is nobody's claim"
    path.unlink()
    os.mkfifo(path)  # which is opened at once, and may be locked
    assert is_abandoned(tmp_path)
    path.unlink()

    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with claimed(tmp_path), claimed(tmp_path):
        assert path.stat().st_mode == other.stat().st_mode
        assert not is_held(path) and not is_abandoned(tmp_path)
        hold(0)


def test_jobs_are_named_with_their_cluster() -> None:
    assert this_job({}) is None and this_job({"SLURM_JOB_ID": "a1"}) is None
    job = {"SLURM_JOB_ID": "17"}
    assert this_job(job) == "17 on cluster"
    assert this_job(job | {"SLURM_CLUSTER_NAME": "big"}) == "17 on big"
    counts = {"": False, "0": False, "1": True, "x": False}
    for count, requeued in counts.items():
        assert was_requeued({"SLURM_RESTART_COUNT": count}) == requeued
    assert not was_requeued({})


def test_a_folder_says_which_job_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / JOB, tmp_path / "other"
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert begun_by(tmp_path) is None
    other.touch()
    file.symlink_to(other)
    sign(tmp_path)
    assert begun_by(tmp_path) == "17 on cluster" and other.read_text() == ""
    monkeypatch.delenv("SLURM_JOB_ID")
    sign(tmp_path)
    assert not file.exists()
    file.write_bytes(b"\xff" + b"x" * 2000)
    assert begun_by(tmp_path) == "\ufffd" + "x" * 999
    file.write_text("\n")
    assert begun_by(tmp_path) is None


@pytest.mark.parametrize(
    "words", [["--resume", "{}/seed-0"], [*QUICK, "--overwrite", "--out", "{}/seed-0"]]
)
def test_seeds_are_claimed_with_their_run(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = stopped(tmp_path / "run", "--seeds", "0,1")
    before = contents(out)
    capsys.readouterr()
    said: list[str] = []

    def meanwhile(*_: object, **__: object) -> None:
        said.append(mistake(capsys, "run", *[word.format(out) for word in words]))
        raise KeyboardInterrupt

    monkeypatch.setattr("hpcfed.experiment.run.run_in_step", meanwhile)
    with pytest.raises(KeyboardInterrupt):
        started("--resume", out)
    assert f"another run is writing to {out}/seed-0" in said[0]
    assert contents(out) == before


def test_a_seed_that_is_at_work_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = stopped(tmp_path / "run", "--seeds", "0,1")
    with claimed(out / "seed-1"):
        for words in (["--resume", out], [*QUICK, "--out", out, "--overwrite"]):
            capsys.readouterr()
            with pytest.raises(SystemExit):
                cli.main(["run", *map(str, words)])
            assert f"another run is writing to {out}/seed-1" in capsys.readouterr().err
    assert read_run(out / "seed-0").status == "stopped"


@pytest.mark.parametrize("seeds", [(), ("--seeds", "0,1")])
def test_what_has_been_completed_meanwhile_is_left(
    seeds: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process brings the run to its end after this one has read its options."""
    out = stopped(tmp_path / "run", *seeds)
    late = cli.parse_run(["--resume", str(out)])
    started("--resume", out)
    before = contents(out)
    assert run(late) == out
    assert "is complete; there is nothing to go on with" in capsys.readouterr().err
    assert contents(out) == before


def test_notes_on_errors_do_not_make_a_run_fail(tmp_path: Path) -> None:
    out = started(*QUICK, "--out", tmp_path / "run")
    for name in ("error-bars.txt", "error-0.txt"):
        (out / name).write_text("mine")
    assert read_run(out).status == "complete"
    before = contents(out)
    cli.main(["run", "--resume", str(out)])
    assert contents(out) == before
    cut = stopped(tmp_path / "cut")
    (cut / "notes").mkdir()
    for name in ("error-bars.txt", "notes/error-0.txt"):
        (cut / name).write_text("mine")
    assert read_run(cut).status == "stopped"
    started("--resume", cut)
    assert (cut / "error-bars.txt").exists() and (cut / "notes/error-0.txt").exists()


def test_seeds_go_on_from_a_common_round(tmp_path: Path) -> None:
    """One seed's last two checkpoints are gone: bit for bit the uninterrupted run, which
    stacked them in every round.

    Killed between two seeds' checkpoints, one is a checkpoint behind the other; if its
    newest is then damaged, it is two behind.
    """
    words = flags(
        clients=3,
        rounds=6,
        epochs=1,
        batch_size=64,
        method="genefl",
        model="cnn-bn",
        precision="fp32",
        seeds="0,2",
    )
    whole = started(*words, "--checkpoint-every", 2, "--out", tmp_path / "whole")
    out = shutil.copytree(whole, tmp_path / "cut")
    for rounds in (4, 6):
        (out / f"seed-2/checkpoints/{rounds:08d}/complete.json").unlink()
    for seed in (0, 2):
        with h5py.File(out / f"seed-{seed}/run.h5", "r+") as file:
            file.attrs["status"] = "running"
    started("--resume", out)
    for seed in (0, 2):
        same(whole / f"seed-{seed}", out / f"seed-{seed}")
        with h5py.File(out / f"seed-{seed}/run.h5") as file:
            assert file.attrs["resumed"].tolist() == [2]


@pytest.fixture(scope="module")
def ended_apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Three seeds, of which two end early and go on with new clients; and the same,
    stopped meanwhile: no round has a checkpoint of all.
    """
    folder = tmp_path_factory.mktemp("apart")
    words = flags(
        dataset="synthetic",
        synthetic_shape="1x4x4",
        train_per_client=20,
        clients=5,
        rounds=12,
        seeds="0..2",
        method="genefl",
        new_clients=2,
        new_rounds=8,
        early_stop=1,
        lr=0.003,
        precision="fp64",
        checkpoint_every=1,
        telemetry=0,
    )
    whole = started(*words, "--out", folder / "whole")
    first, second, last = (run.rounds_done for run in read_seeds(whole))
    assert max(first, second) <= 4 and last == 12
    return whole, stopped(folder / "cut", *words, after=8)


@pytest.mark.parametrize("more", [[], ["--overwrite"]], ids=["resumed", "requeued"])
def test_seeds_that_have_ended_need_no_common_round(
    more: list[str], ended_apart: tuple[Path, Path], tmp_path: Path
) -> None:
    whole, cut = ended_apart
    out = shutil.copytree(cut, tmp_path / "run")
    done = list(map(checkpoints.newest_rounds, runs(out)))
    started("--resume", out, *more)
    for seed, before in zip(runs(out), done, strict=True):
        # What the engine does at once differs: new clients meet other rounds.
        assert_same_run(seed, whole / seed.name)
        same_newcomers(seed, whole / seed.name)
        assert read_run(seed).facts["resumed"].tolist() == [before]


def test_seeds_without_a_common_round_are_never_replaced(
    ended_apart: tuple[Path, Path], tmp_path: Path
) -> None:
    every = runs(shutil.copytree(ended_apart[1], tmp_path / "run"))

    def found(of: list[Path], **changes: object) -> list[int] | None:
        config = RunConfig(rounds=12, **{"early_stop": 1, **changes})
        there = resume._find(of, config, pytest.fail, lambda: False)
        return there and [checkpoint.rounds for checkpoint in there]

    newest = [checkpoints.newest_rounds(run) for run in every]
    for first in every[:2]:
        for older in checkpoint_folders(first)[:-1]:
            checkpoints.remove(older)
    assert newest[0] != newest[1] and found(every[:2]) == newest[:2]
    # Without its early end, each of them is under way.
    assert found(every, early_stop=None) is None
    assert found(every, early_stop=None, overwrite=True) == newest
    checkpoints.remove(checkpoint_folder(every[0], newest[0]))
    assert found(every, overwrite=True) is None, "one has nothing to go on from"


def test_a_stop_is_heard_while_checkpoints_are_read(tmp_path: Path) -> None:
    out = stopped(tmp_path / "run")
    before = contents(out)
    stop = Stop()
    stop.asked = True
    with pytest.raises(SystemExit) as ended:
        run(cli.parse_run(["--resume", str(out)]), stop)
    assert ended.value.code == STOPPED and contents(out) == before


def bytes_read() -> int:
    """Return how many bytes this process has read from files so far."""
    counts = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in counts)["rchar"])


@pytest.mark.parametrize("size", ["other", "named"])
def test_a_file_of_holes_is_not_read(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terabyte that was never written is left alone, whether or not the marker names
    its size.
    """
    out = stopped(tmp_path / "run", "--checkpoint-every", 1)
    there = out / "checkpoints/00000002"
    with open(there / "common.shared.npy", "r+b") as file:
        file.truncate(2**40)
    if size == "named":
        marker = json.loads((there / checkpoints.MARKER).read_text())
        for part in marker["parts"]:
            part["size"] = (
                2**40 if part["name"] == "common.shared.npy" else part["size"]
            )
        (there / checkpoints.MARKER).write_text(json.dumps(marker))
    before = bytes_read()
    started("--resume", out)
    assert bytes_read() - before < 2**32
    assert "00000002 is damaged" in capsys.readouterr().err
    with open(out / "run.h5", "r+b") as file:
        file.truncate(2**40)
    assert "never written as a whole" in mistake(capsys, "show", out)


def rewrite_config(out: Path, changes: dict[str, object]) -> None:
    """Change recorded options of a stopped run, as if it had been run with these."""
    for path in out.rglob("run.h5"):
        with h5py.File(path, "r+") as file:
            config = json.loads(file["config"].asstr()[()]) | changes
            del file["config"]
            file["config"] = json.dumps(config)
    for marker in out.glob("checkpoints/*/complete.json"):
        names = checkpoints.listed(marker.parent)
        checkpoints.complete(
            marker.parent,
            int(marker.parent.name),
            [checkpoints.existing(marker.parent / name) for name in names],
        )


def test_nothing_is_fetched_because_a_folder_says_so(tmp_path: Path) -> None:
    out = stopped(tmp_path / "run")
    rewrite_config(out, {"download": True})
    assert cli.parse_run(["--resume", str(out)]).config.download is False


def test_a_zero_that_older_versions_wrote_for_unset_is_read_as_unset(
    tmp_path: Path,
) -> None:
    out = stopped(tmp_path / "run", "--method", "fedavg-ft")
    before = read_run(out).config
    wanted = cli.parse_run(["--resume", str(out)])
    zeros = {name: 0 for name, one in facts("fedavg-ft").items() if one.zero_was_unset}
    assert {"validation", "krum_keep", "finetune_epochs"} <= zeros.keys()
    assert all(before[name] is None for name in zeros)
    rewrite_config(out, zeros)
    assert read_run(out).config == before
    assert cli.parse_run(["--resume", str(out)]) == wanted
    cli.main(["run", "--resume", str(out)])
    assert read_run(out).status == "complete"


def test_other_data_is_not_mixed_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    images = {
        split: random.integers(0, 255, (200, 8, 8), dtype=np.uint8)
        for split in ("train", "test")
    }
    labels = {split: np.arange(200) % 10 for split in ("train", "test")}

    def write() -> None:
        arrays = {f"{split}_images": images[split] for split in images}
        np.savez(
            tmp_path / "mine.npz",
            **arrays,
            **{f"{split}_labels": labels[split] for split in labels},
        )

    write()
    out = stopped(tmp_path / "run", "--dataset", f"file:{tmp_path / 'mine.npz'}")
    record = (out / "run.h5").read_bytes()
    images["test"][7] = 0
    write()
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["run", "--resume", str(out)])
    assert "was begun with other data" in capsys.readouterr().err
    assert (out / "run.h5").read_bytes() == record, "what was recorded stays"


def test_shared_fields_differ_on_no_rank(tmp_path: Path, mpirun: Callable) -> None:
    """A field that is not marked as owned, but is another on every rank, could not be
    gone on with; one that differs by roundings could.
    """
    program = tmp_path / "parted.py"
    program.write_text(
        "import sys\nfrom dataclasses import replace\nfrom hpcfed.methods import fedavg\n"
        "from hpcfed import cli\nround = fedavg.round\n"
        "def parted(fed, state, cohort):\n"
        "    state = round(fed, state, cohort)\n"
        "    return replace(state, w=state.w + apart * fed.clients[0])\n"
        "fedavg.round = parted\n"
        "for apart in (1e-9, 1.0):\n"
        "    cli.main([*sys.argv[2:], f'{sys.argv[1]}/{apart}'])\n"
    )
    words = ["run", *flags(clients=4, rounds=2), "--out"]
    ended = mpirun(2, program, tmp_path, *words)
    assert ended.returncode == 1
    assert "state field w of method fedavg differs between ranks" in ended.stderr
    assert read_run(tmp_path / "1e-09").status == "complete", ended.stderr
    assert read_run(tmp_path / "1.0").status == "failed"


def test_seeds_with_a_server_leave_when_there_is_nothing_to_do(tmp_path: Path) -> None:
    """Stopped while checkpoints are read, or completed meanwhile: nobody waits for a
    turn that never comes.
    """
    words = flags(
        **SERVER, clients=3, rounds=4, method="pfedgpa", bank_rounds=4, seeds="0,1"
    )
    out = tmp_path / "run"
    with pytest.raises(SystemExit):
        run(cli.parse_run([*words, "--out", str(out)]), StopAfter(2))
    stop = Stop()
    stop.asked = True
    with pytest.raises(SystemExit) as ended:
        run(cli.parse_run(["--resume", str(out)]), stop)
    assert ended.value.code == STOPPED
    late = cli.parse_run(["--resume", str(out)])
    started("--resume", out)
    assert run(late) == out


def test_a_folder_of_notes_is_no_seed(tmp_path: Path) -> None:
    out = stopped(tmp_path / "run", "--seeds", "0,1")
    (out / "seed-7").mkdir()
    (out / "seed-7/notes.md").write_text("mine")
    assert cli.parse_run(["--resume", str(out)]).config.seeds == (0, 1)


RARE = [
    ".claim", ".job", ".run.h5.host.1.tmp", "error-0.txt", "learning.json", "progress.json", "server.h5",
    "tensorboard/events.out.tfevents.1", "tracked.json",
]  # fmt: skip
"""What a run's folder also has, at times."""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has written all that a run writes by itself."""
    out = tmp_path_factory.mktemp("profiled") / "r0"
    every = {"snapshot_every": 2, "checkpoint_every": 2}
    wanted = flags(clients=3, rounds=4, method="fedavg", **every)
    cli.main(["profile", *wanted, "--out", str(out)])
    return out


def test_no_export_replaces_what_a_run_has_written(profiled: Path) -> None:
    """Neither by its name nor by that of a link to its folder."""
    files = [path.relative_to(profiled).as_posix() for path in contents(profiled)]
    assert {"run.h5", "model.npz", "trace.json", "params-0.h5"} <= set(files)
    assert "checkpoints/00000004/complete.json" in files
    link = profiled.with_name("link")
    link.symlink_to(profiled)
    for name in [*files, *RARE, "checkpoints/new/figure.pdf"]:
        for folder in (profiled, link):
            with pytest.raises(UserError, match=r"name a(nother| file of)"):
                check_export("--json", folder / name)
    check_export("--json", profiled / "figures.json")
    check_export("--figures", profiled / "figures" / "accuracy.pdf")


def test_names_of_a_runs_files_are_free_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("plan.json", "profile.json", "error-0.txt", "checkpoints/page.html"):
        (tmp_path / name).write_text("mine")
        check_export("--out", tmp_path / name)
    with pytest.raises(UserError, match="is for results"):
        check_export("--csv", tmp_path / "other.npz")


@pytest.mark.parametrize(
    "words",
    [
        ("report", "r0", "--out", "r0/model.npz"),
        ("report", "r0", "--json", "r0/profile.json"),
        ("report", "r0", "--csv", "r0/checkpoints/00000004/complete.json"),
        ("report", "r0", "--extrap", "r0/trace.json"),
        ("report", "r0", "--figures", "r0/checkpoints"),
        ("plan", "my.toml", "--calibrate", "--constants", "r0/profile.json"),
        ("attack", "idlg", "--out", "r0/checkpoints/figure.png"),
        ("run", "--out", "r0/checkpoints/00000009"),
    ],
)
def test_commands_that_write_files_spare_runs(
    words: tuple[str, ...],
    profiled: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(profiled.parent)
    Path("my.toml").write_text("clients = 20\n")
    before = contents(profiled)
    said = mistake(capsys, *words)
    assert words[-2] in said and words[-1] in said
    assert contents(profiled) == before
    assert sorted(path.name for path in Path().iterdir() if path.is_file()) == [
        "my.toml"
    ]


def test_names_of_new_folders_are_on_disk(tmp_path: Path, synced: list[Path]) -> None:
    """A folder outlasts a power cut only once the folder above it is synced."""
    make_durably(tmp_path / "a/b")
    assert synced == [tmp_path, tmp_path / "a"]
    synced.clear()
    # Whoever has made it may have been killed before the sync.
    make_durably(tmp_path / "a/b")
    assert synced == [tmp_path / "a"]
    synced.clear()
    checkpoints.prepare(tmp_path / "a/checkpoints/00000002")
    assert synced == [tmp_path / "a", tmp_path / "a/checkpoints"]


def test_the_name_of_a_job_is_on_disk(
    tmp_path: Path, synced: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a job that is requeued after a power cut is refused its own folder."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    sign(tmp_path)
    assert (tmp_path / JOB).read_text() == "7 on cluster\n"
    assert len(synced) == 2 and synced[1] == tmp_path
    # Also when it is killed while it signs again.
    with monkeypatch.context() as killed, pytest.raises(InterruptedError):
        killed.setattr(os, "replace", Mock(side_effect=InterruptedError))
        sign(tmp_path)
    assert begun_by(tmp_path) == "7 on cluster"
    # What a kill may leave behind is the run's own.
    (tmp_path / synced[0].name).touch()
    assert not strangers(tmp_path)
    # And no reason to refuse the folder, to a requeued job or to anybody.
    check_out(tmp_path, overwrite=False)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return what is synced from now on, in order."""
    found = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


@pytest.mark.parametrize(
    ("words", "link"),
    [
        ("run --model mlp --rounds 1 --out gone", "--out gone"),
        ("run --model mlp --rounds 1 --out gone/below", "--out gone/below: gone"),
        ("study quick --out gone", "--out gone"),
        ("doctor --out gone", "--out gone"),
        ("report quick --figures gone", "--figures gone"),
        ("examples gone", "examples gone"),
    ],
)
def test_a_link_that_leads_nowhere_is_one_line(
    words: str,
    link: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gone").symlink_to("nowhere/at/all")
    leads = "is a link to nowhere/at/all, which does not exist; make that folder, or"
    assert f"hpcfed: {link} {leads} name another" in mistake(capsys, *words.split())
