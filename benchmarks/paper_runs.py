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
from paper_tables import texts

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
    """Runs what is not finished; the number of cells that failed."""
    begin, children = time.monotonic(), Children(options)
    attempt = children.attempt_here if options.jobs == 1 else children.attempt

    def settled(cell: Cell) -> bool | None:
        """Whether the cell is finished now; None if there was no time left for it."""
        started, done, reason = time.monotonic(), outcome(cell, study), None
        there = done is not None
        if not there:
            if started - begin >= options.budget or children.stopping:
                return None
            reason = attempt(cell)
            done = outcome(cell, study)
            if done is None and children.stopping:
                return None
        text = f"failed: {reason}" if done is None else texts(cell, study, done)
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
        """A second Ctrl-C ends them as they are."""
        at_once = self.stopping and number == signal.SIGINT
        self.stopping = True
        for child in list(self._at_work):
            child.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)
        if at_once:
            raise KeyboardInterrupt

    def attempt_here(self, cell: Cell) -> str | None:
        """Runs a cell in this process; the reason when it fails."""
        stop = Stop()
        try:
            return attempt(cell, stop)
        finally:
            self.stopping = (
                self.stopping or stop.asked
            )  # perhaps in the cell's last round
            clear()

    def attempt(self, cell: Cell) -> str | None:
        """Runs a cell; the reason when it fails."""
        options = self._options
        words = [
            str(options.study),
            "--out",
            str(options.out),
            "--only",
            glob.escape(str(cell)),
        ]
        changes = [
            word
            for word in options.set
            if word.partition("=")[0].replace("-", "_") in cell.settings.flat()
        ]
        words += [
            "--seeds",
            options.seeds,
            "--device",
            options.device,
            *(["--set", *changes] if changes else []),
        ]
        words += ["--data-root", str(options.data_root)] if options.data_root else []
        words += ["--data", *options.data] if options.data else []
        threads = {
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // options.jobs))
        }
        child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("paper.py")), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=threads | os.environ,
            start_new_session=True,  # Ctrl-C is for the study alone, which asks them in turn
        )
        self._at_work.add(child)
        if self.stopping:  # meanwhile
            child.terminate()
        out, err = child.communicate()
        self._at_work.discard(child)
        self.stopping = self.stopping or child.returncode == STOPPED
        if not child.returncode:
            return None
        told = [
            line.partition("failed: ")[2]
            for line in out.splitlines()
            if line.startswith(f"{cell} ")
        ]
        return (
            "".join(told)
            or (err.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        )


def attempt(cell: Cell, stop: Stop) -> str | None:
    """Runs a cell, or goes on with it; the reason when it fails."""
    from hpcfed.experiment.run import run

    try:
        run(resumed(cell) or cell.settings, stop)
    except UserError as error:
        return str(error)
    except SystemExit as end:
        if end.code == STOPPED:
            raise Stopped from None
        return one_line(
            end.__context__ or end
        )  # the traceback has been shown, and is in the folder
    return None


def resumed(cell: Cell) -> Settings | None:
    """Settings that go on with the cell where it was stopped; None where there is
    nothing to go on with.
    """
    there = {record.facts["seed"]: record for record in read_seeds(cell.folder)}
    states = {record.status for record in there.values()}
    if (
        set(there) != set(cell.seeds)
        or "stopped" not in states
        or states - {"stopped", "complete"}
    ):
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
    """Leaves nothing of a cell behind that the next one would stumble over, or whose
    memory it would miss.
    """
    import torch

    from hpcfed.runtime import process_group

    process_group.leave()  # a cell that failed has not
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # so that a cell's peak memory is its own


@contextmanager
def data_read_once() -> Iterator[None]:
    """All cells of a data set share its images in host memory; synthetic ones depend on
    the cell.
    """
    from hpcfed.experiment import data

    load = data.load
    kept: dict[str, Any] = {}

    def load_once(name: str, **how: Any) -> Any:
        if name == "synthetic":
            return load(name, **how)
        if name not in kept:
            kept.clear()
            kept[name] = load(name, **how)
        return kept[name]

    data.load = load_once
    try:
        yield
    finally:
        data.load = load
