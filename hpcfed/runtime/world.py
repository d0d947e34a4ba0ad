"""The world: every rank's role, device and process group.

MPI starts everything. Workers and server ranks each get their own torch.distributed
world, so that a collective (or DeepSpeed) of one role never waits for the other. A
single process plays both roles and does not even load MPI.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from hpcfed.errors import UserError
from hpcfed.runtime import mpi, process_group
from hpcfed.runtime.launcher import Launch, launched
from hpcfed.runtime.location import (
    Location,
    choose_device,
    locate,
    share_device,
    threads_for,
)
from hpcfed.runtime.process_group import (
    Backend,
    check_backend,
    choose_backend,
    group_backend,
    nccl_on_shared_gpus,
)
from hpcfed.runtime.stalls import Pulse

Role = Literal["worker", "server"]


@dataclass(frozen=True)
class World:
    """What a rank knows about itself and all others.

    Methods that begin with `role_` are collectives among the ranks of this rank's role;
    methods that end with `_all_roles` are among all ranks.
    """

    rank: int
    size: int
    local_rank: int
    """This rank's number among the ranks of its host."""
    role: Role
    role_rank: int
    role_size: int
    server_ranks: int
    device: torch.device
    locations: tuple[Location, ...]
    """Where each rank runs, by rank."""
    backend: str
    reason: str
    """Why this backend was chosen."""
    threads: int
    launch: Launch
    wanted: Backend = "auto"
    """The backend that the user asked for."""
    comm: Any = None
    """mpi4py's communicator of all ranks; None when alone. For runtime/ only."""
    role_comm: Any = None
    """mpi4py's communicator of the role; None when alone. For runtime/ only."""
    pulse: Pulse | None = None
    """Signs of life of the role's ranks; None if the role has no group."""

    @property
    def num_workers(self) -> int:
        return self.size - self.server_ranks

    @property
    def location(self) -> Location:
        """Where this rank runs."""
        return self.locations[self.rank]

    @property
    def server_locations(self) -> tuple[Location, ...]:
        """Where the ranks with the server's model run: server ranks, or all workers."""
        if self.server_ranks:
            return self.locations[self.num_workers :]
        return self.locations

    @property
    def alone(self) -> bool:
        """Whether one process plays every role."""
        return self.comm is None

    @property
    def is_root(self) -> bool:
        """Whether this is the rank that talks to the user and writes results."""
        return self.rank == 0

    def role_bcast(self, value: Any) -> Any:
        """Return the value of the role's first rank, on every rank of the role."""
        return value if self.role_comm is None else self.role_comm.bcast(value, root=0)

    def role_bcast_array(self, array: np.ndarray) -> None:
        """Overwrite the array with that of the role's first rank, on every rank of the
        role; shapes and types must agree.
        """
        if self.role_size > 1:
            for piece in mpi.pieces_of(array):
                self.role_comm.Bcast(piece, root=0)

    def role_allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the role, in rank order, on every rank."""
        return [value] if self.role_comm is None else self.role_comm.allgather(value)

    def role_barrier(self) -> None:
        """Wait until every rank of the role is here."""
        if self.role_comm is not None:
            self.role_comm.Barrier()

    def barrier_all_roles(self) -> None:
        """Wait until every rank of every role is here."""
        if self.comm is not None:
            self.comm.Barrier()

    def gather_all_roles(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks of every role on the root; None elsewhere."""
        if self.comm is None:
            return [value]
        values: list[Any] | None = self.comm.gather(value, root=0)
        return values

    def join_alone(self) -> None:
        """Make a process group of only this rank, unless there is a group."""
        process_group.join_alone(group_backend((self.location,), self.wanted))

    def abort(self, code: int) -> None:
        """End every rank of every role immediately."""
        if self.comm is not None:
            self.comm.Abort(code)

    def close(self) -> None:
        """Leave the role's process group; all ranks of the role call it."""
        if self.pulse is not None:
            # Its first rank takes the store along, so nobody may still leave signs. They
            # go on until all are here: one that hangs before is told from those that wait.
            self.role_barrier()
            self.pulse.end()
            self.role_barrier()
        process_group.leave_before_exit()


def is_first_of_host(world: World) -> bool:
    """Tell whether this rank reports what all ranks of its host share."""
    return _is_first(world, [location.host for location in world.locations])


def is_first_of_device(world: World) -> bool:
    """Tell whether this rank reports what all ranks on its device share."""
    places = [(location.host, location.device) for location in world.locations]
    return _is_first(world, places)


def _is_first(world: World, places: Sequence[object]) -> bool:
    return places.index(places[world.rank]) == world.rank


def enter(
    *,
    device: str = "auto",
    server_ranks: int = 0,
    backend: Backend = "auto",
    connect: bool = True,
) -> World:
    """Find out this rank's role, and join its group unless told not to `connect`; server
    ranks are the last.
    """
    check_backend(backend)
    launch = launched()
    comm = mpi.all_ranks(launch)
    rank, size = mpi.rank_and_size(comm)
    server_ranks = _server_ranks(server_ranks, size)
    local_rank = mpi.local_rank(comm)
    chosen_device = choose_device(device, local_rank)
    here = locate(chosen_device)
    # All ranks know all locations, so each chooses threads, backend and process group
    # by itself, and all choose the same.
    locations = (here,) if comm is None else tuple(comm.allgather(here))
    threads = threads_for(here, locations)
    torch.set_num_threads(threads)

    num_workers = size - server_ranks
    role: Role = "server" if rank >= num_workers else "worker"
    # Split keeps the order of ranks, so the workers' first rank is the root.
    role_comm = None if comm is None else comm.Split(int(role == "server"), rank)
    role_rank, role_size = mpi.rank_and_size(role_comm)
    workers, servers = locations[:num_workers], locations[num_workers:]
    peers = servers if role == "server" else workers
    chosen_backend, reason = choose_backend(peers, backend)
    if chosen_backend == "nccl" and share_device(peers):
        # NCCL reads its variables when the group is created.
        os.environ |= nccl_on_shared_gpus(rank, peers, torch.cuda.nccl.version())
    pulse = None
    # A single worker needs no group. A single server rank does, for DeepSpeed.
    needed = role_comm is not None and (role_size > 1 or role == "server")
    if needed and connect:
        name = group_backend(peers, backend)
        pulse = process_group.join(role_comm, name, chosen_device)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        role=role,
        role_rank=role_rank,
        role_size=role_size,
        server_ranks=server_ranks,
        device=chosen_device,
        locations=locations,
        backend=chosen_backend,
        reason=reason,
        threads=threads,
        launch=launch,
        wanted=backend,
        comm=comm,
        role_comm=role_comm,
        pulse=pulse,
    )


def _server_ranks(wanted: int, size: int) -> int:
    """Return how many ranks belong to the server; refuse to leave no worker."""
    if size == 1:
        return 0  # a single process plays both roles
    if wanted >= size:
        raise UserError(
            f"--server-ranks {wanted} leaves no worker among {size} ranks; use "
            "fewer or more ranks"
        )
    return wanted
