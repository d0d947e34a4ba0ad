"""A GPU that is really full: another process holds its memory."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfed.results.stored import read_run
from tests.conftest import start

pytestmark = [pytest.mark.gpu, pytest.mark.exclusive]

HERE = Path(__file__).parent
OPTIONS = "--dataset synthetic --model cnn-cifar --partition iid --clients 300"
OPTIONS += " --train-per-client 50 --test-per-client 2"
OPTIONS += " --batch-size 50 --epochs 1 --rounds 3 --lr 0.01 --device cuda --evaluate-every 3 --snapshot-every 3"
LEFT = {"tf32": 900, "fp64": 1800}
"""MiB: room for a part of the clients, and for what aggregation and evaluation take."""


@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 1e-3), ("fp64", 1e-12)])
def test_a_full_gpu_halves_the_stack_and_the_run_goes_on(
    precision: str, tolerance: float, tmp_path: Path
) -> None:
    words = ["run", *OPTIONS.split(), "--precision", precision]
    alone, crowded = tmp_path / "alone", tmp_path / "crowded"
    assert (
        start([sys.executable, "-m", "hpcfed", *words, "--out", str(alone)]).returncode
        == 0
    )
    program = [sys.executable, str(HERE / "crowded_gpu.py"), str(LEFT[precision])]
    job = start([*program, *words, "--out", str(crowded)], PYTHONPATH=str(HERE.parent))
    assert job.returncode == 0, job.stderr
    assert (
        "out of memory training 300 clients at a time; going on with 150" in job.stderr
    ), job.stderr
    with h5py.File(crowded / "run.h5") as file:
        assert file["timing/halvings"][-1, 0] >= 1
    one, other = read_run(crowded), read_run(alone)
    assert one.status == "complete"
    np.testing.assert_allclose(
        one.rounds["train_loss"], other.rounds["train_loss"], rtol=tolerance
    )
    with h5py.File(crowded / "params-0.h5") as a, h5py.File(alone / "params-0.h5") as b:
        rows, expected = a["rows"][-1], b["rows"][-1]
    assert np.linalg.norm(rows - expected) <= tolerance * np.linalg.norm(expected)
