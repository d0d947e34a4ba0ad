"""Run the cells of a study, here or in processes of their own."""

import argparse
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import launching
from benchmarks.paper.cells import Cell, outcome
from benchmarks.paper.tables import result_line
from hpcfed.cli import parse_run
from hpcfed.errors import UserError, one_line
from hpcfed.options import Settings, check_unchanged
from hpcfed.results import checkpoints
from hpcfed.results.stored import read_seeds
from hpcfed.runtime.signals import SIGNALS, STOPPED, Stop
from hpcfed.studies.stacks import in_common


class Stopped(Exception):
    """The study was asked to stop."""


def go(cells: Sequence[Cell], options: argparse.Namespace) -> int:
    """Run the cells that are not finished, in their order, and return how many failed."""
    work, together = Work(options), stacks(cells, options.stack)
    with work.listening():
        if options.jobs == 1:
            with data_read_once():
                settled = [work.settle(stack) for stack in together]
        else:
            with ThreadPoolExecutor(options.jobs) as pool:
                settled = list(pool.map(work.settle, together))
    results = list(chain.from_iterable(settled))
    left = results.count(None)
    if left and work.children.stopping:
        raise Stopped
    if left:
        print(f"--budget {options.budget:g} is spent; cells left: {left}", flush=True)
    return results.count(False)


Stack = Sequence[Cell]
"""Cells that advance together in one process."""


def stacks(cells: Sequence[Cell], most: int) -> list[Stack]:
    """Put cells together that differ only in what runs of a stack may differ in, up to
    `most` runs, of which every seed is one. A stack comes where its first cell does.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        key = _company(cell) if most > len(cell.seeds) else str(cell.folder)
        groups.setdefault(key, []).append(cell)
    made: dict[Path, Stack] = {}
    for members in groups.values():
        fit = max(1, most // len(members[0].seeds))
        for at in range(0, len(members), fit):
            made[members[at].folder] = members[at : at + fit]
    # What was asked for first comes first.
    return [made[cell.folder] for cell in cells if cell.folder in made]


def _company(cell: Cell) -> str:
    """Return what cells of a stack have in common."""
    there = read_seeds(cell.folder)
    if any(record.status == "complete" for record in there):
        return str(cell.folder)
    begun = 0
    if resumed(cell) is not None:
        # Runs of a stack go on after the same round.
        begun = min(checkpoints.newest_rounds(record.folder) for record in there)
    options = in_common(cell.settings) | {"out": ""}
    # One process has one command line, but for the names of its cells.
    return json.dumps([options, begun, _without_names(cell)], default=str)


def _without_names(cell: Cell) -> list[str]:
    study, only, _, *words = cell.words
    return [study, only, *words]


class Work:
    """Cells that are run within the time that the call has."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._begin = time.monotonic()
        self.children = Children(options.jobs)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Stop the cells at work when a signal comes, or when the time is over."""
        with self.children.listening(), alarm(self._options.stop_after):
            yield

    def settle(self, stack: Stack) -> list[bool | None]:
        """Bring the cells of a stack to their end and print a line of each; return
        whether each is finished now, or None if no time was left for that.
        """
        started = time.monotonic()
        left = []
        for cell in stack:
            done = outcome(cell)
            if done is None:
                left.append(cell)
            else:
                self._print(cell, result_line(cell, done), "there already")
        finished: list[bool | None] = [True] * (len(stack) - len(left))
        late = started - self._begin >= self._options.budget
        if not left or late or self.children.stopping:
            return finished + [None] * len(left)
        if self._options.jobs == 1:
            reason = self.children.attempt_here(left)
        else:
            reason = self.children.attempt(left, self._options.stack)
        seconds = f"{time.monotonic() - started:.1f} s"
        if len(left) > 1:
            seconds += f" for {len(left)} cells together"
        for cell in left:
            own = _own_reason(cell) if len(left) > 1 else None
            finished.append(self._end(cell, own or reason, seconds))
        return finished

    def _end(self, cell: Cell, reason: str | None, seconds: str) -> bool | None:
        """Print what became of a cell."""
        done = outcome(cell)
        if done is not None:
            self._print(cell, result_line(cell, done), seconds)
            return True
        if self.children.stopping:
            self._print(cell, _how_far(cell), seconds)
            return None
        self._print(cell, f"failed: {reason}", seconds)
        return False

    def _print(self, cell: Cell, *texts: str) -> None:
        # The folder tells cells of a plan apart that have the same names.
        name = cell.folder.relative_to(self._options.out)
        print(f"{name!s:28} {'  '.join(texts)}", flush=True)


def _own_reason(cell: Cell) -> str:
    """Return why a cell has failed, which others of its stack may have survived."""
    reasons = [record.error for record in read_seeds(cell.folder) if record.error]
    return reasons[0] if reasons else ""


def _how_far(cell: Cell) -> str:
    """Say how far a cell has come that was stopped."""
    rounds = [record.rounds_done for record in read_seeds(cell.folder)]
    reached = min(rounds, default=0)
    return f"stopped after round {reached} of {cell.settings.config.rounds}"


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Send this process SIGTERM when the block lasts longer than these seconds."""
    if seconds == math.inf:
        yield
        return
    # Whoever listens to signals hears it: the study, or the cell that it runs itself.
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # One that has begun sends its signal while somebody listens.
        timer.join()


class Children:
    """Cells in processes of their own, which are asked to stop when the study is."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._at_work: set[subprocess.Popen[str]] = set()
        self.stopping = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        """Pass the request to stop on to all cells; a second Ctrl-C kills them."""
        at_once = self.stopping and number == signal.SIGINT
        self.stopping = True
        for child in list(self._at_work):
            child.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)
        if at_once:
            raise KeyboardInterrupt

    def attempt_here(self, stack: Stack) -> str | None:
        """Run a stack in this process; return the reason when it fails."""
        minutes = stack[0].settings.config.checkpoint_minutes
        stop = Stop(every=60 * minutes)
        try:
            return attempt(stack, stop)
        except Stopped:
            self.stopping = True
            return None
        finally:
            # A signal in the cell's last round stops the study, not the cell.
            self.stopping = self.stopping or stop.asked
            clear()

    def attempt(self, stack: Stack, most: int) -> str | None:
        """Run a stack in a process of its own; return the reason when it fails."""
        cores = len(os.sched_getaffinity(0))
        threads = {"OMP_NUM_THREADS": str(max(1, cores // self._jobs))}
        words = [*stack[0].words, "--stack", str(most)]
        for cell in stack[1:]:
            words += ["--only", cell.words[2]]
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.paper", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=threads | launching.environment(),
            # So that Ctrl-C reaches the study alone, which asks its cells in turn.
            start_new_session=True,
        )
        self._at_work.add(child)
        # A signal that came before the line above has not reached this child.
        if self.stopping:
            child.terminate()
        out, err = child.communicate()
        self._at_work.discard(child)
        self.stopping = self.stopping or child.returncode == STOPPED
        if not child.returncode:
            return None
        for line in out.splitlines():
            if "failed: " in line:
                return line.partition("failed: ")[2]
        last_words = err.strip().splitlines()
        return last_words[-1] if last_words else f"exit code {child.returncode}"


def attempt(stack: Stack, stop: Stop) -> str | None:
    """Run the cells of a stack, or resume them; return the reason when they fail."""
    from hpcfed.experiment.run import run_stacked

    try:
        run_stacked([resumed(cell) or cell.settings for cell in stack], stop)
    except UserError as error:
        return str(error)
    except SystemExit as end:
        if end.code == STOPPED:
            raise Stopped from None
        # The traceback has been shown, and is in the folder.
        return one_line(end.__context__ or end)
    return None


def resumed(cell: Cell) -> Settings | None:
    """Return settings that resume the cell where it was stopped or killed; None where
    there is nothing to resume.
    """
    there = {record.facts["seed"]: record for record in read_seeds(cell.folder)}
    if set(there) != set(cell.seeds):
        return None
    for record in there.values():
        if record.status == "failed":
            return None
        if record.status != "complete" and not checkpoints.exist(record.folder):
            return None
    try:
        for seed, record in there.items():
            check_unchanged(
                cell.folder, record.config, cell.settings.of_seed(seed).flat()
            )
    except UserError:
        return None
    return parse_run(["--resume", str(cell.folder)])


def clear() -> None:
    """Leave no process group and no memory of a cell behind for the next one."""
    import torch

    from hpcfed.runtime import process_group

    process_group.leave()  # a cell that failed has not done so
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # so that a cell's peak memory is its own


@contextmanager
def data_read_once() -> Iterator[None]:
    """Let all cells of a data set share its images in host memory; synthetic images
    depend on the cell.
    """
    from hpcfed.experiment import data

    load = data.load
    cached: dict[str, Any] = {}

    def load_once(name: str, **how: Any) -> Any:
        if name == "synthetic":
            return load(name, **how)
        if name not in cached:
            cached.clear()  # one data set at a time: cells come in their order
            cached[name] = load(name, **how)
        return cached[name]

    data.load = load_once
    try:
        yield
    finally:
        data.load = load
