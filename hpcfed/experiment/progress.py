"""What the user sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from contextlib import suppress
from math import isnan
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from hpcfed.errors import remark

LINE_EVERY = 1.0
"""Seconds between plain lines, so that a long run does not fill a log."""


class RunProgress:
    """Told of every round that has been written down."""

    def __init__(self, rounds: int, *, visible: bool) -> None:
        self._rounds = rounds
        self._visible = visible
        self._next_line = 0.0
        self._bar: Progress | None = None
        if visible and sys.stderr is not None and sys.stderr.isatty():
            columns = (
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(8),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(
                *columns, TimeRemainingColumn(), console=Console(stderr=True)
            )
            self._task = self._bar.add_task("", total=rounds)

    def __enter__(self) -> "RunProgress":
        if self._bar is not None:
            with suppress(OSError):  # the terminal may go at any time
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
        if self._visible:
            remark(line)

    def round(self, round: int, values: dict[str, float], *, on_disk: bool) -> None:
        """A plain line appears only for what is on disk: what the user has read
        survives any accident.
        """
        if not self._visible:
            return
        text = _line(values)
        if self._bar is not None:  # short enough for 80 columns
            with suppress(OSError):
                self._bar.update(self._task, completed=round + 1, description=text)
            return
        last = round + 1 == self._rounds
        if (on_disk and time.monotonic() >= self._next_line) or last:
            self.say(
                f"round {round + 1}/{self._rounds}  {text}  {_seconds(values['seconds'])}"
            )
            self._next_line = time.monotonic() + LINE_EVERY

    def stop(self, round: int) -> None:
        """The run ends with this round, before its last."""
        self.say(f"the target was reached in round {round + 1}")


class SeedsProgress(RunProgress):
    """One display for several seeds: the mean of what they tell of a round, once all
    have told.
    """

    def __init__(self, rounds: int, *, seeds: int, visible: bool) -> None:
        super().__init__(rounds, visible=visible)
        self._seeds = seeds
        self._told: dict[int, list[tuple[dict[str, float], bool]]] = {}
        self._stopped: list[int] = []
        """The last rounds of seeds that have stopped."""

    def round(self, round: int, values: dict[str, float], *, on_disk: bool) -> None:
        self._told.setdefault(round, []).append((values, on_disk))
        self._tell(round)

    def stop(self, round: int) -> None:
        self._stopped.append(round)
        self.say(
            f"a seed has reached the target in round {round + 1}; "
            f"{self._seeds - len(self._stopped)} go on"
        )
        for waiting in sorted(self._told):
            self._tell(waiting)

    def _tell(self, round: int) -> None:
        told = self._told[round]
        if len(told) < self._seeds - sum(last < round for last in self._stopped):
            return
        mean = {
            name: sum(of_seed[name] for of_seed, _ in told) / len(told)
            for name in told[0][0]
        }
        super().round(round, mean, on_disk=all(on_disk for _, on_disk in told))
        del self._told[round]


def _line(values: dict[str, float]) -> str:
    accuracy, common = (
        values.get("accuracy", float("nan")),
        values.get("global_accuracy", float("nan")),
    )
    parts = [f"loss {values['train_loss']:.4f}"]
    if not isnan(accuracy):
        parts.append(f"clients {accuracy:.2%}")
    if not isnan(common):
        parts.append(f"global {common:.2%}")
    return "  ".join(parts)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
