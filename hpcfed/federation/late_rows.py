"""Rows that the server generates while clients go on, from the beginning of a learning
until a round starts from them.

Checkpoints and clients that move wait for the rows. From then on the channel's memory
holds them, like everything that is on its way.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hpcfed.federation.channel import Memory
from hpcfed.runtime.device import on_device
from hpcfed.runtime.timer import Timer
from hpcfed.server.client import ServerClient
from hpcfed.server.messages import Posted
from hpcfed.server.report import LearningReport
from hpcfed.server.requests import LearnedRows

COLUMNS, KNOWN, ROW = "late-columns", "late-known", "late-row"
"""Names in the channel's memory."""


@dataclass(frozen=True)
class Generation:
    """What the server has generated, as of the round after which it began."""

    columns: Tensor
    """The generated columns of every client of this rank."""
    known: np.ndarray
    """Which of these clients the server knows; the others' columns mean nothing."""
    row: Tensor
    """The generated columns of the server's row."""


@dataclass
class _Learning:
    """A learning that may still go on."""

    after: int
    posted: Posted[LearnedRows]
    starts: Tensor


class LateRows:
    """At most one learning that clients do not wait for, on one worker."""

    def __init__(self, server: ServerClient, memory: Memory, timer: Timer) -> None:
        self._server = server
        self._memory = memory
        self._timer = timer
        self._learning: _Learning | None = None
        self._report: LearningReport | None = None
        """The report of a learning whose rows are here, until it is recorded."""
        self._waited = 0.0
        """Seconds of waiting that are not recorded yet."""

    def begin(
        self, clients: np.ndarray, *, after: int, starts: Tensor, row: Tensor
    ) -> None:
        """Let the server learn from what it has now, after this round.

        What it generates for the clients will be added to their `starts` of now; `row`
        has the generated columns of the server's row.
        """
        assert self._learning is None, "the server learns one thing at a time"
        posted, self._waited = self._server.begin_learning(clients)
        self._learning = _Learning(after, posted, starts.clone())
        self._memory.keep(ROW, row)

    def settle(self) -> None:
        """Wait for the rows of a learning that may still go on."""
        learning = self._learning
        if learning is None:
            return
        # A checkpoint's time counts as `record`, but not this.
        before = self._timer.switch("server")
        answer, waited = self._server.finish_learning(learning.posted)
        columns = answer.rows.to(learning.starts.dtype) + learning.starts
        rows = self._memory.rows
        rows[COLUMNS] = columns
        rows[KNOWN] = on_device(answer.known, columns.device)
        self._learning = None
        self._waited += waited
        if answer.report is not None:
            self._report = answer.report
            self._report.after = learning.after
        self._timer.switch(before)

    def take(self, device: torch.device) -> Generation:
        """Return the rows that the next round starts from, or the run ends with; wait
        for them if need be.
        """
        self.settle()
        memory = self._memory
        # A checkpoint is read to the host.
        return Generation(
            memory.rows.pop(COLUMNS).to(device),
            memory.rows.pop(KNOWN).cpu().numpy(),
            memory.shared.pop(ROW).to(device),
        )

    def recordable(self) -> tuple[LearningReport | None, float]:
        """Return the report and the seconds of waiting that are not recorded yet."""
        found = self._report, self._waited
        self._report, self._waited = None, 0.0
        return found
