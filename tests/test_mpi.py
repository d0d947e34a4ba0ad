"""Real MPI ranks: the same numbers on any number of them, roles apart, and no rank left
behind.
"""

import os
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfed.results.stored import read_run
from tests.runs import started

HERE = Path(__file__).parent
OPTIONS = [
    "--method",
    "fedavg-ft",
    "--clients",
    7,
    "--participation",
    0.7,
    "--rounds",
    2,
]
OPTIONS += ["--alpha", 0.3, "--batch-size", 40, "--snapshot-every", 2]


def final_row(folder: Path) -> np.ndarray:
    with h5py.File(folder / "params-0.h5") as file:
        assert file["taken"][-1] == 1
        return file["global"][-1]


def client_rows(folder: Path) -> dict[int, np.ndarray]:
    rows = {}
    for path in folder.glob("params-*.h5"):
        with h5py.File(path) as file:
            rows |= {
                int(client): row
                for client, row in zip(file["client"], file["rows"][-1], strict=True)
            }
    return rows


def distance(row: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(row - expected) / np.linalg.norm(expected))


RUNS = {
    "fp32": [*OPTIONS, "--precision", "fp32", "--model", "mlp"],
    "fp64": [*OPTIONS, "--precision", "fp64", "--model", "cnn-digits"],
    "ordered": [
        *OPTIONS,
        "--precision",
        "fp64",
        "--model",
        "cnn-digits",
        "--deterministic",
    ],
    "state": [
        *OPTIONS,
        "--precision",
        "fp64",
        "--model",
        "tests/own/networks.py:Counting",
    ],
    "repeated": [*OPTIONS, "--deterministic"],
}
JOBS = {
    "2": ["fp32", "fp64", "state", "repeated"],
    "2 again": ["repeated"],
    "3": ["fp32", "fp64", "state", "ordered"],
}
"""The runs of every job, one after the other, since starting ranks takes longer than a
run.
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, mpirun: Callable) -> Path:
    """The runs of all jobs, JOB/NAME, and of this process alone, 1/NAME."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("fp32", "fp64", "state"):
        started(*RUNS[name], "--out", folder / "1" / name)
    for job, names in JOBS.items():
        words = [
            word
            for name in names
            for word in ("+", *RUNS[name], "--out", folder / job / name)
        ]
        result = mpirun(int(job[0]), "-m", "mpi4py", HERE / "several_runs.py", *words)
        assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize(
    ("name", "tolerance"), [("fp32", 1e-3), ("fp64", 1e-12), ("state", 1e-12)]
)
def test_one_two_and_three_ranks_give_the_same_run(
    name: str, tolerance: float, runs: Path
) -> None:
    """In float64 to the last digits, and so every answer.

    In float32 a rounding may flip a ReLU, of the MLP that is taken there in one of ten
    such runs. Of one unit and one of the 40 samples of a batch, the step then changes by
    0.1 (the rate) × 0.025 (the sample's share) × 0.1 (the gradient of the unit) × 8 (the
    length of an image), which is less than a thousandth of a row.
    """
    alone = runs / "1" / name
    one, alone_rows = read_run(alone), client_rows(alone)
    took_part = [
        client for client, row in alone_rows.items() if not np.isnan(row).any()
    ]
    assert len(took_part) == 5
    for ranks in (2, 3):
        folder = runs / str(ranks) / name
        many, rows = read_run(folder), client_rows(folder)
        assert many.facts["ranks"] == ranks
        for series in ("bytes_up", "bytes_down", "cohort"):
            np.testing.assert_array_equal(
                many.rounds[series], one.rounds[series], err_msg=series
            )
        np.testing.assert_allclose(
            many.rounds["train_loss"], one.rounds["train_loss"], rtol=tolerance
        )
        with h5py.File(alone / "run.h5") as file:
            tested = file["clients/test_samples"][()]
        images = np.abs(many.client_accuracy - one.client_accuracy) * tested
        # Rows a thousandth off answer otherwise on as many images, of 360.
        assert np.nanmax(images) < (1e-9 if name == "fp64" else 1.5)
        assert distance(final_row(folder), final_row(alone)) < tolerance
        assert sorted(rows) == list(range(7))
        assert all(
            np.isnan(rows[client]).all() for client in set(range(7)) - set(took_part)
        )
        assert (
            max(distance(rows[client], alone_rows[client]) for client in took_part)
            < tolerance
        )


def test_summing_in_client_order_is_the_same_mean(runs: Path) -> None:
    """Three ranks that exchange rows for columns against one process that sums as it
    likes.
    """
    assert distance(final_row(runs / "3/ordered"), final_row(runs / "1/fp64")) < 1e-12


def test_deterministic_repeats_are_identical_to_the_byte(runs: Path) -> None:
    """In two jobs, of which one did other things before."""
    once, twice = runs / "2/repeated", runs / "2 again/repeated"
    assert final_row(once).tobytes() == final_row(twice).tobytes()
    first, again = client_rows(once), client_rows(twice)
    assert all(
        first[client].tobytes() == again[client].tobytes() for client in range(7)
    )
    with h5py.File(once / "run.h5") as a, h5py.File(twice / "run.h5") as b:
        for name in (
            "accuracy",
            "global_accuracy",
            "global_loss",
            "train_loss",
            "bytes_up",
            "bytes_down",
            "cohort",
        ):
            assert (
                a[f"rounds/{name}"][()].tobytes() == b[f"rounds/{name}"][()].tobytes()
            ), name
        assert (
            a["clients/accuracy"][()].tobytes() == b["clients/accuracy"][()].tobytes()
        )


def test_a_rank_that_raises_ends_all_ranks(tmp_path: Path, mpirun: Callable) -> None:
    """While the other ranks wait for a collective, for ever if nobody ended them."""
    out = tmp_path / "run"
    words = [*OPTIONS, "--rounds", 1000, "--engine", "loop", "--out", out]
    result = mpirun(3, HERE / "failing_rank.py", "run", *words)
    assert result.returncode == 1
    told = result.stderr.splitlines()
    # mpirun may indent it
    line = next((line for line in told if "hpcfed: rank 2" in line), "")
    assert line, result.stderr
    assert "failed in phase train" in line
    assert "planted failure" in line
    assert "while training client " in line
    failure = out / "error-2.txt"
    assert failure.read_text().startswith("rank 2")
    if (out / "run.h5").exists():
        record = read_run(out)
        assert record.status == "failed" and "planted failure" in record.error


def test_roles_have_worlds_of_their_own(mpirun: Callable) -> None:
    """In the end there are to be as many servers as ranks, which is the user's mistake."""
    result = mpirun(4, HERE / "roles.py", 1, 2, 4, OMP_NUM_THREADS="64")
    assert result.returncode != 0
    assert "leaves no worker among 4 ranks" in result.stderr
    for servers in (1, 2):
        lines = [
            line
            for line in result.stdout.splitlines()
            if line.startswith(f"of {servers}: ")
        ]
        threads = [int(line.rpartition(" ")[2]) for line in lines]
        assert sum(threads) <= max(4, len(os.sched_getaffinity(0))), (
            "ranks share the cores, whatever was wished for"
        )
        worker_lines = [line for line in lines if ": worker" in line]
        server_lines = [line for line in lines if ": server" in line]
        assert len(worker_lines) == 4 - servers and len(server_lines) == servers
        for role in ("worker", "server"):
            made = f"made for {role}s of {servers}"
            assert result.stdout.count(made) == 1, "once for the ranks of a host"
        total = sum(range(4 - servers))
        assert all(f"sum {total} joined {4 - servers}" in line for line in worker_lines)
        assert all(f"sum {6 - total} joined {servers}" in line for line in server_lines)


def test_a_mistake_that_only_one_rank_finds_is_told_too(
    tmp_path: Path, mpirun: Callable
) -> None:
    """A rank whose node lacks the data speaks for itself, and all ranks end."""
    script = tmp_path / "one_rank.py"
    script.write_text(
        "import os, sys\nfrom hpcfed import cli\n"
        "name = 'digits' if os.environ['OMPI_COMM_WORLD_RANK'] == '0' else 'cifar10'\n"
        f"cli.main(['run', '--dataset', name, '--data-root', {str(tmp_path)!r}, "
        f"'--out', {str(tmp_path / 'run')!r}])\n"
    )
    result = mpirun(2, script)
    assert result.returncode == 2
    assert result.stderr.count("hpcfed: rank 1: cifar10: no cifar-10-batches-py") == 1
    assert "Traceback" not in result.stderr


def test_fewer_clients_than_ranks_is_said_once(
    tmp_path: Path, mpirun: Callable
) -> None:
    words = ["-m", "hpcfed", "run", "--clients", 2, "--out", tmp_path / "run"]
    # The variable makes ranks import torch themselves: a warm process ends too slowly.
    result = mpirun(3, *words, OMP_NUM_THREADS="1")
    assert result.returncode == 2
    assert result.stderr.count("--clients 2 on 3 ranks") == 1
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()
