"""MPI, and where it has placed the ranks: nodes, cores and GPUs."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from hpcfed.doctor.finding import (
    Finding,
    by_value,
    error,
    fine,
    ranks_text,
    skipped,
    warning,
)
from hpcfed.errors import count
from hpcfed.runtime.gpu_state import gpu_state, visible_gpus
from hpcfed.runtime.launcher import core_of
from hpcfed.runtime.location import Location
from hpcfed.runtime.machine import cores_text
from hpcfed.runtime.probes import THREAD_LEVELS, MpiFacts, mpi_facts
from hpcfed.runtime.world import World

NEEDED = "serialized"
"""The thread level that stacked seeds need: they call MPI from threads, in turn."""
BIND = (
    "bind each rank to cores of its own: mpirun --map-by slot:PE=CORES --bind-to core, "
    "srun --cpus-per-task CORES, or launch/mpirun"
)


class Placed(NamedTuple):
    """Where a rank is, and what is around it."""

    location: Location
    mpi: MpiFacts | None
    cores: frozenset[tuple[str, ...]]
    """Its cores by socket, without hardware threads."""
    host_cores: int
    """Cores of the whole host."""
    visible_gpus: int
    gpu_node: int | None = None
    """The NUMA node of its GPU; None if unknown."""
    tasks: int = 1
    """Tasks of the Slurm job, if this process is alone in it."""


Ranks = Mapping[int, Placed]


def look(world: World) -> Placed:
    """Find out where this rank is."""
    here = world.location
    on_gpu = here.device != "cpu"
    threads = {thread for node in here.machine.numa for thread in node}
    return Placed(
        location=here,
        mpi=mpi_facts(world),
        cores=frozenset(map(core_of, here.cores)),
        host_cores=len(set(map(core_of, threads | set(here.cores)))),
        visible_gpus=visible_gpus() if on_gpu else 0,
        gpu_node=gpu_state(here.device).numa if on_gpu else None,
        tasks=_tasks() if world.alone else 1,
    )


def _tasks() -> int:
    tasks = os.environ.get("SLURM_NTASKS", "")
    # One process of a step of one task is as it should be.
    in_step = os.environ.get("SLURM_STEP_ID", "").isdigit()
    return int(tasks) if tasks.isdigit() and not in_step else 1


def judge(ranks: Ranks) -> list[Finding]:
    """Judge MPI and the placement of all ranks."""
    return [_mpi(ranks), _nodes(ranks), *_cores(ranks), *_gpus(ranks)]


def _mpi(ranks: Ranks) -> Finding:
    facts = {rank: placed.mpi for rank, placed in ranks.items()}
    known = by_value({rank: mpi for rank, mpi in facts.items() if mpi is not None})
    if not known:
        tasks = next(iter(ranks.values())).tasks
        if tasks > 1:
            return warning(
                "MPI",
                f"one process, but the Slurm job has {tasks} tasks",
                "start it by srun: srun --mpi=pmix python -m hpcfed doctor",
            )
        return skipped("MPI", "one process, which does not load MPI")
    if len(known) > 1:
        told = "; ".join(
            f"{_mpi_text(mpi)} on {ranks_text(own)}" for mpi, own in known.items()
        )
        return error("MPI", told, "give all nodes the same MPI and environment")
    mpi = next(iter(known))
    if THREAD_LEVELS.index(mpi.threads) < THREAD_LEVELS.index(NEEDED):
        advice = "use an MPI with threads, or one seed a run: several share MPI"
        return warning("MPI", _mpi_text(mpi), advice)
    return fine("MPI", _mpi_text(mpi))


def _mpi_text(mpi: MpiFacts) -> str:
    return f"{mpi.library}, thread level {mpi.threads}"


def _nodes(ranks: Ranks) -> Finding:
    hosts = by_value({rank: placed.location.host for rank, placed in ranks.items()})
    numbers = {len(own) for own in hosts.values()}
    if len(numbers) > 1:
        told = ", ".join(f"{len(own)} on {host}" for host, own in hosts.items())
        advice = (
            "give every node as many: --ntasks-per-node, or mpirun --map-by ppr:N:node"
        )
        return warning("ranks", told, advice)
    each = count(numbers.pop(), "rank")
    where = next(iter(hosts)) if len(hosts) == 1 else f"each of {len(hosts)} nodes"
    return fine("ranks", f"{each} on {where}")


def _cores(ranks: Ranks) -> list[Finding]:
    found = []
    hosts = by_value({rank: placed.location.host for rank, placed in ranks.items()})
    for own in hosts.values():
        finding = _shared_cores({rank: ranks[rank] for rank in own})
        if finding is not None:
            found.append(finding)
    if found:
        return found
    numbers = sorted({len(placed.cores) for placed in ranks.values()})
    each = " or ".join(str(number) for number in numbers)
    return [fine("cores", f"{each} a rank, which no other rank has")]


def _shared_cores(ranks: Ranks) -> Finding | None:
    """Judge the ranks of one host; None if no core has two ranks."""
    cores = frozenset().union(*(placed.cores for placed in ranks.values()))
    if sum(len(placed.cores) for placed in ranks.values()) == len(cores):
        return None
    threads = {core for placed in ranks.values() for core in placed.location.cores}
    have = "has" if len(cores) == 1 else "have"
    told = (
        f"{count(len(cores), 'core')} ({cores_text(threads)}) {have} {len(ranks)} ranks"
    )
    if len(cores) >= len(ranks):
        return warning("cores", f"not bound: {told}", BIND, *ranks)
    host = next(iter(ranks.values())).host_cores
    if host > len(cores):
        return error("cores", f"{told}; the node has {host}", BIND, *ranks)
    advice = "start no more ranks than cores: they slow each other down"
    return warning("cores", told, advice, *ranks)


def _gpus(ranks: Ranks) -> list[Finding]:
    on_gpu = {rank: one for rank, one in ranks.items() if one.visible_gpus}
    if not on_gpu:
        return [skipped("GPUs of ranks", "no GPU")]
    found = []
    without = [rank for rank in ranks if rank not in on_gpu]
    if without:
        advice = "give it one (--gpus-per-task 1): until then all ranks use gloo"
        found.append(warning("GPUs of ranks", "no GPU", advice, *without))
    places = {rank: one.location for rank, one in on_gpu.items()}
    devices = by_value({rank: (at.host, at.device) for rank, at in places.items()})
    for own in devices.values():
        if len(own) > 1:
            told = f"{len(own)} ranks share a GPU"
            advice = "start as many ranks as GPUs: --ntasks-per-node, --gpus-per-task 1"
            found.append(warning("GPUs of ranks", told, advice, *own))
    found += _idle(on_gpu) + _far(on_gpu)
    if found:
        return found
    return [fine("GPUs of ranks", "each rank has a GPU of its own")]


def _idle(ranks: Ranks) -> list[Finding]:
    """Name the nodes that have more GPUs than their ranks use."""
    found = []
    hosts = by_value({rank: placed.location.host for rank, placed in ranks.items()})
    for own in hosts.values():
        used = len({ranks[rank].location.device for rank in own})
        visible = ranks[own[0]].visible_gpus
        if visible > used:
            told = f"{used} of {visible} GPUs are used"
            advice = "start a rank for each GPU"
            found.append(warning("GPUs of ranks", told, advice, *own))
    return found


def _far(ranks: Ranks) -> list[Finding]:
    """Name the ranks whose cores are far from their GPU."""
    found = []
    for rank, placed in ranks.items():
        nodes = placed.location.machine.nodes_of(placed.location.cores)
        if placed.gpu_node is None or placed.gpu_node in nodes:
            continue
        told = f"its GPU is at NUMA node {placed.gpu_node}, its cores at {cores_text(nodes)}"
        advice = "bind it to cores near its GPU: srun --gpu-bind=closest, or numactl"
        found.append(warning("GPUs of ranks", told, advice, rank))
    return found
