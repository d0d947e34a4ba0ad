"""Where a rank runs: host, process, device, cores, and the threads that allows."""

import os
import socket
from typing import NamedTuple

import torch

from hpcfed.errors import UserError
from hpcfed.runtime import accelerator
from hpcfed.runtime.machine import Machine, this_machine, usable


class Location(NamedTuple):
    """Where a rank runs."""

    host: str
    pid: int
    device: str
    """`cpu`, or the GPU's unique id."""
    device_name: str
    cores: tuple[int, ...]
    """The cores that the launcher lets this process use."""
    machine: Machine = Machine()
    memory: int = 0
    """Bytes of the GPU, or those that the machine lets us use; 0: unknown."""
    kind: str = "cuda"
    """torch's name for the GPU's kind."""


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Choose this rank's device, and make it torch's current one.

    The ranks of a host take its GPUs in turn. If there are more ranks than GPUs, ranks
    share them.
    """
    found = None if wanted == "cpu" else accelerator.kind()
    if wanted in accelerator.KINDS and wanted != found:
        raise UserError(
            f"--device {wanted}, but torch finds no {wanted.upper()} device; "
            "use --device cpu or auto"
        )
    if found is None:
        return torch.device("cpu")
    device = torch.device(found, local_rank % accelerator.count())
    accelerator.use(device)
    return device


def locate(device: torch.device) -> Location:
    """Return where this process runs, with this device."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    host = socket.gethostname()
    if device.type == "cpu":
        here = "cpu", "cpu", cores, this_machine(), usable()
        return Location(host, os.getpid(), *here)
    properties = accelerator.properties(device)
    # The unique id, because device numbers start at 0 on every rank that sees only its
    # own GPU.
    device_id, name = accelerator.unique_id(device), properties.name
    here = device_id, name, cores, this_machine(), properties.total_memory
    return Location(host, os.getpid(), *here, device.type)


def share_device(locations: tuple[Location, ...]) -> bool:
    """Return whether some of these ranks have the same device."""
    devices = {(location.host, location.device) for location in locations}
    return len(devices) < len(locations)


def threads_for(here: Location, locations: tuple[Location, ...]) -> int:
    """Return a rank's share of its cores, or OMP_NUM_THREADS if that is less.

    The ranks of a host together never have more threads than cores, unless there are
    more ranks than cores.
    """
    sharing = 0
    # This includes the rank itself, but not ranks that the launcher has bound to other
    # cores.
    for other in locations:
        overlaps = not set(other.cores).isdisjoint(here.cores)
        sharing += other.host == here.host and overlaps
    share = len(here.cores) // sharing
    wanted = omp_threads()
    if wanted is not None:
        share = min(share, wanted)
    return max(1, share)


def omp_threads() -> int | None:
    """Return OMP_NUM_THREADS; None if it is not set or not a plain number."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    # Ten digits are more than any share, and Python refuses to parse thousands of
    # digits.
    if value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    return None
