"""Simulated MPI and torch.distributed: what hpcfed calls of both, between threads.

Calls of a communicator are matched by their order, as MPI matches them; ranks that call
different ones are told. Objects travel as pickles that this process has made itself.
"""

import pickle
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.simulated.processes import Process
from benchmarks.simulated.scheduler import Scheduler

WIRE = 0.01
"""Mean simulated seconds before a rank is at its next collective."""


class Mismatch(RuntimeError):
    """Ranks call different collectives."""


class Meetings:
    """The collectives of a group of processes, in order."""

    def __init__(self, label: str, members: list[Process]) -> None:
        self.label, self.members = label, members
        self.came: dict[int, dict[int, tuple[str, Any]]] = {}
        self.left: dict[int, int] = {}
        self.calls = [0] * len(members)
        self.mail: dict[tuple[int, int, int], deque[bytes]] = {}
        """Messages by source, target and tag."""

    def meet(
        self,
        scheduler: Scheduler,
        rank: int,
        call: str,
        value: Any,
        needs: Callable[[int], bool],
    ) -> list[Any]:
        """Bring a value, wait for the ranks that this one needs; return all values."""
        scheduler.spend(scheduler.chance.expovariate(1 / WIRE))
        number = self.calls[rank]
        self.calls[rank] += 1
        came = self.came.setdefault(number, {})
        came[rank] = call, value
        scheduler.note(f"{self.label} {number} {call}")
        scheduler.changed()
        needed = [one for one in range(len(self.members)) if needs(one)]

        def all_here() -> bool:
            return all(one in came for one in needed)

        missing = ", ".join(self.members[one].name for one in needed if one not in came)
        scheduler.wait(all_here, f"{call} number {number} with {missing}")
        calls = {theirs for theirs, _ in came.values()}
        if len(calls) > 1:
            raise Mismatch(f"call {number} of {self.label}: {', '.join(sorted(calls))}")
        found = [
            came[one][1] if one in came else None for one in range(len(self.members))
        ]
        self.left[number] = self.left.get(number, 0) + 1
        if self.left[number] == len(self.members):
            del self.came[number], self.left[number]
        return found


class Request:
    """A message that is on its way."""

    def Test(self) -> bool:
        return True

    def Wait(self) -> None: ...


class Communicator:
    """One process's end of a communicator of mpi4py."""

    def __init__(self, scheduler: Scheduler, meetings: Meetings, rank: int) -> None:
        self._scheduler, self._meetings, self._rank = scheduler, meetings, rank

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._meetings.members)

    def _meet(
        self, call: str, value: Any, needs: Callable[[int], bool] = lambda rank: True
    ) -> list[Any]:
        return self._meetings.meet(self._scheduler, self._rank, call, value, needs)

    def Barrier(self) -> None:
        self._meet("Barrier", None)

    def bcast(self, value: Any, root: int = 0) -> Any:
        content = pickle.dumps(value) if self._rank == root else b""
        every = self._meet(f"bcast from {root}", content, lambda rank: rank == root)
        return value if self._rank == root else pickle.loads(every[root])

    def allgather(self, value: Any) -> list[Any]:
        return [
            pickle.loads(one) for one in self._meet("allgather", pickle.dumps(value))
        ]

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        every = self._meet(
            f"gather to {root}", pickle.dumps(value), lambda rank: self._rank == root
        )
        return [pickle.loads(one) for one in every] if self._rank == root else None

    def Bcast(self, array: np.ndarray, root: int = 0) -> None:
        every = self._meet(
            f"Bcast from {root}", array.copy(), lambda rank: rank == root
        )
        array[...] = every[root]

    def Gather(self, array: np.ndarray, into: np.ndarray | None, root: int = 0) -> None:
        every = self._meet(
            f"Gather to {root}", array.copy(), lambda rank: self._rank == root
        )
        if into is not None:
            into[...] = np.stack(every)

    def Split(self, colour: int, key: int) -> "Communicator":
        every = self._meet("Split", (colour, key))
        same = [rank for rank, (theirs, _) in enumerate(every) if theirs == colour]
        same.sort(key=lambda rank: every[rank][1])
        members = [self._meetings.members[rank] for rank in same]
        # All members find the same one: it belongs to the job.
        known = members[0].job.groups
        label = f"{self._meetings.label}.{colour}"
        group = known.setdefault(label, Meetings(label, members))
        return Communicator(self._scheduler, group, same.index(self._rank))

    def on_host(self) -> "Communicator":
        """Return the communicator of the ranks of this host."""
        hosts = sorted({one.host for one in self._meetings.members})
        here = self._meetings.members[self._rank].host
        return self.Split(1000 + hosts.index(here), self._rank)

    def isend(self, value: Any, dest: int, tag: int) -> Request:
        self._scheduler.check_alive()
        self._box(self._rank, dest, tag).append(pickle.dumps(value))
        self._scheduler.changed()
        return Request()

    Isend = isend

    def Iprobe(self, source: int, tag: int) -> bool:
        self._scheduler.check_alive()
        return bool(self._box(source, self._rank, tag))

    def recv(self, source: int, tag: int) -> Any:
        box = self._box(source, self._rank, tag)
        self._scheduler.wait(lambda: bool(box), f"a message of rank {source}")
        return pickle.loads(box.popleft())

    def Recv(self, array: np.ndarray, source: int, tag: int) -> None:
        array[...] = self.recv(source, tag)

    def Abort(self, code: int) -> None:
        self._scheduler.check_alive()
        self._meetings.members[self._rank].job.abort(code)
        self._scheduler.check_alive()

    def _box(self, source: int, target: int, tag: int) -> deque[bytes]:
        return self._meetings.mail.setdefault((source, target, tag), deque())


class Store:
    """A store of torch.distributed, which lives in the process of its first rank."""

    def __init__(
        self,
        distributed: "Distributed",
        host: str,
        port: int,
        *_: Any,
        is_master: bool = False,
        timeout: timedelta = timedelta(minutes=5),
        **__: Any,
    ) -> None:
        stores = distributed.stores
        self._scheduler = distributed.scheduler
        process = distributed.process()
        if is_master:
            port = 20000 + len(stores)
            stores[port] = process, {}
        self.port = port
        self._master, self._values = stores[port]
        self._seconds = timeout.total_seconds()
        # torch tries a closed port again and again.
        self._answered(patience=self._seconds)

    def _answered(self, *, patience: float = 0.0) -> None:
        """Wait until the process with the store answers."""
        master = self._master
        self._scheduler.wait(
            lambda: not master.halted or master.code is not None,
            f"the store of {master.name}",
        )
        if master.code is not None:
            self._scheduler.spend(patience)
            raise RuntimeError("the store is gone")

    def set(self, name: str, value: str) -> None:
        self._answered()
        self._values[name] = value.encode()
        self._scheduler.changed()

    def get(self, name: str) -> bytes:
        return self.multi_get([name])[0]

    def multi_get(self, names: list[str]) -> list[bytes]:
        self._answered()
        # torch waits for names that nobody has set, and gives up after a while.
        what = f"{', '.join(names)} in the store"
        if not self._scheduler.wait(lambda: self._has(names), what, self._seconds):
            raise RuntimeError(f"nobody has set {what}")
        return [self._values[name] for name in names]

    def _has(self, names: list[str]) -> bool:
        return all(name in self._values for name in names)

    def check(self, names: list[str]) -> bool:
        self._answered()
        return self._has(names)


class Group:
    """One process's end of a process group."""

    def __init__(self, backend: str, meetings: Meetings, rank: int) -> None:
        self.backend, self.meetings, self.rank = backend, meetings, rank


class Distributed:
    """What hpcfed calls of torch.distributed."""

    class distributed_c10d:
        @staticmethod
        def _set_pg_timeout(timeout: Any) -> None: ...

    def __init__(self, scheduler: Scheduler, process: Callable[[], Process]) -> None:
        self.scheduler, self.process = scheduler, process
        self.stores: dict[int, tuple[Process, dict[str, bytes]]] = {}
        self._groups: dict[int, Meetings] = {}

    def TCPStore(self, host: str, port: int, *rest: Any, **named: Any) -> Store:
        return Store(self, host, port, *rest, **named)

    def HashStore(self) -> None: ...

    def is_backend_available(self, backend: str) -> bool:
        return backend == "gloo"

    def is_initialized(self) -> bool:
        return self.process().group is not None

    def init_process_group(
        self, backend: str, *, store: Store | None, rank: int, world_size: int, **_: Any
    ) -> None:
        process = self.process()
        label = f"{process.job.name} {backend}"
        if store is None:
            group = Meetings(label, [process])
        else:
            group = self._groups.setdefault(
                store.port, Meetings(label, [process] * world_size)
            )
            group.members[rank] = process
        process.group = Group(backend, group, rank)
        self._meet("init", None)

    def destroy_process_group(self) -> None:
        self.process().group = None

    def get_rank(self) -> int:
        return int(self.process().group.rank)

    def get_world_size(self) -> int:
        return len(self.process().group.meetings.members)

    def get_backend(self) -> str:
        return str(self.process().group.backend)

    def _meet(self, call: str, value: Any) -> list[Any]:
        group = self.process().group
        found: list[Any] = group.meetings.meet(
            self.scheduler, group.rank, call, value, lambda rank: True
        )
        return found

    def all_reduce(self, tensor: Tensor) -> None:
        every = self._meet(f"all_reduce {tuple(tensor.shape)}", tensor.clone())
        total = every[0].clone()
        for other in every[1:]:
            total += other
        tensor.copy_(total)

    def all_gather(self, into: list[Tensor], tensor: Tensor) -> None:
        every = self._meet("all_gather", tensor.clone())
        for target, theirs in zip(into, every, strict=True):
            target.copy_(theirs)

    def all_gather_into_tensor(self, into: Tensor, tensor: Tensor) -> None:
        every = self._meet("all_gather_into_tensor", tensor.clone())
        into.copy_(torch.cat(every))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        every = self._meet(f"broadcast from {source}", tensor.clone())
        tensor.copy_(every[source])

    def all_to_all_single(
        self,
        into: Tensor,
        tensor: Tensor,
        *,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
    ) -> None:
        pieces = list(tensor.clone().split(input_split_sizes))
        every = self._meet("all_to_all_single", pieces)
        mine = [theirs[self.get_rank()] for theirs in every]
        into.copy_(torch.cat(mine))
