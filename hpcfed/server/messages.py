"""Messages between workers and server: how they are made, joined and shared out.

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

# Messages are compared nowhere: arrays would make == ambiguous, hence eq=False.


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """A request, or an answer to one."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that travel in buffers of their own."""
        found = {}
        # Not client ids and flags: a few bytes each, they travel with the header.
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                found[item.name] = value
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer(Message):
    """An answer that says no more than that it is done."""

    seconds: float = 0.0
    """Seconds that the server took."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Failure(Answer):
    """There is no answer, because the model has diverged."""

    reason: str


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
    """One worker's request, which is answered by an `A`.

    A kind of request is one class: its fields are what travels, and `handle` is what
    every server rank does about it.
    """

    answered: ClassVar[bool] = True
    """Whether workers wait for an answer."""
    seed: int
    """Whose model is asked: stacked seeds have one each."""

    def handle(self, rank: "ServerRank") -> A:
        """Answer the merged request, which is about the clients of all workers."""
        raise NotImplementedError

    @property
    def num_clients(self) -> int:
        """How many entries arrays of the answer have."""
        return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientRequest(Request[A]):
    """A request about clients, given by their ids."""

    clients: np.ndarray

    @property
    def num_clients(self) -> int:
        return len(self.clients)


def merge(requests: Sequence[M]) -> M:
    """Join the workers' requests into one about all their clients, in rank order.

    This is the one place that checks that the workers agree about what they ask.
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
    """Give every worker the entries of its own clients, of which it has `counts`."""
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
