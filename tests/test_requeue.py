"""`--requeue`: a job that Slurm begins again goes on with its own run, and never
touches another's.
"""

import shutil
from pathlib import Path

import h5py
import pytest

from hpcfed import cli
from hpcfed.cli.resume import requeued
from hpcfed.experiment.run import run
from hpcfed.results.claim import claimed
from hpcfed.results.folder import CHECKPOINTS, HALF_LEARNT, JOB
from hpcfed.results.stored import read_run
from hpcfed.runtime.launcher import ENDED
from hpcfed.runtime.signals import STOPPED
from tests.halted_runs import TOKENS, StopWhileLearning, options_of
from tests.runs import flags, mistake, started
from tests.stopped_run import StopAfter

ROUNDS = 4
WORDS = [
    "run",
    "--clients",
    "3",
    "--model",
    "mlp",
    "--rounds",
    str(ROUNDS),
    "--epochs",
    "1",
    "--batch-size",
    "64",
    "--partition",
    "iid",
    "--requeue",
]


class Slurm:
    """Environment variables as Slurm sets them for a batch job."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def begin(self, job: int, *, restarts: int = 0, cluster: str = "here") -> None:
        self._patch.setenv("SLURM_JOB_ID", str(job))
        self._patch.setenv("SLURM_CLUSTER_NAME", cluster)
        if restarts:
            self._patch.setenv("SLURM_RESTART_COUNT", str(restarts))
        else:
            self._patch.delenv("SLURM_RESTART_COUNT", raising=False)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Slurm:
    monkeypatch.chdir(tmp_path)
    return Slurm(monkeypatch)


def stopped_after(rounds: int, *words: object) -> None:
    """Let a job run and be stopped with a checkpoint after this number of rounds."""
    settings = requeued(cli.parse_run([str(word) for word in [*WORDS[1:], *words]]))
    with pytest.raises(SystemExit) as ended:
        run(settings, StopAfter(rounds))
    assert ended.value.code == STOPPED


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("left", ["complete", "stopped", "no checkpoint"])
def test_a_run_of_another_is_refused_after_a_requeueing_too(
    slurm: Slurm, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it was begun by another job, by this number on another cluster, or
    without Slurm.
    """
    out = Path("theirs")
    slurm.begin(7)
    if left == "stopped":
        stopped_after(2, "--out", out)
    else:
        cli.main([*WORDS, "--out", str(out)])
    if left == "no checkpoint":
        with h5py.File(out / "run.h5", "r+") as file:
            file.attrs["status"] = "running"
    capsys.readouterr()
    before = content(out)
    for job, cluster in ((8, "here"), (7, "there")):
        for restarts in (0, 1, 2):
            slurm.begin(job, restarts=restarts, cluster=cluster)
            assert "theirs already holds a run" in mistake(capsys, *WORDS, "--out", out)
    (out / JOB).unlink()
    slurm.begin(7, restarts=1)
    assert "theirs already holds a run" in mistake(capsys, *WORDS, "--out", out)
    assert content(out) == {
        path: data for path, data in before.items() if path.name != JOB
    }


def test_a_folder_in_which_another_job_begins_is_refused(
    slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path("theirs")
    out.mkdir()
    (out / JOB).write_text("7 on here\n")
    slurm.begin(8, restarts=1)
    with claimed(out):
        assert "another run is writing to theirs" in mistake(
            capsys, *WORDS, "--out", out
        )
    cli.main([*WORDS, "--out", str(out)])
    assert (out / JOB).read_text() == "8 on here\n", (
        "nobody lost anything: there was no run yet"
    )


@pytest.mark.parametrize(
    "words", [[], ["--out", "mine"], ["--seeds", "0,1", "--out", "mine"]], ids=str
)
def test_a_job_goes_on_with_its_own_run(
    slurm: Slurm,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Killed before there was a folder, requeued twice with checkpoints, and once more
    when it is complete.
    """
    out = Path("mine" if words else "runs/slurm-7")
    runs = [out / "seed-0", out / "seed-1"] if "--seeds" in words else [out]
    slurm.begin(7, restarts=1)
    stopped_after(1, *words)
    slurm.begin(7, restarts=2)
    stopped_after(3, *words)
    slurm.begin(7, restarts=3)
    cli.main([*WORDS, *words])
    for folder in runs:
        record = read_run(folder)
        assert record.status == "complete" and record.rounds_done == ROUNDS
        with h5py.File(folder / "run.h5") as file:
            assert file.attrs["resumed"].tolist() == [1, 3]
    before, told = content(out), tmp_path / "ended"
    capsys.readouterr()
    monkeypatch.setenv(ENDED, str(told))
    slurm.begin(7, restarts=4)
    cli.main([*WORDS, *words])
    assert "is complete; there is nothing to go on with" in capsys.readouterr().err
    assert content(out) == before and told.exists()


@pytest.mark.parametrize("words", [[], ["--seeds", "0,1"]], ids=str)
@pytest.mark.parametrize("left", ["no record", "no checkpoint"])
def test_a_job_begins_its_own_run_anew_where_it_has_no_checkpoint(
    slurm: Slurm, left: str, words: list[str]
) -> None:
    slurm.begin(7)
    # Without a checkpoint of the last round.
    words = [*words, "--checkpoint-minutes", "0"]
    cli.main([*WORDS, *words])
    out = Path("runs/slurm-7")
    for record in out.rglob("run.h5"):
        if left == "no record":
            record.rename(record.with_name("params-0.h5"))
            continue
        with h5py.File(record, "r+") as file:
            file.attrs["status"] = "running"
    slurm.begin(7, restarts=1)
    cli.main([*WORDS, *words])
    for folder in [out / "seed-0", out / "seed-1"] if "--seeds" in words else [out]:
        assert read_run(folder).status == "complete"
    assert not any(out.rglob("params-0.h5"))


def test_whose_a_folder_is_follows_who_has_begun_it(
    slurm: Slurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job that resumes the run leaves it to its owner; one that overwrites it
    does not.
    """
    out = Path("mine")
    slurm.begin(7)
    stopped_after(1, "--out", out)
    slurm.begin(8)
    cli.main(["run", "--resume", str(out), "--requeue"])
    assert (out / JOB).read_text() == "7 on here\n" and read_run(
        out
    ).status == "complete"
    slurm.begin(7, restarts=1)
    cli.main([*WORDS, "--out", str(out)])
    cli.main([*WORDS[:-1], "--out", str(out), "--overwrite"])
    assert (out / JOB).exists()
    monkeypatch.delenv("SLURM_JOB_ID")
    cli.main([*WORDS[:-1], "--out", str(out), "--overwrite"])
    assert not (out / JOB).exists()
    capsys.readouterr()
    assert "SLURM_JOB_ID is not set" in mistake(capsys, *WORDS, "--out", "other")
    assert "--requeue: a profile" in mistake(capsys, "profile", *WORDS[1:])


def test_a_script_is_told_of_good_ends_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "ended"
    monkeypatch.setenv(ENDED, str(told))
    mistake(capsys, "run", "--rounds", "0")
    assert not told.exists()
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    assert told.read_text()
    told.unlink()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    cli.main(["list"])
    assert not told.exists(), "the root tells it"


def test_a_job_keeps_seeds_that_are_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run of a job can also be resumed outside of Slurm."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    out = started(
        *flags(clients=3, rounds=2, seeds="0,1"), "--requeue", "--out", tmp_path / "run"
    )
    with h5py.File(out / "seed-1/run.h5", "r+") as file:
        file.attrs["status"] = "running"
    before = (out / "seed-0/run.h5").read_bytes()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    cli.main(
        [
            "run",
            *flags(clients=3, rounds=2, seeds="0,1"),
            "--requeue",
            "--out",
            str(out),
        ]
    )
    assert (out / "seed-0/run.h5").read_bytes() == before
    assert read_run(out / "seed-1").status == "complete"
    with h5py.File(out / "seed-1/run.h5", "r+") as file:
        file.attrs["status"] = "running"
    monkeypatch.delenv("SLURM_JOB_ID")
    cli.main(["run", "--resume", str(out), "--overwrite"])


def test_a_requeued_job_needs_its_first_weights_no_more(
    slurm: Slurm, tmp_path: Path
) -> None:
    """It goes on with its copy, as the same words say that began it."""
    first = started(*flags(clients=3, rounds=1, out=tmp_path / "first"))
    slurm.begin(7)
    stopped_after(2, "--init", first)
    shutil.rmtree(first)
    slurm.begin(7, restarts=1)
    cli.main([*WORDS, "--init", str(first)])
    record = read_run(Path("runs/slurm-7"))
    assert (record.status, record.rounds_done) == ("complete", ROUNDS)
    assert record.config["init"] == str(first)


def test_a_job_goes_on_with_a_learning_of_its_first_round(
    slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no checkpoint then."""
    out = Path("mine")
    words = [*flags(**options_of(**TOKENS, rounds=1)), "--requeue", "--out", str(out)]
    slurm.begin(7)
    with pytest.raises(SystemExit) as ended:
        run(requeued(cli.parse_run(words)), StopWhileLearning(out))
    assert ended.value.code == STOPPED and (out / HALF_LEARNT).exists()
    assert not (out / CHECKPOINTS).exists()
    slurm.begin(7, restarts=1)
    run(requeued(cli.parse_run(words)))
    assert "learning resumed at step" in capsys.readouterr().err
    assert read_run(out).status == "complete"
