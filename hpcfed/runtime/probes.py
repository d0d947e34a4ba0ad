"""Small messages and collectives between ranks, to see whether they arrive, whether their
numbers are right, and how fast they are.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcfed.runtime import accelerator, process_group
from hpcfed.runtime.meetings import wait_for
from hpcfed.runtime.process_group import group_backend
from hpcfed.runtime.world import World

THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")
"""MPI's, in the order of its numbers."""
MESSAGE = 2**20
"""Floats of a large message over MPI: 4 MiB."""
LARGE, LARGE_ON_GPU = 2**20, 2**24
"""Floats of a large collective: 4 or 64 MiB."""
MESSAGES, COLLECTIVES = 20, 5
"""Trials of each; the best counts, as the first sets up connections."""
PERIOD = 251
"""After this many numbers a pattern repeats: a prime, so a shifted one differs."""
_SMALL_TAG, _LARGE_TAG = 75, 76
_open: list[tuple[list[Any], np.ndarray, np.ndarray]] = []
"""Messages that were given up, with their numbers: MPI may still write there."""


class MpiFacts(NamedTuple):
    """What MPI tells about itself."""

    library: str
    threads: str
    """How far threads may call it, one of `THREAD_LEVELS`."""


class Passed(NamedTuple):
    """Messages from the previous rank, over MPI."""

    source: int
    right: bool
    latency: float
    """Seconds of a message of one number."""
    bytes_per_second: float


class TimedCollective(NamedTuple):
    """A collective among some ranks, by torch.distributed."""

    kind: str
    """`all-reduce` or `broadcast`."""
    scope: str
    """Among whom: `all ranks`, `within nodes` or `between nodes`."""
    ranks: int
    right: bool
    latency: float
    """Seconds of a collective of one number."""
    bytes_per_second: float


def mpi_facts(world: World) -> MpiFacts | None:
    """Ask MPI; None if this process is alone, which does not load it."""
    if world.comm is None:
        return None
    from mpi4py import MPI

    # Some libraries tell a page, or end with a zero byte.
    library = MPI.Get_library_version().partition("\n")[0].partition(",")[0]
    levels = (
        MPI.THREAD_SINGLE,
        MPI.THREAD_FUNNELED,
        MPI.THREAD_SERIALIZED,
        MPI.THREAD_MULTIPLE,
    )
    level = THREAD_LEVELS[levels.index(MPI.Query_thread())]
    return MpiFacts(library.strip("\0 "), level)


def pass_around(world: World, seconds: float) -> Passed | None:
    """Send messages to the next rank, and time those of the previous one; None if they
    do not come within so many seconds.
    """
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    one, many = np.zeros(1, np.float32), np.zeros(MESSAGE, np.float32)
    end = time.monotonic() + seconds
    times: dict[int, list[float]] = {_SMALL_TAG: [], _LARGE_TAG: []}
    right = True
    for tag, incoming in ((_SMALL_TAG, one), (_LARGE_TAG, many)):
        outgoing = _pattern(len(incoming), world.rank)
        wanted = _pattern(len(incoming), before)
        for _ in range(MESSAGES):
            incoming[:] = -1
            begin = time.perf_counter()
            requests = [
                world.comm.Irecv(incoming, source=before, tag=tag),
                world.comm.Isend(outgoing, dest=after, tag=tag),
            ]
            if not _complete(requests, end):
                _open.append((requests, incoming, outgoing))
                return None
            times[tag].append(time.perf_counter() - begin)
            right = right and np.array_equal(incoming, wanted)
    large = min(times[_LARGE_TAG])
    return Passed(before, right, min(times[_SMALL_TAG]), many.nbytes / large)


def _complete(requests: list[Any], end: float) -> bool:
    # Not sleeping between polls at first: a message takes microseconds.
    for _ in range(1000):
        if all(request.Test() for request in requests):
            return True
    done = lambda: all(request.Test() for request in requests)  # noqa: E731
    return wait_for(done, end - time.monotonic())


def _pattern(number: int, rank: int) -> np.ndarray:
    """Return numbers that tell ranks and places apart. Sums over thousands of ranks are
    exact in float32.
    """
    return (np.arange(number) % PERIOD + rank).astype(np.float32)


def connect(world: World) -> str:
    """Join the group of all ranks, or of this one; return its backend."""
    if world.alone:
        world.join_alone()
    else:
        name = group_backend(world.locations, world.wanted)
        process_group.join(world.role_comm, name, world.device)
    return process_group.backend()


def exchanges(world: World) -> list[TimedCollective]:
    """Time collectives among all ranks, those of each node, and the nodes' first ranks;
    this rank's only. The same call on every rank.
    """
    found = []
    for scope, ranks in scopes([location.host for location in world.locations]):
        everybody = len(ranks) == world.size
        # All ranks must make all groups, in the same order.
        group = dist.group.WORLD if everybody else dist.new_group(list(ranks))
        if world.rank in ranks:
            found.append(_all_reduce(world, scope, ranks, group))
            found.append(_broadcast(world, scope, ranks, group))
    return found


def scopes(hosts: list[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Return who exchanges with whom, by the hosts of all ranks."""
    found = [("all ranks", tuple(range(len(hosts))))]
    nodes = sorted(set(hosts), key=hosts.index)
    if len(nodes) == 1:
        return found
    for node in nodes:
        ranks = tuple(rank for rank, host in enumerate(hosts) if host == node)
        if len(ranks) > 1:
            found.append(("within nodes", ranks))
    found.append(("between nodes", tuple(map(hosts.index, nodes))))
    return found


def _all_reduce(
    world: World, scope: str, ranks: tuple[int, ...], group: Any
) -> TimedCollective:
    def reduce(tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=group)

    def wanted(number: int) -> np.ndarray:
        return len(ranks) * _pattern(number, 0) + np.float32(sum(ranks))

    return _timed(world, "all-reduce", scope, len(ranks), reduce, wanted)


def _broadcast(
    world: World, scope: str, ranks: tuple[int, ...], group: Any
) -> TimedCollective:
    def broadcast(tensor: Tensor) -> None:
        dist.broadcast(tensor, ranks[-1], group=group)

    def wanted(number: int) -> np.ndarray:
        return _pattern(number, ranks[-1])

    return _timed(world, "broadcast", scope, len(ranks), broadcast, wanted)


def _timed(
    world: World,
    kind: str,
    scope: str,
    ranks: int,
    exchange: Callable[[Tensor], None],
    wanted: Callable[[int], np.ndarray],
) -> TimedCollective:
    # As in a run, gloo's numbers lie in host memory.
    gloo = process_group.backend() == "gloo"
    device = torch.device("cpu") if gloo else world.device
    right = True
    best = []
    large = LARGE if device.type == "cpu" else LARGE_ON_GPU
    for number in (1, large):
        times = []
        expected = torch.from_numpy(wanted(number)).to(device)
        for _ in range(COLLECTIVES):
            tensor = torch.from_numpy(_pattern(number, world.rank)).to(device)
            accelerator.synchronize(device)
            begin = time.perf_counter()
            exchange(tensor)
            accelerator.synchronize(device)
            times.append(time.perf_counter() - begin)
            right = right and torch.equal(tensor, expected)
        best.append(min(times))
    speed = 4 * large / best[1]
    return TimedCollective(kind, scope, ranks, right, best[0], speed)
