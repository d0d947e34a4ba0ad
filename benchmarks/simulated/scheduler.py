"""Simulated threads under a simulated clock: one runs at a time, and hands on to the
one whose time comes next.

Every delay is drawn from one generator, so the order of all that happens follows from
its seed. A simulated thread is a real one that waits for its turn.
"""

import random
import threading
import zlib
from collections.abc import Callable
from typing import Any

PATIENCE = 600.0
"""Simulated seconds without any step of a main thread after which a run hangs."""
STEPS = 200_000
"""Most turns of a life, in case that threads keep each other busy forever."""
TOLD = 40
"""Last events that a report repeats."""


class Killed(BaseException):
    """Unwinds a thread whose process is dead; all that it calls raises it again."""


class Task:
    """A simulated thread."""

    def __init__(
        self, name: str, owner: Any, function: Callable[[], None], *, main: bool
    ) -> None:
        self.name, self.owner, self.main = name, owner, main
        self.turn = threading.Lock()
        self.turn.acquire()
        self.wake: float | None = None
        """When it runs on; None: never, unless its condition comes true."""
        self.condition: Callable[[], bool] | None = None
        self.waits_for = ""
        self.killed = self.ended = False
        self._function = function
        self._scheduler: Scheduler | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self.thread.start()

    def _run(self) -> None:
        assert self._scheduler is not None
        self.turn.acquire()
        try:
            if not self.killed:
                self._scheduler.resumed(self)
                self._function()
        except Killed:
            pass
        finally:
            self.ended = True
            self._scheduler.leave(self)


class Scheduler:
    """The threads of all simulated processes, and their clock."""

    def __init__(self, seed: str, *, keep_trace: bool = False) -> None:
        self.chance = random.Random(seed)
        self.now = 1000.0
        self.steps = 0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.on_resume: Callable[[Task], None] = lambda task: None
        """Called in a thread whenever it runs on."""
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        """What happens at a time, whoever runs then."""
        self.at_step: dict[int, list[Callable[[], None]]] = {}
        self.hang = ""
        """Who waits for what, where nobody can go on."""
        self._progress = self.now
        self._all_done = threading.Event()
        self.trace: list[str] = []
        self.digest = 0
        self._keep_trace = keep_trace
        self._threads: list[threading.Thread] = []

    def note(self, what: str) -> None:
        """Add an event to the trace."""
        task = self.current
        line = f"{self.now:.6f} {task.name if task else '-'}: {what}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.trace.append(line)
        if not self._keep_trace and len(self.trace) > 4 * TOLD:
            del self.trace[:-TOLD]

    def add(
        self, name: str, owner: Any, function: Callable[[], None], *, main: bool = False
    ) -> Task:
        """Start a simulated thread; it has its first turn soon."""
        task = Task(name, owner, function, main=main)
        task.wake = self.now + self.chance.expovariate(1e4)
        self.tasks.append(task)
        self._threads.append(task.thread)
        task.start(self)
        return task

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Have something happen at a later time."""
        self.events.append((self.now + seconds, len(self.events), do))

    def run(self) -> None:
        """Run until all threads have ended."""
        self._all_done.clear()
        self._progress, self.steps, self.hang = self.now, 0, ""
        if self.tasks:
            self._pass_on(None)
            self._all_done.wait()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self.events.clear()
        self.at_step.clear()
        self.current = None

    # Called by simulated threads.

    def tick(self) -> float:
        """Return the time, a little later each time."""
        self.now += 1e-7
        return self.now

    def spend(self, seconds: float) -> None:
        """Let this time pass for the current thread, with the others at work."""
        task = self._living()
        task.wake = self.now + task.owner.slow * seconds
        task.waits_for = ""
        self._pass_on(task)

    def wait(
        self, condition: Callable[[], bool], what: str, timeout: float | None = None
    ) -> bool:
        """Wait until the condition holds, and return whether it does."""
        task = self._living()
        self.spend(self.chance.expovariate(5e4))
        if condition():
            return True
        task.condition, task.waits_for = condition, what
        task.wake = None if timeout is None else self.now + timeout
        self._pass_on(task)
        return condition()

    def changed(self) -> None:
        """Wake all whose conditions hold now."""
        for task in self.tasks:
            if task.condition is not None and not task.ended and task.condition():
                task.condition = None
                task.wake = self.now + self.chance.expovariate(1e5)

    def kill(self, owner: Any) -> None:
        """End all threads of an owner: each unwinds at its next turn."""
        for task in self.tasks:
            if task.owner is owner and not task.ended:
                task.killed, task.condition, task.wake = True, None, 0.0

    def check_alive(self) -> None:
        """Raise in a thread whose process is dead."""
        self._living()

    def leave(self, task: Task) -> None:
        """Hand on at the end of a thread."""
        self.tasks.remove(task)
        self.changed()
        self._pass_on(None)

    def resumed(self, task: Task) -> None:
        """Note that a thread runs on."""
        self.current = task
        task.condition = None
        if task.main:
            self._progress = self.now
        self.on_resume(task)

    def _living(self) -> Task:
        task = self.current
        assert task is not None
        if task.killed:
            raise Killed
        return task

    def _pass_on(self, task: Task | None) -> None:
        """Give the turn to the next thread; return when it is this one's again."""
        self.steps += 1
        for do in self.at_step.pop(self.steps, ()):
            do()
        following = self._following()
        if following is None:
            if self.tasks:
                self._give_up()
                following = self._following()
            if following is None:
                self._all_done.set()
                return
        if following is not task:
            following.turn.release()
            if task is None:
                return
            task.turn.acquire()
        assert task is not None
        if task.killed:
            self.current = task
            raise Killed
        self.resumed(task)

    def _following(self) -> Task | None:
        """Return the thread whose turn it is, after what happens before that."""
        if self.steps > STEPS or self.now - self._progress > PATIENCE:
            self._give_up()
        while True:
            ready = [task for task in self.tasks if _may_run(task)]
            first = min(ready, key=lambda task: task.wake or 0.0, default=None)
            event = min(self.events, default=None, key=lambda one: one[:2])
            if first is None and event is None:
                return None
            at = float("inf") if first is None else first.wake or 0.0
            if event is not None and event[0] <= at:
                self.events.remove(event)
                self.now = max(self.now, event[0])
                event[2]()
                continue
            assert first is not None
            self.now = max(self.now, at)
            return first

    def _give_up(self) -> None:
        """Tell who waits for what, and end all threads."""
        if not self.hang:
            waiting = []
            for task in self.tasks:
                if task.main:
                    state = task.waits_for or "its next turn"
                    waiting.append(f"{task.name} waits for {state}")
            self.hang = "; ".join(waiting) or "only threads without a program are left"
        self.events.clear()
        for task in self.tasks:
            task.killed, task.condition, task.wake = True, None, 0.0
        self.steps, self._progress = 0, self.now


def _may_run(task: Task) -> bool:
    """Tell whether a thread has a next turn, and is not halted."""
    return task.wake is not None and (task.killed or not task.owner.halted)
