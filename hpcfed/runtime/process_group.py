"""The torch.distributed process group of this rank's role.

Every role has its own default group, so that a collective of one role, or DeepSpeed,
never waits for the other role. The functions below act among the ranks of that group.
They are for networks and trainers, which do not know the World.
"""

import os
import resource
import socket
import sys
import time
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hpcfed.errors import UserError
from hpcfed.runtime import accelerator
from hpcfed.runtime.location import Location, share_device
from hpcfed.runtime.stalls import Pulse

CONNECTING = timedelta(minutes=30)
"""How long the ranks of a role may take to find each other."""
CONNECTIONS = 4
"""Most connections between rank 0, which has the store, and another: of the group, of
its signs of life, while it looks whether others are alive, and of gloo.
"""
OWN_FILES = 1024
"""Files that a process may open besides, with its libraries."""
COLLECTIVE = timedelta(days=24)
"""How long a collective may take: effectively forever.

--stall-timeout ends a run that hangs. torch's own limit keeps counting while a job is
suspended, and would end it. More days do not fit into 31 bits of milliseconds.
"""


def rank() -> int:
    """Return this rank's number in its role; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """Return the number of ranks in the role; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def backend() -> str:
    """Return the name of the group's backend, such as `gloo` or `nccl`."""
    return dist.get_backend()


def allreduce(tensor: Tensor) -> None:
    """Replace the tensor by its sum over the role's ranks, in place.

    The tensor stays on its device, and its bytes are not counted as traffic of the
    federation: `Collectives` does that.
    """
    if size() > 1:
        # NCCL takes rows in order only; eigenvectors, for one, lie column by column.
        dense = tensor.contiguous()
        dist.all_reduce(dense)
        if dense is not tensor:
            tensor.copy_(dense)


def join_columns(rows: Tensor, widths: list[int]) -> Tensor:
    """Return the columns of all ranks side by side, in rank order, on every rank.

    `widths` are the ranks' numbers of columns.
    """
    # gloo gathers in host memory only.
    here = rows.cpu() if backend() == "gloo" else rows
    # A gather needs equal shapes, so shares are padded to the widest.
    most = max(widths)
    padded = here.new_zeros(len(rows), most)
    padded[:, : rows.shape[1]] = here
    gathered = [torch.empty_like(padded) for _ in widths]
    dist.all_gather(gathered, padded)
    shares = []
    for share, width in zip(gathered, widths, strict=True):
        shares.append(share[:, :width])
    return torch.cat(shares, 1).to(rows.device)


def join(role_comm: Any, backend_name: str, device: torch.device) -> Pulse:
    """Join the role's group: rank 0 opens a store, and tells its port by MPI."""
    role_rank, role_size = role_comm.Get_rank(), role_comm.Get_size()
    hosts = role_comm.allgather(socket.gethostname())
    store = None
    address: tuple[str, int] | None = None
    allow_open_files(CONNECTIONS * role_size + OWN_FILES)
    if role_rank == 0:
        # Port 0 means any free port, so that several runs can share a host.
        host = _store_host(hosts)
        store = dist.TCPStore(
            host,
            0,
            role_size,
            is_master=True,
            wait_for_workers=False,
            timeout=CONNECTING,
        )
        address = (host, store.port)
    host, port = role_comm.bcast(address, root=0)
    if store is None:
        store = dist.TCPStore(
            host, port, role_size, is_master=False, timeout=CONNECTING
        )
    # Given a device, NCCL connects immediately. A group of one has no peer to connect
    # to.
    bound = device if backend_name != "gloo" and role_size > 1 else None
    dist.init_process_group(
        backend_name,
        store=store,
        rank=role_rank,
        world_size=role_size,
        timeout=CONNECTING,
        device_id=bound,
    )
    # Only connecting has a limit: afterwards a job may be suspended for days.
    _set_timeout(COLLECTIVE)
    return Pulse(host, port, rank=role_rank, size=role_size, patience=CONNECTING)


def allow_open_files(number: int) -> None:
    """Raise this process's limit of open files, if it is lower and may be raised.

    With the usual limit of 1024, a run of 512 ranks does not start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Linux has no unlimited number of files.
    wanted = min(number, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def join_alone(backend_name: str) -> None:
    """Make a group of only this rank, for libraries, unless there is one."""
    if not dist.is_initialized():
        dist.init_process_group(
            backend_name, store=dist.HashStore(), rank=0, world_size=1
        )


def leave() -> None:
    """End all process groups, if there are any."""
    if not dist.is_initialized():
        return
    # DeepSpeed holds its own groups, and releases them only through its own function.
    # If it was imported but never started, it cannot end any.
    started: Any = sys.modules.get("deepspeed.comm")
    if started is not None and started.is_initialized():
        started.destroy_process_group()
    else:
        dist.destroy_process_group()


def leave_before_exit() -> None:
    """End all process groups, and let their threads finish before Python does.

    A gloo thread may still wait for the interpreter, to release the last collective's
    tensors. If the interpreter ended first, that thread would abort the process (seen
    once in some hundred runs).
    """
    if dist.is_initialized():
        leave()
        time.sleep(0.05)


def _store_host(hosts: list[str]) -> str:
    """Return the address at which all ranks reach rank 0's store."""
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    return os.environ.get("MASTER_ADDR", hosts[0])


def _set_timeout(timeout: timedelta) -> None:
    """Set how long collectives of the role's group may take from now on."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout)
    else:  # torch before 2.15
        dist.distributed_c10d._set_pg_timeout(timeout)


# Which torch.distributed backend the ranks of a role use.


Backend = Literal["auto", "nccl", "xccl", "gloo"]
"""What the user may ask for."""
SHARES_GPUS = (2, 30)
"""The first version of NCCL with a switch that lets ranks share a GPU."""


def check_backend(wanted: Backend) -> None:
    """Refuse collectives of GPUs if this process cannot use them."""
    for kind, backend in accelerator.BACKENDS.items():
        if wanted != backend:
            continue
        if accelerator.kind() != kind or not dist.is_backend_available(backend):
            raise UserError(
                f"--backend {wanted}, but torch finds no {kind.upper()} device with "
                f"{wanted.upper()}; use --backend gloo or auto"
            )


def choose_backend(
    locations: tuple[Location, ...], wanted: Backend = "auto"
) -> tuple[str, str]:
    """Return a role's backend, and why: that of the GPUs if each rank has one of the same
    kind, else gloo.
    """
    of_gpus = _backend_of_gpus(locations)
    asked = wanted not in ("auto", "gloo")
    if asked and wanted != of_gpus:
        raise UserError(
            f"--backend {wanted} needs a GPU on every rank; use --backend gloo or auto"
        )
    if len(locations) == 1:
        return "none", "a single rank needs no collectives"
    if wanted == "gloo":
        return "gloo", "as --backend says"
    if of_gpus is None:
        everywhere = all(location.device != "cpu" for location in locations)
        some = "ranks have GPUs of different kinds"
        return "gloo", some if everywhere else "not every rank has a GPU"
    if not share_device(locations):
        return of_gpus, "every rank has a GPU of its own"
    if asked:
        return (
            of_gpus,
            "as --backend says; ranks share a GPU, so this tests that a run is "
            "right, not how fast it is",
        )
    return (
        "gloo",
        f"several ranks share a GPU, which {of_gpus.upper()} refuses unless "
        f"--backend {of_gpus} asks for it",
    )


def group_backend(locations: tuple[Location, ...], wanted: Backend) -> str:
    """Return the backend for a process group of these ranks.

    Unlike `choose_backend`, it also names one for a single rank: DeepSpeed needs a
    group even there.
    """
    backend, _ = choose_backend(locations, wanted)
    if backend != "none":
        return backend
    of_gpus = _backend_of_gpus(locations)
    return "gloo" if of_gpus is None or wanted == "gloo" else of_gpus


def nccl_on_shared_gpus(
    rank: int, locations: tuple[Location, ...], version: tuple[int, ...]
) -> dict[str, str]:
    """Return environment variables that make NCCL let ranks share a GPU; the user's own
    settings stay.

    Newer versions have a switch. Older ones refuse two ranks of one host on one GPU, so
    every rank pretends to have its own host; they then communicate through sockets.
    """
    if version >= SHARES_GPUS:
        variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    else:
        variables = {"NCCL_HOSTID": f"{socket.gethostname()}-{rank}"}
        hosts = {location.host for location in locations}
        # The loopback interface does not reach other hosts.
        if len(hosts) == 1:
            variables["NCCL_SOCKET_IFNAME"] = "lo"
    for name in variables.keys() & os.environ.keys():
        variables[name] = os.environ[name]
    return variables


def _backend_of_gpus(locations: tuple[Location, ...]) -> str | None:
    """Return the backend that all ranks' GPUs have; None if some rank has no GPU, or one
    of another kind.
    """
    kinds = {each.kind if each.device != "cpu" else "cpu" for each in locations}
    return accelerator.BACKENDS.get(kinds.pop()) if len(kinds) == 1 else None
