"""Captures GPU work that is launched repeatedly, and replays it as a whole.

Launching the kernels of a small network's step one by one takes longer than the kernels
themselves.
"""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

import torch

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
        self._on = on and device.type == "cuda"
        self._may_fail = may_fail
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        """None for a function that has run only once."""
        if self._on:
            # One memory pool for all graphs, since they never run at the same time.
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

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
                    graph = self._captured(function)
            except RuntimeError:
                return False
            self._graphs[key] = graph
        graph.replay()
        return True

    def _tried(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        try:
            with starting.counted("captured"):
                return self._captured(function)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # A user's module may synchronise with the host, which a capture cannot do.
            if not self._may_fail:
                raise
            self._on = False
            return None

    def _captured(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        _make_room()
        # CUDA refuses captures on the default stream, so they have one of their own.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _keeping_garbage():
            graph.capture_begin(pool=self._pool)
            try:
                function()
            except BaseException:
                # A capture that has begun must end, or nothing else could be launched.
                with suppress(RuntimeError):
                    graph.capture_end()
                _leave_capture()
                raise
            graph.capture_end()
        return graph

    def forget(self) -> None:
        """Drop all graphs, because the memory that they use is about to move."""
        self._graphs.clear()
        if self._on:
            # The old pool is freed with its last graph.
            self._pool = torch.cuda.graph_pool_handle()


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


def _make_room() -> None:
    """Return what plain runs have left in torch's cache, if a graph, which has memory of
    its own, might need it: during a capture torch cannot.
    """
    free, _ = torch.cuda.mem_get_info()
    if free < torch.cuda.max_memory_allocated():
        torch.cuda.empty_cache()


@contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Suspend Python's garbage collection. Graphs of an earlier run may be garbage, and
    destroying a graph during the capture of another spoils that capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _leave_capture() -> None:
    """Let torch's generator of this device draw again after a failed capture.

    It would still believe that it is being captured. A clone of it does not.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
