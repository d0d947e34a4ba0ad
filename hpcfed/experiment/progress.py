"""What the user sees during a run: a bar on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from hpcfed.errors import count, remark
from hpcfed.experiment.failures import Reporting
from hpcfed.options.metrics import METRICS, global_name, text_of
from hpcfed.results.folder import SIGN
from hpcfed.results.pace import pace, rest
from hpcfed.results.signs import EVERY, RunSign, leave_sign, remove_sign
from hpcfed.runtime.telemetry import Sampler
from hpcfed.runtime.timer import Timer
from hpcfed.words import duration, short_seconds

LINE_EVERY = 10.0
"""Seconds between plain lines, so that a long run does not fill a log."""
FIRST_LINES = 3
"""Lines that appear as soon as possible: a user wants to see that all is well."""

Told = tuple[dict[str, float], bool]
"""A round's figures, and whether they are on disk."""


class RunProgress:
    """Shows the progress of a run; it is told about every recorded round."""

    def __init__(self, rounds: int, *, visible: bool, then: str = "") -> None:
        """`then` says what follows the rounds, and is not in the time that is left."""
        self._rounds = rounds
        self._then = then
        self._visible = visible
        self._next_line = 0.0
        self._lines = 0
        self._seconds: list[float] = []
        """Seconds of every round so far, to estimate the rest."""
        self._evaluated = ""
        """What the last evaluation found, and in which round."""
        self._bar: Progress | None = None
        console = _console() if visible else None
        if console is not None:
            self._bar = Progress(
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(8),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("", total=rounds)

    def __enter__(self) -> Self:
        if self._bar is not None:
            # The terminal may vanish at any time; the run goes on.
            with suppress(OSError):
                self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line, on the rank that shows progress."""
        if self._visible:
            remark(line)

    def round(self, round: int, values: dict[str, float], *, on_disk: bool) -> None:
        """Show a round's figures.

        A plain line appears only after the round is on disk: what the user has read
        survives any crash.
        """
        if not self._visible:
            return
        self._seconds.append(values["seconds"])
        figures = self._latest(round, values)
        if self._bar is not None:
            # Without seconds it is short enough for 80 columns.
            with suppress(OSError):
                self._bar.update(self._task, completed=round + 1, description=figures)
            return
        is_last = round + 1 == self._rounds
        is_time = time.monotonic() >= self._next_line or self._lines < FIRST_LINES
        if is_last or (on_disk and is_time):
            self.say(
                f"round {round + 1}/{self._rounds}  {figures}  {self._pace(round)}"
            )
            self._lines += 1
            self._next_line = time.monotonic() + LINE_EVERY

    def _latest(self, round: int, values: dict[str, float]) -> str:
        """Return the round's figures, or with those of the last evaluation."""
        found = evaluation_text(values)
        if found:
            # A bar has no room for the round's number, which it shows anyway.
            at = "" if self._bar is not None else f" (round {round + 1})"
            self._evaluated = f"{found}{at}"
        shown = [_loss(values), found or self._evaluated, _virtual(values)]
        return "  ".join(filter(None, shown))

    def _pace(self, round: int) -> str:
        """Return how long recent rounds took, and how long the rest will take."""
        left = self._rounds - round - 1
        eta = f"  ETA {duration(rest(self._seconds, left))}{self._then}" if left else ""
        return f"pace {short_seconds(pace(self._seconds))}/round{eta}"

    def stop(self, round: int, *, patience: int | None = None, why: str = "") -> None:
        """Say that the run ends early with this round: at the target, after `patience`
        evaluations that were no better, or for another reason.
        """
        if why:
            self.say(f"{why}: ended with round {round + 1}")
        elif patience is None:
            self.say(f"the target was reached in round {round + 1}")
        else:
            since = count(patience, "evaluation")
            self.say(f"no better accuracy for {since}: stopped in round {round + 1}")


class StackedProgress(RunProgress):
    """Shows several runs as one: the mean of their figures of a round, once all runs
    that are still going have reported theirs.
    """

    def __init__(
        self, rounds: int, *, runs: int, visible: bool, then: str = ""
    ) -> None:
        super().__init__(rounds, visible=visible, then=then)
        self._runs = runs
        self._told: dict[int, list[Told]] = {}
        """By round: what runs have reported."""
        self._stopped: list[int] = []
        """The last rounds of runs that have stopped."""

    def round(self, round: int, values: dict[str, float], *, on_disk: bool) -> None:
        # A run may be a round ahead of another that waits for its turn.
        self._told.setdefault(round, []).append((values, on_disk))
        self._show_if_all_told(round)

    def stop(self, round: int, *, patience: int | None = None, why: str = "") -> None:
        self._stopped.append(round)
        left = self._runs - len(self._stopped)
        has = "has reached the target" if patience is None else "has stopped early"
        has = f"has ended ({why})" if why else has
        self.say(f"a run {has} in round {round + 1}; {left} go on")
        self._show_waiting()

    def lose(self) -> None:
        """Expect one run fewer: it has failed."""
        self._runs -= 1
        self._show_waiting()

    def _show_waiting(self) -> None:
        """Show rounds that have waited for a run that is gone."""
        for waiting in sorted(self._told):
            self._show_if_all_told(waiting)

    def _show_if_all_told(self, round: int) -> None:
        told = self._told[round]
        stopped_before = sum(last < round for last in self._stopped)
        if len(told) < self._runs - stopped_before:
            return
        mean = {}
        for name in told[0][0]:
            total = sum(values[name] for values, _ in told)
            mean[name] = total / len(told)
        all_on_disk = all(on_disk for _, on_disk in told)
        super().round(round, mean, on_disk=all_on_disk)
        del self._told[round]


def _console() -> Console | None:
    """Return where a bar can be drawn: a terminal, or a notebook with widgets."""
    # Without widgets, rich would add a line to a notebook's cell for every update.
    if "ipykernel" in sys.modules and find_spec("ipywidgets") is not None:
        return Console()
    # A process may have been started without stderr.
    if sys.stderr is not None and sys.stderr.isatty():
        return Console(stderr=True)
    return None


def _loss(values: dict[str, float]) -> str:
    return f"loss {values['train_loss']:.4f}"


def _virtual(values: dict[str, float]) -> str:
    """Return the virtual time, in runs that have a clock."""
    seconds = values.get("virtual_seconds", float("nan"))
    return "" if isnan(seconds) else f"virtual {duration(seconds)}"


def evaluation_text(values: dict[str, float]) -> str:
    """Return the task's main metric; empty if the round was not evaluated."""
    # NaN for methods without a global model, and for rounds between evaluations.
    name = _headline(values)
    told = []
    for label, series in {"clients": name, "global": global_name(name)}.items():
        value = values.get(series, float("nan"))
        if not isnan(value):
            told.append(f"{label} {text_of(name, value)}")
    # Per cent can only be accuracy; other figures need a name.
    if told and not METRICS[name].in_percent:
        told.insert(0, "test loss" if name == "loss" else name)
    return "  ".join(told)


def _headline(values: dict[str, float]) -> str:
    """Return the most telling metric: perplexity, else accuracy, else loss."""
    # Rounds that were not evaluated have no metrics: then the choice does not matter.
    if "perplexity" in values:
        return "perplexity"
    known = {name for name, value in values.items() if not isnan(value)}
    if known & {"accuracy", "global_accuracy"}:
        return "accuracy"
    return "loss" if known & {"loss", "global_loss"} else "accuracy"


# Signs of life that a run leaves in its folder, so that others can watch it from any
# machine that sees the folder.


@contextmanager
def showing_life(
    folders: Sequence[Path],
    reporting: Reporting,
    timers: Sequence[Timer],
    sampler: Sampler | None = None,
    *,
    visible: bool,
) -> Iterator[None]:
    """Leave a sign of life in each folder every few seconds within the block, on the
    rank that is `visible`.

    A thread writes them: a round may take minutes, and a file system may hang.
    """
    if not visible:
        yield
        return

    def changes() -> int:
        return sum(timer.changes for timer in timers)

    paths = [folder / SIGN for folder in folders]
    over = threading.Event()
    # A daemon, because the run must not wait for a file system that hangs.
    beating = threading.Thread(
        target=_beat,
        args=(paths, reporting.phase, changes, sampler, over),
        name="signs",
        daemon=True,
    )
    beating.start()
    try:
        yield
    finally:
        over.set()
        # It may be about to write another one.
        beating.join(EVERY)
        for path in paths:
            remove_sign(path)


def _beat(
    paths: Sequence[Path],
    phase: Callable[[], str],
    changes: Callable[[], int],
    sampler: Sampler | None,
    over: threading.Event,
) -> None:
    seen, since = changes(), time.monotonic()
    while not over.is_set():
        now, clock = changes(), time.monotonic()
        if now != seen:
            seen, since = now, clock
        machine: dict[str, float | None] = {}
        if sampler is not None:
            machine |= sampler.latest()
        for path in paths:
            leave_sign(path, RunSign(phase(), clock - since, machine))
        over.wait(EVERY)
