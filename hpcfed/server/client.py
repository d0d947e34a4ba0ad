"""The server as a worker's federation sees it."""

import time
from typing import TypeVar

import numpy as np
from torch import Tensor

from hpcfed.errors import GRACE
from hpcfed.record.checkpoints import StoredFile
from hpcfed.runtime.collectives import Collectives
from hpcfed.server.report import LearningReport
from hpcfed.server.requests import (
    Answer,
    Bank,
    Failure,
    Guide,
    Invert,
    InvertedRows,
    KnownRows,
    Learn,
    Learned,
    Leave,
    Recall,
    Reconstruct,
    Request,
    Restore,
    Rows,
    Sample,
    Save,
    Store,
    Stored,
)
from hpcfed.server.transport import Transport

A = TypeVar("A", bound=Answer)


class ServerClient:
    """One seed's requests to the server.

    All workers call the same methods in the same order, each with its own clients.
    """

    def __init__(
        self, transport: Transport, seed: int, collectives: Collectives
    ) -> None:
        self._transport = transport
        self._seed = seed
        self._collectives = collectives
        self._reports: list[tuple[int, LearningReport]] = []

    def reports(self) -> list[tuple[int, LearningReport]]:
        """Return what was learnt since the last call, each with its round."""
        reports, self._reports = self._reports, []
        return reports

    def bank(self, round: int, clients: np.ndarray, rows: Tensor) -> None:
        """Hand in a round's uploads; they travel while the worker goes on."""
        self._tell(
            Bank(seed=self._seed, round=round, clients=clients, rows=rows.float())
        )

    def learn(self, round: int) -> None:
        """Have the model train on the banked uploads, and wait for it."""
        answer, seconds = self._ask(Learn(seed=self._seed), Learned)
        if answer.report is not None:
            # Until its turn the request waits for uploads that are still on their way.
            answer.report.seconds["collect"] = seconds - answer.seconds
            self._reports.append((round, answer.report))

    def invert(
        self, clients: np.ndarray, *, depth: int | None = None
    ) -> tuple[Tensor, np.ndarray]:
        """Return rows generated from the clients' newest uploads, and which clients
        the server knows; the others' rows are zero.
        """
        request = Invert(seed=self._seed, clients=clients, depth=depth)
        answer, seconds = self._ask(request, InvertedRows)
        if self._reports:
            round, report = self._reports.pop()
            report = report.with_inversion(
                recognised=answer.recognised,
                invert=answer.seconds,
                transfer=seconds - answer.seconds,
            )
            self._reports.append((round, report))
        return answer.rows, answer.known

    def recall(self, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return the clients' newest uploads, and which clients the server knows."""
        answer, _ = self._ask(Recall(seed=self._seed, clients=clients), KnownRows)
        return answer.rows, answer.known

    def reconstruct(self, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return the newest uploads after a pass through the autoencoder alone, and
        which clients the server knows.
        """
        answer, _ = self._ask(Reconstruct(seed=self._seed, clients=clients), KnownRows)
        return answer.rows, answer.known

    def sample(self, clients: np.ndarray) -> Tensor:
        """Return a row out of noise alone for each client."""
        answer, _ = self._ask(Sample(seed=self._seed, clients=clients), Rows)
        return answer.rows

    def guide(
        self,
        clients: np.ndarray,
        before: Tensor,
        after: Tensor,
        *,
        strength: float,
        start: int,
        steps: int,
    ) -> Tensor:
        """Return new clients' rows after a local update, guided by the model."""
        request = Guide(
            seed=self._seed,
            clients=clients,
            before=before,
            after=after,
            strength=strength,
            start=start,
            steps=steps,
        )
        answer, _ = self._ask(request, Rows)
        return answer.rows

    def save(self, path: str) -> None:
        """Write the trained model to a file."""
        self._ask(Save(seed=self._seed, path=path), Answer)

    def store(self, folder: str) -> tuple[StoredFile, ...]:
        """Write bank and model to a checkpoint's folder, and return the files."""
        answer, _ = self._ask(Store(seed=self._seed, folder=folder), Stored)
        return answer.files

    def restore(self, folder: str) -> None:
        """Read bank and model from a checkpoint's folder."""
        self._ask(Restore(seed=self._seed, folder=folder), Answer)

    def leave(self) -> None:
        """Tell the server that this seed asks nothing more."""
        self._tell(Leave(seed=self._seed))

    def _ask(self, request: Request, kind: type[A]) -> tuple[A, float]:
        """Return the answer, and the seconds until it was there.

        Seconds before our turn are not counted: they belong to other seeds.
        """

        def ask() -> tuple[Answer, float]:
            begin = time.perf_counter()
            answer = self._transport.ask(request)
            return answer, time.perf_counter() - begin

        self._count_bytes(request)
        answer, seconds = self._collectives.in_turn(ask)
        if isinstance(answer, Failure):
            if not self._collectives.world.is_root:
                time.sleep(GRACE)  # the root prints the line for all, and ends them
            raise ArithmeticError(answer.reason)
        assert isinstance(answer, kind)
        return answer, seconds

    def _tell(self, request: Request) -> None:
        self._count_bytes(request)
        self._collectives.in_turn(lambda: self._transport.tell(request))

    def _count_bytes(self, request: Request) -> None:
        """Count a request's rows as traffic, unless they stay in this process."""
        if self._collectives.world.alone:
            return
        for tensor in request.tensors().values():
            self._collectives.bytes_sent += tensor.numel() * tensor.element_size()
