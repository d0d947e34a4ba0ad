"""Who we are: what launchers say, which backend is chosen and why, how cores and
clients are shared out.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcfed.clients.placement import place
from hpcfed.errors import UserError
from hpcfed.runtime import energy, machine, mpi
from hpcfed.runtime.environment import capture
from hpcfed.runtime.launcher import Launch, is_copy, launched
from hpcfed.runtime.location import Location, locate, threads_for
from hpcfed.runtime.process_group import choose_backend, nccl_on_shared_gpus
from hpcfed.runtime.world import World
from hpcfed.server.options import ServerOptions
from hpcfed.server.transport import check_world


def step(rank: int, size: int) -> dict[str, str]:
    """Variables of a task of a Slurm step, whatever --mpi is."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "5",
    }


def pmi(rank: int, size: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size)}


HYDRA = {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
"""Variables of MPICH's and Intel's mpiexec."""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Launch("no launcher", 0, 1)),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
            Launch("Open MPI's mpirun", 2, 4),
        ),
        # mpirun starts its daemons by srun, one per node.
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"} | step(1, 2),
            Launch("Open MPI's mpirun", 2, 4),
        ),
        (pmi(1, 2), Launch("mpiexec (PMI)", 1, 2)),
        (pmi(1, 2) | HYDRA, Launch("mpiexec (PMI)", 1, 2)),
        # So does mpiexec; with a rank per node only its own variables tell.
        (pmi(3, 4) | HYDRA | step(1, 2), Launch("mpiexec (PMI)", 3, 4)),
        (pmi(1, 2) | HYDRA | step(1, 2), Launch("mpiexec (PMI)", 1, 2)),
        # mpiexec in a shell that srun has started with --mpi=pmi2.
        (
            pmi(1, 2) | step(0, 1) | {"PMI_JOBID": "5.0", "SLURM_MPI_TYPE": "pmi2"},
            Launch("mpiexec (PMI)", 1, 2),
        ),
        (step(3, 8) | {"PMIX_RANK": "3"}, Launch("srun", 3, 8)),
        (
            step(3, 8) | pmi(3, 8) | {"PMI_JOBID": "5.0", "SLURM_MPI_TYPE": "pmi2"},
            Launch("srun", 3, 8),
        ),
        (step(3, 8), Launch("srun", 3, 8)),  # --mpi=none
        # A batch script sees its job's variables, but no launcher has started it.
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "5"},
            Launch("no launcher", 0, 1),
        ),
    ],
)
def test_launchers_are_recognised(variables: dict[str, str], expected: Launch) -> None:
    assert launched(variables) == expected


@pytest.mark.parametrize(
    ("started", "words", "expected"),
    [
        ("-m hpcfed show runs/a", "show runs/a", True),
        ("show runs/a b", "show|runs/a b", True),
        ("-m hpcfed", "", True),
        # A script may have given each rank words of its own.
        ("-c hpcfed show runs/$OMPI_COMM_WORLD_RANK", "show runs/1", False),
        ("mine.py", "show runs/a", False),
        ("mine.py", "list", False),
    ],
)
def test_copies_of_one_command_are_recognised(
    started: str, words: str, expected: bool
) -> None:
    ours = words.split("|") if "|" in words else words.split()
    variables = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    variables |= {"OMPI_ARGV": started, "OMPI_NUM_APP_CTX": "1"}
    assert is_copy(ours, variables) is expected
    assert not is_copy(ours, variables | {"OMPI_COMM_WORLD_RANK": "0"})
    assert not is_copy(ours, variables | {"OMPI_NUM_APP_CTX": "2"})
    srun = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
    assert not is_copy(ours, srun)


def rank_at(host: str, device: str, cores: tuple[int, ...] = (0, 1)) -> Location:
    return Location(host=host, pid=1, device=device, device_name=device, cores=cores)


def test_the_backend_is_chosen_with_a_reason() -> None:
    assert choose_backend((rank_at("a", "gpu-1"),))[0] == "none"
    assert choose_backend((rank_at("a", "gpu-1"), rank_at("a", "gpu-2"))) == (
        "nccl",
        "every rank has a GPU of its own",
    )
    assert choose_backend((rank_at("a", "gpu-1"), rank_at("a", "gpu-1")))[0] == "gloo"
    assert (
        "share a GPU"
        in choose_backend((rank_at("a", "gpu-1"), rank_at("a", "gpu-1")))[1]
    )
    assert (
        "not every rank has a GPU"
        in choose_backend((rank_at("a", "gpu-1"), rank_at("b", "cpu")))[1]
    )


def test_the_backend_that_was_asked_for_is_taken() -> None:
    own, shared = (
        (rank_at("a", "gpu-1"), rank_at("a", "gpu-2")),
        (rank_at("a", "gpu-1"), rank_at("a", "gpu-1")),
    )
    assert choose_backend(own, "gloo") == ("gloo", "as --backend says")
    assert choose_backend(own, "nccl") == ("nccl", "every rank has a GPU of its own")
    backend, reason = choose_backend(shared, "nccl")
    assert backend == "nccl" and "not how fast it is" in reason
    assert choose_backend(shared[:1], "nccl")[0] == "none"
    for ranks in (1, 2):
        with pytest.raises(UserError, match="needs a GPU on every rank"):
            choose_backend((rank_at("a", "cpu"),) * ranks, "nccl")


def test_nccl_is_told_that_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions by a host of its own for every rank, newer ones by a switch; what
    the user has set stays.
    """
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    here, apart = (
        (rank_at("a", "gpu-1"),) * 2,
        (rank_at("a", "gpu-1"), rank_at("b", "gpu-1")),
    )
    old = [nccl_on_shared_gpus(rank, here, (2, 28, 9)) for rank in (0, 1)]
    assert old[0]["NCCL_HOSTID"] != old[1]["NCCL_HOSTID"]
    assert [variables["NCCL_SOCKET_IFNAME"] for variables in old] == ["lo", "lo"]
    assert "NCCL_SOCKET_IFNAME" not in nccl_on_shared_gpus(0, apart, (2, 28, 9)), (
        "lo leads to no other host"
    )
    assert nccl_on_shared_gpus(0, here, (2, 30, 1)) == {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1"
    }
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert nccl_on_shared_gpus(0, here, (2, 28, 9))["NCCL_SOCKET_IFNAME"] == "eth7"


GPU_WORLD = World(
    rank=0, size=3, local_rank=0, role="worker", role_rank=0, role_size=1, server_ranks=2, device=torch.device("cpu"),
    locations=(rank_at("a", "gpu-1"),) * 3, backend="none", reason="", threads=1, launch=Launch("mpirun", 0, 3),
)  # fmt: skip
"""A worker and two server ranks that share a GPU."""


def test_zero_is_refused_where_gloo_would_have_to_gather_on_gpus() -> None:
    """Before the start, on all ranks alike; the remedy that is named is none of those
    that are refused.
    """
    zero = ServerOptions(zero_stage=2)
    with pytest.raises(
        UserError, match=r"--zero-stage 2 over gloo.*; add --backend nccl"
    ):
        check_world(zero, GPU_WORLD)
    with pytest.raises(UserError, match="over gloo"):
        check_world(zero, replace(GPU_WORLD, wanted="gloo", server_ranks=1))
    check_world(zero, replace(GPU_WORLD, wanted="nccl"))
    check_world(zero, replace(GPU_WORLD, server_ranks=1))
    check_world(
        zero,
        replace(
            GPU_WORLD,
            locations=(
                rank_at("a", "gpu-1"),
                rank_at("a", "gpu-2"),
                rank_at("a", "gpu-3"),
            ),
        ),
    )
    check_world(zero, replace(GPU_WORLD, locations=(rank_at("a", "cpu"),) * 3))
    check_world(ServerOptions(), GPU_WORLD)


def test_ranks_never_oversubscribe_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    everything = tuple(range(8))
    unbound = tuple(rank_at("a", "cpu", everything) for _ in range(4))
    assert threads_for(unbound[0], unbound) == 2
    bound = tuple(rank_at("a", "cpu", (2 * i, 2 * i + 1)) for i in range(4))
    assert threads_for(bound[1], bound) == 2
    crowded = tuple(rank_at("a", "cpu", (0, 1)) for _ in range(3))
    assert threads_for(crowded[0], crowded) == 1
    elsewhere = (rank_at("a", "cpu", everything), rank_at("b", "cpu", everything))
    assert threads_for(elsewhere[0], elsewhere) == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_for(elsewhere[0], elsewhere) == 3, (
        "less than our share, if that is what the user wants"
    )
    assert threads_for(unbound[0], unbound) == 2, "but never more"
    for strange in ("abc", "-1", "", "²", "4,2", "1000000000", "9" * 5000):
        monkeypatch.setenv("OMP_NUM_THREADS", strange)
        assert threads_for(unbound[0], unbound) == 2, (
            "what is no number of threads is as if it were not there"
        )


CORES = st.sets(st.integers(0, 15), min_size=1).map(lambda cores: tuple(sorted(cores)))
RANKS = st.lists(st.tuples(st.sampled_from("ab"), CORES), min_size=1, max_size=12)


@given(RANKS, st.sampled_from(["", "1", "4", "64"]))
def test_threads_of_all_ranks_fit_the_cores_of_their_host(
    ranks: list[tuple[str, tuple[int, ...]]], wanted: str
) -> None:
    """Whatever cores the launcher binds ranks to; a rank whose cores are fewer than its
    sharers still needs one.
    """
    locations = tuple(rank_at(host, "cpu", cores) for host, cores in ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", wanted)
        threads = [threads_for(location, locations) for location in locations]
    assert min(threads) >= 1
    for host in "ab":
        here = [
            (place, count)
            for place, count in zip(locations, threads, strict=True)
            if place.host == host
        ]
        more_than_one = sum(count for _, count in here if count > 1)
        assert more_than_one <= len(set().union(*(place.cores for place, _ in here)))
        if len({place.cores for place, _ in here}) == 1:  # unbound ranks
            assert sum(count for _, count in here) <= max(
                len(here), len(here[0][0].cores)
            )


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200), st.integers(1, 16))
def test_every_client_has_one_place_and_loads_are_balanced(
    loads: list[int], ranks: int
) -> None:
    ranks = min(ranks, len(loads))
    weights = np.array(loads) + 1
    rank_of = place(weights, ranks)
    assert set(rank_of) == set(range(ranks)), "every rank has a client"
    totals = np.bincount(rank_of, weights)
    assert totals.max() - totals.min() <= weights.max(), (
        "a rank is ahead by more than one client"
    )


def test_equal_clients_are_dealt_out_evenly() -> None:
    assert np.bincount(place(np.ones(10), 4)).tolist() == [3, 3, 2, 2]


def test_a_gpu_counts_its_energy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "joules", lambda device: {"a": 5.0, "b": 7.0}[device])
    locations = [
        Location(host, 0, device, "", ())
        for host, device in (("x", "a"), ("x", "a"), ("x", "b"), ("y", "a"))
    ]
    worlds = [
        cast(World, SimpleNamespace(rank=rank, locations=locations))
        for rank in range(4)
    ]
    assert [energy.rank_joules(world) for world in worlds] == [5.0, 0.0, 7.0, 5.0]


def _counter(folder: Path, number: str, name: str, used: float, most: float) -> Path:
    """Write a counter as RAPL has it."""
    path = folder / f"intel-rapl{number}"
    path.mkdir(exist_ok=True)
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{used:.0f}\n")
    (path / "max_energy_range_uj").write_text(f"{most:.0f}\n")
    return path / "energy_uj"


def test_a_cpus_energy_is_that_of_packages_and_memory(tmp_path: Path) -> None:
    """Cores are part of a package, psys of all, and mmio is the package once more."""
    for number, name in {
        ":0": "package-0", ":0:0": "core", ":0:1": "dram", ":1": "package-1",
        ":2": "psys", "-mmio:0": "package-0",
    }.items():  # fmt: skip
        _counter(tmp_path, number, name, 90e6, 100e6)
    with energy.CpuMeter(tmp_path) as meter:
        for path in tmp_path.glob("*/energy_uj"):
            path.write_text("95000000")
        meter.look()
        # A counter that has come to its end begins again at 0.
        (tmp_path / "intel-rapl:0" / "energy_uj").write_text("2000000")
        assert meter.joules() == pytest.approx(5 + 5 + 5 + 7)


def test_a_cpus_energy_is_unknown_where_it_cannot_be_read(tmp_path: Path) -> None:
    assert np.isnan(energy.CpuMeter(tmp_path / "none").joules())
    path = _counter(tmp_path, ":0", "package-0", 1.0, 2.0)
    path.unlink()
    with energy.CpuMeter(tmp_path) as meter:
        assert np.isnan(meter.joules())


def test_hosts_count_their_cpus_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _counter(tmp_path, ":0", "package-0", 0.0, 9e9)
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    locations = [Location(host, 0, "cpu", "", ()) for host in ("x", "x", "y")]
    worlds = [
        cast(World, SimpleNamespace(rank=rank, locations=locations))
        for rank in range(3)
    ]
    ranks = [energy.Used(world) for world in worlds]
    path.write_text("4000000")
    found = [rank.until_now() for rank in ranks]
    assert [one["cpu_energy"] for one in found] == [4.0, 0.0, 4.0]
    assert all(one["load_at_end"] >= 0 for one in found)


def test_a_machine_is_read_as_linux_tells_it(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\n\nmodel name\t: B\n"
    )
    assert machine.cpu_model(info) == "Fast CPU @ 3 GHz"
    info.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    assert machine.cpu_model(info).endswith("CPU implementer 0x41, CPU part 0xd0c")
    for number, cores in {0: "0-1,4\n", 1: "2-3\n"}.items():
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores)
    nodes = machine.numa_nodes(tmp_path)
    assert nodes == ((0, 1, 4), (2, 3))
    assert machine.Machine("", nodes).nodes_of([3]) == [1]
    assert machine.Machine("", nodes).nodes_of([1, 2]) == [0, 1]
    assert machine.numa_nodes(tmp_path / "none") == ()
    assert machine.cores_text([8, 1, 0, 2, 5]) == "0-2,5,8"
    assert machine.cores_of("0-2,5,8") == (0, 1, 2, 5, 8)


def test_large_arrays_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI counts with 31 bits: of 2³⁰ bytes none is left out."""
    monkeypatch.setattr(mpi, "PIECE", 17)
    array = np.arange(10, dtype=np.float32).reshape(2, 5)
    pieces = mpi.pieces_of(array)
    assert [piece.tolist() for piece in pieces] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    pieces[2][1] = 7
    assert array[1, 4] == 7, "what is received in a piece is in the array"
    assert mpi.pieces_of(np.empty((0, 5))) == []
    with pytest.raises(AssertionError, match="copies"):
        mpi.pieces_of(array.T)


def test_the_record_says_where_every_rank_ran() -> None:
    here = locate(torch.device("cpu"))
    facts = capture(
        locations=[here], backend="none", reason="", launcher="none", threads=1
    )
    (rank,) = facts["ranks"]
    assert machine.cores_of(rank["binding"]) == here.cores
    assert rank["cores"] == len(here.cores) and rank["memory"] > 2**20 and rank["cpu"]
