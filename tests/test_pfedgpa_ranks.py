"""pFedGPA on several ranks: a server apart from the workers or among them, and failures."""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfed import cli
from hpcfed.methods import pfedgpa
from hpcfed.results.stored import read_run
from tests.conftest import Finished
from tests.federations import assembled
from tests.pfedgpa_runs import COLUMNS, STARTS, TINY, assert_seconds_fit, losses
from tests.runs import flags, started

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path(__file__).parent
ROLES = TINY | {
    "server_engine": "deepspeed",
    "precision": "fp64",
    "autoencoder_samples": 400,
    "denoiser_samples": 400,
    "participation": 0.5,
    "placement": "steps",
    "new_clients": 3,
    "new_updates": 2,
    "guided_noise": True,
    "direct": True,
    "memorisation": True,
}
"""Batches of twenty for every step, shared by however many ranks."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs of two seeds, each for itself in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        seed: started(*flags(**ROLES, seed=seed, out=folder / f"seed-{seed}"))
        for seed in (0, 1)
    }


ADAM = 1e-2
"""By which share the server's losses may differ where ranks share its batches.

Its networks are of float32, where another order of sums changes a gradient of n terms by
√n ε: 2e-5 for 20 rows of 4,810 columns. Adam divides a gradient by its size, so that a
weight whose gradient is such an error makes a whole step in either direction. Errors
grow by some hundreds on their way: when every weight of the autoencoder begins one
rounding off, 1e-7, losses of the denoiser change by 8e-5.
"""
EXACT_FINALS = {"FedAvg", "FedAvg-FT", "upload", "mean of uploads", "halfway mean"}
"""What no network of the server has made: clients train in float64."""
IMAGES = 2
"""Test images of a client on which a row of the server's may answer otherwise.

Rows that differ by some thousandths change the answers to images whose two best classes
are as close: of a client's 18 to 96 images, hardly ever one.
"""


def assert_same_run(folder: Path, expected: Path) -> None:
    """Check that two runs are equal up to roundings; what has never been in the server's
    networks, exactly.
    """
    one, two = read_run(folder), read_run(expected)
    assert one.status == two.status == "complete"
    # The server has learnt after the last round.
    np.testing.assert_array_equal(one.client_accuracy[:-1], two.client_accuracy[:-1])
    np.testing.assert_allclose(
        one.rounds["train_loss"], two.rounds["train_loss"], rtol=1e-12
    )
    setup = assembled(**ROLES, seed=one.config["seed"])
    tested, new = setup.clients.test_samples, setup.newcomers
    assert new is not None
    within_images(one.client_accuracy[-1], two.client_accuracy[-1], tested)
    assert one.finals.keys() == two.finals.keys() == set(pfedgpa.FINALS)
    # Training from rows out of noise makes roundings grow.
    for name in one.finals.keys() - {"direct-FT"}:
        if name in EXACT_FINALS:
            np.testing.assert_array_equal(one.finals[name], two.finals[name])
        else:
            within_images(one.finals[name], two.finals[name], tested)
    assert_same_figures(one.figures, two.figures, tested)
    assert one.newcomers.keys() == two.newcomers.keys() == STARTS
    for name, accuracy in one.newcomers.items():
        within_images(accuracy, two.newcomers[name], new.clients.test_samples)
    first, expected_first = (
        losses(run, "autoencoder")[0, 0] for run in (folder, expected)
    )
    assert first == pytest.approx(expected_first, rel=1e-5), (
        "of the same weights, samples and noise"
    )
    for name in ("autoencoder", "denoiser"):
        np.testing.assert_allclose(
            losses(folder, name), losses(expected, name), rtol=ADAM, err_msg=name
        )
    assert one.learnings[0].rows == two.learnings[0].rows == 9


def assert_same_figures(
    one: dict[str, np.ndarray], two: dict[str, np.ndarray], tested: np.ndarray
) -> None:
    assert one.keys() == two.keys() == set(pfedgpa.FIGURES)
    for name in one:
        if name == "agreement with own upload":
            within_images(one[name], two[name], tested)
        elif name == "nearest upload is own":
            # Two uploads may be as near as each other.
            assert np.count_nonzero(one[name] != two[name]) <= 1
        else:
            # A sample out of noise takes the denoiser's error in each of 50 steps.
            rtol = 50**0.5 * ADAM if name.startswith("direct") else ADAM
            np.testing.assert_allclose(one[name], two[name], rtol=rtol, err_msg=name)


def within_images(one: np.ndarray, two: np.ndarray, tested: np.ndarray) -> None:
    """Check that shares of clients' test images differ by no more than some images."""
    np.testing.assert_array_equal(np.isnan(one), np.isnan(two))
    assert np.nanmax(np.abs(one - two) * tested) < IMAGES + 0.5


def assert_wire(folder: Path, clients: int) -> None:
    """Beside what FedAvg's ranks exchange, the generated columns of the round's uploads
    travel, and travel once.
    """
    with h5py.File(folder / "run.h5") as file:
        wire = file["timing/wire"][()].sum(1)
    np.testing.assert_array_equal(wire[1:] - wire[0], 4 * COLUMNS * clients)


def test_two_seeds_at_once_are_the_same_runs(
    alone: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    together = started(*flags(**ROLES, seeds="0..1", out=tmp_path / "together"))
    capsys.readouterr()
    cli.main(["show", str(together)])
    name = "nearest upload is own"
    means = [np.nanmean(read_run(folder).figures[name]) for folder in alone.values()]
    assert f"{name} {np.mean(means):.3f}" in " ".join(capsys.readouterr().out.split())
    for seed, folder in alone.items():
        assert_same_run(together / f"seed-{seed}", folder)
        assert_seconds_fit(together / f"seed-{seed}")
    assert not np.allclose(
        losses(alone[0], "denoiser"), losses(alone[1], "denoiser"), rtol=0.01
    )


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, mpirun: Callable) -> Path:
    """Two runs of one job of four ranks, since starting ranks takes longer than a run:
    one server rank for two seeds, and two server ranks that share the optimiser.
    """
    folder = tmp_path_factory.mktemp("apart")
    one = flags(**ROLES, seeds="0..1", server_ranks=1, out=folder / "one")
    two = flags(**ROLES, server_ranks=2, zero_stage=2, out=folder / "two")
    result = mpirun(4, "-m", "mpi4py", HERE / "several_runs.py", *one, "+", *two)
    assert result.returncode == 0, result.stderr
    assert "on 3 ranks and 1 server rank" in result.stderr
    assert "on 2 ranks and 2 server ranks" in result.stderr
    return folder


def test_a_server_rank_for_three_workers_and_two_seeds(
    alone: dict[int, Path], apart: Path
) -> None:
    for seed, folder in alone.items():
        own = apart / f"one/seed-{seed}"
        assert_same_run(own, folder)
        assert_wire(own, clients=3)
        assert_seconds_fit(own)
        assert (own / "server.h5").exists()


@pytest.fixture(scope="module")
def among(
    tmp_path_factory: pytest.TempPathFactory, mpirun: Callable
) -> tuple[Path, Finished]:
    """The run of two workers that are the server as well, and what its job told: before
    it, the ranks exchange rows.
    """
    folder = tmp_path_factory.mktemp("among") / "run"
    words = [*flags(**ROLES), "--out", folder]
    result = mpirun(2, "-m", "mpi4py", HERE / "sending.py", *words)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_workers_that_learn_themselves_and_two_server_ranks_that_share_the_optimiser(
    alone: dict[int, Path], apart: Path, among: tuple[Path, Finished]
) -> None:
    assert_same_run(among[0], alone[0])
    assert_same_run(apart / "two", among[0])
    for folder in (among[0], apart / "two"):
        assert_wire(folder, clients=3)
        memory = read_run(folder).learnings[0].peak_memory
        assert memory.shape == (2,) and (memory > 2**26).all()


def test_uploads_leave_while_the_worker_goes_on(among: tuple[Path, Finished]) -> None:
    """64 MiB, which no MPI keeps in a buffer of its own, to a rank that looks only after
    the worker has gone on. If sending waited, both would wait until the time is over.
    """
    told = among[1].stdout
    assert "received as sent" in told and "all gone" in told


@pytest.mark.parametrize(
    ("culprit", "ranks", "rank"), [("server", 2, 1), ("worker", 3, 1)]
)
def test_a_failing_rank_ends_all(
    culprit: str, ranks: int, rank: int, tmp_path: Path, mpirun: Callable
) -> None:
    """A server rank while a worker waits for it, and a worker while another worker and
    the server wait: for ever, if they were not ended.
    """
    words = flags(**TINY, server_ranks=1, out=tmp_path / "run")
    result = mpirun(ranks, HERE / "failing_server.py", "run", *words, FAIL=culprit)
    assert result.returncode == 1, result.stderr
    assert (
        f"hpcfed: rank {rank} on" in result.stderr
        and "FloatingPointError: planted failure" in result.stderr
    )
    record = read_run(tmp_path / "run")
    assert record.status == "failed" and "planted failure" in record.error


def test_a_server_that_diverges_fails_the_run(tmp_path: Path, mpirun: Callable) -> None:
    words = flags(**TINY, server_lr=1e30, server_ranks=1, out=tmp_path / "run")
    result = mpirun(3, "-m", "hpcfed", "run", *words)
    assert result.returncode == 1, result.stderr
    line = "the server's autoencoder has diverged: its loss is not finite from step 2 of 5 on"
    line += "; try --server-lr below 1e+30"
    told = [text for text in result.stderr.splitlines() if "hpcfed: rank" in text]
    assert len(told) == 1 and "rank 0" in told[0] and line in told[0], result.stderr
    assert "Traceback" not in result.stderr, "the line says what to change"
    record = read_run(tmp_path / "run")
    assert (
        record.status == "failed" and line in record.error and record.rounds_done == 3
    )


def test_a_server_rank_tells_of_a_bad_file(tmp_path: Path, mpirun: Callable) -> None:
    """It alone reads the file."""
    (tmp_path / "bad.h5").write_text("no HDF5")
    words = flags(
        **TINY, server_ranks=1, server_load=tmp_path / "bad.h5", out=tmp_path / "run"
    )
    result = mpirun(2, "-m", "hpcfed", "run", *words)
    assert result.returncode == 2, result.stderr
    assert (
        result.stderr.count("hpcfed: ")
        == result.stderr.count("hpcfed: rank 1: --server-load")
        == 1
    )
    assert "Traceback" not in result.stderr
