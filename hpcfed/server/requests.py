"""What workers ask of the server, and what it answers: one dataclass for each.

All workers send the same request together, each about its own clients. An array or
tensor in a message has one entry per client of the worker. Every other field is the
same on all workers. `merge`, `divide` and the wire rely on this rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpcfed.results.checkpoints import StoredFile
from hpcfed.server.diffusion import Sign
from hpcfed.server.report import LearningReport

M = TypeVar("M", bound="Message")


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


# Requests


@dataclass(frozen=True, kw_only=True, eq=False)
class Request(Message):
    """One worker's request. `seed` says whose model: stacked seeds have one each."""

    answered: ClassVar[bool] = True
    """Whether workers wait for an answer."""
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientRequest(Request):
    """A request about clients, given by their ids."""

    clients: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Begin(Request):
    """Say which folder the seed's run writes to: the server leaves signs of its progress
    there.
    """

    answered = False
    folder: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Bank(ClientRequest):
    """Remember these rows of a round: updates, or uploads with their starts."""

    answered = False
    round: int
    rows: Tensor
    starts: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Learn(Request):
    """Train the model on the banked uploads. Answer: `Learned`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recall(ClientRequest):
    """Return the clients' newest rows as they were. Answer: `KnownRows`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruct(ClientRequest):
    """Pass the newest uploads through the autoencoder alone. Answer: `KnownRows`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Invert(ClientRequest):
    """Generate rows from the newest uploads by inversion. Answer: `InvertedRows`."""

    depth: int | None = None
    """Diffusion steps t0; None: --inversion-depth."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Average(ClientRequest):
    """Return the mean of each client's rows in the bank. Answer: `KnownRows`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Compare(ClientRequest):
    """Compare generated rows with those in the bank. Answer: `Compared`."""

    rows: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample(ClientRequest):
    """Generate a row out of noise for each client. Answer: `Rows`."""

    whole: bool = False
    """Whether a loaded model adds updates to the start that its file has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Guide(ClientRequest):
    """Guide new clients' rows, given before and after a local update. Answer: `Rows`."""

    before: Tensor
    after: Tensor
    strength: float
    start: int
    steps: int
    sign: Sign = "progress"
    noise: str | None = None
    """What fresh noise is drawn for; None: none is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Save(Request):
    """Write the trained model to a file. Answer: `Answer`."""

    path: str
    start: bytes = b""
    """The float32 columns that updates may be added to, if any. Bytes, because an array
    would have an entry per client.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class Store(Request):
    """Write bank and model to a checkpoint's folder. Answer: `Stored`."""

    folder: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Restore(Request):
    """Read bank and model from a checkpoint's folder. Answer: `Answer`."""

    folder: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Leave(Request):
    """Announce that this seed asks nothing more."""

    answered = False


# Answers


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
class Learned(Answer):
    """What training took; None on workers that do not record it."""

    report: LearningReport | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows(Answer):
    """A generated row for each client."""

    rows: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownRows(Rows):
    """A row for each client that has an upload in the bank; zeros for the others."""

    known: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class InvertedRows(KnownRows):
    """Rows by inversion."""

    recognised: float
    """The share of all workers' clients whose update is nearest to their own ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Compared(Answer):
    """How near rows are to those in the bank, as `likeness.Likeness` says; NaN for
    clients that are not in it.
    """

    own: np.ndarray
    nearest: np.ndarray
    nearest_is_own: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored(Answer):
    """The files that the first server rank has written; none on the others."""

    files: tuple[StoredFile, ...]


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
