"""Run the cells of a study, here or in processes of their own; for
benchmarks/paper.py.
"""

import argparse
import gc
import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from paper_cells import Cell, outcome
from paper_study import Study
from paper_tables import result_line

from hpcfed.cli import parse_run
from hpcfed.config import (
    Settings,
    check_unchanged,
)
from hpcfed.errors import UserError, one_line
from hpcfed.experiment.stored import read_seeds
from hpcfed.runtime.signals import SIGNALS, STOPPED, Stop


class Stopped(Exception):
    """The study was asked to stop."""


def go(cells: Sequence[Cell], study: Study, options: argparse.Namespace) -> int:
    """Run the cells that are not finished, and return how many failed."""
    begin, children = time.monotonic(), Children(options)
    attempt = children.attempt_here if options.jobs == 1 else children.attempt

    def settled(cell: Cell) -> bool | None:
        """Return whether the cell is finished now; None if no time was left for it."""
        started, reason = time.monotonic(), None
        done = outcome(cell, study)
        there = done is not None
        if not there:
            if started - begin >= options.budget or children.stopping:
                return None
            reason = attempt(cell)
            done = outcome(cell, study)
            if done is None and children.stopping:
                return None
        text = f"failed: {reason}" if done is None else result_line(cell, study, done)
        seconds = "there already" if there else f"{time.monotonic() - started:.1f} s"
        print(f"{cell!s:28} {text}  {seconds}", flush=True)
        return done is not None

    if options.jobs == 1:
        with children.listening(), data_read_once():
            results = [settled(cell) for cell in cells]
    else:
        with children.listening(), ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(settled, cells))
    if children.stopping and None in results:
        raise Stopped
    if left := results.count(None):
        print(f"--budget {options.budget:g} is spent; cells left: {left}", flush=True)
    return results.count(False)


class Children:
    """Cells in processes of their own, which are asked to stop when the study is."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
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

    def attempt_here(self, cell: Cell) -> str | None:
        """Run a cell in this process; return the reason when it fails."""
        stop = Stop()
        try:
            return attempt(cell, stop)
        finally:
            # A signal in the cell's last round stops the study, not the cell.
            self.stopping = self.stopping or stop.asked
            clear()

    def attempt(self, cell: Cell) -> str | None:
        """Run a cell in a process of its own; return the reason when it fails."""
        cores = len(os.sched_getaffinity(0))
        threads = {"OMP_NUM_THREADS": str(max(1, cores // self._options.jobs))}
        program = str(Path(__file__).with_name("paper.py"))
        child = subprocess.Popen(
            [sys.executable, program, *self._words(cell)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=threads | os.environ,
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
            if line.startswith(f"{cell} ") and "failed: " in line:
                return line.partition("failed: ")[2]
        last_words = err.strip().splitlines()
        return last_words[-1] if last_words else f"exit code {child.returncode}"

    def _words(self, cell: Cell) -> list[str]:
        """Return the options of a study of this cell alone."""
        options = self._options
        words = [str(options.study), "--only", glob.escape(str(cell))]
        words += ["--out", str(options.out), "--seeds", options.seeds]
        words += ["--device", options.device]
        changes = []
        for word in options.set:
            name = word.partition("=")[0].replace("-", "_")
            # --set of an option that this cell's method lacks would be refused.
            if name in cell.settings.flat():
                changes.append(word)
        if changes:
            words += ["--set", *changes]
        if options.data_root:
            words += ["--data-root", str(options.data_root)]
        if options.data:
            words += ["--data", *options.data]
        return words


def attempt(cell: Cell, stop: Stop) -> str | None:
    """Run a cell, or resume it; return the reason when it fails."""
    from hpcfed.experiment.run import run

    try:
        run(resumed(cell) or cell.settings, stop)
    except UserError as error:
        return str(error)
    except SystemExit as end:
        if end.code == STOPPED:
            raise Stopped from None
        # The traceback has been shown, and is in the folder.
        return one_line(end.__context__ or end)
    return None


def resumed(cell: Cell) -> Settings | None:
    """Return settings that resume the cell where it was stopped; None where there is
    nothing to resume.
    """
    there = {record.facts["seed"]: record for record in read_seeds(cell.folder)}
    states = {record.status for record in there.values()}
    if set(there) != set(cell.seeds):
        return None
    if "stopped" not in states or not states <= {"stopped", "complete"}:
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
