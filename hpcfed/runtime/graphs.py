"""Graphs: work on a GPU that is recorded once and replayed as a whole."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

import torch

from hpcfed.runtime import accelerator, own_kernels


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do the work again."""


def has_cuda_graphs(device: torch.device) -> bool:
    """Whether work is recorded by CUDA's own graphs: they come with our kernels."""
    return accelerator.make_of(device) == "NVIDIA" and own_kernels.are_allowed()


def can_capture(device: torch.device) -> bool:
    """Whether work on this device can be recorded."""
    if not accelerator.is_gpu(device):
        return False
    return has_cuda_graphs(device) or _has_torch_graphs()


@cache
def _has_torch_graphs() -> bool:
    """Whether torch has graphs for GPUs of any make, and for those of this process."""
    # Newer than torch 2.11; for some GPUs it can be imported, but not made.
    try:
        getattr(torch.accelerator, "Graph")()  # noqa: B009
    except (AttributeError, RuntimeError):
        return False
    return True


class GraphRecorder:
    """Records work of one device, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_cuda = has_cuda_graphs(device)
        # Captures are refused on the default stream.
        self._stream = accelerator.new_stream(device)
        self._record_here = accelerator.entering(self._stream)
        self.forget()

    def forget(self) -> None:
        """Use other memory for graphs from now on; the old one is freed with the last
        graph that uses it.
        """
        # One memory pool for all graphs, since they never run at the same time.
        self._pool = torch.cuda.graph_pool_handle() if self._by_cuda else None

    def record(self, function: Callable[[], None]) -> Graph:
        """Return a graph of what the function launches, without doing it."""
        graph: Any = self._new_graph()
        self._make_room()
        self._stream.wait_stream(accelerator.current_stream(self._device))
        with self._record_here(), _keeping_garbage():
            self._begin(graph)
            try:
                function()
            except BaseException:
                # A capture that has begun must end, or nothing else could be launched.
                with suppress(RuntimeError):
                    graph.capture_end()
                self._leave_capture()
                raise
            graph.capture_end()
        if self._pool is None:
            self._pool = graph.pool()
        recorded: Graph = graph
        return recorded

    def _new_graph(self) -> Any:
        if self._by_cuda:
            return torch.cuda.CUDAGraph()
        return getattr(torch.accelerator, "Graph")(pool=self._pool)  # noqa: B009

    def _begin(self, graph: Any) -> None:
        if self._by_cuda:
            graph.capture_begin(pool=self._pool)
        else:
            graph.capture_begin()

    def _make_room(self) -> None:
        """Return what plain runs have left in torch's cache, if a graph, which has memory
        of its own, might need it: during a capture torch cannot.
        """
        free = accelerator.free_memory(self._device)
        if free < accelerator.most_allocated(self._device):
            accelerator.return_memory()

    def _leave_capture(self) -> None:
        """Let torch's generator of this device draw again after a failed capture.

        It would still believe that it is being captured. A clone of it does not.
        """
        generator = accelerator.generator_of(self._device)
        generator.graphsafe_set_state(generator.clone_state())


def graphed(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function that replays the call's forward and backward passes; only where
    there are CUDA's graphs.
    """
    # `Any`, because its type hints do not allow nested arguments.
    capture: Any = torch.cuda.make_graphed_callables
    made: Callable[..., Any] = capture(call, arguments, num_warmup_iters=0)
    return made


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
