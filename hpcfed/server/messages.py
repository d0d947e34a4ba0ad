"""Messages between workers and server, and how they are merged and divided.

All workers send the same request together, each about its own clients. An array or
tensor in a message has one entry per client of the worker. Every other field is the
same on all workers. `merge`, `divide` and the wire rely on this rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from hpcfed.server.rank import ServerRank

# eq=False: messages are never compared, and arrays would make == ambiguous.


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """A request, or an answer to one."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are sent in separate buffers."""
        found = {}
        # Without client ids and flags: they are small and are sent in the header.
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                found[item.name] = value
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer(Message):
    """An answer that only confirms that the request is done."""

    seconds: float = 0.0
    """Seconds that the server needed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Failure(Answer):
    """The request failed because the model has diverged."""

    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Halt(Failure):
    """The server was told to stop while it learnt, and did."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows(Answer):
    """A generated row for each client."""

    rows: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownRows(Rows):
    """A row for each client that has an upload in the bank; zeros for the others."""

    known: np.ndarray
    """Which clients have an upload in the bank."""


M = TypeVar("M", bound=Message)
A = TypeVar("A", bound=Answer)


@dataclass(frozen=True, kw_only=True, eq=False)
class Request(Message, Generic[A]):
    """One worker's request; the answer is an `A`.

    Each kind of request is a class: its fields are sent, and `handle` runs on every
    server rank.
    """

    answered: ClassVar[bool] = True
    """Whether workers wait for an answer."""
    seed: int
    """Which model to ask: each stacked seed has its own."""

    def handle(self, rank: "ServerRank") -> A:
        """Answer the merged request, which is about the clients of all workers."""
        raise NotImplementedError

    @property
    def num_clients(self) -> int:
        """The number of entries in the answer's arrays."""
        return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientRequest(Request[A]):
    """A request about clients, given by their ids."""

    clients: np.ndarray

    @property
    def num_clients(self) -> int:
        return len(self.clients)


@dataclass(eq=False)
class Posted(Generic[A]):
    """A request whose sender goes on, and asks for the answer later."""

    request: Request[A]
    answer: A | Failure | None = None
    """None until it is received."""


def merge(requests: Sequence[M]) -> M:
    """Merge the workers' requests into one about all their clients, in rank order.

    Only this function checks that all workers send the same request.
    """
    first = requests[0]
    kinds = {type(request).__name__ for request in requests}
    assert len(kinds) == 1, f"workers ask for different things: {sorted(kinds)}"
    joined: dict[str, Any] = {}
    for item in fields(first):
        name = item.name
        values = [getattr(request, name) for request in requests]
        if isinstance(values[0], Tensor):
            joined[name] = torch.cat(values)
        elif isinstance(values[0], np.ndarray):
            joined[name] = np.concatenate(values)
        else:
            agreed = values.count(values[0]) == len(values)
            assert agreed, f"workers disagree about {name}: {values}"
    return replace(first, **joined)


def divide(answer: M, counts: Sequence[int]) -> list[M]:
    """Divide an answer among workers; `counts` are their numbers of clients."""
    answers = []
    start = 0
    for count in counts:
        entries = slice(start, start + count)
        start += count
        share: dict[str, Any] = {}
        for item in fields(answer):
            value = getattr(answer, item.name)
            # Arrays have an entry per client; everything else is the same for all.
            if isinstance(value, (Tensor, np.ndarray)):
                share[item.name] = value[entries]
        answers.append(replace(answer, **share))
    return answers
