"""What `hpcfed doctor` says of healthy machines, and of every fault that can be planted."""

import errno
import fcntl
import json
import os
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from hpcfed import cli
from hpcfed.doctor import (
    devices,
    hearing,
    limits,
    links,
    placement,
    server_step,
    software,
    storage,
)
from hpcfed.doctor.finding import Finding, Level
from hpcfed.doctor.report import told_by
from hpcfed.plan import speeds
from hpcfed.runtime import attempts, probes, process_group, stalls
from hpcfed.runtime.attempts import NoAnswer, attempt
from hpcfed.runtime.gpu_state import GpuState, slowdowns
from hpcfed.runtime.launcher import Launch
from hpcfed.runtime.location import Location
from hpcfed.runtime.machine import Machine, available
from hpcfed.runtime.meetings import Meetings
from hpcfed.runtime.probes import MpiFacts, Passed, TimedCollective, scopes
from tests.conftest import start

GIB = 2**30
OPEN_MPI = MpiFacts("Open MPI v5.0.11", "multiple")
VERSIONS = {"Python": "3.11.7", "torch": "2.15.0"}
ON_CPU = software.Installed(VERSIONS, {}, software.NO_GPU)
ON_GPU = software.Installed(
    VERSIONS, {"CUDA": "13.0", "driver": "580.1", "NCCL": "2.28"}
)
GPU = GpuState(
    driver="570.1",
    free=139 * GIB,
    memory=140 * GIB,
    clock=1900,
    top_clock=1980,
    temperature=40,
    ecc=True,
    uncorrected=0,
    rows_pending=False,
    rows_failed=False,
)


def place(
    *cores: int, host: str = "a", device: str = "cpu", on_host: int = 8, **more: Any
) -> placement.Placed:
    """A rank that is bound to these cores."""
    at = Location(host, 1, device, device, cores, Machine("", ((0, 1), (2, 3)), 0))
    own = frozenset((str(core),) for core in cores)
    fields: dict[str, Any] = {"visible_gpus": int(device != "cpu"), **more}
    return placement.Placed(at, OPEN_MPI, own, on_host, **fields)


def measure(flops: float = 1e13, copied: float = 1e12, **state: Any) -> Any:
    """A rank with a GPU."""
    gpu = GPU._replace(**state)
    return devices.DeviceProbe(
        "a", "1a2b", "H", "gpu", True, flops, copied, gpu, gpu.free
    )


def on_cores(flops: float) -> devices.DeviceProbe:
    """A rank without a GPU."""
    return devices.DeviceProbe("a", "cpu", "cpu", "cpu", True, flops, 1e9, None)


def probe(*failures: tuple[str, str], **fields: Any) -> storage.StorageProbe:
    """A file system on which these steps fail."""
    told = dict(failures)
    steps = tuple(
        storage.Step(name, told.get(name, ""), 0.01) for name in storage.WORKS
    )
    healthy = storage.StorageProbe("a", "/runs", "lustre", 900 * GIB, None, steps)
    return healthy._replace(**fields)


def allow(**fields: Any) -> limits.Allowed:
    """What a rank may use; nothing is scarce."""
    unlimited = {one.name: None for one in limits.RESOURCES}
    healthy = limits.Allowed(
        "a", unlimited, None, False, 64 * GIB, GIB, None, False, True
    )
    return healthy._replace(**fields)


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    """Levels and words of what is not fine; each says what to do."""
    found = []
    for finding in findings:
        if finding.level in (Level.WARNING, Level.ERROR):
            assert finding.advice
            found.append((str(finding.level), told_by(finding, ["a"] * 4)))
    return found


# Placement


def test_ranks_with_cores_of_their_own_are_fine() -> None:
    found = placement.judge({0: place(0, 1), 1: place(2, 3)})
    assert [finding.level for finding in found] == ["OK", "OK", "OK", "not checked"]
    assert found[0].told == "Open MPI v5.0.11, thread level multiple"
    assert found[1].told == "2 ranks on a"
    assert found[2].told == "2 a rank, which no other rank has"
    assert found[3] == Finding("GPUs of ranks", Level.SKIPPED, "no GPU")


def test_two_ranks_on_one_core_are_an_error_where_the_node_has_more() -> None:
    ranks = {0: place(0), 1: place(0), 2: place(1, host="b"), 3: place(2, host="b")}
    assert bad(placement.judge(ranks)) == [
        ("error", "ranks 0-1 on a: 1 core (0) has 2 ranks; the node has 8")
    ]
    ranks = {0: place(0, on_host=1), 1: place(0, on_host=1)}
    assert bad(placement.judge(ranks)) == [
        ("warning", "ranks 0-1 on a: 1 core (0) has 2 ranks")
    ]


def test_ranks_that_are_not_bound_are_a_warning() -> None:
    ranks = {0: place(0, 1, 2), 1: place(0, 1, 2)}
    assert bad(placement.judge(ranks)) == [
        ("warning", "ranks 0-1 on a: not bound: 3 cores (0-2) have 2 ranks")
    ]


def test_uneven_nodes_and_another_mpi_are_told() -> None:
    older = MpiFacts("Open MPI v4.1.0", "multiple")
    third = place(0, host="b")._replace(mpi=older)
    assert bad(placement.judge({0: place(0), 1: place(1), 2: third})) == [
        (
            "error",
            "Open MPI v5.0.11, thread level multiple on ranks 0-1; Open MPI v4.1.0, "
            "thread level multiple on rank 2",
        ),
        ("warning", "2 on a, 1 on b"),
    ]


def test_an_mpi_without_threads_is_a_warning() -> None:
    single = place(0)._replace(mpi=MpiFacts("MPI 1", "funneled"))
    assert bad(placement.judge({0: single})) == [
        ("warning", "MPI 1, thread level funneled")
    ]


def test_a_job_of_several_tasks_with_one_process_is_a_warning() -> None:
    alone = place(0)._replace(mpi=None, tasks=4)
    assert bad(placement.judge({0: alone})) == [
        ("warning", "one process, but the Slurm job has 4 tasks")
    ]


def test_gpus_that_are_shared_idle_missing_or_far_are_told() -> None:
    def on(device: str, core: int, **more: Any) -> placement.Placed:
        return place(core, device=device, **more)

    assert not bad(placement.judge({0: on("x", 0, gpu_node=0), 1: on("y", 1)}))
    assert bad(placement.judge({0: on("x", 0), 1: on("x", 1), 2: on("y", 2)})) == [
        ("warning", "ranks 0-1 on a: 2 ranks share a GPU")
    ]
    assert bad(placement.judge({0: on("x", 0, visible_gpus=4)})) == [
        ("warning", "rank 0 on a: 1 of 4 GPUs are used")
    ]
    assert bad(placement.judge({0: on("x", 0), 1: place(1)})) == [
        ("warning", "rank 1 on a: no GPU")
    ]
    assert bad(placement.judge({0: on("x", 0, gpu_node=1)})) == [
        ("warning", "rank 0 on a: its GPU is at NUMA node 1, its cores at 0")
    ]


# Software


def test_another_torch_on_a_rank_is_an_error() -> None:
    ranks = {rank: ON_CPU for rank in range(4)}
    assert not bad(software.judge(ranks))
    ranks[2] = ON_CPU._replace(versions=VERSIONS | {"torch": "2.11.0"})
    assert bad(software.judge(ranks)) == [
        ("error", "torch: 2.15.0 on ranks 0-1,3, 2.11.0 on rank 2")
    ]


def test_a_driver_without_a_gpu_for_torch_is_an_error() -> None:
    reason = software.why_no_gpu("auto", there=True)
    assert bad(software.judge({0: ON_CPU._replace(reason=reason)})) == [
        ("error", "rank 0 on a: there is a driver, but torch finds no GPU")
    ]
    # Who asks for CPUs of a node with GPUs gets them.
    reason = software.why_no_gpu("cpu", there=True)
    found = software.judge({0: ON_CPU._replace(reason=reason)})
    assert found[1] == Finding("CUDA", Level.SKIPPED, "not used: --device cpu")
    assert software.why_no_gpu("cpu", there=False) == "no GPU"


def test_versions_of_gpus_are_compared_among_ranks_that_have_one() -> None:
    found = software.judge({0: ON_CPU, 1: ON_GPU, 2: ON_GPU})
    assert found[1] == Finding("CUDA", Level.OK, "CUDA 13.0, driver 580.1, NCCL 2.28")
    assert not bad(found)
    older = ON_GPU._replace(gpu={**ON_GPU.gpu, "driver": "570.1"})
    assert bad(software.judge({0: ON_CPU, 1: ON_GPU, 2: older})) == [
        ("error", "driver: 580.1 on rank 1, 570.1 on rank 2")
    ]
    other_make = ON_GPU._replace(gpu={"rocm": "7.0", "RCCL": "2.27"})
    assert software.judge({0: other_make})[1] == Finding(
        "GPU software", Level.OK, "rocm 7.0, RCCL 2.27"
    )


# Devices


def test_a_slow_gpu_is_named() -> None:
    ranks = {0: measure(1.0e13), 1: measure(0.8e13), 2: measure(1.02e13)}
    found = devices.judge(ranks)
    # 0.8 divided by the median of 1.0 and 1.02.
    assert bad(found) == [
        ("warning", "rank 1 on a: 8 TFLOP/s: 79% of the other ranks'")
    ]
    assert "GPU 1a2b of a" in found[0].advice
    # Programs need the figure above all where it is bad.
    assert dict(found[0].figures) == {
        "per_second": 0.8e13,
        "share": pytest.approx(0.8 / 1.01),
    }
    assert devices.slow_ranks({0: 1.0, 1: 0.7}, {0: "cpu", 1: "cpu"}) == {}
    assert devices.slow_ranks({0: 1.0, 1: 0.5}, {0: "cpu", 1: "cpu"}) == {1: 0.5}
    # Its only node cannot be left out.
    slow, fast = (on_cores(speed) for speed in (1.0, 2.0))
    for host, advice in {
        "a": "see what else works on the cores, or start fewer ranks",
        "b": "leave out the cores of a, or see what else works there",
    }.items():
        found = devices.judge({0: slow, 1: fast._replace(host=host)})
        assert found[0].advice == f"{advice}: the slowest rank sets the pace"
    # There is nothing like it to compare it with.
    assert devices.slow_ranks({0: 1.0, 1: 0.1}, {0: "gpu", 1: "cpu"}) == {}


def test_faults_of_gpus_are_told() -> None:
    assert not bad(devices.judge({0: measure()}))
    clocks = {0: measure(), 1: measure(clock=1500), 2: measure()}
    lowest = [one.told for one in devices.judge(clocks) if one.check == "GPU clocks"]
    assert lowest == ["1500 of 1980 MHz at 40 °C, the lowest of 3 GPUs"]
    faults: dict[tuple[str, str], dict[str, Any]] = {
        ("error", "7 uncorrected errors since the driver started"): {"uncorrected": 7},
        ("warning", "bad rows of its memory wait for a reset"): {"rows_pending": True},
        ("warning", "error correction is off"): {"ecc": False},
        ("warning", "70.00 GiB of 140.00 GiB are free"): {"free": 70 * GIB},
        ("warning", "1000 of 1980 MHz at 40 °C"): {"clock": 1000},
        ("error", "1900 of 1980 MHz at 40 °C: power brake"): {
            "slowed": slowdowns(0x84)
        },
    }
    for (level, told), state in faults.items():
        ranks = {0: measure(), 1: measure(**state)}
        assert bad(devices.judge(ranks)) == [(level, f"rank 1 on a: {told}")]


def test_wrong_products_are_an_error() -> None:
    ranks = {0: measure(), 3: measure()._replace(right=False)}
    assert bad(devices.judge(ranks)) == [
        ("error", "rank 3 on a: a product of matrices is wrong")
    ]


# Links


def test_scopes_are_all_ranks_each_node_and_between_nodes() -> None:
    assert scopes(["a", "a"]) == [("all ranks", (0, 1))]
    assert scopes(["a", "b", "a", "c"]) == [
        ("all ranks", (0, 1, 2, 3)),
        ("within nodes", (0, 2)),
        ("between nodes", (0, 1, 3)),
    ]


def test_wrong_lost_and_slow_messages_are_told() -> None:
    ranks: dict[int, Passed | None] = {}
    for rank in range(4):
        ranks[rank] = Passed((rank - 1) % 4, True, 1e-6, 1e9)
    assert not bad(links.judge_messages(ranks))
    slow = ranks | {2: Passed(1, True, 1e-6, 1e8)}
    assert bad(links.judge_messages(slow)) == [
        ("warning", "rank 2 on a: from rank 1: 95.37 MiB/s, 10% of the other ranks'")
    ]
    wrong = ranks | {2: Passed(1, False, 1e-6, 1e9)}
    assert bad(links.judge_messages(wrong)) == [
        ("error", "rank 2 on a: from rank 1: wrong numbers")
    ]
    assert bad(links.judge_messages(ranks | {2: None})) == [
        ("error", "rank 2 on a: they do not arrive")
    ]


def test_numbers_of_messages_that_are_given_up_live_on() -> None:
    """MPI may write them later."""
    buffers = []

    def begin(buffer: np.ndarray, **_: Any) -> Any:
        buffers.append(weakref.ref(buffer))
        return SimpleNamespace(Test=lambda: False)

    comm = SimpleNamespace(Irecv=begin, Isend=begin)
    world: Any = SimpleNamespace(rank=0, size=2, comm=comm)
    assert probes.pass_around(world, 0.0) is None
    assert len(buffers) == 2
    assert all(buffer() is not None for buffer in buffers)
    probes._open.clear()
    assert all(buffer() is None for buffer in buffers)


def test_collectives_are_told_by_their_slowest() -> None:
    fast = TimedCollective("all-reduce", "within nodes", 2, True, 1e-5, 4 * GIB)
    slow = fast._replace(bytes_per_second=2 * GIB)
    found = links.judge_exchanges({0: [fast], 1: [fast], 2: [slow], 3: [slow]}, "nccl")
    assert [finding.told for finding in found] == [
        "right numbers, 10 µs, 2.00 GiB/s over nccl, 2 ranks (rank 2)"
    ]
    wrong = fast._replace(right=False)
    assert bad(links.judge_exchanges({0: [fast], 1: [wrong]}, "nccl")) == [
        ("error", "rank 1 on a: wrong numbers over nccl")
    ]


def test_a_step_of_other_losses_or_weights_is_an_error() -> None:
    # The mean of 1 and 2 times a weight of 1.
    right = server_step.Stepped("0.19", 1.5, 0.999)
    assert not bad(server_step.judge({0: right, 1: right}))
    assert bad(server_step.judge({0: right, 1: right._replace(loss=2.0)})) == [
        ("error", "rank 1 on a: a step's loss is 2 instead of 1.5")
    ]
    assert bad(server_step.judge({0: right, 1: right._replace(weight=0.5)})) == [
        ("error", "after a step ranks have weights 0.5, 0.999")
    ]


def test_the_loss_of_a_step_may_be_rounded() -> None:
    # Sums of a fourteenth of each rank's loss, one after the other in float32.
    total = np.float32(0)
    for rank in range(14):
        total += np.float32(rank + 1) / np.float32(14)
    assert total != 7.5
    rounded = server_step.Stepped("0.19", float(total), 0.999)
    ranks = {rank: rounded for rank in range(14)}
    assert not bad(server_step.judge(ranks))
    for wrong in (7.5001, nan):
        ranks[3] = rounded._replace(loss=wrong)
        assert bad(server_step.judge(ranks)) == [
            ("error", f"rank 3 on a: a step's loss is {wrong} instead of 7.5")
        ]


# Limits


def test_scarce_memory_and_time_are_told() -> None:
    assert not bad(limits.judge({0: allow(), 1: allow()}))
    # Three GiB for two ranks of a node.
    scarce = {rank: allow(memory=3 * GIB) for rank in (0, 1)}
    assert bad(limits.judge(scarce)) == [
        ("warning", "ranks 0-1 on a: 1.50 GiB a rank is available on a")
    ]
    assert bad(limits.judge({0: allow(memory=GIB // 4)})) == [
        ("error", "rank 0 on a: 256.00 MiB a rank is available on a")
    ]
    assert bad(limits.judge({0: allow(shared=64 * 2**20)})) == [
        ("warning", "rank 0 on a: 64.00 MiB free in /dev/shm")
    ]
    locked = allow(locked=2**23, infiniband=True)
    assert bad(limits.judge({0: locked})) == [
        ("warning", "rank 0 on a: locked memory: 8.00 MiB, and there is InfiniBand")
    ]
    assert bad(limits.judge({0: allow(cached=False)})) == [
        (
            "warning",
            "rank 0 on a: compiled kernels cannot be kept: each start compiles them again",
        )
    ]


def test_the_time_left_is_told() -> None:
    told = {"SLURM_JOB_END_TIME": "1300"}
    assert limits.seconds_left(told, 1000.0) == 300
    assert limits.seconds_left({}, 1000.0) is None
    assert limits.clock_seconds("4:05") == 245
    assert limits.clock_seconds("1-02:03:04") == 86400 + 7200 + 184
    assert limits.clock_seconds("UNLIMITED") is None
    for seconds, expected in {
        3600.0: [],
        300.0: [("warning", "5 min 0 s of the job are left")],
        100.0: [("error", "100 s of the job are left")],
    }.items():
        assert (
            bad(limits.judge({0: allow(in_job=True, seconds_left=seconds)})) == expected
        )


def test_available_memory_is_read_as_linux_tells_it(tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       99 kB\nMemAvailable:       12 kB\n")
    assert available(told) == 12 * 1024
    assert available(tmp_path / "none") is None


# Files


def test_a_healthy_folder_is_fine_and_left_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "not" / "there"
    found = storage.look(out, "a")
    assert [step.failure for step in found.steps] == [""] * 4
    assert found.folder == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_mounted_is_found_by_its_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "root / ext4 rw 0 0\nserver:/x /no\\040where nfs4 rw 0 0\n"
        "none /no\\040where/fast lustre rw 0 0\n"
    )
    assert storage.mounted(Path("/no where/deep"), mounts) == "nfs4"
    assert storage.mounted(Path("/no where/fast/x"), mounts) == "lustre"
    assert storage.mounted(Path("/other"), mounts) == "ext4"


def test_file_systems_that_are_no_place_for_results_are_told() -> None:
    out = Path("/runs")
    assert not bad(storage.judge({0: probe()}, out))
    faults: dict[tuple[str, str], dict[str, Any]] = {
        ("warning", "/runs is memory (tmpfs)"): {"kind": "tmpfs"},
        ("warning", "/runs is on nfs4"): {"kind": "nfs4"},
        ("warning", "3.00 GiB in /runs"): {"free": 3 * GIB},
        ("error", "100.00 MiB in /runs"): {"free": 100 * 2**20},
        ("error", "room for 3 more files in /runs"): {"free_files": 3},
    }
    for (level, told), fields in faults.items():
        found = storage.judge({0: probe(**fields)}, out)
        assert bad(found) == [(level, f"rank 0 on a: {told}")]
        (worst,) = [one for one in found if one.level == level]
        assert dict(worst.figures) == (
            {"bytes": fields["free"]} if "free" in fields else {}
        )
    slow = (storage.Step(storage.WRITE, "", 4.0), storage.Step("rename", "", 3.0))
    # 16 MiB in four seconds; two files in three.
    assert bad(storage.judge({0: probe(steps=slow)}, out)) == [
        ("warning", "rank 0 on a: 4.00 MiB/s in /runs"),
        ("warning", "rank 0 on a: 1.5 s to publish a file in /runs"),
    ]
    told = storage.judge({0: probe(steps=slow)}, out)
    figures = [dict(one.figures) for one in told if one.level == "warning"]
    assert figures == [{"bytes_per_second": 2**22}, {"seconds": 1.5}]


def test_nodes_that_do_not_share_files_or_locks_are_told(tmp_path: Path) -> None:
    with storage.offered(tmp_path) as folder:
        assert storage.see(folder) == storage.Seen(there=True, locked=True)
    assert list(tmp_path.iterdir()) == []
    assert not bad([storage.judge_shared({2: storage.Seen(True, True)})])
    assert bad([storage.judge_shared({2: storage.Seen(False, False)})]) == [
        ("error", "rank 2 on a: does not see what rank 0 writes to --out")
    ]
    assert bad([storage.judge_shared({2: storage.Seen(True, False)})]) == [
        ("warning", "rank 2 on a: does not see the lock of rank 0")
    ]


# Signals


def test_signals_that_do_not_reach_ranks_are_told() -> None:
    heard = hearing.Heard(True, True, hearing.SENT)
    assert not bad(hearing.judge({0: heard, 1: heard}))
    assert bad(hearing.judge({0: heard, 1: heard._replace(launchers=False)})) == [
        ("warning", "rank 1 on a: the launcher's SIGUSR2 did not arrive")
    ]
    found = hearing.judge({0: heard._replace(way="there is no scancel here")})
    assert found[1].told == "there is no scancel here"
    assert found[1].level == Level.SKIPPED


def test_the_way_of_a_signal_is_that_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scancel = tmp_path / "scancel"
    scancel.write_text("#!/bin/sh\nexit 7\n")
    scancel.chmod(0o755)
    here, step = os.getpid(), {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}
    srun, mpirun = Launch("srun", 0, 2), Launch("Open MPI's mpirun", 0, 2)
    # This test is neither: as a shell in between, it would not pass signals on.
    for launch, name in ((srun, "srun"), (mpirun, "mpirun")):
        way = hearing.way_to_send(launch, step, here)
        assert str(way).endswith(f", not {name}, has started rank 0")
        assert hearing.send(way) == way
    own_name = Path("/proc/self/comm").read_text().strip()
    monkeypatch.setattr(hearing, "STEPS", (own_name,))
    monkeypatch.setattr(hearing, "MPIRUNS", (own_name,))
    assert hearing.way_to_send(mpirun, {}, here) == here
    monkeypatch.setenv("PATH", str(tmp_path))
    way = hearing.way_to_send(srun, step, here)
    assert way == [str(scancel), "--signal=USR2", "12.3"]
    assert hearing.send(way) == f"{scancel} exits with 7"


# Ranks that meet, and work that hangs


class SilentRank:
    """A communicator of two ranks, the second of which never answers."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def Iprobe(self, **_: Any) -> bool:
        return False

    def isend(self, message: Any, dest: int, **_: Any) -> None:
        self.sent.append(dest)


def test_a_rank_that_does_not_come_is_missing() -> None:
    comm = SilentRank()
    assert Meetings(comm, 0.01).hold("here") == {0: "here"}
    assert comm.sent == [1]
    assert Meetings(None, 0.01).hold("here") == {0: "here"}


def test_work_that_fails_hangs_or_exits_becomes_an_answer() -> None:
    over = threading.Event()
    try:
        assert attempt(lambda: 3, 10) == 3
        assert attempt(lambda: 1 // 0, 10) == NoAnswer(
            "ZeroDivisionError: integer division or modulo by zero"
        )
        assert attempt(lambda: sys.exit(3), 10) == NoAnswer("SystemExit: 3")
        assert attempt(over.wait, 0.01) == NoAnswer(
            "no answer within 0.01 s", hangs=True
        )
    finally:
        over.set()


# The command


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small products, no DeepSpeed, no mark of a job; what is left is undone."""
    monkeypatch.setitem(speeds.SIDE, "cpu", 8)
    monkeypatch.setitem(speeds.COPIED, "cpu", 8)
    monkeypatch.setattr(storage, "WRITTEN", 8)
    monkeypatch.setattr(storage, "SLOW_SPEED", 0)
    stepped = server_step.Stepped("0", 1.0, 0.9)
    monkeypatch.setattr(server_step, "look", lambda world: stepped)
    # The disk and the memory of whoever runs this test are none of its business.
    monkeypatch.setattr(storage, "TOO_LITTLE", 0)
    monkeypatch.setattr(limits, "TOO_LITTLE_MEMORY", 0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    yield
    process_group.leave()


Outcome = tuple[int, str]


def examined(
    capsys: pytest.CaptureFixture[str], out: Path, *words: str, timeout: str = "100s"
) -> Outcome:
    """Run the command in this process; return its exit code, and what it printed."""
    code: Any = 0
    try:
        arguments = ["--out", str(out), "--device", "cpu", "--timeout", timeout]
        cli.main(["doctor", *arguments, *words])
    except SystemExit as end:
        code = end.code
    return int(code), capsys.readouterr().out


def line_of(printed: str, check: str, level: str) -> str:
    """Return the line of a check that has this level."""
    lines = [line for line in printed.splitlines() if f"{check} " in line]
    assert any(f" {level} " in line for line in lines), printed
    return next(line for line in lines if f" {level} " in line)


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.usefixtures("quick")
def test_errors_are_findings_with_exit_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def planted(check: str, target: Any, name: str, fault: Any) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fault)
            code, printed = examined(capsys, tmp_path)
        assert code == 1, printed
        return line_of(printed, check, "error")

    read_only = failing(errno.EROFS)
    line = planted(storage.WRITE, storage.tempfile, "mkdtemp", read_only)
    assert line.rstrip().endswith(f"{tmp_path}: Read-only file system")
    line = planted(storage.WRITE, storage.os, "fsync", failing(errno.ENOSPC))
    assert "No space left on device" in line
    line = planted("rename", storage.os, "replace", failing(errno.EPERM))
    assert "Operation not permitted" in line
    line = planted("HDF5", storage.h5py, "File", failing(errno.ENOLCK))
    assert "No locks available" in line

    def one_too_many(tensor: Any, **_: Any) -> None:
        tensor += 1

    line = planted("all-reduce, all ranks", dist, "all_reduce", one_too_many)
    assert "wrong numbers over gloo" in line
    calls = iter(range(100))

    def wrong_once(tensor: Any, **_: Any) -> None:
        tensor += next(calls) == 0

    line = planted("all-reduce, all ranks", dist, "all_reduce", wrong_once)
    assert "wrong numbers over gloo" in line
    line = planted("speed", speeds, "_trial", failing(errno.EIO))
    assert "OSError: [Errno 5]" in line
    low = lambda number: (100, 100)  # noqa: E731
    line = planted("ulimit", resource, "getrlimit", low)
    assert "open files: 100 (each rank has sockets)" in line


@pytest.mark.usefixtures("quick")
def test_a_collective_that_hangs_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    over = threading.Event()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: over.wait())
    # Python's own end would meet the thread that hangs.
    ends: list[int] = []

    def end(code: int) -> None:
        ends.append(code)
        sys.exit(code)

    monkeypatch.setattr(os, "_exit", end)
    try:
        code, printed = examined(capsys, tmp_path, timeout="2s")
    finally:
        over.set()
    assert code == 1 and ends == [1]
    assert "no answer within 2 s" in line_of(printed, "collectives", "error")
    line = line_of(printed, "DeepSpeed", "not checked")
    assert line.rstrip().endswith("collectives do not work")


@pytest.mark.usefixtures("quick")
def test_an_interrupted_check_leaves_no_files(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Ctrl-C reaches the main thread while it waits for the check. No real signal: it may
    end the process that runs the tests.
    """
    entered, over = threading.Event(), threading.Event()
    seen: list[bool] = []

    class Waiting(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            until = time.monotonic() + (timeout or 0)
            while self.is_alive() and time.monotonic() < until:
                super().join(0.01)
                if entered.is_set():
                    entered.clear()
                    raise KeyboardInterrupt

    def interrupted(folder: Path) -> None:
        seen.append(folder.is_dir())
        entered.set()
        over.wait()

    monkeypatch.setattr(attempts, "Thread", Waiting)
    monkeypatch.setitem(storage.WORKS, storage.WRITE, interrupted)
    try:
        code, _ = examined(capsys, tmp_path)
        assert code == 130
        assert seen == [True]
        assert list(tmp_path.iterdir()) == []
    finally:
        over.set()


@pytest.mark.usefixtures("quick")
def test_warnings_are_findings_with_exit_0(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 500))
    code, printed = examined(capsys, tmp_path)
    assert code == 0
    assert "a file can be locked twice" in line_of(printed, "locks", "warning")
    assert "of the job are left" in line_of(printed, "time limit", "warning")
    assert "→ never start two runs with the same --out" in printed
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    code, printed = examined(capsys, tmp_path)
    assert code == 1
    assert "of the job are left" in line_of(printed, "time limit", "error")


@pytest.mark.usefixtures("quick")
def test_a_blocked_signal_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(hearing, "PATIENCE", 0.05)
    # Not by this thread's mask: the system would give the signal to another thread.
    monkeypatch.setattr(hearing.os, "kill", lambda process, number: None)
    code, printed = examined(capsys, tmp_path)
    assert code == 1
    assert "SIGUSR2 does not arrive" in line_of(printed, "signals", "error")


def test_a_stage_that_no_limit_ends_is_ended_by_a_watcher() -> None:
    """As where the system itself hangs, or rank 0 has gone."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stalls.os, "_exit", lambda code: told.append(f"exit {code}"))
        over = threading.Event()
        give_up = lambda check, seconds: told.append(check) or over.set()  # noqa: E731
        stalls.watch(lambda: (0, "files"), 0.05, give_up, over)
    assert told == ["files", "exit 1"]


def test_a_start_that_holds_pythons_lock_is_ended_from_outside() -> None:
    """As MPI's does, if a rank is missing."""
    program = (
        "import ctypes\n"
        "from hpcfed.runtime.ending import ended_from_outside\n"
        "with ended_from_outside('quick', 60): pass\n"
        "with ended_from_outside('too late', 0.1): ctypes.PyDLL(None).sleep(60)\n"
    )
    done = start([sys.executable, "-c", program])
    assert done.returncode == -signal.SIGTERM
    assert done.stderr == "too late\n"
    # A process that is killed meanwhile takes its watcher along.
    program = (
        "import os, signal\n"
        "from hpcfed.runtime.ending import ended_from_outside\n"
        "with ended_from_outside('too late', 1): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = start([sys.executable, "-c", program])
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--out", "FILE"], "--out FILE is a file; name a folder"),
        (["--out", ""], "argument --out: must be a path, got ''"),
        (["--out", "FILE/below"], "--out FILE/below: FILE is a file; name a folder"),
        (["--timeout", "20"], "must be a number with a unit"),
        (["--json", "none/x.json"], "--json none/x.json: there is no such folder"),
        (["--json", "run.h5"], "--json run.h5: .h5 is for results"),
        (["--devise", "cpu"], "unknown option --devise; did you mean '--device'?"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--device", "xpu"], "--device xpu, but torch finds no XPU device"),
        (["--backend", "xccl"], "--backend xccl, but torch finds no XPU device"),
        (["runs"], "unexpected argument 'runs'; hpcfed doctor --help"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *words])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert line in told and told.count("\n") == 1


def test_a_real_machine_alone(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """All that is checked, DeepSpeed as well; then without it."""
    monkeypatch.setitem(speeds.SIDE, "cpu", 64)
    file = tmp_path / "doctor.json"
    code, printed = examined(capsys, tmp_path / "runs", "--json", str(file))
    report = json.loads(file.read_text())
    levels = {one["check"]: one["level"] for one in report["findings"]}
    assert code == int(report["verdict"] == "error")
    for check in ("versions", "product", "rename", "HDF5", "DeepSpeed", "signals"):
        assert levels[check] == "OK", printed
    for check in ("MPI", "CUDA", "GPU", "shared"):
        assert levels[check] == "not checked", printed
    assert report["environment"]["packages"]["torch"]
    written = next(one for one in report["findings"] if one["check"] == storage.WRITE)
    assert written["figures"]["bytes_per_second"] > 0
    assert "runs is not there yet" in printed
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setitem(speeds.SIDE, "cpu", 8)
    code, printed = examined(capsys, tmp_path)
    assert code == 1
    assert "ModuleNotFoundError" in line_of(printed, "DeepSpeed", "error")
    assert "--server-engine torch" in printed


def test_two_real_ranks(mpirun: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    job = mpirun(
        2,
        "-m",
        "hpcfed",
        "doctor",
        "--device=cpu",
        f"--out={tmp_path}",
        f"--json={file}",
    )
    report = json.loads(file.read_text())
    found = {one["check"]: one for one in report["findings"]}
    assert job.returncode == int(report["verdict"] == "error"), job.stderr
    assert found["ranks"]["told"].startswith("2 ranks on ")
    assert found["MPI"]["told"].endswith("thread level multiple")
    for check in ("MPI messages", "all-reduce, all ranks", "broadcast, all ranks"):
        assert found[check]["told"].startswith("right numbers, ")
    assert found["DeepSpeed"]["level"] == found["signals"]["level"] == "OK"
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 4])
def test_real_ranks_on_a_gpu(
    ranks: int, mpirun: Callable[..., Any], tmp_path: Path
) -> None:
    """Four share a GPU over NCCL, which is told as a warning."""
    file = tmp_path / "doctor.json"
    words = ["--device=cuda", "--backend=nccl", f"--out={tmp_path}", f"--json={file}"]
    job = mpirun(ranks, "-m", "hpcfed", "doctor", *words)
    report = json.loads(file.read_text())
    found = {one["check"]: one for one in report["findings"]}
    assert job.returncode == int(report["verdict"] == "error"), job.stderr
    for check in ("CUDA", "product", "copy", "all-reduce, all ranks", "DeepSpeed"):
        assert found[check]["level"] == "OK", job.stdout
    if ranks > 1:
        assert found["GPUs of ranks"]["told"] == "4 ranks share a GPU"
        assert "over nccl, 4 ranks" in found["broadcast, all ranks"]["told"]
