"""Several seeds of one run advance in step, so that the engine trains and evaluates
their rows together.

A seed's program (its method, evaluation and recording) knows nothing of the others. It
has a thread of its own, but only one thread runs at any time. A program that calls the
engine waits there. When all programs wait, calls that are alike become one call with
more rows, and each program gets its share of the answer.

A program waits in the same way for its collectives. They are due only when every
program waits for one, and then take place in the order of the seeds. So all ranks call
the k-th collectives of all seeds in one order, however many calls of the engine each
rank's clients have led to in between. Engine and collectives run in the main thread, as
without seeds.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.fisher import Fisher
from hpcfed.clients.job import Losses, RowEngine, Score, TrainingJob
from hpcfed.clients.merging import EvaluationJob, Job, mergeable, run_merged
from hpcfed.clients.objective import NOTHING, Wanted
from hpcfed.data.shards import Shard
from hpcfed.errors import one_line
from hpcfed.record.timing import Timer


class Stopped(Exception):
    """Raised in all programs after one has failed, so that they close their files."""


Collective = Callable[[], Any]


def _nothing() -> None: ...


class Lockstep:
    """The seeds of a run and the engine that they share."""

    def __init__(
        self, engine: RowEngine, seeds: Sequence[int], timers: Sequence[Timer]
    ) -> None:
        self._engine = engine
        self.seeds = [
            Seed(seed, engine, timer) for seed, timer in zip(seeds, timers, strict=True)
        ]
        self.at_work = self.seeds[0]
        """The seed whose program runs, or for which the engine or a collective runs; the
        first, where that serves several.
        """

    def run(self, programs: Sequence[Callable[[], None]], device: torch.device) -> None:
        """Run every seed's program to its end.

        An exception in one, or in the engine, ends all and is raised here.
        """
        try:
            for seed, program in zip(self.seeds, programs, strict=True):
                self.at_work = seed
                seed.start(program, device)
            while waiting := [seed for seed in self.seeds if not seed.ended]:
                self._serve(waiting)
        except BaseException as error:
            # An interrupt stays one; anything else tells the others what went wrong.
            reason = error
            if not isinstance(error, KeyboardInterrupt):
                reason = Stopped(one_line(error))
            for seed in self.seeds:
                seed.stop(reason)
            raise

    def _serve(self, waiting: Sequence["Seed"]) -> None:
        """Answer all calls of the engine or, where there are none, all collectives.

        The seeds that got an answer then run on, in their order.
        """
        groups = _mergeable_groups(waiting)
        if not groups:
            groups = [[seed] for seed in waiting]
        answers: dict[int, Any] = {}
        for group in groups:
            answers.update(self._answers(group))
        for seed in waiting:
            if seed.number in answers:
                self.at_work = seed
                # Popped, and held by no other name: rows that nobody needs any more
                # must not stay in memory.
                seed.go_on(answers.pop(seed.number))

    def _answers(self, group: Sequence["Seed"]) -> dict[int, Any]:
        """Return what the seeds of a group wait for: one call of the engine for all of
        them, or one seed's collective.
        """
        self.at_work = group[0]
        for seed in group:
            seed.timer.switch(seed.phase)
        try:
            answers = _answered(group, self._engine)
        except Exception as error:
            if len(group) == 1:
                error.add_note(f"in seed {group[0].number}")
            raise
        for seed in group:
            seed.timer.switch("other")
        return dict(zip([seed.number for seed in group], answers, strict=True))


class Seed:
    """One seed's program; to the program, this is the engine.

    It runs only while `start` or `go_on` waits for it.
    """

    def __init__(self, number: int, engine: RowEngine, timer: Timer) -> None:
        self.number = number
        self.layout = engine.layout
        self.timer = timer
        self.phase = timer.current
        """The phase that waits."""
        self.call: Job | Collective = _nothing
        """What it waits for."""
        self.ended = False
        self._engine = engine
        self._thread: threading.Thread | None = None
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._pauses: SimpleQueue[BaseException | None] = SimpleQueue()
        """An item whenever the program waits or ends: its exception, or None."""
        self._stopped: BaseException | None = None

    @property
    def mode(self) -> str:
        return self._engine.mode

    @property
    def reason(self) -> str:
        return self._engine.reason

    @property
    def halvings(self) -> int:
        return self._engine.halvings

    @property
    def fisher(self) -> Fisher:
        """Each seed calls it by itself: samples with a gradient each fill the device
        sooner than seeds do.
        """
        return self._engine.fisher

    def train(self, job: TrainingJob) -> tuple[Tensor, Losses]:
        answer: tuple[Tensor, Losses] = self._wait(job)
        return answer

    def evaluate(
        self, rows: Tensor, shard: Shard, clients: np.ndarray, wanted: Wanted = NOTHING
    ) -> Score:
        answer: Score = self._wait(EvaluationJob(rows, shard, clients, wanted))
        return answer

    def forget(self) -> None:
        self._engine.forget()

    def turn(self, collective: Collective) -> Any:
        """Return the collective's result, once it was due."""
        return self._wait(collective)

    def _wait(self, call: Job | Collective) -> Any:
        """Wait for the answer to a call.

        Time spent waiting for other seeds does not count for the current phase; the
        engine's work does.
        """
        self.call = call
        self.phase = self.timer.switch("other")
        if self._stopped is None:
            self._pauses.put(None)
            answer = self._answers.get()
            # The call holds rows, which must not outlive the answer.
            self.call = _nothing
        if self._stopped is not None:
            raise self._stopped
        self.timer.switch(self.phase)
        return answer

    def start(self, program: Callable[[], None], device: torch.device) -> None:
        """Start the program; return when it waits or has ended.

        Its exception is raised here.
        """

        def thread() -> None:
            error: BaseException | None = None
            try:
                if device.type == "cuda":
                    # A new thread would take the first GPU.
                    torch.cuda.set_device(device)
                program()
            except BaseException as raised:
                error = raised
            self.ended = True
            self._pauses.put(error)

        self._thread = threading.Thread(
            target=thread, name=f"seed {self.number}", daemon=True
        )
        self._thread.start()
        self._until_it_waits()

    def go_on(self, answer: Any) -> None:
        """Hand the program its answer; return when it waits again or has ended.

        Its exception is raised here.
        """
        self._answers.put(answer)
        self._until_it_waits()

    def _until_it_waits(self) -> None:
        error = self._pauses.get()
        if error is not None:
            error.add_note(f"in seed {self.number}")
            raise error

    def stop(self, reason: BaseException) -> None:
        """End the program by an exception, where it waits or would wait next."""
        self._stopped = reason
        if self._thread is not None and self._thread.is_alive():
            # Wakes the program where it waits; it then finds that it is stopped.
            self._answers.put(None)
            self._thread.join()


def _mergeable_groups(waiting: Sequence[Seed]) -> list[list[Seed]]:
    """Group the seeds that call the engine by calls that can be merged."""
    groups: list[list[Seed]] = []
    for seed in waiting:
        if callable(seed.call):
            continue
        for group in groups:
            first = group[0].call
            if not callable(first) and mergeable(first, seed.call):
                group.append(seed)
                break
        else:
            groups.append([seed])
    return groups


def _answered(group: Sequence[Seed], engine: RowEngine) -> list[Any]:
    jobs = [seed.call for seed in group if not callable(seed.call)]
    if jobs:
        return run_merged(jobs, engine)
    # A group that does not call the engine is one seed with its collective.
    return [seed.call() for seed in group if callable(seed.call)]
