"""Ranks that share a GPU and talk through NCCL: the same runs as one rank gives, and no
rank left behind.

What ranks compute over gloo on a CPU, `test_ranks` and `test_mpi` hold; here it is the
same over NCCL on a GPU.
"""

import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfed import methods
from hpcfed.results import checkpoints
from hpcfed.results.stored import read_run
from tests import jobs
from tests.conftest import Finished

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
together = pytest.mark.xdist_group("nccl")
"""Tests that look at the same two jobs."""

HERE = Path(__file__).parent
NCCL = ("--device", "cuda", "--backend", "nccl")
COMMON = "--clients 9 --participation 0.7 --epochs 1 --rounds 2 --snapshot-every 1"
CLUSTERS = "--partition sharding --classes-per-client 3 --model cnn-bn --clusters 2"
METHODS = {
    "apfl": "--local-steps 2 --apfl-adaptive",
    "clustered-fedavg": CLUSTERS,
    "ditto": "--model cnn-bn",
    "dual-lora": "--lora 4",
    "fedadagrad": "",
    "fedadam": "--model cnn-bn",
    "fedasync": "--concurrency 5 --model cnn-bn",
    "fedau": "--au-cutoff 2",
    "fedavg": "--model cnn-digits",
    "fedavg-ft": "",
    "fedavgm": "",
    "fedbabu": "",
    "fedbn": f"{CLUSTERS} --clustering angles --basis 2",
    "fedbuff": "--buffer 4 --model cnn-bn --dropout-rate 0.2",
    "feddyn": "--model cnn-bn",
    "fedex-lora": "--lora 4",
    "fedfina": f"{CLUSTERS} --shared-layers conv1,conv2",
    "fedlg": f"{CLUSTERS} --gene-pools conv1,conv2/fc1,head --gene-each 1",
    "fedlp": CLUSTERS,
    "fedlps": f"{CLUSTERS} --prune-ratio 0.5",
    "fednova": "--model cnn-bn",
    "fedper": "",
    "fedprox": "--prox-mu 0.5",
    "fedrep": "",
    "fedsa-lora": "--lora 4",
    "fedumf": "",
    "ffa-lora": "--lora 4",
    "flexlora": "--lora 4 --client-ranks 2,4",
    "fedyogi": "",
    "genefl": f"{CLUSTERS} --gene-layers 2 --new-clients 4 --new-updates 1",
    "genfed": "--rho-max 3 --supplement --supplement-share 0.1",
    "genfedau": "--rho-max 3",
    "genfedumf": "--rho-max 3 --umf-beta 0.5",
    "hetlora": "--lora 4",
    "lg-fedavg": "",
    "local": "",
    "parfed": f"{CLUSTERS} --shared-layers conv2",
    "per-fedavg": "--local-steps 2",
    "pfedgpa": "--server small --bank-rounds 2 --server-batch 16 --autoencoder-samples 64 --denoiser-samples 64",
    "pfedhn": "",
    "pfedme": "--local-rounds 2",
    "scaffold": "--model cnn-bn --local-steps 3",
}
"""Options of every method; all but the learning of pFedGPA's server are computed in
float64.
"""
RULES = {
    "median": "--aggregation median --attack ipm",
    "trimmed-mean": "--aggregation trimmed-mean --attack noise",
    "krum": "--aggregation krum --attack sign-flip",
    "multi-krum": "--aggregation multi-krum --attack mimic",
    "label-flip": "--attack label-flip",
}
RUNS = {
    **{
        name: f"--method {name} --precision fp64 {words}"
        for name, words in METHODS.items()
    },
    **{name: f"--precision fp64 --model mlp {words}" for name, words in RULES.items()},
    "span": "--method pfedgpa --precision fp64 --server-model span --server tiny --bank-rounds 2 "
    "--server-batch 16 --denoiser-samples 64",
    "seeds": "--method fedavg --precision fp64 --seeds 3,1",
    "fp32": "--method fedavg --precision fp32 --model mlp",
    "tf32": "--method fedavg --model mlp",
}
REPEATED = "--method fedavg --model cnn-digits --deterministic"
"""In TF32, on the kernels that users get."""
TOLERANCES = {"fp32": 1e-5, "tf32": 1e-3}
"""Largest relative distance of rows; others 1e-12. A GPU adds float32 in any order, and
rounds TF32 to 11 bits.
"""


def runs_on(
    ranks: int, names: dict[str, str], folder: Path, mpirun: Callable[..., Finished]
) -> None:
    """Runs one after the other in one job, each in a folder of its name."""
    words = [
        word
        for name in names
        for word in (
            "+",
            *NCCL,
            *COMMON.split(),
            *names[name].split(),
            "--out",
            folder / name,
        )
    ]
    module = ["-m", "mpi4py"] if ranks > 1 else []
    job = mpirun(ranks, *module, HERE / "several_runs.py", *words, timeout=360)
    assert job.returncode == 0, job.stderr[-3000:]


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, mpirun: Callable
) -> tuple[Path, Path]:
    """All runs on one rank, and on two over NCCL, which also make one that is repeated."""
    folders = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("two")
    with ThreadPoolExecutor(2) as pool:
        started = [
            pool.submit(runs_on, 1, RUNS, folders[0], mpirun),
            pool.submit(runs_on, 2, RUNS | {"repeated": REPEATED}, folders[1], mpirun),
        ]
    for job in started:
        job.result()
    return folders


@pytest.fixture
def alone(both: tuple[Path, Path]) -> Path:
    return both[0]


@pytest.fixture
def two(both: tuple[Path, Path]) -> Path:
    return both[1]


def rows(folder: Path) -> dict[int, np.ndarray]:
    """Every client's rows of all snapshots, as one vector without what was not trained."""
    found = {}
    for path in folder.glob("params-*.h5"):
        with h5py.File(path) as file:
            for place, client in enumerate(file["client"]):
                row = file["rows"][:, place]
                found[int(client)] = row[~np.isnan(row)]
    return found


def assert_same(folder: Path, expected: Path, *, tolerance: float) -> None:
    one, other = read_run(folder), read_run(expected)
    assert one.status == other.status == "complete"
    for name in ("bytes_up", "bytes_down", "cohort", "kept", "excluded"):
        np.testing.assert_array_equal(
            one.rounds[name], other.rounds[name], err_msg=name
        )
    np.testing.assert_allclose(
        one.rounds["train_loss"], other.rounds["train_loss"], rtol=tolerance
    )
    if tolerance < 1e-10:
        np.testing.assert_array_equal(one.client_accuracy, other.client_accuracy)
    got, wanted = rows(folder), rows(expected)
    assert sorted(got) == sorted(wanted) == list(range(9))
    for client, row in wanted.items():
        assert np.linalg.norm(got[client] - row) <= tolerance * np.linalg.norm(row), (
            f"client {client}"
        )


def test_every_method_is_here() -> None:
    assert sorted(METHODS) == sorted(methods.names())


@together
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_over_nccl_give_the_run_of_one(
    name: str, alone: Path, two: Path
) -> None:
    for part in ("seed-1", "seed-3") if name == "seeds" else (".",):
        there = read_run(two / name / part)
        assert there.facts["ranks"] == 2 and there.environment["backend"] == "nccl"
        assert_same(
            two / name / part,
            alone / name / part,
            tolerance=TOLERANCES.get(name, 1e-12),
        )


@together
@pytest.mark.parametrize("model", ["pfedgpa", "span"])
def test_the_server_learns_the_same_over_nccl(
    model: str, alone: Path, two: Path
) -> None:
    """Its arithmetic is float32 rounded to TF32; batch norm goes over the samples of
    both ranks. Each rank has half of span's columns.
    """
    with (
        h5py.File(two / model / "run.h5") as one,
        h5py.File(alone / model / "run.h5") as other,
    ):
        for network in one["server/network_names"].asstr():
            name = f"server/{network}_loss"
            np.testing.assert_allclose(one[name][()], other[name][()], rtol=1e-2)


@together
@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_give_the_same_fedavg(
    ranks: int, alone: Path, tmp_path: Path, mpirun: Callable
) -> None:
    runs_on(ranks, {"fedavg": RUNS["fedavg"]}, tmp_path, mpirun)
    assert read_run(tmp_path / "fedavg").facts["ranks"] == ranks
    assert_same(tmp_path / "fedavg", alone / "fedavg", tolerance=1e-12)


@together
def test_deterministic_runs_are_the_same_to_the_byte(
    two: Path, tmp_path: Path, mpirun: Callable
) -> None:
    """In two jobs, of which one did other things before."""
    runs_on(2, {"repeated": REPEATED}, tmp_path, mpirun)
    first, again = rows(two / "repeated"), rows(tmp_path / "repeated")
    assert sorted(first) == list(range(9))
    assert all(first[client].tobytes() == again[client].tobytes() for client in first)
    with (
        h5py.File(two / "repeated/run.h5") as a,
        h5py.File(tmp_path / "repeated/run.h5") as b,
    ):
        for name in (
            "rounds/accuracy",
            "rounds/train_loss",
            "rounds/global_loss",
            "clients/accuracy",
        ):
            assert a[name][()].tobytes() == b[name][()].tobytes(), name


def test_a_stopped_run_goes_on_with_other_ranks(
    tmp_path: Path, mpirun: Callable
) -> None:
    words = [
        "--method",
        "fedper",
        "--clients",
        9,
        "--rounds",
        6,
        "--epochs",
        1,
        "--precision",
        "fp64",
        *NCCL,
    ]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    first = mpirun(
        2, "-m", "mpi4py", HERE / "stopped_run.py", 3, *words, "--out", stopped
    )
    assert "go on with: hpcfed run --resume" in first.stderr, first.stderr
    assert read_run(stopped).status == "stopped" and read_run(stopped).rounds_done == 3
    again = mpirun(4, "-m", "hpcfed", "run", "--resume", stopped)
    assert again.returncode == 0, again.stderr
    assert mpirun(1, "-m", "hpcfed", "run", *words, "--out", straight).returncode == 0
    one, other = read_run(stopped), read_run(straight)
    assert one.status == "complete" and one.rounds_done == 6
    np.testing.assert_array_equal(one.client_accuracy, other.client_accuracy)
    for name in ("train_loss", "global_loss"):
        np.testing.assert_allclose(one.rounds[name], other.rounds[name], rtol=1e-12)


LONG = [
    "--clients",
    4,
    "--rounds",
    400_000,
    "--checkpoint-every",
    5,
    "--evaluate-every",
    50,
    *NCCL,
]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_no_rank_waits_for_ever_in_a_collective(
    how: signal.Signals, tmp_path: Path
) -> None:
    """A rank is killed or halted while ranks exchange rows all the time; the other one
    names it and ends.
    """
    out = tmp_path / "run"
    with jobs.begun(2, "run", *LONG, "--stall-timeout", 10, "--out", out) as job:
        jobs.wait_for_a_checkpoint(out, job)
        os.kill(jobs.pids(job)[1], how)
        told = job.communicate(timeout=60)[1]
    assert job.returncode != 0
    if how == signal.SIGSTOP:
        assert (
            "hpcfed: rank 0 on " in told and "no sign of life from rank 1 on " in told
        ), told
        assert "no sign of life" in read_run(out).error
    assert checkpoints.newest(out, say=pytest.fail) is not None
    shutil.rmtree(out)
