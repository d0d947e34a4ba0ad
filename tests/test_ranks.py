"""Several ranks give the same runs as one: methods, attacks, rules, clusters that
span ranks, clients that move.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcfed.results.stored import read_run
from tests import ranks as programs
from tests.runs import assert_same_run, same_newcomers

RANKS = 3
"""On how many ranks all runs are repeated."""
Alone = tuple[str, Path, dict[int, np.ndarray]]


@pytest.fixture(scope="module", params=sorted(programs.FAMILIES))
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Alone:
    """A family, the folder of all its runs in this process, and the rows of clients
    that never moved.
    """
    folder, family = tmp_path_factory.mktemp("alone"), programs.FAMILIES[request.param]
    family.run_all(folder)
    torch.set_deterministic_debug_mode("default")
    return (
        request.param,
        folder,
        dict(zip(*family.moved_rows(moving=False), strict=True)),
    )


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, mpirun: Callable) -> Path:
    """The folder of all families' runs on several ranks, made by one job."""
    folder = tmp_path_factory.mktemp("together")
    words = ["-m", "mpi4py", programs.__file__, folder]
    result = mpirun(RANKS, *words, PYTHONPATH=str(Path(__file__).parent.parent))
    assert result.returncode == 0, result.stderr
    return folder


def test_ranks_give_the_same_runs(alone: Alone, together: Path) -> None:
    """Also where clients send different parts or join later, and where they move in the
    middle with what they keep.
    """
    family, folder, stayed = alone
    many = together / family
    for name in programs.FAMILIES[family].runs:
        for part in ("seed-1", "seed-3") if name == "seeds" else (".",):
            assert read_run(many / name / part).facts["ranks"] == RANKS
            assert_same_run(many / name / part, folder / name / part, tolerance=1e-9)
            same_newcomers(many / name / part, folder / name / part)
    moved: dict[int, np.ndarray] = {}
    for path in many.glob("moved-*.npz"):
        with np.load(path) as part:
            moved |= dict(zip(part["clients"].tolist(), part["rows"], strict=True))
    assert sorted(moved) == sorted(stayed)
    for client, row in stayed.items():
        np.testing.assert_allclose(moved[client], row, rtol=0, atol=1e-10)
