"""Work of a GPU that is launched again and again is captured once and replayed whole."""

from collections.abc import Callable, Hashable
from contextlib import suppress

import torch


class Replays:
    """Runs functions by key: as they are at first, captured as a graph at the second
    time, replayed from then on.

    A captured function must always do the same work on the same memory, and may return
    nothing. The first, plain run is what lets libraries choose their kernels and
    workspaces. Without a GPU every run is a plain one.
    """

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        if self._on:
            self._pool = (
                torch.cuda.graph_pool_handle()
            )  # one for all graphs, since they never run side by side
            self._stream = torch.cuda.Stream(device)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        if not self._on:
            function()
            return
        if key not in self._graphs:
            self._graphs[key] = None
            function()
            return
        graph = self._graphs[key]
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool)
                try:
                    function()
                except BaseException:
                    with suppress(
                        RuntimeError
                    ):  # what was begun must end, or nothing else could be launched
                        graph.capture_end()
                    raise
                graph.capture_end()
            self._graphs[key] = graph
        graph.replay()

    def forget(self) -> None:
        """Drops all graphs, because the memory that they work on is going to move."""
        self._graphs.clear()
        if self._on:
            self._pool = (
                torch.cuda.graph_pool_handle()
            )  # the old one ends with its last graph
