"""The interface through which a worker's federation talks to the server."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
from torch import Tensor

from hpcfed.errors import GRACE, Diverged, Halted
from hpcfed.results.checkpoints import StoredFile
from hpcfed.runtime.collectives import Collectives
from hpcfed.server.guidance import Guidance
from hpcfed.server.half_learnt import Asked
from hpcfed.server.likeness import Likeness
from hpcfed.server.messages import A, Failure, Halt, KnownRows, Posted, Request
from hpcfed.server.report import Inversion, LearningReport
from hpcfed.server.requests import (
    Bank,
    Begin,
    Compare,
    Guide,
    Invert,
    Learn,
    LearnAndInvert,
    LearnedRows,
    Leave,
    Recall,
    Reconstruct,
    Restore,
    SampleRows,
    Save,
    Store,
)
from hpcfed.server.rivals import (
    Average,
    AverageInversions,
    Halfway,
    InvertAverage,
    Shrink,
)
from hpcfed.server.transport import Transport

T = TypeVar("T")


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
        self.saves_every = 0.0
        """Seconds after which a learning saves how far it is, and so may stop; 0: it
        does not. The loop of rounds sets it, since it knows the checkpoints.
        """

    def begin(self, folder: str, asked: Asked = lambda: False) -> None:
        """Tell the server which folder the run writes to. Once `asked` says so on a
        rank, learnings that save how far they are stop soon.
        """
        self._transport.heed(asked)
        self._tell(Begin(seed=self._seed, folder=folder))

    def bank(
        self,
        round: int,
        clients: np.ndarray,
        rows: Tensor,
        starts: Tensor | None = None,
    ) -> None:
        """Send a round's updates, or its uploads and their starts. The worker does not
        wait for the transfer.
        """
        # Always float32, whatever clients train in: the server's model expects it.
        request = Bank(
            seed=self._seed,
            round=round,
            clients=clients,
            rows=rows.float(),
            starts=None if starts is None else starts.float(),
        )
        self._tell(request)

    def learn(self) -> LearningReport | None:
        """Train the model on the banked uploads, and wait for it; raise Halted if it
        stops.

        If the server has its own ranks, only the first worker gets the report.
        """
        answer, seconds = self._ask(Learn(seed=self._seed, every=self.saves_every))
        report = answer.report
        if report is not None:
            # Before it learns, the server waits for uploads that are still in transit.
            report.seconds["collect"] = seconds - answer.seconds
        return report

    def invert(self, clients: np.ndarray, *, depth: int | None = None) -> Inversion:
        """Return rows generated from the clients' newest uploads.

        `depth` is the number of diffusion steps; None: --inversion-depth.
        """
        request = Invert(seed=self._seed, clients=clients, depth=depth)
        answer, seconds = self._ask(request)
        return replace(answer, transfer=seconds - answer.seconds)

    def average_inversions(
        self, clients: np.ndarray, *, number: int
    ) -> tuple[Tensor, np.ndarray]:
        """Return the mean of several inversions of each client's newest upload, each
        with noise of its own, and which clients the server knows.
        """
        request = AverageInversions(seed=self._seed, clients=clients, number=number)
        return self._known(request)

    def invert_average(self, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return rows generated from the mean of each client's rows in the bank, and
        which clients the server knows.
        """
        return self._known(InvertAverage(seed=self._seed, clients=clients))

    def begin_learning(self, clients: np.ndarray) -> tuple[Posted[LearnedRows], float]:
        """Let the model learn from what is banked now, and generate rows from the
        clients' newest uploads; `finish_learning` returns them. Also return the seconds
        until the server had all that it learns from.
        """
        request = LearnAndInvert(
            seed=self._seed, clients=clients, every=self.saves_every
        )
        self._count_bytes(request)
        return self._timed(lambda: self._transport.post(request))

    def finish_learning(self, posted: Posted[LearnedRows]) -> tuple[LearnedRows, float]:
        """Return a learning's rows and, on the first worker, its report. Wait for it if
        it is not over; also return the seconds of this wait.
        """
        return self._received(lambda: self._transport.collect(posted))

    def recall(self, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return the clients' newest uploads, and which clients the server knows."""
        return self._known(Recall(seed=self._seed, clients=clients))

    def average(self, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return the mean of each client's rows in the bank, and which clients the
        server knows.
        """
        return self._known(Average(seed=self._seed, clients=clients))

    def shrink(self, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return the best linear estimate of each client's row from those in the bank,
        and which clients the server knows.
        """
        return self._known(Shrink(seed=self._seed, clients=clients))

    def halfway(self, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return rows halfway between the mean of each client's rows in the bank and
        that of all clients, and which clients the server knows.
        """
        return self._known(Halfway(seed=self._seed, clients=clients))

    def reconstruct(self, clients: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return the newest uploads after a pass through the autoencoder alone, and
        which clients the server knows.
        """
        return self._known(Reconstruct(seed=self._seed, clients=clients))

    def compare(self, clients: np.ndarray, rows: Tensor) -> Likeness:
        """Return how close generated rows are to those in the bank; NaN for clients
        that are not in it.
        """
        request = Compare(seed=self._seed, clients=clients, rows=rows.float())
        return self._ask(request)[0]

    def sample(self, clients: np.ndarray, *, whole: bool = False) -> Tensor:
        """Generate a row from noise alone for each client. With `whole`, add a loaded
        model's updates to the start in its file.
        """
        request = SampleRows(seed=self._seed, clients=clients, whole=whole)
        return self._ask(request)[0].rows

    def guide(
        self, clients: np.ndarray, before: Tensor, after: Tensor, how: Guidance
    ) -> Tensor:
        """Return new clients' rows after a local update, guided by the model."""
        request = Guide(
            seed=self._seed,
            clients=clients,
            before=before.float(),
            after=after.float(),
            how=how,
        )
        return self._ask(request)[0].rows

    def save(self, path: str, start: Tensor | None = None) -> None:
        """Write the trained model to a file, with the columns to which its updates may
        be added.
        """
        columns = b"" if start is None else start.float().cpu().numpy().tobytes()
        # Use the first worker's: others may have rounded differently.
        columns = self._collectives.bcast(columns)
        self._ask(Save(seed=self._seed, path=path, start=columns))

    def store(self, folder: str) -> tuple[StoredFile, ...]:
        """Write bank and model to a checkpoint's folder, and return the files."""
        return self._ask(Store(seed=self._seed, folder=folder))[0].files

    def restore(self, folder: str) -> None:
        """Read bank and model from a checkpoint's folder."""
        self._ask(Restore(seed=self._seed, folder=folder))

    def leave(self) -> None:
        """Tell the server that this seed has no more requests."""
        self._tell(Leave(seed=self._seed))

    def _known(self, request: Request[KnownRows]) -> tuple[Tensor, np.ndarray]:
        answer, _ = self._ask(request)
        return answer.rows, answer.known

    def _ask(self, request: Request[A]) -> tuple[A, float]:
        """Return the answer, and the seconds until it arrived."""
        self._count_bytes(request)
        return self._received(lambda: self._transport.ask(request))

    def _received(self, receive: Callable[[], A | Failure]) -> tuple[A, float]:
        """Return the answer that `receive` waits for, and the seconds until it arrived."""
        answer, seconds = self._timed(receive)
        if isinstance(answer, Halt):
            raise Halted
        if isinstance(answer, Failure):
            # The root prints the message and ends all ranks, so give it time.
            if not self._collectives.world.is_root:
                time.sleep(GRACE)
            raise Diverged(answer.reason)
        return answer, seconds

    def _timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """Return the result of work that uses the transport, and its seconds.

        The wait for our turn does not count: it belongs to other seeds.
        """

        def timed() -> tuple[T, float]:
            begin = time.perf_counter()
            result = work()
            seconds = time.perf_counter() - begin
            return result, seconds

        # Stacked seeds share the transport, and take turns alike on all ranks.
        return self._collectives.in_turn(timed)

    def _tell(self, request: Request) -> None:
        self._count_bytes(request)
        self._collectives.in_turn(lambda: self._transport.tell(request))

    def _count_bytes(self, request: Request) -> None:
        """Count a request's rows as traffic, unless they stay in this process."""
        collectives = self._collectives
        if collectives.world.alone:
            return
        for tensor in request.tensors().values():
            collectives.bytes_sent += tensor.nbytes
