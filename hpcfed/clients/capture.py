"""Captures GPU work that is launched repeatedly, and replays it as a whole.

Launching the kernels of a small network's step one by one takes longer than the kernels
themselves.
"""

from collections.abc import Callable, Hashable

import torch

from hpcfed.runtime import graphs
from hpcfed.runtime.graphs import Graph, GraphRecorder
from hpcfed.runtime.starting import starting

Run = Callable[[Hashable, Callable[[], None]], None]
"""Runs a function that is known by a key."""


def plainly(key: Hashable, function: Callable[[], None]) -> None:
    """Run a function without a graph."""
    function()


class Replays:
    """Functions by key: the first call runs plainly, the second is captured, then
    replayed.

    A captured function must always do the same work on the same memory, and return
    nothing. In the first, plain run libraries choose their kernels and workspaces,
    which they cannot do during a capture. Without a GPU every run is plain.
    """

    def __init__(
        self, device: torch.device, *, on: bool = True, may_fail: bool = False
    ) -> None:
        """`on`: whether functions can be captured. `may_fail`: this is not certain, so
        stop capturing after the first failure.
        """
        self._on = on and graphs.can_capture(device)
        self._may_fail = may_fail
        self._graphs: dict[Hashable, Graph | None] = {}
        """None for a function that has run only once."""
        if self._on:
            self._recorder = GraphRecorder(device)

    @property
    def captures(self) -> bool:
        """Whether functions are captured."""
        return self._on

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        if not self._on:
            function()
            return
        if key not in self._graphs:
            self._graphs[key] = None
            with starting.counted("first_steps"):
                function()
            return
        graph = self._graphs[key]
        if graph is None:
            graph = self._tried(function)
            if graph is None:
                # A capture does not execute: the function has yet to run.
                function()
                return
            self._graphs[key] = graph
        # A capture only records: the first replay does the work of this call.
        graph.replay()

    def run_whole(self, key: Hashable, function: Callable[[], None]) -> bool:
        """Replay a function that only calls functions which have run before, so that it
        is captured at once. Return False if it cannot be: then nothing has run.
        """
        graph = self._graphs.get(key)
        if graph is None:
            # A key without a graph has failed before, most likely for want of memory.
            if key in self._graphs:
                return False
            self._graphs[key] = None
            try:
                with starting.counted("captured"):
                    graph = self._recorder.record(function)
            except RuntimeError:
                return False
            self._graphs[key] = graph
        graph.replay()
        return True

    def _tried(self, function: Callable[[], None]) -> Graph | None:
        try:
            with starting.counted("captured"):
                return self._recorder.record(function)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # A user's module may synchronise with the host, which a capture cannot do.
            if not self._may_fail:
                raise
            self._on = False
            return None

    def forget(self) -> None:
        """Drop all graphs, because the memory that they use is about to move."""
        self._graphs.clear()
        if self._on:
            self._recorder.forget()


class Repeats:
    """Tells what is worth a graph of its own: what comes time after time."""

    def __init__(self, *, times: int = 3, most: int = 8) -> None:
        """From the time number `times` in a row on; `most` different ones."""
        self._times = times
        self._most = most
        self._worthy: set[Hashable] = set()
        self._last: Hashable = None
        self._in_a_row = 0

    def __call__(self, key: Hashable) -> bool:
        """Note that this comes once more; tell whether it is worth a graph."""
        self._in_a_row = self._in_a_row + 1 if key == self._last else 1
        self._last = key
        if self._in_a_row >= self._times and len(self._worthy) < self._most:
            self._worthy.add(key)
        return key in self._worthy
