"""Several seeds of one run advance in step, so that the engine trains and evaluates
their rows together.

A seed's program (its method, evaluation and recording) knows nothing of the others. It
has a thread of its own, but only one thread runs at any time. A program that calls the
engine waits there; when all programs wait, calls that are alike become one call with
more rows, and each program gets its part of the answer.

A program waits in the same way for its collectives. They are due only when every
program waits for one, and then take place in the order of the seeds. So all ranks call
the k-th collectives of all seeds in one order, however many calls of the engine each
rank's clients have led to in between. Engine and collectives run in the main thread, as
without seeds.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hpcfed.clients.engine import Score, Sgd
from hpcfed.clients.fisher import Fisher
from hpcfed.clients.pull import Pull, together
from hpcfed.data.shards import Part, Shard
from hpcfed.errors import one_line
from hpcfed.models.layout import Layout
from hpcfed.record.timing import Timer


class RowEngine(Protocol):
    """An engine, or a seed's access to the one that all seeds share."""

    layout: Layout

    @property
    def mode(self) -> str: ...

    @property
    def halvings(self) -> int: ...

    @property
    def fisher(self) -> Fisher: ...

    def train(
        self,
        rows: Tensor,
        shard: Shard,
        clients: np.ndarray,
        sgd: Sgd,
        *,
        keys: Tensor,
        columns: Tensor | None = None,
        pull: Pull | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def evaluate(self, rows: Tensor, shard: Shard, clients: np.ndarray) -> Score: ...

    def forget(self) -> None: ...


class Stopped(Exception):
    """Raised in all programs after one has failed, so that they close their files."""


_Collective = Callable[[], Any]


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
        """The seed that runs, or for which (and maybe others) the engine runs, or a
        collective.
        """

    def run(self, programs: Sequence[Callable[[], None]], device: torch.device) -> None:
        """Runs every seed's program to its end. An exception in one, or in the engine,
        ends all and is raised here.
        """
        try:
            for seed, program in zip(self.seeds, programs, strict=True):
                self.at_work = seed
                seed.start(program, device)
            while waiting := [seed for seed in self.seeds if not seed.ended]:
                groups = _groups(waiting) or [
                    [seed] for seed in waiting
                ]  # collectives, once no engine is called
                answers = {
                    seed.number: answer
                    for group in groups
                    for seed, answer in self._answers(group)
                }
                for seed in waiting:
                    if seed.number in answers:
                        self.at_work = seed
                        seed.go_on(
                            answers.pop(seed.number)
                        )  # rows that nobody needs any more must not stay
        except BaseException as error:
            reason = (
                error
                if isinstance(error, KeyboardInterrupt)
                else Stopped(one_line(error))
            )
            for seed in self.seeds:
                seed.stop(reason)
            raise

    def _answers(self, group: Sequence["Seed"]) -> Iterator[tuple["Seed", Any]]:
        """What the seeds of a group wait for: one call of the engine for all of them,
        or one seed's collective.
        """
        self.at_work = group[0]
        for seed in group:
            seed.timer.switch(seed.phase)
        try:
            answers = _answered([seed.call for seed in group], self._engine)
        except Exception as error:
            if len(group) == 1:
                error.add_note(f"in seed {group[0].number}")
            raise
        for seed in group:
            seed.timer.switch("other")
        yield from zip(group, answers, strict=True)


class Seed:
    """One seed's program, which runs only while `start` or `go_on` waits for it; to the
    program, this is the engine.
    """

    def __init__(self, number: int, engine: RowEngine, timer: Timer) -> None:
        self.number = number
        self.layout = engine.layout
        self.timer = timer
        self.phase = timer.current
        """The phase that waits."""
        self.call: _Call | _Collective = _nothing
        """What it waits for."""
        self.ended = False
        self._engine = engine
        self._thread: threading.Thread | None = None
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._pauses: SimpleQueue[BaseException | None] = SimpleQueue()
        self._stopped: BaseException | None = None

    @property
    def mode(self) -> str:
        return self._engine.mode

    @property
    def halvings(self) -> int:
        return self._engine.halvings

    @property
    def fisher(self) -> Fisher:
        """Each seed's by itself: samples with a gradient each fill the device sooner
        than seeds do.
        """
        return self._engine.fisher

    def train(
        self,
        rows: Tensor,
        shard: Shard,
        clients: np.ndarray,
        sgd: Sgd,
        *,
        keys: Tensor,
        columns: Tensor | None = None,
        pull: Pull | None = None,
    ) -> tuple[Tensor, Tensor]:
        answer: tuple[Tensor, Tensor] = self._wait(
            _Call(rows, shard, clients, _Training(sgd, keys, columns, pull))
        )
        return answer

    def evaluate(self, rows: Tensor, shard: Shard, clients: np.ndarray) -> Score:
        answer: Score = self._wait(_Call(rows, shard, clients))
        return answer

    def forget(self) -> None:
        self._engine.forget()

    def turn(self, collective: "_Collective") -> Any:
        """The collective's result, once it was due."""
        return self._wait(collective)

    def _wait(self, call: "_Call | _Collective") -> Any:
        """Waiting for other seeds is no part of the phase in progress; the engine's
        work is.
        """
        self.call, self.phase = call, self.timer.switch("other")
        if self._stopped is None:
            self._pauses.put(None)
            answer = self._answers.get()
            self.call = _nothing
        if self._stopped is not None:
            raise self._stopped
        self.timer.switch(self.phase)
        return answer

    def start(self, program: Callable[[], None], device: torch.device) -> None:
        """Begins the program, and returns when it waits or has ended. Its exception is
        raised here.
        """

        def thread() -> None:
            error: BaseException | None = None
            try:
                if device.type == "cuda":
                    torch.cuda.set_device(
                        device
                    )  # a new thread would take the first GPU
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
        """The program gets its answer and runs until it waits again or has ended. Its
        exception is raised here.
        """
        self._answers.put(answer)
        self._until_it_waits()

    def _until_it_waits(self) -> None:
        error = self._pauses.get()
        if error is not None:
            error.add_note(f"in seed {self.number}")
            raise error

    def stop(self, reason: BaseException) -> None:
        """Ends the program by an exception: where it waits, or where it would wait
        next.
        """
        self._stopped = reason
        if self._thread is not None and self._thread.is_alive():
            self._answers.put(None)
            self._thread.join()


@dataclass(frozen=True)
class _Training:
    sgd: Sgd
    keys: Tensor
    columns: Tensor | None
    pull: Pull | None


@dataclass(frozen=True)
class _Call:
    """A call of the engine."""

    rows: Tensor
    shard: Shard
    clients: np.ndarray
    training: _Training | None = None
    """None: evaluation."""


def _groups(waiting: Sequence[Seed]) -> list[list[Seed]]:
    """The seeds that call the engine, those together whose calls are alike."""
    groups: list[list[Seed]] = []
    for seed in waiting:
        alike = next(
            (group for group in groups if _alike(group[0].call, seed.call)), None
        )
        if alike is not None:
            alike.append(seed)
        elif isinstance(seed.call, _Call):
            groups.append([seed])
    return groups


def _alike(a: "_Call | _Collective", b: "_Call | _Collective") -> bool:
    """Whether two calls of the engine can be one: the same work on clients of the same
    larger shard.
    """
    if not isinstance(a, _Call) or not isinstance(b, _Call):
        return False
    if not (
        isinstance(a.shard, Part)
        and isinstance(b.shard, Part)
        and a.shard.whole is b.shard.whole
    ):
        return False
    if a.training is not None and b.training is not None:
        one, other = a.training.pull, b.training.pull
        pulls_alike = one is other if one is None else one.alike(other)
        return (
            a.training.sgd == b.training.sgd
            and pulls_alike
            and _equal(a.training.columns, b.training.columns)
        )
    # The engine scores one row, expanded to many clients, faster than as many rows of
    # their own.
    return a.training is b.training and not _expanded(a.rows) and not _expanded(b.rows)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _expanded(rows: Tensor) -> bool:
    return len(rows) > 1 and rows.stride(0) == 0


def _answered(waiting: Sequence["_Call | _Collective"], engine: RowEngine) -> list[Any]:
    calls = [call for call in waiting if isinstance(call, _Call)]
    if not calls:
        return [
            collective() for collective in waiting if not isinstance(collective, _Call)
        ]
    if len(calls) == 1:
        return [_called(calls[0], engine)]
    answer = _called(_together(calls), engine)
    counts = [len(call.rows) for call in calls]
    if not isinstance(answer, Score):
        rows, losses = answer
        return list(zip(rows.split(counts), losses.split(counts), strict=True))
    sizes = np.split(answer.count, np.cumsum(counts)[:-1])
    return [
        Score(*of)
        for of in zip(
            answer.correct.split(counts), answer.loss.split(counts), sizes, strict=True
        )
    ]


def _called(call: _Call, engine: RowEngine) -> tuple[Tensor, Tensor] | Score:
    training = call.training
    if training is None:
        return engine.evaluate(call.rows, call.shard, call.clients)
    sgd, keys, columns, pull = (
        training.sgd,
        training.keys,
        training.columns,
        training.pull,
    )
    return engine.train(
        call.rows, call.shard, call.clients, sgd, keys=keys, columns=columns, pull=pull
    )


def _together(calls: Sequence[_Call]) -> _Call:
    parts = [call.shard for call in calls if isinstance(call.shard, Part)]
    clients = np.concatenate(
        [call.clients + part.first for call, part in zip(calls, parts, strict=True)]
    )
    training = calls[0].training
    if training is not None:
        trainings = [call.training for call in calls if call.training is not None]
        keys = torch.cat([one.keys for one in trainings])
        pulls = [one.pull for one in trainings if one.pull is not None]
        training = _Training(
            training.sgd, keys, training.columns, together(pulls) if pulls else None
        )
    return _Call(
        torch.cat([call.rows for call in calls]), parts[0].whole, clients, training
    )
