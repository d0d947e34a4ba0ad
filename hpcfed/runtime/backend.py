"""Which backend of torch.distributed the ranks of a role talk through."""

import os
import socket
from typing import Literal

import torch
import torch.distributed as dist

from hpcfed.errors import UserError
from hpcfed.runtime.location import Location, share_device

Backend = Literal["auto", "nccl", "gloo"]
"""What the user may ask for."""
SHARES_GPUS = (2, 30)
"""The first version of NCCL that lets ranks share a GPU when told to."""


def check_backend(wanted: Backend) -> None:
    """Refuse NCCL where this process cannot use it."""
    usable = torch.cuda.is_available() and dist.is_nccl_available()
    if wanted == "nccl" and not usable:
        raise UserError(
            "--backend nccl, but torch finds no CUDA device with NCCL; "
            "use --backend gloo or auto"
        )


def choose_backend(
    locations: tuple[Location, ...], wanted: Backend = "auto"
) -> tuple[str, str]:
    """Return the backend for the ranks of a role, and why: NCCL when every rank has a
    GPU of its own, otherwise gloo.
    """
    on_gpus = _on_gpus(locations)
    if wanted == "nccl" and not on_gpus:
        raise UserError(
            "--backend nccl needs a GPU on every rank; use --backend gloo or auto"
        )
    if len(locations) == 1:
        return "none", "a single rank needs no collectives"
    if wanted == "gloo":
        return "gloo", "as --backend says"
    if not on_gpus:
        return "gloo", "not every rank has a GPU"
    if not share_device(locations):
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


def group_backend(locations: tuple[Location, ...], wanted: Backend) -> str:
    """Return the backend that a process group of these ranks is made with.

    Unlike `choose_backend` it names one for a single rank, too: DeepSpeed wants a
    group even there.
    """
    backend, _ = choose_backend(locations, wanted)
    if backend != "none":
        return backend
    return "nccl" if _on_gpus(locations) and wanted != "gloo" else "gloo"


def nccl_on_shared_gpus(
    rank: int, locations: tuple[Location, ...], version: tuple[int, ...]
) -> dict[str, str]:
    """Return environment variables that make NCCL let ranks share a GPU; what the user
    has set stays.

    Newer versions have a switch. Older ones refuse two ranks of one host on one GPU,
    so every rank claims a host of its own; they then talk through sockets.
    """
    if version >= SHARES_GPUS:
        variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    else:
        variables = {"NCCL_HOSTID": f"{socket.gethostname()}-{rank}"}
        hosts = {location.host for location in locations}
        # The loopback interface leads to no other host.
        if len(hosts) == 1:
            variables["NCCL_SOCKET_IFNAME"] = "lo"
    for name in variables.keys() & os.environ.keys():
        variables[name] = os.environ[name]
    return variables


def _on_gpus(locations: tuple[Location, ...]) -> bool:
    return all(location.device != "cpu" for location in locations)
