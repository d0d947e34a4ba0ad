"""hpcfed with faults planted on order; every round is told
and on disk at once.

Usage: faulty.py FOLDER hpcfed's words…. FOLDER/order-RANK holds the kind of fault that
the rank commits in its next training, and is gone when that is done. What must happen
again when the round is repeated is kept in FOLDER/ledger. With FOLDER/reference nothing
runs out of memory: the rounds in which that happened have few clients at a time.
FOLDER/pace holds the seconds by which every round takes longer, so that a short run can
be hit in any of its rounds.
"""

import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpcfed import __main__
from hpcfed.clients.job import Losses, TrainingJob
from hpcfed.clients.training import StackTraining
from hpcfed.experiment import progress
from hpcfed.federation.cohort import Cohort
from hpcfed.federation.training import LocalTraining
from hpcfed.results import results

SLOW_ROUNDS, SLOW_SECONDS = 3, 0.2
MOMENT = 0.01
"""Seconds of one of the many sleeps of a round: a rank that was halted must not find
them all over.
"""


class Planted:
    """The faults that this rank is ordered to commit, and those that it must commit
    again.
    """

    def __init__(self, folder: Path) -> None:
        self._rank = str(MPI.COMM_WORLD.rank)
        self._order = folder / f"order-{self._rank}"
        self._ledger = folder / "ledger"
        self._reference = (folder / "reference").exists()
        self._paced = folder / "pace"
        self._slow = 0
        self.limit = 0
        """Larger stacks of clients find no memory; 0: all do."""
        self.round: int | None = None
        """The round that clients train in right now, in its first phase."""

    def due(self, kind: str, round: int) -> bool:
        """Return whether the ledger says that a fault belongs to this round."""
        if not self._ledger.exists():
            return False
        return f"{kind} {self._rank} {round}" in self._ledger.read_text().splitlines()

    def train(
        self, training: LocalTraining, rows: Tensor, round: int, work: Any
    ) -> tuple[Tensor, Tensor]:
        """Train a round, with the faults that belong to it."""
        self._obey(round)
        for _ in range(int(self._pace() / MOMENT)):
            time.sleep(MOMENT)
        if self._slow:
            self._slow -= 1
            time.sleep(SLOW_SECONDS)
        engine: Any = training.engine
        # Seeds that advance together share an engine, which is behind their programs.
        stacks = getattr(engine, "_engine", engine).stacks
        if self.due("memory", round):
            half = max(1, len(rows) // 2)
            if self._reference:
                stacks.most = half
            else:
                self.limit = half
        trained, losses = work()
        self.limit = stacks.most = 0
        if self.due("nan", round):
            trained[0] = float("nan")
        return trained, losses

    def _pace(self) -> float:
        try:
            return float(self._paced.read_text())
        except FileNotFoundError:
            return 0.0

    def _obey(self, round: int) -> None:
        """Take an order, note what must happen again when the round is repeated, and
        remove the order.
        """
        try:
            kind = self._order.read_text()
        except FileNotFoundError:
            return
        if kind in ("nan", "memory"):
            with open(self._ledger, "a") as file:
                file.write(f"{kind} {self._rank} {round}\n")
        if kind == "straggler":
            self._slow = SLOW_ROUNDS
        self._order.unlink()
        if kind == "raise":
            raise FloatingPointError("planted")


def main() -> None:
    planted = Planted(Path(sys.argv[1]))
    train, descend, run = (
        LocalTraining.train,
        LocalTraining._descend,
        StackTraining.run,
    )

    def in_round(
        self: LocalTraining, rows: Tensor, cohort: Cohort, *, phase: int = 0, **how: Any
    ) -> Tensor:
        planted.round = None if phase else cohort.round
        try:
            return train(self, rows, cohort, phase=phase, **how)
        finally:
            planted.round = None

    def training(self: LocalTraining, job: TrainingJob) -> Any:
        def work() -> Any:
            return descend(self, job)

        if planted.round is None:
            return work()
        return planted.train(self, job.rows, planted.round, work)

    def advancing(self: StackTraining, job: TrainingJob, trained: Tensor) -> Losses:
        if planted.limit and len(job.rows) > planted.limit:
            raise torch.OutOfMemoryError("planted")
        return run(self, job, trained)

    LocalTraining.train = in_round  # type: ignore[method-assign]
    LocalTraining._descend = training  # type: ignore[method-assign]
    StackTraining.run = advancing  # type: ignore[method-assign]
    # As in a terminal, also where the campaign was started by nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    progress.LINE_EVERY, results.PAUSE = 0.0, 0
    sys.argv[1:] = sys.argv[2:]
    __main__.main()


if __name__ == "__main__":
    main()
