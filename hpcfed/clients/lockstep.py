"""Several runs advance in step, so that the engine trains and evaluates their rows
together: seeds of one run, or points of a study.

A run's program (its method, evaluation and recording) knows nothing of the others. It
has a thread of its own, but only one thread runs at any time. A program that calls the
engine waits there. When all programs wait, calls that are alike become one call with
more rows, and each program gets its share of the answer.

A program waits in the same way for its collectives. They are due only when every
program waits for one, and then take place in the order of the programs. So all ranks
call the k-th collectives of all programs in one order, however many calls of the engine
each rank's clients have led to in between. Engine and collectives run in the main
thread, as they do in a run of its own.

Programs meet at the beginning of a round, and at its end. So which calls become one
follows from the round alone, also in methods whose runs differ in the number of calls,
and a resumed run has the same numbers.

Where a program may fail without ending the others, ranks tell each other before the
collectives which programs have failed: elsewhere these would wait for a collective that
one rank never calls.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.exits import without_exits
from hpcfed.clients.fisher import Fisher
from hpcfed.clients.job import EngineAccess, Losses, RowEngine, Score, TrainingJob
from hpcfed.clients.merging import EvaluationJob, Job, mergeable, run_merged
from hpcfed.clients.objective import NOTHING, Wanted
from hpcfed.data.shards import Shard
from hpcfed.errors import one_line
from hpcfed.runtime import accelerator, draws
from hpcfed.runtime.timer import Timer


class Stopped(Exception):
    """Raised in programs that have to end because another one has failed, or because
    they have failed on another rank. So they close their files.
    """


Collective = Callable[[], Any]
OnFailure = Callable[[int, Exception], None]
"""Called with the number of the failed program, and its error."""
Exchange = Callable[[dict[int, str]], list[dict[int, str]]]
"""Returns what every rank has passed in; all ranks call it together."""
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Failures that are not a program's own: with fewer programs, memory might suffice."""


def _nothing() -> None: ...


def _meeting() -> None:
    """Stand for the meeting that a program waits for."""


def _alone(failed: dict[int, str]) -> list[dict[int, str]]:
    return [failed]


class Lockstep:
    """The programs of several runs and the engine that they share."""

    def __init__(
        self, engine: RowEngine, names: Sequence[str], timers: Sequence[Timer]
    ) -> None:
        """`names` tell the runs apart in messages."""
        self._engine = engine
        self.programs: list[Program] = []
        for number, (name, timer) in enumerate(zip(names, timers, strict=True)):
            self.programs.append(Program(number, name, engine, timer))
        self.at_work = self.programs[0]
        """The running program, or the one that the engine or a collective works for; if
        it works for several, the first.
        """
        self._on_failure: OnFailure | None = None
        self._failed: dict[int, str] = {}
        """Programs that have failed on this rank, and why."""

    def run(
        self,
        functions: Sequence[Callable[[], None]],
        device: torch.device,
        *,
        on_failure: OnFailure | None = None,
        exchange: Exchange = _alone,
    ) -> None:
        """Run every program to its end.

        An exception in one, or in the engine, ends all and is raised here. Given
        `on_failure`, an exception in a program's own code ends that program alone, on
        all ranks, which learn of it through `exchange`.
        """
        self._on_failure = on_failure
        try:
            for program, function in zip(self.programs, functions, strict=True):
                self._advance(program, partial(program.start, function, device))
            while True:
                self._serve_engine()
                if on_failure is not None:
                    self._end_failed(exchange)
                if not self._waiting():
                    break
                self._serve_collectives()
        except BaseException as error:
            # An interrupt stays one; anything else tells the others what went wrong.
            reason = error
            if not isinstance(error, KeyboardInterrupt):
                reason = Stopped(one_line(error))
            for program in self.programs:
                program.stop(reason)
            raise

    def _waiting(self) -> list["Program"]:
        return [program for program in self.programs if not program.ended]

    def _serve_engine(self) -> None:
        """Answer calls until every program waits for a collective, or has ended."""
        while groups := _mergeable_groups(self._waiting()):
            self._serve(groups)

    def _serve_collectives(self) -> None:
        waiting = self._waiting()
        # Who meets waits for all others. Every rank has the same meetings.
        due = [program for program in waiting if program.call is not _meeting]
        if not due:
            for program in waiting:
                program.call = partial(len, waiting)
        self._serve([[program] for program in due or waiting])

    def _serve(self, groups: Sequence[Sequence["Program"]]) -> None:
        """Answer the calls of all groups. The programs then run on, in their order."""
        answers: dict[int, Any] = {}
        for group in groups:
            answers.update(self._answers(group))
        for number in sorted(answers):
            program = self.programs[number]
            # Popped, so that no other reference is left: rows that are no longer needed
            # must not stay in memory.
            self._advance(program, partial(_hand_over, program, answers))

    def _advance(self, program: "Program", go: Callable[[], None]) -> None:
        """Let a program run until it waits or has ended."""
        self.at_work = program
        try:
            go()
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            if self._on_failure is None:
                raise
            self._failed[program.number] = one_line(error)
            self._on_failure(program.number, error)

    def _end_failed(self, exchange: Exchange) -> None:
        """End the programs that have failed on another rank.

        Programs end with the same collective on all ranks, or fail on one and are ended
        here on the others. So all ranks are left with the same programs, and call this
        equally often.
        """
        for of_rank in exchange(self._failed):
            for number, reason in of_rank.items():
                program = self.programs[number]
                if not program.ended:
                    error = Stopped(reason)
                    program.stop(error)
                    assert self._on_failure is not None
                    self._on_failure(number, error)

    def _answers(self, group: Sequence["Program"]) -> dict[int, Any]:
        """Return what the programs of a group wait for: one call of the engine for all
        of them, or one program's collective.
        """
        self.at_work = group[0]
        # One time stamp for all: on a GPU an event for each would take milliseconds.
        begin = group[0].timer.stamp()
        for program in group:
            program.timer.switch(program.phase, begin)
        try:
            answers = _answered(group, self._engine)
        except Exception as error:
            if len(group) == 1:
                error.add_note(f"in {group[0].name}")
            raise
        end = group[0].timer.stamp()
        for program in group:
            program.timer.switch("other", end)
        return dict(zip([program.number for program in group], answers, strict=True))


class Program(EngineAccess):
    """One run's program; to the program, this is the engine.

    It runs only while `start` or `go_on` waits for it.
    """

    def __init__(self, number: int, name: str, engine: RowEngine, timer: Timer) -> None:
        super().__init__(engine)
        self.number = number
        self.name = name
        self.timer = timer
        self.phase = timer.current
        """The phase that waits."""
        self.call: Job | Collective = _nothing
        """What it waits for."""
        self.ended = False
        self._thread: threading.Thread | None = None
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._pauses: SimpleQueue[BaseException | None] = SimpleQueue()
        """An item whenever the program waits or ends: its exception, or None."""
        self._stopped: BaseException | None = None

    @property
    def fisher(self) -> Fisher:
        """Each program calls it separately: samples with individual gradients fill the
        device sooner than programs do.
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

    def turn(self, collective: Collective) -> Any:
        """Return the collective's result, once it is its turn."""
        return self._wait(collective)

    def meet(self) -> int:
        """Wait until every other program meets, too, or has ended; return how many
        meet.
        """
        number: int = self._wait(_meeting)
        return number

    def _wait(self, call: Job | Collective) -> Any:
        """Wait for the answer to a call.

        Time spent waiting for other programs does not count for the current phase; the
        engine's work does.
        """
        self.call = call
        self.phase = self.timer.switch("other")
        if self._stopped is None:
            with draws.put_aside():
                self._pauses.put(None)
                answer = self._answers.get()
            # The call holds rows, which must not outlive the answer.
            self.call = _nothing
        if self._stopped is not None:
            raise self._stopped
        self.timer.switch(self.phase)
        return answer

    def start(self, function: Callable[[], None], device: torch.device) -> None:
        """Start the program; return when it waits or has ended.

        Its exception is raised here.
        """

        def thread() -> None:
            error: BaseException | None = None
            try:
                if accelerator.is_gpu(device):
                    # A new thread would use the first GPU.
                    accelerator.use(device)
                with without_exits():
                    function()
            except BaseException as raised:
                error = raised
            self.ended = True
            self._pauses.put(error)

        self._thread = threading.Thread(target=thread, name=self.name, daemon=True)
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
            error.add_note(f"in {self.name}")
            raise error

    def stop(self, reason: BaseException) -> None:
        """End the program with an exception, where it waits or would wait next."""
        self._stopped = reason
        if self._thread is not None and self._thread.is_alive():
            # Wakes the waiting program, which then finds that it is stopped.
            self._answers.put(None)
            self._thread.join()


def _hand_over(program: Program, answers: dict[int, Any]) -> None:
    program.go_on(answers.pop(program.number))


def _mergeable_groups(waiting: Sequence[Program]) -> list[list[Program]]:
    """Group the programs that call the engine by calls that can be merged."""
    groups: list[list[Program]] = []
    for program in waiting:
        if callable(program.call):
            continue
        for group in groups:
            first = group[0].call
            if not callable(first) and mergeable(first, program.call):
                group.append(program)
                break
        else:
            groups.append([program])
    return groups


def _answered(group: Sequence[Program], engine: RowEngine) -> list[Any]:
    jobs = [program.call for program in group if not callable(program.call)]
    if jobs:
        return run_merged(jobs, engine)
    # A group that does not call the engine is one program with its collective.
    return [program.call() for program in group if callable(program.call)]
