"""How blocks share the units of all clients' weight gradients, by the kernels' own
source, compiled for the CPU.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcfed.kernels import cuda
from hpcfed.kernels.convolution_plan import sharing_blocks
from hpcfed.runtime.compiler import COMPILERS

SHARES = [(50, 20, 250), (100, 50, 264), (3, 7, 5), (7, 3, 4), (300, 2, 264), (2, 5, 1)]
"""Clients, units of each, and blocks: aligned with clients or not, more or fewer."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("parts")
    text = Path(cuda.__file__).with_name("parts.cuh").read_text()
    Path(folder, "parts.c").write_text(text)
    options = ["-D__device__=", "-D__forceinline__=", "-shared", "-fPIC"]
    command = [compiler, *options, "parts.c", "-o", "parts.so"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "parts.so"))
    library.first_unit.restype = library.block_of.restype = ctypes.c_int64
    return library


@pytest.mark.parametrize(("clients", "per_client", "blocks"), SHARES)
def test_every_unit_has_one_block_and_every_part_one_place(
    source: ctypes.CDLL, clients: int, per_client: int, blocks: int
) -> None:
    units = clients * per_client

    def called(function: Callable[..., int], number: int) -> int:
        return function(*map(ctypes.c_int64, (number, blocks, units)))

    edges = [called(source.first_unit, block) for block in range(blocks + 1)]
    owners: list[int] = []
    for block in range(blocks):
        owners += [block] * (edges[block + 1] - edges[block])
    assert len(owners) == units and set(owners) == set(range(blocks))
    assert owners == [called(source.block_of, unit) for unit in range(units)]
    parts = []
    for client in range(clients):
        shared = owners[client * per_client : (client + 1) * per_client]
        of_client = sorted({block + client for block in shared})
        first, last = shared[0] + client, shared[-1] + client
        assert of_client == list(range(first, last + 1)), "they follow each other"
        parts += of_client
    assert len(parts) == len(set(parts)) and max(parts) == blocks + clients - 2


@pytest.mark.parametrize(
    ("units", "capacity", "blocks"),
    [
        # Of four units each; 264 blocks would have four at most, too.
        (1000, 264, 250),
        (5000, 264, 264),
        (6, 264, 6),
        (7, 3, 3),
    ],
)
def test_no_block_is_added_that_shortens_nothing(
    units: int, capacity: int, blocks: int
) -> None:
    assert sharing_blocks(units, capacity) == blocks
    largest = -(-units // blocks)
    assert largest == -(-units // min(units, capacity)), "as short as with all blocks"
    assert blocks == 1 or -(-units // (blocks - 1)) > largest, "and with no fewer"
