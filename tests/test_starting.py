"""What a start does once: arrays in shared memory, threads, parts of MPI left out; and
how the program ends.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcfed import __main__ as program
from hpcfed.experiment.materials import SMALL, threads_for_work
from hpcfed.models.cost import Cost
from hpcfed.runtime import imports, mpi, sharing, waking
from hpcfed.runtime import world as worlds
from hpcfed.runtime.starting import FIGURES, Starting

ARRAYS = {
    "images": np.arange(60, dtype=np.uint8).reshape(5, 3, 4),
    "labels": np.array([3, 1, 2]),
    "mean": np.array([0.5, 0.25]),
}


def test_arrays_are_found_where_another_process_has_put_them() -> None:
    place, here = sharing.put(ARRAYS)
    there = sharing.attach(place)
    assert there is not None
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(here[name], array, strict=True)
        np.testing.assert_array_equal(there[name], array, strict=True)
        assert there[name].ctypes.data % sharing.ALIGNMENT == 0
    there["labels"][0] = 9
    assert here["labels"][0] == 3, "what one rank changes no other sees"
    wrong = replace(place, token=bytes(sharing.TOKEN_BYTES))
    assert sharing.attach(wrong) is None, "some other process's file"
    os.close(place.file)
    assert sharing.attach(place) is None
    assert here["images"].sum() == ARRAYS["images"].sum(), "they outlive the file"


def test_parts_of_a_start_follow_each_other_until_rounds_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0, 2, 3, 7, 8, 10, 15, 20, 30, 34, 40, 41, 50, 51])
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    starting = Starting()
    starting.begin_program()  # 0
    starting.begin_run()  # 2
    starting.reached("world")  # 3
    starting.reached("data")  # 7
    starting.reached("network")  # 8
    starting.reached("data")  # 10: of another run that is stacked
    starting.reached("opening")  # 15
    starting.reached("opening")  # 20: another stacked run begins its rounds
    with starting.counted("captured"):  # 30 to 34
        pass
    first = starting.figures()
    assert set(first) == set(FIGURES)
    assert {name: value for name, value in first.items() if value} == {
        "start_imports": 2,
        "start_world": 1,
        "start_data": 4 + 2,
        "start_network": 1,
        "start_opening": 5,
        "captured": 1,
        "captured_seconds": 4,
    }
    starting.begin_run()  # 40: a second run of the process imports nothing
    starting.reached("world")  # 41
    again = starting.figures()
    assert {name: value for name, value in again.items() if value} == {"start_world": 1}
    # The second ended by a mistake, before its opening: the third imports nothing, too.
    starting.begin_run()  # 50
    starting.reached("world")  # 51
    assert starting.figures() == again


class Driver:
    """Notes what it is asked for; a first GPU is there."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.asked.append(name)
            return 0

        return call


def test_only_a_process_alone_knows_its_gpu_before_torch_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    waking._wake(alone=True)  # without a driver nothing happens
    driver = Driver()
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    waking._wake(alone=False)
    assert driver.asked == ["cuInit"]
    driver.asked.clear()
    waking._wake(alone=True)
    assert driver.asked == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


@pytest.mark.gpu
def test_torch_finds_the_context_that_was_made_early() -> None:
    script = (
        "import torch\n"
        "from hpcfed.runtime import waking\n"
        "assert waking._torch_has_cuda()\n"
        "waking._wake(alone=True)\n"
        "assert torch.ones(3, device='cuda').sum() == 3\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_small_networks_get_one_thread_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = torch.get_num_threads()
    world = replace(worlds.enter(device="cpu"), threads=8)
    torch.set_num_threads(threads)
    small, large = Cost(SMALL - 1, 1), Cost(SMALL, 1)
    assert threads_for_work(world, small) == 1
    assert threads_for_work(world, large) == 8
    on_gpu = replace(world, device=torch.device("cuda"))
    assert threads_for_work(on_gpu, small) == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert threads_for_work(world, small) == 8


def test_open_mpi_opens_no_layer_that_sleeps_unless_somebody_names_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mca-params.conf"
    monkeypatch.setattr(mpi, "parameter_files", lambda: [tmp_path / "none", file])
    file.write_text("# btl = self\npml = ob1\n")
    monkeypatch.setenv(mpi.OMPI_LAYERS, "tcp,self")
    mpi.spare_a_second()
    assert os.environ[mpi.OMPI_LAYERS] == "tcp,self"
    monkeypatch.delenv(mpi.OMPI_LAYERS)
    mpi.spare_a_second()
    assert os.environ[mpi.OMPI_LAYERS] == "^ofi"
    monkeypatch.delenv(mpi.OMPI_LAYERS)
    file.write_text("pml = ob1\n  btl = ^tcp\n")
    mpi.spare_a_second()
    assert mpi.OMPI_LAYERS not in os.environ


def test_a_job_that_was_started_without_ctrl_c_stays_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr("sys.argv", ["hpcfed", "--version"])
    monkeypatch.setattr("hpcfed.runtime.imports.keep_bytecode", lambda: _note(seen))
    monkeypatch.setattr("hpcfed.runtime.imports.keep_memory", lambda: None)
    monkeypatch.setattr("hpcfed.cli.main", lambda: _note(seen))
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr(program, "_end", lambda: None)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        program.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIG_IGN, signal.SIG_IGN]


def _note(seen: list[object]) -> None:
    seen.append(signal.getsignal(signal.SIGINT))


def test_torch_keeps_freed_memory_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in imports.ALLOCATION:
        monkeypatch.delenv(name, raising=False)
    imports.keep_memory()
    assert int(os.environ["MIMALLOC_PURGE_DELAY"]) > 1000
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    for name in imports.ALLOCATION:
        monkeypatch.setenv(name, "0")
    imports.keep_memory()
    assert {os.environ[name] for name in imports.ALLOCATION} == {"0"}


ENDING = """
import atexit, ctypes, sys
from hpcfed.runtime.ending import skip_destructors

libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)  # stands for a library's destructor
skip_destructors()
libc.printf(b"printed in C, ")
atexit.register(lambda: open("after.txt", "w").write("Python has ended"))
left_open = open("open.txt", "w")
left_open.write("written")
sys.exit(7)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="glibc only")
def test_only_destructors_are_skipped_when_the_program_ends(tmp_path: Path) -> None:
    words = [sys.executable, "-c", ENDING]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout == "printed in C, "
    assert (tmp_path / "after.txt").read_text() == "Python has ended"
    assert (tmp_path / "open.txt").read_text() == "written"
    # A profiler that is loaded into the process must see its end.
    profiled = os.environ | {"CUDA_INJECTION64_PATH": "profiler.so"}
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, env=profiled)
    assert ended.returncode == -signal.SIGABRT
